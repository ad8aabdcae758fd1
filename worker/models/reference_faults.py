"""Planted faults of the reference model: tests make one request fail, or its worker die.

A fault is a mapping. `point`: "prepare", "forward", "postprocess" or "check_stop". `action`: a name
in `protocol.faults.ACTIONS` (`ms`: how long "slow" sleeps). `when_token`: a token id anywhere in
the prompt; `when_prompt`: the whole prompt; neither: every request. `at`: from this output position
on. `times`: how often in this process (0: no bound). `once_file`: a path; it fires only if it can
create that file, so once over all processes.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import ConfigError
from protocol.faults import ACTIONS, perform
from worker.api.inputs import RequestInfo
from worker.api.nearest import nearest

POINTS = ("prepare", "forward", "postprocess", "check_stop")


@dataclass(slots=True, eq=False)
class Fault:
    point: str
    action: str = "raise"
    when_token: int | None = None
    when_prompt: Sequence[int] | None = None
    at: int = 0
    times: int = 0
    once_file: str = ""
    ms: int = 100
    fired: int = 0

    def matches(self, prompt: Sequence[int]) -> bool:
        if self.when_prompt is not None:
            return list(prompt) == list(self.when_prompt)
        return self.when_token is None or self.when_token in prompt

    def due(self, info: RequestInfo) -> bool:
        if info.output_position < self.at or (self.times and self.fired >= self.times):
            return False
        if self.once_file:
            try:
                os.close(os.open(self.once_file, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
        self.fired += 1
        return True


@dataclass(slots=True)
class Faults:
    """The configured faults, and which requests each of them waits for."""

    faults: list[Fault]
    armed: dict[int, list[Fault]] = field(default_factory=dict[int, list[Fault]])

    @classmethod
    def parse(cls, specs: Iterable[Mapping[str, Any]]) -> "Faults":
        """ConfigError names a key, point or action that does not exist."""
        known = [n for n in Fault.__dataclass_fields__ if n != "fired"]
        for s in specs:
            for name in s:
                if name not in known:
                    raise ConfigError(f"faults: unknown key {name!r}{nearest(name, known)}")
            point, action = str(s.get("point", "")), str(s.get("action", "raise"))
            if point not in POINTS:
                raise ConfigError(f"faults: no point {point!r}{nearest(point, POINTS)}")
            if action not in ACTIONS:
                raise ConfigError(f"faults: no action {action!r}{nearest(action, ACTIONS)}")
        return cls([Fault(**s) for s in specs])

    def has(self, point: str) -> bool:
        return any(f.point == point for f in self.faults)

    def arm(self, info: RequestInfo) -> None:
        """A prompt (or a part of one) is known: remember which faults wait for this request."""
        if self.faults and info.request_id >= 0 and len(info.tokens):
            known = self.armed.setdefault(info.request_id, [])
            known += [f for f in self.faults if f not in known and f.matches(info.tokens)]

    def fire(self, point: str, infos: Iterable[RequestInfo]) -> None:
        if not self.armed:
            return
        for info in infos:
            for f in self.armed.get(info.request_id, ()):
                if f.point == point and f.due(info):
                    perform(f.action, f"{point} for request {info.request_id}", f.ms)

    def forget(self, request_id: int) -> None:
        self.armed.pop(request_id, None)
