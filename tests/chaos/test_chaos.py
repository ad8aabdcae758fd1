"""Chaos for a minute: the seeds that CI runs. By hand: `python -m tests.chaos.run --seeds 0..299`.

Each prints the pids that it struck. What is checked: the whole history of every stream (P1, P2),
that submitted = closed + open at every scrape (P22), and that afterwards nothing is left: pages,
rows, batches, streams, owners, descriptors, threads, processes, sockets (P16).
"""

import pytest

from tests.chaos import scenario
from tests.chaos.run import Chaos, line

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SEEDS = (1, 2, 10, 16, 19)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed(shared: Chaos, seed: int) -> None:
    outcome = shared.run(seed)
    told = "\n  ".join([line(outcome), *outcome.story])
    print(told)
    assert not outcome.violations, shared.daemon.story("\n".join([told, *outcome.violations]))
    assert outcome.scrapes > 0
    assert sum(outcome.ends.values()) == outcome.requests


def test_the_same_seed_is_the_same_scenario() -> None:
    assert scenario.make(5) == scenario.make(5)
    assert scenario.make(5) != scenario.make(6)


def test_three_hundred_seeds_strike_everything() -> None:
    strikes = [s for seed in range(300) for s in scenario.make(seed).strikes]
    whats = {"SIGKILL", "SIGSTOP", "SIGTERM", "pause", "plant", "close"}
    assert {s.what for s in strikes} == whats
    assert {s.target for s in strikes} == {"w0", "w1", "gateway", "conductor", "p", "b"}
    assert {s.point for s in strikes if s.target in scenario.WORKERS} - {""} == set(
        scenario.PLANTED
    )
    asks = [a for seed in range(300) for a in scenario.make(seed).asks]
    assert {a.poison for a in asks} == {0, 1, 2, 3, 4}
    assert {a.replay for a in asks} == {"history", "restart", "never"}
