"""Simulated workers for the benchmark `conductor`: one process, one DEALER and session each.

`python -m scripts.bench.conductor_load JSON` connects, takes the rows that it is given, and says
"ready" on stdout. For each line on stdin it sends its messages at the asked pace, and says "done"
and their number when all are answered (`echo`) or acknowledged. The end of stdin ends it.
"""

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import zmq

from protocol import PROTOCOL_VERSION, columns
from protocol.channel.base import Network
from protocol.channel.zeromq import ZmqNetwork
from protocol.codec import decode
from protocol.graph import GraphSpec, Loop, ModelSpec, Step, Walk, spec_to_wire
from protocol.messages import Beat, Hello, Kind, Message, Report, Row, Run
from protocol.session import Session

MODEL = "m"
PAGE_TOKENS = 1024
FIRST_LIFE = 1000
BOUND_S = 120.0
BEAT_S, PROGRESS_S = 0.2, 0.5  # what a worker's main loop does
GRAPH = GraphSpec(
    nodes=("decoder",),
    walks=(
        Walk("prefill", Step("decoder"), then="decode"),
        Walk("decode", Loop("decode", Step("decoder"))),
    ),
    entry="prefill",
)
LOAD: dict[str, Any] = {
    "pages_free": 100, "pages_used": 924, "pages_total": 1024, "tokens_out": 123_456, "wasted": 17,
    "failed_steps": 0, "missing_events": 0, "unacknowledged_bytes": 4096, "rows": 64, "held": 0,
    "one_shot": 0, "standing": 1, "in_flight": 2, "ended": 400, "refused_steps": 0, "preempted": 0,
    "strays": 0, "returned_rows": 0, "step_ms": 5.125,
    "stage_s": dict.fromkeys(
        ("queued", "prepare", "reserve", "plan", "launch_wait", "forward", "commit", "device",
         "postprocess"), 1.25,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """`rounds` of one message per worker, every `pace_s`; or, `steady`, `seconds` of a worker's own
    beats and progress. `echo`: the server sends everything back."""

    address: str
    workers: int
    rows: int
    echo: bool
    steady: bool
    rounds: int
    pace_s: float
    seconds: float


class SimulatedWorker:
    """The control link of a worker whose rows only make progress."""

    def __init__(self, network: Network, load: Load, index: int) -> None:
        self._channel = network.connect(load.address)
        self._session = Session()
        self._echo = load.echo
        self._wanted = load.rows
        self._index = index
        self.sent = self.back = self.acked = 0
        self.rows: list[int] = []
        self.position = 0
        self.steps = 0

    @property
    def pollable(self) -> Any:
        return self._channel.pollable

    def hello(self) -> None:
        """Say it; an echo has no rows to give, so they are made up."""
        if self._echo:
            self.rows = [(self._index << 32) | i for i in range(self._wanted)]
            return
        spec = ModelSpec(
            model=MODEL, graph=GRAPH, context=1 << 16, vocab=1000, pages=self._wanted,
            page_tokens=PAGE_TOKENS, max_batch={}, eos=(),
        )  # fmt: skip
        life = FIRST_LIFE + self._index
        wire = [spec_to_wire(spec)]
        self.say(Hello("worker", f"w{self._index}", life, [PROTOCOL_VERSION], specs=wire))

    def say(self, message: Message) -> None:
        self._channel.send(self._session.stamp(message))
        self.sent += 1

    def report(self, kind: Kind, rows: list[int], value: int) -> None:
        n = len(rows)
        self.say(
            Report(
                columns.u64(rows), columns.u8([kind]) * n, columns.u32([value]) * n,
                columns.u32([0]) * n,
            )
        )  # fmt: skip

    def progress(self) -> None:
        self.position += 1
        self.report(Kind.PROGRESS, self.rows, self.position)

    def beat(self) -> None:
        self.steps += 40
        self.say(Beat(self.steps, 3, LOAD))

    def hear(self) -> None:
        for _, frame in self._channel.receive():
            if self._echo:
                self.back += 1
                continue
            envelope = decode(frame)
            if not self._session.accept(envelope):
                continue
            self.acked = max(self.acked, envelope.c)
            if isinstance(envelope.message, Run):
                self._run(envelope.message)

    def _run(self, run: Run) -> None:
        new = [r.row for r in run.rows if isinstance(r, Row)]
        self.rows += new
        self.report(Kind.MOVED, new, 1)

    @property
    def ready(self) -> bool:
        return len(self.rows) >= self._wanted

    @property
    def settled(self) -> bool:
        return (self.back if self._echo else self.acked) >= self.sent


def play(load: Load, network: Network) -> None:
    workers = [SimulatedWorker(network, load, i) for i in range(load.workers)]
    poller = zmq.Poller()
    for w in workers:
        poller.register(w.pollable, zmq.POLLIN)
        w.hello()
    _until(poller, workers, lambda: all(w.ready and (load.echo or w.settled) for w in workers))
    _tell("ready")
    while sys.stdin.readline():  # the server has looked at its clock
        before = sum(w.sent for w in workers)
        if load.steady:
            _steady(load, poller, workers)
        else:
            _rounds(load, poller, workers)
        _until(poller, workers, lambda: all(w.settled for w in workers))
        _tell(f"done {sum(w.sent for w in workers) - before}")


def _tell(line: str) -> None:
    """In one write, so that who polls finds all of it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _until(poller: zmq.Poller, workers: list[SimulatedWorker], reached: Any) -> None:
    limit = time.monotonic() + BOUND_S
    while not reached():
        if time.monotonic() > limit:
            raise SystemExit("the server does not answer")
        poller.poll(200)
        for w in workers:
            w.hear()


def _rounds(load: Load, poller: zmq.Poller, workers: list[SimulatedWorker]) -> None:
    """All workers step at once: the server finds as many messages as there are workers."""
    due = time.monotonic()
    for _ in range(load.rounds):
        for w in workers:
            w.progress()
        due += load.pace_s
        while (left := due - time.monotonic()) > 0:
            poller.poll(max(1, int(left * 1000)))
            for w in workers:
                w.hear()


def _steady(load: Load, poller: zmq.Poller, workers: list[SimulatedWorker]) -> None:
    start = time.monotonic()
    events = sorted(
        (k * every + every * i / load.workers, i, what)
        for i in range(load.workers)
        for what, every in (("beat", BEAT_S), ("progress", PROGRESS_S))
        for k in range(int(load.seconds / every))
    )
    for at, i, what in events:
        while (left := start + at - time.monotonic()) > 0:
            poller.poll(int(left * 1000) + 1)
            for w in workers:
                w.hear()
        getattr(workers[i], what)()


def main() -> None:
    network = ZmqNetwork()
    try:
        play(Load(**json.loads(sys.argv[1])), network)
    finally:
        network.close()


if __name__ == "__main__":
    main()
