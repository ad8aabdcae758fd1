"""A pool that is too small for what was placed: the oldest always goes on (P18)."""

import pytest

from protocol.messages import Kind
from tests.support.scheduler_sim import OTHER_NODE, Sim, make_row

DECODE, OTHER_DECODE = 1000, 1001


def waiting(sim: Sim) -> Sim:
    """Row 1 of 20 tokens waits for pages that row 2 has: 12 of 24, growing by one a step."""
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 8), (500, 12), (DECODE, 0)], 2), plan=False)
    sim.run(2, make_row(2, [(2, 3), (DECODE, 0)], 14))
    sim.settle_until(lambda: sim.rows[2].consumed >= 6)
    sim.run(500, 1)
    sim.settle_until(lambda: Kind.HELD in sim.kinds(1))
    return sim


def test_a_younger_row_does_not_begin_while_an_older_one_waits_for_pages() -> None:
    """Small requests keep coming; each would take a page that the oldest waits for."""
    sim = waiting(Sim(pages=24))
    for n in range(3, 40):
        sim.run(n, make_row(n, [(n, 1), (DECODE, 0)], 2))
        sim.turn()
    sim.settle()
    ends = [s.row for s in sim.said if s.kind.ends]
    assert Kind.PREEMPTED not in {s.kind for s in sim.said}
    assert ends[:2] == [2, 1], "row 1 waits for what ran already, and for nobody else"
    assert ends[2:] == sorted(ends[2:]), "who waited is taken in order"
    assert set(ends) == set(range(1, 40))


def test_held_rows_do_not_count_as_ahead_so_they_are_reported() -> None:
    sim = waiting(Sim(pages=24))
    sim.run(3, make_row(3, [(3, 1), (DECODE, 0)], 2))
    assert sim.kinds(3) == [Kind.HELD]
    sim.settle()
    assert sim.kinds(3)[:3] == [Kind.HELD, Kind.STARTED, Kind.RESUMED]


def test_age_is_the_order_of_placement_not_of_arrival() -> None:
    """Batches of a higher priority arrive first; the conductor reckons with its own order."""
    sim = Sim(pages=12)
    sim.open(DECODE)
    for r in (2, 1):
        sim.run(r, make_row(r, [(r, 4), (DECODE, 0)], 8), plan=r == 1)
    sim.settle()
    assert (sim.last(1).kind, sim.last(2).kind) == (Kind.FINISHED, Kind.PREEMPTED)


def test_one_models_pool_is_no_concern_of_anothers() -> None:
    """Both rows of "m" are stuck; "n" has a younger row with pages, which runs all the while."""
    sim = Sim(pages=40)
    sim.open(DECODE)
    sim.open(OTHER_DECODE, node=OTHER_NODE)
    sim.run(1, *[make_row(r, [(1, 18), (DECODE, 0)], 15) for r in (1, 2)], plan=False)
    sim.run(3, make_row(3, [(3, 1), (OTHER_DECODE, 0)], 39), node=OTHER_NODE)
    sim.settle_until(lambda: Kind.PREEMPTED in sim.kinds(2))
    assert sim.ends[3] == 0, "the stuck pool waited for the other to come to rest"
    sim.settle()
    assert sim.last(1).kind is Kind.FINISHED
    assert sim.last(3).kind is Kind.FINISHED
    assert Kind.HELD not in sim.kinds(3)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_fits_beside_all_that_is_older_is_never_preempted(depth: int) -> None:
    """Rows 1 to 3 fit together (8 + 8 + 8 of 24); rows 4 to 9 are promised pages twice."""
    sim = Sim(depth=depth, pages=24)
    sim.open(DECODE)
    for r in range(1, 10):
        sim.run(r, make_row(r, [(r, 3), (DECODE, 0)], 6), plan=r == 9)
    sim.settle()
    assert all(Kind.PREEMPTED not in sim.kinds(r) for r in (1, 2, 3))
    assert {sim.last(r).kind for r in range(1, 10)} <= {Kind.FINISHED, Kind.PREEMPTED}
    assert sim.used == 0
