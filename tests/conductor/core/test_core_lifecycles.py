"""The two lifecycle tables, and how a missing row tells its story."""

import pytest

from conductor.core import request_lifecycle, worker_lifecycle
from conductor.core.request_lifecycle import RequestEvent, RequestState
from conductor.core.worker_lifecycle import WorkerEvent, WorkerState
from protocol.errors import IllegalTransition
from protocol.lifecycle import STORY, Lifecycle

FINAL = {RequestState.GONE, WorkerState.GONE, WorkerState.LOST}


@pytest.mark.parametrize("table", [request_lifecycle.TABLE, worker_lifecycle.TABLE])
def test_every_state_is_reached_and_only_final_ones_are_left_by_nothing(table) -> None:
    states = type(next(iter(table))[0])
    start = next(iter(states))
    assert set(table.values()) | {start} == set(states)
    assert {s for s in states if not any(a is s for a, _ in table)} == FINAL & set(states)


def test_closed_ends_a_request_wherever_it_stands() -> None:
    for state in set(RequestState) - FINAL:
        assert request_lifecycle.TABLE[(state, RequestEvent.CLOSED)] is RequestState.GONE


def test_a_failing_end_is_never_rebased() -> None:
    assert (RequestState.ENDING, RequestEvent.REBASE) not in request_lifecycle.TABLE
    assert (RequestState.ENDING, RequestEvent.FAIL) not in request_lifecycle.TABLE


def test_a_lost_worker_never_comes_back() -> None:
    for event in WorkerEvent:
        assert (WorkerState.LOST, event) not in worker_lifecycle.TABLE
        assert (WorkerState.GONE, event) not in worker_lifecycle.TABLE


def test_an_illegal_transition_brings_the_last_ones() -> None:
    life = Lifecycle("request 0x7 of gw", RequestState.QUEUED, request_lifecycle.TABLE)
    for k in range(STORY):
        life.on(RequestEvent.PLACED, f"w{k}")
        life.on(RequestEvent.REBASE, "death")
        life.on(RequestEvent.HISTORY)
    with pytest.raises(IllegalTransition) as e:
        life.on(RequestEvent.DONE)
    lines = str(e.value).splitlines()
    assert lines[0].startswith("request 0x7 of gw: no transition from QUEUED on DONE")
    assert len(lines) == 1 + STORY
    assert lines[-1] == "  REBASING -HISTORY-> QUEUED"
    assert "REBASING (death)" in lines[-2]
    assert life.state is RequestState.QUEUED
