"""Random lives of a scheduler. The simulation asserts on the way what no decision may ever do:
never a row twice in a step, in a step after its end was known, beyond `max_steps`, before its
earlier chunk, removed while in flight, or more steps in flight than `depth`."""

import itertools
import random

import pytest

from protocol.messages import ROW_MAY_CLOSE, ROW_TRIAL, Kind, Limit, Owners, Row, Run
from tests.support.scheduler_sim import NODE, OWNER, Sim, make_row
from worker.micro_scheduler.events import OwnerStalled

STANDING = {1000: 0, 1001: 0, 1002: 3}  # batch → priority
OTHER = 8


class Conductor:
    """Submits rows with random paths, chunk by chunk, and disturbs them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        r = self.random
        self.pages = r.choice([1 << 30, 120, 60])
        self.sim = Sim(depth=r.choice([1, 2, 3]), pages=self.pages)
        self.sim.give(Owners(OTHER, "memory://other", True))
        for batch, priority in STANDING.items():
            self.sim.open(batch, priority=priority)
        self.next_row = 0
        self.next_batch = 0
        self.later: list[tuple[int, int]] = []  # (batch, row): chunks not sent yet, in order
        self.trials = r.random() < 0.5
        self.other_up = True
        self.everyone: list[int] = []

    def new_rows(self) -> None:
        r = self.random
        self.next_batch += 1
        batch, standing = self.next_batch, r.choice(list(STANDING))
        rows: list[Row | int] = []
        for _ in range(r.randint(1, 4)):
            self.next_row += 1
            path = [[batch, r.randint(1, 9)]]
            for _ in range(r.choice([0, 0, 0, 1, 2])):
                self.next_batch += 1
                path.append([self.next_batch, r.randint(1, 9)])
                self.later.append((self.next_batch, self.next_row))
            if r.random() < 0.85:
                path.append([standing, 0])
            flags = ROW_MAY_CLOSE | (ROW_TRIAL if self.trials and r.random() < 0.1 else 0)
            steps = r.choice([0, 1, 2, 5, 20])
            self.sim.stops_at[self.next_row] = r.choice([1, 3, 8, 1 << 30])
            owner = OTHER if r.random() < 0.2 and self.other_up else OWNER
            rows.append(
                make_row(
                    self.next_row, path, steps, base=r.choice([0, 0, 4]), flags=flags, owner=owner
                )
            )
            self.everyone.append(self.next_row)
        self.sim.give(Run(batch, NODE, "prefill", STANDING[standing], rows), r.random() < 0.8)

    def next_chunk(self) -> None:
        if self.later:
            batch, row = self.later.pop(0)
            self.sim.run(batch, row, priority=self.random.choice([0, 0, 3]))

    def disturb(self) -> None:
        r, sim = self.random, self.sim
        if not self.everyone:
            return
        what, row = r.random(), r.choice(self.everyone)
        if what < 0.4:
            sim.leave(row)
        elif what < 0.6:
            sim.fail_next.add(row)
        elif what < 0.8:
            sim.skip_next.add(row)
        elif what < 0.9:
            sim.give(Limit(r.choice(list(STANDING)), r.choice([0, 5, None])))
        elif what < 0.95:
            sim.give(OwnerStalled(OWNER, r.random() < 0.5))
        elif self.other_up:
            self.other_up = False
            sim.give(Owners(OTHER, "", False))

    def live(self, events: int) -> None:
        for _ in range(events):
            x = self.random.random()
            if x < 0.12:
                self.new_rows()
            elif x < 0.25:
                self.next_chunk()
            elif x < 0.35:
                self.disturb()
            elif x < 0.7:
                self.sim.step()
            else:
                self.sim.finish()

    def come_to_rest(self) -> None:
        for batch in STANDING:
            self.sim.give(Limit(batch, None))
        self.sim.give(OwnerStalled(OWNER, False))
        while self.later:
            self.next_chunk()
        self.sim.settle()


@pytest.mark.parametrize("seed", range(150))
def test_every_row_ends_exactly_once_and_nothing_is_left(seed: int) -> None:
    life = Conductor(seed)
    life.live(250)
    life.come_to_rest()
    sim = life.sim
    left = [r for r in life.everyone if sim.ends[r] != 1]
    assert left == [], f"rows without one end: {left}"
    assert sim.used == 0
    assert sim.scheduler.idle
    assert sim.removed == set(sim.rows)
    assert set(sim.scheduler.inventory()["batches"]) == set(STANDING)
    counts = sim.scheduler.statistics()
    assert counts["rows"] == counts["held"] == counts["one_shot"] == counts["in_flight"] == 0
    for row in life.everyone:
        kinds = sim.kinds(row)
        assert kinds.count(Kind.HELD) - kinds.count(Kind.RESUMED) in (0, 1)
        assert all(
            {a, b} == {Kind.HELD, Kind.RESUMED}
            for held in [[k for k in kinds if k in (Kind.HELD, Kind.RESUMED)]]
            for a, b in itertools.pairwise(held)
        ), "held and resumed must alternate"


def test_the_oldest_row_always_progresses() -> None:
    """P18: with room for little more than one row, the oldest never loses its pages."""
    sim = Sim(pages=20)
    sim.open(100)
    sim.run(1, *[make_row(r, [(1, 3), (100, 0)], 12) for r in range(1, 6)])
    sim.settle()
    assert sim.kinds(1)[-1] is Kind.FINISHED
    assert Kind.PREEMPTED not in sim.kinds(1)
    assert all(sim.ends[r] == 1 for r in range(1, 6))
