"""A peer must not be able to crash the conductor, whatever well-formed messages it sends."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conductor.core.events import Drain, LinkDown, Received, Tick, WorkerExited
from conductor.core.invariants import check
from conductor.core.records import Request
from protocol.errors import InvariantViolation
from protocol.messages import Hello
from tests.support.conductor_driver import Driver, config, spec
from tests.support.hostile_messages import LIVES, MESSAGES

EVENTS = st.one_of(
    st.builds(Received, life=LIVES, message=MESSAGES),
    st.builds(Received, life=LIVES, message=MESSAGES),
    st.builds(Received, life=LIVES, message=MESSAGES),
    st.builds(LinkDown, life=LIVES, why=st.just("x")),
    st.builds(WorkerExited, life=LIVES, outside=st.booleans(), why=st.just("x")),
    st.just(Tick()),
    st.builds(Drain, grace_ms=st.integers(0, 5000)),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.05, 0.3])), max_size=60))
def test_no_message_breaks_an_invariant(events: list[tuple[Any, float]]) -> None:
    d = Driver(config(prefill_tokens=16, max_rows=3))
    d.worker("w0", spec(pages=6))
    d.worker("w1", spec(pages=6))
    d.owner("gw")
    d.submit(0x103, 1, prompt=30)
    for event, passed in events:
        d.now += passed
        if isinstance(event, Received) and isinstance(event.message, Hello):
            object.__setattr__(event.message, "life", event.life)
        d.event(event)
        d.machine.next_due()
        d.machine.snapshot(d.now)


def _live(d: Driver) -> Request:
    owner = next(iter(d.machine._state.registry.owners.values()))
    return next(iter(owner.streams.values()))


def _forget_row(d: Driver) -> None:
    _live(d).row = None


def _lose_count(d: Driver) -> None:
    d.machine._state.submitted += 1


def _promise_too_much(d: Driver) -> None:
    next(iter(d.machine._state.registry.workers.values())).pages["m"] += 1


def _drop_stake(d: Driver) -> None:
    next(iter(d.machine._state.registry.workers.values())).stakes.clear()


def _queue_active(d: Driver) -> None:
    d.machine._state.queue.push(_live(d))


def _beside_trial(d: Driver) -> None:
    from conductor.core.records import Trial

    worker = next(iter(d.machine._state.registry.workers.values()))
    worker.trial = Trial("m", {}, 0.0, worker)


@pytest.mark.parametrize(
    "damage",
    [_forget_row, _lose_count, _promise_too_much, _drop_stake, _queue_active, _beside_trial],
)
def test_check_finds_the_damage(damage: Any) -> None:
    d = Driver()
    d.worker()
    d.submit(d.owner(), 1)
    check(d.machine._state)
    damage(d)
    with pytest.raises(InvariantViolation):
        d.machine.check()
