"""A peer must not be able to crash the conductor, whatever well-formed messages it sends."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conductor.core.events import Drain, LinkDown, Received, Tick, WorkerExited
from conductor.core.invariants import check
from conductor.core.records import Request
from protocol import columns
from protocol.errors import InvariantViolation
from protocol.graph import spec_to_wire
from protocol.messages import (
    Beat,
    Bye,
    Closed,
    End,
    Frames,
    Hello,
    History,
    Leaving,
    Report,
    Run,
    Submit,
    Welcome,
)
from tests.support.conductor_driver import Driver, config, spec, tokens

LIVES = st.sampled_from([0x101, 0x102, 0x103, 0x104, 7])
U64 = st.one_of(st.integers(0, 6), st.just((1 << 64) - 1), st.just((0xC0DD << 32) + 1))
U32 = st.one_of(st.integers(0, 6), st.just((1 << 32) - 1))
U16 = st.one_of(st.integers(0, 4), st.just(0xFFFF))
U8 = st.integers(0, 26)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 1 << 64), st.text(max_size=4), st.floats()),
    lambda x: st.one_of(
        st.lists(x, max_size=3), st.dictionaries(st.text(max_size=4), x, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["tokens", "max_tokens", "seed", "rows", "ends", "batches", "streams", "pid", "step_ms",
     "error", "reason", "closed", "next", "code"]
)  # fmt: skip
MAP = st.dictionaries(KEYS, JUNK, max_size=4)
INPUTS = st.one_of(
    MAP, st.just({"tokens": tokens([1, 2, 3])}), st.just({"tokens": tokens(range(40))})
)
PARAMS = st.one_of(MAP, st.just({"max_tokens": 6}))
INVENTORY = st.one_of(
    MAP,
    st.fixed_dictionaries(
        {
            "rows": st.lists(st.lists(U64, min_size=3, max_size=3), max_size=3),
            "ends": st.lists(st.lists(U8, min_size=3, max_size=3), max_size=3),
            "batches": st.lists(U32, max_size=4),
            "streams": st.lists(st.lists(U32, min_size=2, max_size=3), max_size=4),
        }
    ),
)


@st.composite
def report(draw: Any) -> Report:
    n = draw(st.integers(0, 3))
    ids = st.one_of(U64, st.integers(1, 8).map(lambda k: (0xC0DD << 32) + k))
    return Report(
        columns.u64(draw(st.lists(ids, min_size=n, max_size=n))),
        columns.u8(draw(st.lists(U8, min_size=n, max_size=n))),
        columns.u32(draw(st.lists(U32, min_size=n, max_size=n))),
        columns.u32(draw(st.lists(U32, min_size=n, max_size=n))),
        draw(st.dictionaries(st.integers(0, 3), MAP, max_size=2)),
    )


@st.composite
def closed(draw: Any) -> Closed:
    n = draw(st.integers(0, 3))
    return Closed(
        columns.u64(draw(st.lists(U64, min_size=n, max_size=n))),
        columns.u16(draw(st.lists(U16, min_size=n, max_size=n))),
        columns.u8(draw(st.lists(U8, min_size=n, max_size=n))),
        columns.u32(draw(st.lists(U32, min_size=n, max_size=n))),
    )


HELLO = st.builds(
    Hello,
    role=st.sampled_from(["worker", "worker", "gateway", "client", "x"]),
    name=st.sampled_from(["w0", "w1", "gw"]),
    life=LIVES,
    versions=st.sampled_from([[1], [1], [2]]),
    endpoint=st.just("ipc://x"),
    specs=st.one_of(st.just([spec_to_wire(spec(pages=6))]), st.lists(MAP, max_size=2)),
    capacity=MAP,
    inventory=INVENTORY,
)
MESSAGES = st.one_of(
    HELLO,
    report(),
    report(),
    closed(),
    st.builds(
        Submit,
        stream=U64, attempt=U16, model=st.sampled_from(["m", "m", "m", "x"]), inputs=INPUTS,
        params=PARAMS, deadline_ms=U64, priority=U64,
        replay=st.sampled_from(["history", "restart", "never", "x"]),
    ),
    st.builds(
        History,
        stream=U64, attempt=U16, counts=st.lists(U32, max_size=2).map(columns.u32),
        tokens=st.lists(U32, max_size=8).map(columns.u32),
    ),
    st.builds(Beat, steps=U64, step_age_ms=U64, load=MAP),
    st.builds(Leaving, grace_ms=U64),
    st.builds(Bye, reason=st.text(max_size=3)),
    st.sampled_from([Welcome(1, 1, 1), End(), Frames(), Run(1, "m/d", "w", 0, [3])]),
)  # fmt: skip
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
