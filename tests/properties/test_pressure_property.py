"""P18: under overcommitted pages every request finishes, and each is preempted a few times at most.

`World` checks on the way that no oldest row gives way and that preemptions are bounded.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core import placement
from protocol.messages import Reason
from tests.support.budget import budget, hunt
from tests.support.conductor_driver import config, spec
from tests.support.lifecycle_world import World
from worker.micro_scheduler import space
from worker.micro_scheduler.records import RowRecord

POOL = 6  # pages of 16 tokens, as many as one of the largest requests needs

SIZE = st.sampled_from([(30, 50), (30, 50), (30, 50), (1, 50), (40, 56), (16, 1)])
REPLAY = st.sampled_from(["history"] * 6 + ["restart", "never"])
REQUESTS = st.lists(st.tuples(SIZE, REPLAY), min_size=6, max_size=12)
PACE = st.lists(st.integers(0, 11), max_size=120)  # which move comes next, before all is even


def live(
    requests: Sequence[tuple[tuple[int, int], str]], pace: list[int], over: float, depth: int
) -> World:
    """Submit them all at once, disturb the order of moves, and let everything finish."""
    cfg = config(prefill_tokens=16, max_rows=16, overcommit=over)
    world = World(cfg, spec(pages=POOL), depth=depth)
    worker: Any = world.start_worker("w0")
    owner = world.start_owner("gw")
    while moves := world.moves():
        world.deliver(*moves[0])
    for i, ((length, n), replay) in enumerate(requests):
        world.submit(owner, [(41 * i + k) % 900 for k in range(length)], n, replay=replay)
    for move in pace:
        can: list[tuple[Any, tuple[Any, ...]]] = [(world.deliver, m) for m in world.moves()]
        can += [(world.engine, (worker,))] if worker.orders else []
        can += [(world.main, (worker,))] if worker.done else []
        if can:
            what, where = can[move % len(can)]
            what(*where)
    world.settle(3000)
    world.check_answers()
    assert {e.reason for e in owner.ended.values()} <= {Reason.LENGTH}
    assert worker.pages_used == 0
    return world


def check(examples: Any) -> None:
    @examples
    @given(
        requests=REQUESTS, pace=PACE, over=st.sampled_from([8.0, 2.0, 1.0]), depth=st.integers(1, 3)
    )
    def all_finish(requests: Any, pace: list[int], over: float, depth: int) -> None:
        world = live(requests, pace, over, depth)
        if over == 1.0:
            assert not world.preempted, "what was promised was not kept"

    all_finish()


def test_every_request_finishes_and_preemptions_are_bounded() -> None:
    check(budget(15))


def test_the_pool_is_too_small_for_them() -> None:
    """The property above is about something: here is preemption, hold and all."""
    world = live([((30, 50), "history")] * 10, [], 8.0, 2)
    assert sum(world.preempted.values()) > 5


def no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "may_be_preempted", lambda request: request.replay != "never")


def never_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    few = placement.MAX_PREEMPTIONS
    monkeypatch.setattr(placement, "may_be_preempted", lambda request: request.preemptions < few)


def overpromised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "fits_pool", lambda worker, request, limits: True)


def no_room_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "make_room", lambda s: None)


def never_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "retry", lambda s, trial: None)


def oldest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowRecord, "age", property(lambda row: -row.row))


PLANTS = [no_bound, never_is_not_heard, overpromised, no_room_is_made]
PLANTS += [never_retried, oldest_gives_way]


@pytest.mark.parametrize("plant", PLANTS)
def test_it_finds_a_planted_bug(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception, match=r"preempted|promised|not at rest|WORKER_LOST|oldest"):
        check(hunt(200))
