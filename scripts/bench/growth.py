"""growth: what time and memory do as requests, rows, context and nodes double.

Requests through the conductor's core; rows, context and nodes through a whole worker on a device
that only takes time (timer_worker.py). CPU time, and allocations as Python counts them.
"""

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conductor.core.commands import Send
from conductor.core.events import Received
from conductor.core.machine import Machine
from protocol import PROTOCOL_VERSION, columns
from protocol.config import parse
from protocol.graph import ModelSpec, spec_to_wire
from protocol.messages import Closed, Hello, Kind, Message, Reason, Report, Row, Run, Submit
from scripts.bench import record, timer_worker
from scripts.bench.conductor_load import GRAPH, MODEL
from scripts.bench.record import Goal, Plot, Points, Record, Table

REQUESTS = (500, 1000, 2000, 4000, 8000, 16000)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXT = (64, 256, 1024, 4096, 16384)
NODES = (1, 2, 4, 8, 16)
CONTEXT_ROWS = 16
STEP_S = 0.004
GOAL_US = 0.15
WORKER, OWNER = 5, 6


Steps = Sequence[tuple[float, dict[str, float]]]


def measure(smoke: bool) -> Record:
    few = (1, 2)
    steps, repeats = (10, 1) if smoke else (200, 3)
    beside = 1 if smoke else CONTEXT_ROWS
    return _record(
        requests=_requests((20, 40) if smoke else REQUESTS, repeats),
        rows=_steps(few if smoke else ROWS, steps, repeats, lambda n: Shape(rows=n)),
        context=_steps(
            (16, 32) if smoke else CONTEXT, steps, repeats,
            lambda n: Shape(rows=beside, prompt=n, kv=True),
        ),
        nodes=_steps(
            few if smoke else NODES, steps, repeats, lambda n: Shape(rows=beside, nodes=n)
        ),
        repeats=repeats,
    )  # fmt: skip


# ---- requests: the conductor's core


def _requests(sizes: Sequence[int], repeats: int) -> list[tuple[float, float, float]]:
    """(open requests, µs of CPU each from Submit to Closed, bytes each while it is open)."""
    us = _least(sizes, repeats, lambda n: {"each": _lives(n)[0]}, "each")
    tracemalloc.start()
    try:
        return [(n, us[n]["each"], _lives(n)[1]) for n in sizes]
    finally:
        tracemalloc.stop()


def _least(
    sizes: Sequence[int], repeats: int, run: Callable[[int], dict[str, float]], by: str
) -> dict[int, dict[str, float]]:
    """The least run of each size. Sizes take turns, so that a busy minute falls on all."""
    runs = [{n: run(n) for n in sizes} for _ in range(repeats)]
    return {n: min((r[n] for r in runs), key=lambda found: found[by]) for n in sizes}


def _lives(n: int) -> tuple[float, float]:
    """All are submitted, 256 run at a time, each moves on, progresses, finishes and is closed."""
    core = _Core(n)
    before = tracemalloc.get_traced_memory()[0]
    start = time.process_time()
    for stream in range(n):
        inputs = {"tokens": columns.to_bytes(columns.u32([1, 2, 3]))}
        core.say(OWNER, Submit(stream, 1, MODEL, inputs, {"max_tokens": 8, "seed": 1}))
    spent = time.process_time() - start
    held = tracemalloc.get_traced_memory()[0] - before
    start = time.process_time()
    while core.running:
        row, stream = core.running.popitem()
        core.report(row, Kind.PROGRESS, 4)
        core.report(row, Kind.FINISHED, 8)
        core.say(OWNER, Closed(columns.u64([stream]), columns.u16([1]),
                               columns.u8([Reason.DONE]), columns.u32([8])))  # fmt: skip
        core.closed += 1
    spent += time.process_time() - start
    if core.closed != n:
        raise AssertionError(f"{core.closed} of {n} requests came to their end")
    return 1e6 * spent / n, held / n


