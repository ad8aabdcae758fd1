import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import InvariantViolation
from worker.resources.kv.pages import SINK, PagePool


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 20))
def test_undoing_takes_in_reverse_restores_the_pool(takes, first):
    pool = PagePool(50)
    kept = pool.take(first)
    before = pool.free_pages().tolist()
    taken = [pool.take(n) for n in takes]
    pool.check(np.concatenate([kept, *taken]))
    for pages in reversed(taken):
        pool.give(pages)
    assert pool.free_pages().tolist() == before


def test_the_sink_is_never_handed_out_and_the_last_freed_page_goes_first():
    pool = PagePool(3)
    assert sorted(pool.take(3).tolist()) == [1, 2, 3]
    assert SINK == 0
    pool.give(np.array([2]))
    pool.give(np.array([3]))
    assert pool.take(2).tolist() == [3, 2]


def test_numbers_of_a_refusal_and_of_a_violation():
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(ValueError, match="2 pages asked, 1 free of 2"):
        pool.take(2)
    with pytest.raises(InvariantViolation, match=r"1 free \+ 0 used is not 3 total - 1 sink"):
        pool.check(np.array([], np.int64))
    with pytest.raises(InvariantViolation, match="held twice"):
        pool.check(pool.free_pages())
    pool.give(np.array([1]))
    with pytest.raises(InvariantViolation, match="2 free of 2"):
        pool.give(np.array([1]))
