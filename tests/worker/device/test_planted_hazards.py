"""The hazards of planning ahead, planted in a small replay loop and caught by the cpu-async device.

Every interleaving is forced by rules on named points. Under each of them the correct loop gives
the oracle's tokens, and the bug that it is made for does not.
"""

from collections.abc import Callable

import pytest

from tests.support.replay_loop import PlantedBug, ReplayLoop
from tests.support.sequencer import Sequencer
from worker.device.cpu_async import CpuAsyncDevice
from worker.device.poison import PoisonRead
from worker.models.reference_hash import reference_tokens

STEPS = 8
PROMPTS = [[5, 6, 7], [80], list(range(40, 60))]
ORACLE = [reference_tokens(p, STEPS) for p in PROMPTS]

Rule = Callable[[Sequencer, ReplayLoop], None]


def run(rule: Rule, bug: PlantedBug | None = None, slots: int = 2) -> list[list[int]]:
    seq = Sequencer()
    device = CpuAsyncDevice(seq.gate)
    try:
        loop = ReplayLoop(device, PROMPTS, STEPS, seq.gate, slots=slots, bug=bug)
        rule(seq, loop)
        return loop.run()
    finally:
        seq.open()
        device.close()


def every_step(seq: Sequencer, point: str, may_pass: Callable[[int], bool]) -> None:
    """`point` followed by a step's number."""
    seq.rule(f"{point} *", lambda name: may_pass(int(name.rpartition(" ")[2])))


# ---- the interleavings


def free(seq: Sequencer, loop: ReplayLoop) -> None:
    """As it comes."""


def compute_behind_the_next_use_of_its_slot(seq: Sequencer, loop: ReplayLoop) -> None:
    """Step N starts once the planner has written what comes next on N's slot, or is held off."""

    def may_pass(n: int) -> bool:
        later = n + len(loop.slots)
        return later >= STEPS or bool(
            seq.reached(f"planner:fence {later}") or seq.passed(f"plan:written {later}")
        )

    every_step(seq, "compute:step", may_pass)


def compute_behind_the_next_plan(seq: Sequencer, loop: ReplayLoop) -> None:
    """Step N starts once step N + 1 is planned on the device."""
    every_step(
        seq,
        "compute:step",
        lambda n: n + 1 >= STEPS or seq.passed(f"plan:written {n + 1}") > 0,
    )


def compute_behind_its_reader(seq: Sequencer, loop: ReplayLoop) -> None:
    """Step N starts once its reader has read, or waits for the completion event in earnest."""

    def may_pass(n: int) -> bool:
        if seq.passed("readback:synchronize") > n:  # behind the copy
            return True
        return seq.reached("readback:wait") > n and not loop.completed(n)

    every_step(seq, "compute:step", may_pass)


def reader_behind_the_next_use_of_the_slot(seq: Sequencer, loop: ReplayLoop) -> None:
    """Step N is read once the step that uses its slot next has run."""

    def may_copy(_: str) -> bool:
        later = seq.passed("readback:copy") + len(loop.slots)
        return later >= STEPS or seq.passed(f"compute:done {later}") > 0

    seq.rule("readback:copy", may_copy)


def plan_behind_its_replay(seq: Sequencer, loop: ReplayLoop) -> None:
    """Step N's plan is copied once N has run without it, or N's stream waits for it."""
    every_step(
        seq,
        "plan:write",
        lambda n: seq.reached("compute:wait") > n or seq.passed(f"compute:done {n}") > 0,
    )


RULES: list[Rule] = [
    free,
    compute_behind_the_next_use_of_its_slot,
    compute_behind_the_next_plan,
    compute_behind_its_reader,
    reader_behind_the_next_use_of_the_slot,
    plan_behind_its_replay,
]


@pytest.fixture(params=RULES, ids=lambda r: r.__name__)
def rule(request: pytest.FixtureRequest) -> Rule:
    return request.param


@pytest.mark.parametrize("slots", [2, 3])
def test_the_correct_loop_gives_the_oracles_tokens(rule: Rule, slots: int) -> None:
    assert run(rule, slots=slots) == ORACLE


# ---- each bug under the interleaving that shows it


def test_a_slot_reused_without_its_fence_is_caught() -> None:
    got = run(compute_behind_the_next_use_of_its_slot, PlantedBug.NO_FENCE)
    assert got != ORACLE


def test_a_plan_written_on_the_live_slot_is_caught() -> None:
    got = run(compute_behind_the_next_plan, PlantedBug.LIVE_SLOT)
    assert got != ORACLE


def test_an_event_set_before_the_launch_is_caught() -> None:
    with pytest.raises(PoisonRead, match="before the kernel"):
        run(compute_behind_its_reader, PlantedBug.EVENT_EARLY)


def test_a_value_read_early_is_caught() -> None:
    with pytest.raises(PoisonRead, match="before the kernel"):
        run(compute_behind_its_reader, PlantedBug.READ_EARLY)


def test_outputs_that_are_not_cloned_are_caught() -> None:
    got = run(reader_behind_the_next_use_of_the_slot, PlantedBug.NO_CLONE)
    assert got != ORACLE


def test_a_replay_that_does_not_wait_for_its_plan_is_caught() -> None:
    got = run(plan_behind_its_replay, PlantedBug.NO_PLAN_WAIT)
    assert got != ORACLE
