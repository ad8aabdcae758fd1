"""The codec: every message round-trips, nothing malformed passes, columns cost columns."""

import contextlib
from dataclasses import fields
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import PROTOCOL_VERSION, columns
from protocol.codec import decode, encode
from protocol.errors import BadMessage, VersionMismatch
from protocol.messages import BY_TAG, CONTROL, STREAM, Frames, Message, Owners, Row, Run

U64 = st.integers(0, 2**64 - 1)
SIZES = {"B": 8, "H": 16, "I": 32, "Q": 64}
SCALARS: dict[Any, Any] = {
    int: U64,
    bool: st.booleans(),
    str: st.text(max_size=20),
    int | None: st.none() | U64,
    dict[str, Any]: st.dictionaries(st.text(max_size=5), U64 | st.text(max_size=5), max_size=3),
    list[int]: st.lists(U64, max_size=4),
    list[str]: st.lists(st.text(max_size=5), max_size=3),
    list[list[int]]: st.lists(st.lists(U64, max_size=3), max_size=3),
    list[dict[str, Any]]: st.lists(
        st.dictionaries(st.text(max_size=3), U64, max_size=2), max_size=2
    ),
    dict[int, dict[str, Any]]: st.dictionaries(U64, st.dictionaries(st.text(max_size=3), U64)),
}
ROW = st.builds(
    Row, U64, U64, U64, st.integers(1, 9), st.integers(0, 9),
    st.lists(st.tuples(U64, U64).map(list), min_size=1, max_size=3),
    st.lists(U64, max_size=2), st.lists(U64, max_size=3), SCALARS[dict[str, Any]],
    SCALARS[dict[str, Any]], U64, st.integers(0, 7), SCALARS[list[str]],
)  # fmt: skip


@st.composite
def messages(draw: st.DrawFn) -> Message:
    cls = draw(st.sampled_from(list(BY_TAG.values())))
    hints = get_type_hints(cls)
    n = draw(st.integers(0, 5))
    values: dict[str, Any] = {}
    for f in fields(cls):  # type: ignore[arg-type]
        code = f.metadata.get("column")
        if code:
            one = st.integers(0, 2 ** SIZES[code] - 1)
            values[f.name] = columns.array(code, draw(st.lists(one, min_size=n, max_size=n)))
        elif f.name == "rows":
            values[f.name] = draw(st.lists(ROW | U64, max_size=3))
        else:
            values[f.name] = draw(SCALARS[hints[f.name]])
    if cls is Frames:
        counts = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
        values["count"] = columns.u32(counts)
        values["tokens"] = columns.u32(range(sum(counts)))
    if cls.__name__ == "End":
        values["counts"], values["detail"] = [[1]] * n, [{}] * n
    return cls(**values)


@given(messages(), U64, U64, U64)
@settings(max_examples=400, deadline=None)
def test_every_message_survives_the_wire(message: Message, a: int, b: int, c: int) -> None:
    assert decode(encode(message, a, b, c)) == (message, a, b, c)


@given(st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_any_bytes_are_refused_or_decoded(data: bytes) -> None:
    with contextlib.suppress(BadMessage, VersionMismatch):
        decode(data)


@given(messages(), st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_frame_is_refused_or_well_typed(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message, 1, 2, 3))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    try:
        got = decode(bytes(frame))
    except (BadMessage, VersionMismatch):
        return
    # well typed: what was accepted can be encoded again
    encode(got.message, got.a, got.b, got.c)


def test_a_nested_bomb_is_refused() -> None:
    with pytest.raises(BadMessage):
        decode(b"\x91" * 100_000)


def test_an_array_that_claims_more_than_the_frame_holds_is_refused() -> None:
    with pytest.raises(BadMessage):
        decode(b"\xdd\xff\xff\xff\xff")  # array32 of 4 billion items


def test_another_version_is_told_apart_from_garbage() -> None:
    frame = encode(Owners(1, "ipc://x", True), 1, 1, 0, version=PROTOCOL_VERSION + 1)
    with pytest.raises(VersionMismatch) as e:
        decode(frame)
    assert e.value.detail == {"theirs": PROTOCOL_VERSION + 1, "ours": PROTOCOL_VERSION}


def test_the_error_names_message_field_and_expectation() -> None:
    frame = msgpack.packb([PROTOCOL_VERSION, Owners.TAG, 1, 1, 0, 7, 8, True])
    with pytest.raises(BadMessage, match=r"Owners\.endpoint: a string expected, got int"):
        decode(frame)
    frame = msgpack.packb([PROTOCOL_VERSION, Owners.TAG, 1, 1, 0, 7])
    with pytest.raises(BadMessage, match="Owners: 3 fields expected, 1 found"):
        decode(frame)


def test_columns_of_different_lengths_are_refused() -> None:
    good = Frames(stream=columns.u64([1, 2]), first=columns.u32([1, 2]))
    parts = msgpack.unpackb(encode(good, 1, 2, 3))
    parts[5 + 3] = columns.to_bytes(columns.u32([1]))
    with pytest.raises(BadMessage, match=r"Frames\.first: 1 values for 2 rows"):
        decode(msgpack.packb(parts))


def test_token_counts_must_match_the_tokens() -> None:
    bad = Frames(
        stream=columns.u64([1]), attempt=columns.u16([1]), channel=columns.u8([0]),
        first=columns.u32([0]), count=columns.u32([2]), flags=columns.u8([0]),
        reason=columns.u8([0]), tokens=columns.u32([5]),
    )  # fmt: skip
    with pytest.raises(BadMessage, match="counts sum to 2, 1 tokens"):
        decode(encode(bad, 1, 2, 3))


def test_a_column_of_defaults_travels_as_nil() -> None:
    def frames(reason: int) -> bytes:
        n = 256
        return encode(
            Frames(
                stream=columns.u64(range(n)), attempt=columns.u16([1] * n),
                channel=columns.u8([0] * n), first=columns.u32([9] * n),
                count=columns.u32([1] * n), flags=columns.u8([0] * n),
                reason=columns.u8([reason] * n), tokens=columns.u32(range(n)),
            ), 1, 2, 3,
        )  # fmt: skip

    assert len(frames(1)) - len(frames(0)) >= 256
    assert len(frames(0)) < 256 * (8 + 4 + 4) + 64


def test_tags_are_unique_and_rows_keep_numbers() -> None:
    assert len(BY_TAG) == len(CONTROL) + len(STREAM)
    run = Run(1, "m/n", "decode", 0, [7, 8])
    assert decode(encode(run, 1, 1, 1)).message == run
