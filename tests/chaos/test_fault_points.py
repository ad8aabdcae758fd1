"""P3: a worker that dies at any of its fault points loses nobody's tokens.

Twelve streams run on two workers when a thread of one of them comes to the point. The driver judges
as it does in chaos: histories, counts, leaks.
"""

import pytest

from protocol.faults import ACTIONS
from tests.chaos.driver import Outcome
from tests.chaos.run import Chaos, line
from tests.chaos.scenario import PLAIN, PLANTED, STEP_POINTS, Ask, Scenario, Strike

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

REQUESTS = 12
PAIRS = list(zip(PLANTED[::2], (*PLANTED[1::2], PLANTED[0]), strict=False))


def play(shared: Chaos, *strikes: Strike) -> Outcome:
    asks = tuple(
        Ask(f"{c}{i}", c, PLAIN, tuple(range(40, 60 + 3 * i)), 40 + i)
        for i, c in enumerate("ab" * (REQUESTS // 2))
    )
    outcome = shared.play(Scenario(-1, asks, strikes))
    told = "\n  ".join([line(outcome), *outcome.story])
    print(told)
    problems = "\n".join([told, *outcome.violations])
    assert not outcome.violations, shared.daemon.story(problems)
    fired = [x for x in outcome.story if x.startswith("fired")]
    assert len(fired) == len(strikes), f"not everything fired:\n{told}"
    return outcome


@pytest.mark.parametrize("points", PAIRS, ids=" then ".join)
def test_killed_there_every_stream_goes_on(shared: Chaos, points: tuple[str, str]) -> None:
    """The second worker dies while the first one is starting again."""
    strikes = zip((0.25, 0.6), ("w0", "w1"), points, strict=True)
    outcome = play(shared, *(Strike(at, "plant", w, p, "kill") for at, w, p in strikes))
    assert outcome.losses == 2
    assert outcome.ends == {"length": REQUESTS}


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("point", PLANTED)
def test_whatever_happens_there(shared: Chaos, point: str, action: str) -> None:
    """An exception in a step fails its requests; everything else costs nobody anything."""
    worker = f"w{PLANTED.index(point) % 2}"
    outcome = play(shared, Strike(0.3, "plant", worker, point, action))
    excused = action in ("raise", "memory") and point in STEP_POINTS
    assert outcome.losses == (0 if excused or action == "slow" else 1)
    assert set(outcome.ends) <= ({"length", "failed"} if excused else {"length"})
