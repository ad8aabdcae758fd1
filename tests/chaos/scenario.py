"""What a seed means: who asks for what, and what strikes when. Pure.

The daemon that scenarios run on is `deployment`: two workers, two models, every fault point of the
workers armed by a file that the driver creates (`order_file`). Model "reference" steps steadily;
"stops" ends streams by EOS and has the author's hooks that keep a step from being steady.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.faults import ACTIONS, POINTS

PLAIN, STOPS = "reference", "stops"
EOS_EVERY = 40
SEGV, RAISE = 1, 2  # tokens that poison a prompt of PLAIN, in its forward
RAISE_PREPARE, RAISE_STOP = 3, 4  # and of STOPS
POISON_AT = 3  # output position
WORKERS = ("w0", "w1")
SILENCE_MS = 3000
PLANTED = tuple(p for p in POINTS if p.startswith("worker."))
STEP_POINTS = (
    "worker.gpu.prepare", "worker.gpu.launch", "worker.gpu.commit", "worker.postprocess.readback",
)  # fmt: skip
"""An exception there fails the step's requests; elsewhere it ends the worker."""


def order_file(orders: Path, point: str, action: str, where: str) -> Path:
    return orders / f"{point}.{action}.{where}"


def deployment(orders: Path) -> dict[str, Any]:
    """`orders`: an empty folder for the files that make a fault fire."""
    where = dict.fromkeys(PLANTED, WORKERS)
    where |= {p: (p.partition(".")[0],) for p in POINTS if p not in PLANTED}
    faults = [
        {
            "point": point, "action": action, "where": w, "ms": 300,
            "when_file": str(order_file(orders, point, action, w)),
        }
        for point, processes in where.items() for action in ACTIONS for w in processes
    ]  # fmt: skip
    poison = [
        {"point": "forward", "action": "segv", "when_token": SEGV, "at": POISON_AT},
        {"point": "forward", "action": "raise", "when_token": RAISE, "at": POISON_AT},
    ]
    hooks = [
        {"point": "prepare", "action": "raise", "when_token": RAISE_PREPARE, "at": POISON_AT},
        {"point": "check_stop", "action": "raise", "when_token": RAISE_STOP, "at": POISON_AT},
    ]
    plain = {"step_ms": 4, "faults": poison}
    stops = {"step_ms": 4, "faults": hooks, "eos_every": EOS_EVERY}
    return {
        "name": "chaos",
        "models": {
            PLAIN: {"kind": "reference", "pages": 250, "options": plain},
            STOPS: {"kind": "reference", "pages": 250, "options": stops},
        },
        "workers": [{"name": w, "threads": 1, "hang_ms": SILENCE_MS} for w in WORKERS],
        "gateway": {"port": 0},
        "limits": {"max_rows": 16, "prefill_tokens": 64},
        "supervision": {
            "beat_ms": 100, "silence_ms": SILENCE_MS, "backoff_ms": 20, "backoff_max_ms": 200,
            "max_restarts": 1_000_000, "restart_window_s": 10, "drain_s": 4,
        },
        "log": {"format": "json"},
        "faults": faults,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `cancel_at`: tokens after which its client has enough. `slow_ms`: its reader
    sleeps so long after every chunk. `poison`: the token that will fail it, 0 for none."""

    key: str
    client: str
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    wait_ms: int = 0
    deadline_ms: int = 0
    cancel_at: int | None = None
    slow_ms: int = 0
    priority: int = 0
    replay: str = "history"
    poison: int = 0

    @property
    def eos_every(self) -> int:
        return EOS_EVERY if self.model == STOPS else 0


@dataclass(frozen=True, slots=True)
class Strike:
    """At a part of all tokens: `what` ("SIGKILL", "SIGSTOP", "pause", "SIGTERM", "plant", "close")
    happens to `target`. "pause": stopped, and going on after `ms`. "plant": `point`, `action`."""

    at: float
    what: str
    target: str
    point: str = ""
    action: str = ""
    ms: int = 0

    def __str__(self) -> str:
        how = f" {self.point} {self.action}" if self.point else f" {self.ms} ms" if self.ms else ""
        return f"{self.what} {self.target}{how} at {self.at:.2f}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """Clients: "a" and "b" live in the driver, "p" is a process of its own, "h" speaks HTTP."""

    seed: int
    asks: tuple[Ask, ...]
    strikes: tuple[Strike, ...] = field(default=())

    def of(self, client: str) -> list[Ask]:
        return [a for a in self.asks if a.client == client]


def make(seed: int) -> Scenario:
    """The same seed gives the same scenario. Every eighth seed is calm."""
    rng = random.Random(seed)
    strikes = () if seed % 8 == 7 else tuple(sorted(_strikes(rng, seed), key=lambda s: s.at))
    process = any(s.target == "p" for s in strikes) or rng.random() < 0.3
    clients = ["a", "a", "b", "h", *(["p"] if process else [])]
    asks = [_ask(rng, i, rng.choice(clients)) for i in range(rng.randint(16, 40))]
    if rng.random() < 0.12 and strikes:
        asks.append(_poisoned(rng, len(asks), PLAIN, SEGV))
    if rng.random() < 0.4:
        model, token = rng.choice([(PLAIN, RAISE), (STOPS, RAISE_PREPARE), (STOPS, RAISE_STOP)])
        asks.append(_poisoned(rng, len(asks), model, token))
    return Scenario(seed, tuple(asks), strikes)


def _ask(rng: random.Random, i: int, client: str) -> Ask:
    plain = client == "h" or rng.random() < 0.7
    length = rng.choice([rng.randint(1, 20), rng.randint(20, 150)])
    fate = rng.random()
    count = rng.choice([1, 2, rng.randint(3, 30), rng.randint(30, 120)])
    over_http = client == "h"
    return Ask(
        key=f"{client}{i}",
        client=client,
        model=PLAIN if plain else STOPS,
        prompt=tuple(rng.randrange(32, 127) for _ in range(length)),
        max_tokens=count,
        wait_ms=rng.choice([0, 0, rng.randint(0, 1500)]),
        deadline_ms=rng.choice([5, 200, 1500]) if fate < 0.1 and not over_http else 0,
        cancel_at=rng.choice([0, 1, 2, 7, 23]) if 0.1 < fate < 0.25 else None,
        slow_ms=rng.choice([0, 0, 0, 30]),
        priority=rng.choice([0, 0, 0, 1, 5]) if not over_http else 0,
        replay=rng.choice(["history"] * 6 + ["restart", "never"]) if not over_http else "history",
    )


def _poisoned(rng: random.Random, i: int, model: str, token: int) -> Ask:
    prompt = [rng.randrange(32, 127) for _ in range(rng.randint(2, 30))]
    prompt[rng.randrange(len(prompt))] = token
    replay = "restart" if rng.random() < 0.2 else "history"
    return Ask(f"a{i}", "a", model, tuple(prompt), 20, replay=replay, poison=token)


def _strikes(rng: random.Random, seed: int) -> Iterator[Strike]:
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        at, worker = rng.uniform(0.02, 0.8), rng.choice(WORKERS)
        kind = rng.random()
        if kind < 0.28:
            yield Strike(at, "SIGKILL", worker)
        elif kind < 0.36:
            yield Strike(at, "SIGSTOP", worker)
        elif kind < 0.44:
            yield Strike(at, "pause", worker, ms=rng.randint(50, 800))
        elif kind < 0.50:
            yield Strike(at, "SIGTERM", worker)
        elif kind < 0.80:
            action = rng.choice(["raise", "memory", "exit", "segv", "kill", "slow", "slow", "hang"])
            action = "hang_gil" if rng.random() < 0.08 else action
            yield Strike(at, "plant", worker, rng.choice(PLANTED), action)
        elif kind < 0.86:
            yield Strike(at, "SIGKILL", "gateway")
        elif kind < 0.90:
            point = rng.choice(["gateway.request", "gateway.event"])
            yield Strike(at, "plant", "gateway", point, rng.choice(["raise", "exit", "slow"]))
        elif kind < 0.94:
            what = rng.choice(["SIGKILL", "pause"])
            yield Strike(at, what, "p", ms=rng.choice([200, 5000]) if what == "pause" else 0)
        elif kind < 0.96:
            yield Strike(at, "close", "b")
        else:
            point = rng.choice(["conductor.receive", "conductor.execute"])
            yield Strike(at, "plant", "conductor", point, "slow")
    if seed % 16 == 3:  # more than three bugs a minute would end the daemon, as they should
        point = rng.choice(["conductor.receive", "conductor.execute"])
        yield Strike(rng.uniform(0.1, 0.7), "plant", "conductor", point, "raise")
