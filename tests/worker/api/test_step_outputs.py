import pytest
import torch

from worker.api.outputs import StepOutputs
from worker.api.states import LazyRequestStates, PerRequestState


def test_rows_are_views_of_columns():
    out = StepOutputs([7, 3], {"tokens": torch.tensor([10, 11])})
    assert list(out) == [7, 3]
    assert out.row_of(3) == 1
    view = out[3]["tokens"][0]
    assert view.tolist() == [11]
    assert view.data_ptr() == out.columns["tokens"][1:].data_ptr()
    with pytest.raises(KeyError):
        out[1]
    with pytest.raises(ValueError, match="column 'x': 3 rows for 1 requests"):
        StepOutputs([1], {"x": torch.zeros(3)})


def test_dropped_and_replaced_rows():
    out = StepOutputs([7, 3], {"tokens": torch.tensor([10, 11])})
    out.drop(7)
    assert 7 not in out
    assert len(out) == 1
    out.set_row(7, {"audio": [torch.zeros(2)]})
    assert list(out[7]) == ["audio"]
    assert out.columns["tokens"].tolist() == [10, 11]


def test_concat_keeps_equal_columns_and_falls_back_to_rows():
    a = StepOutputs([1], {"tokens": torch.tensor([5])})
    b = StepOutputs([3, 2], {"tokens": torch.tensor([6, 7])})
    whole = StepOutputs.concat([a, StepOutputs(), b])
    assert whole.request_ids == [1, 3, 2]
    assert whole.columns["tokens"].tolist() == [5, 6, 7]
    c = StepOutputs([4], {"tokens": torch.tensor([8]), "logits": torch.zeros(1, 2)})
    mixed = StepOutputs.concat([a, c])
    assert not mixed.columns
    assert list(mixed[4]) == ["tokens", "logits"]
    assert mixed[1]["tokens"][0].tolist() == [5]
    assert len(StepOutputs.concat([])) == 0
    b.drop(3)
    assert sorted(StepOutputs.concat([a, b])) == [1, 2]


def test_states_are_made_once_and_released_once():
    released = []

    class State(PerRequestState):
        def __init__(self, rid):
            self.rid = rid

        def release(self):
            released.append(self.rid)

    states = LazyRequestStates(State)
    assert states[4] is states[4]
    assert list(states) == [4]
    states.remove(4)
    states.remove(4)
    assert released == [4]
    assert len(states) == 0
