"""What a steady batch costs the conductor: beats and coalesced progress, counted, not timed."""

import sys
from typing import Any

from conductor.core.commands import Send
from conductor.core.events import Received
from protocol import columns
from protocol.messages import Beat, Kind, Report
from tests.support.conductor_driver import Driver, config, rows, spec
from tests.support.conductor_harness import Simulation


def test_a_thousand_steps_exchange_only_beats_and_progress() -> None:
    sim = Simulation(config(), spec(context=4096, pages=4096), seed=1)
    worker, owner = sim.start_worker("w0"), sim.start_owner("gw")
    while moves := sim.moves():
        sim.deliver(*moves[0])
    for _ in range(8):
        sim.submit(owner, [1, 2, 3], 1200)
    while len([r for r in worker.rows.values() if r.stage == 1]) < 8:
        for move in sim.moves():
            sim.deliver(*move)
        sim.step(worker)
    while moves := sim.moves():
        sim.deliver(*moves[0])
    sim.commands.clear()
    heard: list[Any] = []
    before = worker.steps
    while worker.steps < before + 1000:
        assert sim.step(worker)
        sim.pass_time(0.002)
        for source, target in sim.moves():
            if target == 0:
                heard.append(sim.links[(source, target)][0])
            sim.deliver(source, target)
    told = [c for c in sim.commands if isinstance(c, Send)]
    assert {type(c.message) for c in told} == {Beat}
    beats = 1000 * 0.002 / 0.2
    assert len(told) <= 2 * (beats + 1)
    assert {type(m) for m in heard} == {Beat, Report}
    reports = [m for m in heard if isinstance(m, Report)]
    assert all(set(m.kind) == {Kind.PROGRESS} for m in reports)
    assert len(reports) <= beats + 1


def calls(d: Driver, event: Received) -> int:
    """Python calls that the core makes for one event."""
    count = 0

    def note(frame: Any, what: str, arg: Any) -> None:
        nonlocal count
        count += what == "call"

    sys.setprofile(note)
    try:
        d.machine.handle(event, d.now)
    finally:
        sys.setprofile(None)
    return count


def crowd(queued: int, running: int) -> tuple[Driver, int, list[int]]:
    d = Driver(config(max_rows=running, max_queued=100_000))
    worker, owner = d.worker("w0", spec(pages=1 << 20)), d.owner()
    placed = []
    for stream in range(running):
        placed += rows(d.submit(owner, stream))
        for row in placed:
            placed += rows(d.report(worker, row.row, Kind.MOVED, 1))
    for stream in range(running, running + queued):
        d.submit(owner, stream, deadline_ms=10_000_000)
    return d, worker, [r.row for r in placed]


def test_an_event_costs_what_changed_and_not_what_exists() -> None:
    costs = []
    for queued, running in ((8, 8), (400, 64)):
        d, worker, ids = crowd(queued, running)
        one = columns.u64(ids[:1])
        progress = Report(one, columns.u8([Kind.PROGRESS]), columns.u32([3]), columns.u32([0]))
        moved = Report(one, columns.u8([Kind.HELD]), columns.u32([0]), columns.u32([0]))
        ended = Report(one, columns.u8([Kind.FINISHED]), columns.u32([8]), columns.u32([8]))
        costs.append(
            [
                calls(d, Received(worker, Beat(1, 0, {}))),
                calls(d, Received(worker, progress)),
                calls(d, Received(worker, moved)),
                calls(d, Received(worker, ended)),
            ]
        )
    assert costs[0] == costs[1]


def test_progress_of_a_thousand_rows_costs_what_that_of_one_row_costs() -> None:
    """A steady worker's report is read as columns; only a trial asks about rows."""
    d, worker, ids = crowd(0, 64)

    def progress(of: list[int]) -> Report:
        n = len(of)
        return Report(
            columns.u64(of), columns.u8([Kind.PROGRESS] * n), columns.u32([3] * n),
            columns.u32([0] * n),
        )  # fmt: skip

    one = calls(d, Received(worker, progress(ids[:1])))
    assert calls(d, Received(worker, progress(ids))) == one
    assert calls(d, Received(worker, progress(ids * 16))) == one


def test_looking_at_the_time_costs_the_same_beside_64_workers() -> None:
    def due(workers: int) -> int:
        d = Driver(config())
        for i in range(workers):
            d.worker(f"w{i}")
        seen = 0

        def note(frame: Any, what: str, arg: Any) -> None:
            nonlocal seen
            seen += what in ("call", "c_call")

        sys.setprofile(note)
        try:
            assert d.machine.next_due() is not None
        finally:
            sys.setprofile(None)
        return seen

    assert due(1) == due(64)