class _Core:
    """A machine, one worker that does as it is told, one owner."""

    def __init__(self, most: int) -> None:
        config = parse(
            {"models": {MODEL: {"kind": "reference"}}, "limits": {"max_queued": most + 1}}
        )
        self._machine = Machine(config, 0xC0, seed=1)
        self.running: dict[int, int] = {}  # row -> stream
        self.closed = 0
        spec = ModelSpec(
            model=MODEL, graph=GRAPH, context=1 << 16, vocab=1000, pages=1 << 20,
            page_tokens=16, max_batch={}, eos=(),
        )  # fmt: skip
        wire = [spec_to_wire(spec)]
        self.say(WORKER, Hello("worker", "w0", WORKER, [PROTOCOL_VERSION], specs=wire))
        self.say(OWNER, Hello("client", "owner", OWNER, [PROTOCOL_VERSION], "ipc://nowhere"))

    def say(self, life: int, message: Message) -> None:
        for command in self._machine.handle(Received(life, message), 1.0):
            if isinstance(command, Send) and isinstance(command.message, Run):
                rows = [r for r in command.message.rows if isinstance(r, Row)]
                self.running |= {r.row: r.stream for r in rows}
                for r in rows:
                    self.report(r.row, Kind.MOVED, 1)

    def report(self, row: int, kind: Kind, value: int) -> None:
        extras = {0: {"reason": int(Reason.DONE), "closed": True}} if kind.ends else {}
        self.say(WORKER, Report(columns.u64([row]), columns.u8([kind]), columns.u32([value]),
                                columns.u32([0]), extras))  # fmt: skip


# ---- rows, context, nodes: a worker's steady step


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    prompt: int = 4
    kv: bool = False
    nodes: int = 1


def _steps(sizes: Sequence[int], steps: int, repeats: int, shape: Callable[[int], Shape]) -> Steps:
    """(size, µs of CPU a step by thread)."""

    def run(n: int) -> dict[str, float]:
        s = shape(n)
        return timer_worker.steady(
            step_s=STEP_S, depth=2, rows=s.rows, steps=steps, prompt=s.prompt, kv=s.kv,
            nodes=s.nodes,
        ).cpu  # fmt: skip

    return list(_least(sizes, repeats, run, "process").items())


# ---- the record


def _all(steps: Steps) -> Points:
    return [(x, cpu["process"]) for x, cpu in steps]


def _record(
    requests: list[tuple[float, float, float]], rows: Steps, context: Steps, nodes: Steps,
    repeats: int,
) -> Record:  # fmt: skip
    per_row, fixed = record.slope(_all(rows))
    request_power = record.exponent([(n, n * us) for n, us, _ in requests])
    memory_power = record.exponent([(n, n * b) for n, _, b in requests])
    context_power = record.exponent(_all(context))
    node_power = record.exponent(_all(nodes))
    r = record.rounded
    summary = [
        Goal("requests: time ~ requests ** p", r(request_power), "", "≤ 1.1", request_power <= 1.1),
        Goal("requests: memory ~ requests ** p", r(memory_power), "", "≤ 1.1", memory_power <= 1.1),
        Goal("rows: host CPU per row-step", r(per_row), "µs", f"≤ {GOAL_US}", per_row <= GOAL_US),
        Goal("context: host CPU of a step ~ context ** p", r(context_power), "", "0 ± 0.1",
             abs(context_power) <= 0.1),
        Goal("nodes: host CPU of a step ~ nodes ** p", r(node_power), "", "0 ± 0.1",
             abs(node_power) <= 0.1),
    ]  # fmt: skip
    threads = timer_worker.THREADS
    slopes = [
        [name, *map(r, record.slope([(x, cpu[name]) for x, cpu in rows]))]
        for name in (*threads, "process")
    ]
    return Record(
        name="growth",
        what="Time and memory as requests, rows, context and nodes double.",
        against="linear in requests and rows, constant in context and nodes",
        config={"step_ms": 1000 * STEP_S, "repeats": repeats, "taken": "least of the repeats",
                "rows beside context and nodes": CONTEXT_ROWS},
        seeds=[1],
        summary=summary,
        tables=[
            Table("Requests through the conductor's core, from Submit to Closed",
                  ["requests", "µs each", "bytes each"],
                  [[int(n), r(us), int(b)] for n, us, b in requests]),
            _by_thread("Rows of a steady step, µs of CPU", "rows", rows),
            Table("Fitted over rows", ["thread", "µs a row", "µs a step"], slopes),
            _by_thread("Context of each row (paged KV alone), µs of CPU", "tokens", context),
            _by_thread("Nodes of the model, µs of CPU", "nodes", nodes),
        ],
        notes=[
            "`process` is more than its threads: ZeroMQ's I/O thread has the rest.",
            f"A step's fixed part is {r(fixed)} µs here, most of it wake-ups and system calls; "
            "other work on the cores moves it more than it moves the slope.",
        ],
        plot=Plot(
            "Host CPU of a steady step", "rows", "µs",
            {name: [(x, cpu[name]) for x, cpu in rows] for name in (*threads, "process")}, "x",
        ),
    )  # fmt: skip


def _by_thread(title: str, x: str, steps: Steps) -> Table:
    names = (*timer_worker.THREADS, "process")
    rows = [[int(n), *(record.rounded(cpu[name]) for name in names)] for n, cpu in steps]
    return Table(title, [x, *names], rows)


if __name__ == "__main__":
    record.main(measure, __doc__ or "")
