"""Strategies: well-formed messages that a hostile or broken peer might say to a conductor."""

from typing import Any

from hypothesis import strategies as st

from protocol import columns
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
from tests.support.conductor_driver import spec, tokens

LIVES = st.sampled_from([0x101, 0x102, 0x103, 0x104, 7])
U64 = st.one_of(st.integers(0, 6), st.just((1 << 64) - 1), st.just((0xC0DD << 32) + 1))
U32 = st.one_of(st.integers(0, 6), st.just((1 << 32) - 1))
U16 = st.one_of(st.integers(0, 4), st.just(0xFFFF))
U8 = st.integers(0, 26)
JUNK = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, (1 << 64) - 1), st.text(max_size=4), st.floats()
    ),
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
