"""Drives a Machine by hand: builds the messages of scripted peers, and checks invariants after
every event."""

from collections.abc import Iterable
from typing import Any, TypeVar

from conductor.core.commands import Command, Note, Send
from conductor.core.events import Event, LinkDown, Received, Tick, WorkerExited
from conductor.core.machine import Machine
from protocol import PROTOCOL_VERSION, columns
from protocol.config import DaemonConfig, parse
from protocol.graph import GraphSpec, Loop, ModelSpec, Step, Walk, spec_to_wire
from protocol.messages import (
    Beat,
    Closed,
    Hello,
    History,
    Kind,
    Leave,
    Message,
    Reason,
    Report,
    Row,
    Run,
    Submit,
)

LIFE = 0xC0DD
M = TypeVar("M", bound=Message)

DECODER = GraphSpec(
    nodes=("decoder",),
    walks=(
        Walk("prefill", Step("decoder"), then="decode"),
        Walk("decode", Loop("tokens", Step("decoder"))),
    ),
    entry="prefill",
)


def config(**limits: Any) -> DaemonConfig:
    return parse({"models": {"m": {"kind": "reference"}}, "limits": limits})


def spec(model: str = "m", **changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "model": model, "graph": DECODER, "context": 256, "vocab": 1000, "pages": 64,
        "page_tokens": 16, "max_batch": {}, "eos": (),
    }  # fmt: skip
    return ModelSpec(**{**values, **changes})


def tokens(values: Iterable[int]) -> bytes:
    return columns.to_bytes(columns.u32(values))


class Driver:
    """One machine, fake time, and peers that only say what a test tells them to say."""

    def __init__(self, cfg: DaemonConfig | None = None, seed: int | None = 7) -> None:
        self.machine = Machine(cfg or config(), LIFE, seed)
        self.now = 100.0
        self._lives = 0

    def event(self, event: Event) -> list[Command]:
        """What the core commands, without notes to the log."""
        out = self.machine.handle(event, self.now)
        self.machine.check()
        return [c for c in out if not isinstance(c, Note)]

    def said(self, life: int, message: Message) -> list[Command]:
        return self.event(Received(life, message))

    # ---- peers

    def _life(self) -> int:
        self._lives += 1
        return 0x100 + self._lives

    def worker(self, name: str = "w0", *specs: ModelSpec, life: int = 0, **hello: Any) -> int:
        life = life or self._life()
        wire = [spec_to_wire(s) for s in (specs or (spec(),))]
        message = Hello("worker", name, life, [PROTOCOL_VERSION], specs=wire, **hello)
        self.last = self.said(life, message)
        return life

    def owner(self, name: str = "gw", life: int = 0, **hello: Any) -> int:
        life = life or self._life()
        endpoint = hello.pop("endpoint", f"ipc://{name}")
        self.last = self.said(
            life, Hello("gateway", name, life, [PROTOCOL_VERSION], endpoint, **hello)
        )
        return life

    def submit(
        self, owner: int, stream: int, prompt: int | list[int] = 4, model: str = "m", **more: Any
    ) -> list[Command]:
        ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        params = more.pop("params", {"max_tokens": 8, "seed": 1})
        attempt = more.pop("attempt", 1)
        inputs = more.pop("inputs", {"tokens": tokens(ids)})
        return self.said(owner, Submit(stream, attempt, model, inputs, params, **more))

    def report(
        self, worker: int, row: int, kind: Kind, value: int = 0, acked: int = 0, **extra: Any
    ) -> list[Command]:
        return self.said(
            worker,
            Report(
                columns.u64([row]), columns.u8([kind]), columns.u32([value]),
                columns.u32([acked]), {0: extra} if extra else {},
            ),
        )  # fmt: skip

    def closed(self, owner: int, *streams: int, reason: Reason = Reason.DONE) -> list[Command]:
        n = len(streams)
        return self.said(
            owner,
            Closed(
                columns.u64(streams), columns.u16([1] * n), columns.u8([reason] * n),
                columns.u32([0] * n),
            ),
        )  # fmt: skip

    def history(self, owner: int, stream: int, attempt: int, held: Iterable[int]) -> list[Command]:
        got = columns.u32(held)
        return self.said(owner, History(stream, attempt, columns.u32([len(got)]), got))

    def exited(self, worker: int, outside: bool = False) -> list[Command]:
        return self.event(WorkerExited(worker, outside, "test"))

    def link_down(self, life: int) -> list[Command]:
        return self.event(LinkDown(life, "test"))

    # ---- time

    def tick(self) -> list[Command]:
        return self.event(Tick())

    def wait(self, seconds: float, *heard: int, beat: Beat | None = None) -> list[Command]:
        """Let time pass in ticks of a beat; peers in `heard` beat all along."""
        out: list[Command] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.2)
            for life in heard:
                out += self.said(life, beat or Beat())
            out += self.tick()
        return [c for c in out if not (isinstance(c, Send) and isinstance(c.message, Beat))]

    # ---- the account

    @property
    def counters(self) -> dict[str, int]:
        return self.snapshot["counters"]

    @property
    def requests(self) -> dict[str, Any]:
        return self.snapshot["requests"]

    @property
    def snapshot(self) -> dict[str, Any]:
        return self.machine.snapshot(self.now)


def sent(commands: list[Command], kind: type[M], life: int | None = None) -> list[M]:
    """Messages of that kind among the commands, to that peer if one is named."""
    return [
        c.message
        for c in commands
        if isinstance(c, Send) and isinstance(c.message, kind) and (life is None or c.life == life)
    ]


def rows(commands: list[Command], life: int | None = None) -> list[Row]:
    """Rows as `Run` first carries them."""
    return [r for run in sent(commands, Run, life) for r in run.rows if isinstance(r, Row)]


def leave(*row_ids: int) -> Leave:
    return Leave(columns.u64(row_ids), columns.u8([0] * len(row_ids)))
