"""A pool far too small: rows are held, preempted and computed again, and all come through."""

from collections import Counter
from collections.abc import Iterator

import pytest

from protocol.messages import Kind
from tests.support.worker_rig import Rig
from worker.models.reference_hash import reference_tokens

PAGES = 8  # of 16 tokens; the requests below need 6 each in the end
COUNT = 60


@pytest.fixture
def rig() -> Iterator[Rig]:
    r = Rig(pages=PAGES)
    yield r
    r.close()


def test_preempted_rows_placed_anew_with_their_history_give_the_oracles_tokens(rig: Rig) -> None:
    asked = {i: [40 + i] * 30 for i in range(1, 9)}
    got: dict[int, list[int]] = {i: [] for i in asked}
    attempts = dict.fromkeys(asked, 1)
    row_of = {i: i for i in asked}  # stream → its row
    rig.run([rig.row(i, p, COUNT, batch=900) for i, p in asked.items()])
    preempted: Counter[int] = Counter()
    waiting = set(asked)
    following = 100
    while waiting:
        rig.until(lambda: any(rig.conductor.ended(row_of[i]) for i in waiting))
        for i in [i for i in sorted(waiting) if rig.conductor.ended(row_of[i])]:
            row = row_of[i]
            kind, position, _ = rig.conductor.end(row)
            rig.until(lambda row=row, i=i: len(rig.owner.tokens(row, attempts[i])) + len(got[i])
                      == rig.conductor.end(row)[1])  # fmt: skip
            got[i] += rig.owner.tokens(row, attempts[i])
            assert position == len(got[i])
            if kind is Kind.FINISHED:
                waiting.remove(i)
                continue
            assert kind is Kind.PREEMPTED
            assert row != min(row_of[w] for w in waiting), "the oldest gave way"
            preempted[i] += 1
            attempts[i] += 1
            following += 1
            row_of[i] = following
            history = [*asked[i], *got[i]]
            left = COUNT - len(got[i])
            rig.run([rig.row(following, history, left, attempt=attempts[i], base=len(got[i]))])
    rig.rest()
    for i, prompt in asked.items():
        assert got[i] == reference_tokens(prompt, COUNT), f"stream {i}"
    assert preempted, "the pool was not too small"
    kinds = Counter(k for _, k, _, _ in rig.conductor.lines)
    assert kinds[Kind.HELD]
    assert kinds[Kind.RESUMED]
    assert rig.pages_used() == 0
    rig.worker.engine.check()
