"""The heap against a plain list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.lazy_heap import LazyHeap

OPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 30), st.integers(0, 5)),
        st.tuples(st.just("discard"), st.integers(0, 30), st.just(0)),
    ),
    max_size=200,
)


@given(OPS)
def test_it_gives_what_a_sorted_list_gives(ops: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[int] = LazyHeap()
    model: list[tuple[int, int, int]] = []
    for n, (op, item, key) in enumerate(ops):
        there = any(i == item for _, _, i in model)
        if op == "discard":
            assert heap.discard(item) == there
            model = [e for e in model if e[2] != item]
        elif not there:
            heap.push(key, item)
            model.append((key, n, item))
        model.sort()
        assert heap.first() == ((model[0][0], model[0][2]) if model else None)
        assert len(heap) == len(model)
        assert sorted(heap.items()) == sorted(i for _, _, i in model)


def test_an_item_is_in_once() -> None:
    heap: LazyHeap[str] = LazyHeap()
    heap.push(1, "a")
    with pytest.raises(ValueError, match="already"):
        heap.push(2, "a")


def test_holes_do_not_pile_up() -> None:
    heap: LazyHeap[int] = LazyHeap()
    heap.push(0, -1)  # it never goes, so holes behind it are never popped
    for i in range(10_000):
        heap.push(1, i)
        heap.discard(i)
    assert len(heap._heap) < 100
