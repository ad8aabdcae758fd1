"""`limits.overcommit`: pages promised beyond the pool, preemptions, and their bound (P18)."""

from collections.abc import Iterable
from typing import Any

import pytest

from conductor.core.commands import Command
from conductor.core.placement import MAX_PREEMPTIONS
from protocol.config import parse
from protocol.errors import ConfigError
from protocol.messages import End, Kind, Reason, Row
from tests.support.conductor_driver import Driver, config, rows, sent, spec

POOL = 8  # pages of 16 tokens; a request of 4 + 60 tokens needs 4
SIZE = {"params": {"max_tokens": 60, "seed": 1}}


class World:
    """One worker, one owner; every row that is placed begins at once, so that none is ahead."""

    def __init__(self, overcommit: float, pages: int = POOL) -> None:
        self.d = Driver(config(overcommit=overcommit))
        self.w, self.o = self.d.worker("w0", spec(pages=pages)), self.d.owner()

    def placed(self, commands: list[Command]) -> list[Row]:
        got = rows(commands)
        for row in got:
            got += self.placed(self.d.report(self.w, row.row, Kind.MOVED, 1))
        return got

    def submit(self, stream: int, **more: Any) -> list[Row]:
        return self.placed(self.d.submit(self.o, stream, **SIZE, **more))

    def report(self, row: int, kind: Kind, value: int = 2) -> list[Row]:
        return self.placed(self.d.report(self.w, row, kind, value, reason=Reason.LENGTH))

    def preempt(self, stream: int, row: int, attempts: Iterable[int]) -> int:
        """Preempt it again and again; the row of its last placement, 0 where it waits."""
        for attempt in attempts:
            assert self.report(row, Kind.PREEMPTED) == []
            placed = self.placed(self.d.history(self.o, stream, attempt, [9] * attempt))
            row = placed[0].row if placed else 0
        return row


@pytest.mark.parametrize(("overcommit", "placed"), [(1.0, 2), (1.5, 3), (1.9, 3), (4.0, 8)])
def test_promises_go_up_to_overcommit_times_the_pool(overcommit: float, placed: int) -> None:
    world = World(overcommit)
    for stream in range(1, 11):
        world.submit(stream)
    worker = world.d.snapshot["workers"][0]
    assert (worker["rows"], worker["committed_pages"]) == (placed, 4 * placed)
    assert world.d.requests["queued"] == 10 - placed


def test_no_single_request_is_promised_more_than_a_pool() -> None:
    """The larger pool admits it; the smaller one is free, and overcommits, and still can't."""
    d = Driver(config(overcommit=8))
    small, large = d.worker("a", spec(pages=2)), d.worker("b", spec(pages=4))
    placed = d.submit(d.owner(), 1, **SIZE)
    assert rows(placed, small) == []
    assert len(rows(placed, large)) == 1
    (refused,) = sent(d.submit(d.owner("c"), 1, params={"max_tokens": 61}), End)
    assert list(refused.reason) == [Reason.REJECTED]
    assert refused.detail[0]["code"] == "cannot_fit"
    assert (refused.detail[0]["max_tokens"], refused.detail[0]["pool_tokens"]) == (61, 64)


def test_a_preempted_request_goes_on_from_its_history_before_who_came_later() -> None:
    world = World(2.0)
    first = [row for stream in (1, 2, 3, 4) for row in world.submit(stream)]
    assert world.submit(5) == []
    assert world.submit(6) == []
    taken = world.report(first[3].row, Kind.PREEMPTED)
    assert [r.stream for r in taken] == [5], "nobody waits for a history"
    assert world.placed(world.d.history(world.o, 4, 2, [9, 9])) == []
    (again,) = world.report(first[0].row, Kind.FINISHED)
    assert (again.stream, again.base, again.attempt) == (4, [2], 2)
    assert world.d.counters["preempted"] == 1


def test_after_some_preemptions_a_request_goes_only_where_all_of_it_fits() -> None:
    world = World(3.0)
    elder = [world.submit(stream)[0].row for stream in (1, 2)]
    row = world.preempt(3, world.submit(3)[0].row, range(2, MAX_PREEMPTIONS + 1))
    assert row, "it is promised pages that there may not be"
    last = MAX_PREEMPTIONS + 1
    assert not world.preempt(3, row, [last])
    assert world.d.requests["queued"] == 1
    assert world.submit(4) == [], "who came later doesn't overtake it"
    placed = world.report(elder[0], Kind.FINISHED)
    assert [r.stream for r in placed] == [3, 4]
    assert placed[0].base == [last]


def test_what_may_not_be_computed_again_is_never_overcommitted() -> None:
    world = World(4.0)
    elder = [world.submit(stream)[0].row for stream in (1, 2)]
    assert world.submit(3, replay="never") == []
    assert [r.stream for r in world.report(elder[0], Kind.FINISHED)] == [3]
    assert len(world.submit(4)) == 1, "what comes later is younger: it gives way"


@pytest.mark.parametrize("value", [0.5, 0, -1, float("nan"), float("inf"), "much"])
def test_a_bad_value_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"limits\.overcommit"):
        parse({"models": {"m": {"kind": "reference"}}, "limits": {"overcommit": value}})
