"""E35 over a whole worker: no setting and no interleaving changes a token of the reference model.

Streams are compared with the oracle, which knows no setting, so any two settings agree.
"""

from collections import defaultdict

import pytest

from protocol.messages import Row
from tests.support.interleavings import RULES, async_rig
from tests.support.worker_rig import DECODE, Rig
from tests.worker.metamorphic.settings import Setting, covering, every_pair
from worker.models.reference_hash import reference_tokens

SECOND = DECODE + 1
TOKENS = 14
PROMPTS = {
    1: list(range(40, 77)), 2: [33], 3: list(range(60, 76)), 4: [90, 91, 92],
    5: list(range(50, 67)), 6: [200, 45, 46, 47, 48, 49],
}  # fmt: skip
LAST = 6  # the row that makes a batched forward raise, once it decodes beside others
STREAMS = {row: reference_tokens(prompt, TOKENS + row) for row, prompt in PROMPTS.items()}
FAULT = {"point": "forward", "when_token": 200, "at": 3, "times": 1}


def chunks(prompt: list[int], size: int) -> list[int]:
    size = size or len(prompt)
    return [len(prompt[i : i + size]) for i in range(0, len(prompt), size)]


def send(r: Rig, s: Setting) -> None:
    """All rows, in the setting's order, batches and chunks."""
    order = sorted(PROMPTS, reverse=s.joins == "reversed")
    shared = s.composition != "alone" and s.joins != "staggered"
    batches: list[int] = []  # by chunk, where rows share them
    rows, later = [], defaultdict(list)
    for row in order:
        sizes = chunks(PROMPTS[row], s.chunk)
        while len(batches) < len(sizes):
            batches.append(r.batch())
        path = [(b if shared else r.batch(), n) for b, n in zip(batches, sizes, strict=False)]
        decode = SECOND if s.composition == "two batches" and row % 2 else DECODE
        rows.append(r.row(row, PROMPTS[row], len(STREAMS[row]), prefill=path, decode=decode))
        for batch, _ in path[1:]:
            later[batch].append(row)
        if s.joins == "staggered":
            run(r, rows, later)
            rows, later = [], defaultdict(list)
            r.until(lambda row=row: len(r.owner.tokens(row)) >= 2)
    run(r, rows, later)


def run(r: Rig, rows: list[Row], later: dict[int, list[int]]) -> None:
    r.run(rows)
    for batch, members in later.items():
        r.run_chunk(batch, *members)


def make(s: Setting):
    faults = [FAULT] if s.retries else []
    how = {"standing": (DECODE, SECOND), "faults": faults}
    if s.place == "cpu":
        return Rig(depth=s.depth, **how), None
    return async_rig(RULES[s.place], depth=s.depth, **how)


def test_every_pair_of_settings_is_among_them() -> None:
    chosen = covering()
    assert set().union(*(s.pairs() for s in chosen)) == every_pair()
    assert len(chosen) < 40


@pytest.mark.parametrize("setting", covering(), ids=str)
def test_no_setting_changes_a_token(setting: Setting) -> None:
    r, pace = make(setting)
    try:
        send(r, setting)
        r.until_ended(*PROMPTS)
        r.rest()
        got = {row: r.owner.tokens(row) for row in PROMPTS}
        fired = [f.fired for f in r.worker.loaded["m"].submodules["decoder"].faults.faults]
        used = r.pages_used()
    finally:
        if pace is not None:
            pace.seq.open()
        r.close()
    assert got == STREAMS
    assert used == 0
    assert fired == ([1] if setting.retries else [])
    if pace is not None:
        check_that_it_was_forced(setting, pace)


def check_that_it_was_forced(setting: Setting, pace) -> None:
    if setting.place == "compute_behind":
        assert pace.ahead == setting.depth
    if setting.place == "readback_behind":
        assert pace.unread == setting.depth
    if setting.place == "one_by_one":
        assert pace.ahead <= 1
        assert pace.unread == 1
