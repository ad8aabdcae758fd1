"""Bytes <-> messages: one msgpack array, header first, then the message's fields in order.

Control header `[version, tag, session, seq, ack]`; stream header `[version, tag, worker life,
owner life, seq]`. Whatever bytes arrive, decoding either returns a well-typed message or raises
`BadMessage` or `VersionMismatch`; it never allocates more than the frame's own size suggests.
"""

# What msgpack returns is untyped until it is checked: that is this file's work.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from array import array
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple, get_type_hints

import msgpack

from protocol import PROTOCOL_VERSION, columns
from protocol.errors import BadMessage, VersionMismatch
from protocol.messages import BY_TAG, Column, End, Frames, Message, Row, Run

MAX_FRAME = 64 << 20  # bytes; a larger frame is refused unread
HEADER = 5


class Envelope(NamedTuple):
    """A decoded frame. Control: `a` session, `b` seq, `c` ack. Stream: `a` worker life, `b` owner
    life, `c` seq."""

    message: Message
    a: int
    b: int
    c: int


class _Field(NamedTuple):
    """`what` names it in errors. `of`: index of the field whose length a column shares, or -1."""

    name: str
    what: str
    column: str | None
    default: int
    of: int
    check: Callable[[object], bool]
    wants: str


def _is_int(v: object) -> bool:
    return type(v) is int and 0 <= v < 1 << 64


def _list_of(each: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda v: isinstance(v, list) and all(map(each, v))


def _map_of(
    key: Callable[[object], bool], value: Callable[[object], bool]
) -> Callable[[object], bool]:
    return lambda v: (
        isinstance(v, dict) and (not v or all(key(k) and value(x) for k, x in v.items()))
    )


def _is_str(v: object) -> bool:
    return isinstance(v, str)


def _anything(v: object) -> bool:
    return True


_is_ints = _list_of(_is_int)
_is_map = _map_of(_is_str, _anything)

# Annotation of a field -> (check, what to say when it fails).
_CHECKS: dict[Any, tuple[Callable[[object], bool], str]] = {
    int: (_is_int, "an unsigned integer"),
    bool: (lambda v: type(v) is bool, "a boolean"),
    str: (_is_str, "a string"),
    int | None: (lambda v: v is None or _is_int(v), "an unsigned integer or nil"),
    dict[str, Any]: (_is_map, "a map"),
    dict[int, dict[str, Any]]: (_map_of(_is_int, _is_map), "a map from row index to a map"),
    list[dict[str, Any]]: (_list_of(_is_map), "a list of maps"),
    list[list[int]]: (_list_of(_is_ints), "a list of lists of unsigned integers"),
    list[int]: (_is_ints, "a list of unsigned integers"),
    list[str]: (_list_of(_is_str), "a list of strings"),
    list[Row | int]: (_list_of(_anything), "a list"),
    Column: (_anything, "a column"),
}


@cache
def _layout(cls: type) -> tuple[_Field, ...]:
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    layout: list[_Field] = []
    for f in fields(cls):
        check, wants = _CHECKS[hints[f.name]]
        meta = f.metadata
        of = names.index(meta["of"]) if meta.get("of") else -1
        layout.append(
            _Field(
                f.name,
                f"{cls.__name__}.{f.name}",
                meta.get("column"),
                meta.get("default", 0),
                of,
                check,
                wants,
            )
        )
    return tuple(layout)


def _pack_fields(value: Any) -> list[Any]:
    """Every message passes here: what it costs a row is what `array` and `bytes` cost."""
    out: list[Any] = []
    lengths: list[int] = []
    for name, _, column, default, of, _, _ in _layout(type(value)):
        v = getattr(value, name)
        rows = 0
        if column is not None:
            rows = len(v)
            if of >= 0 and (not rows or (rows == lengths[of] and _only(v, default, rows))):
                v = None
            else:
                v = columns.to_bytes(v)
        lengths.append(rows)
        out.append(v)
    return out


def _only(column: "array[int]", default: int, rows: int) -> bool:
    """Whether the column holds its default alone; one that doesn't mostly shows it at once."""
    return column[0] == default and column.count(default) == rows


def encode(message: Message, a: int, b: int, c: int, version: int = PROTOCOL_VERSION) -> bytes:
    """One frame. The meaning of `a, b, c` is that of `Envelope`."""
    body = _pack_fields(message)
    if isinstance(message, Run):
        body[-1] = [r if isinstance(r, int) else _pack_fields(r) for r in message.rows]
    frame = msgpack.packb([version, message.TAG, a, b, c, *body], use_bin_type=True)
    assert frame is not None  # it is only with a stream to write to
    return frame


def _unpack_fields(cls: type, body: list[Any]) -> Any:
    layout = _layout(cls)
    if len(body) != len(layout):
        raise BadMessage(f"{cls.__name__}: {len(layout)} fields expected, {len(body)} found")
    values: list[Any] = []
    for (_, what, column, default, of, check, wants), v in zip(layout, body, strict=True):
        if column is None:
            if not check(v):
                raise BadMessage(f"{what}: {wants} expected, got {type(v).__name__}")
            values.append(v)
        elif v is None and of >= 0:
            values.append(array(column, [default]) * len(values[of]))
        else:
            col = columns.from_bytes(column, v, what)
            if of >= 0 and len(col) != len(values[of]):
                raise BadMessage(f"{what}: {len(col)} values for {len(values[of])} rows")
            values.append(col)
    return cls(*values)


def decode(frame: bytes) -> Envelope:
    """Read one frame; raises `BadMessage` (malformed) or `VersionMismatch`."""
    if len(frame) > MAX_FRAME:
        raise BadMessage(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME}")
    n = len(frame)
    try:
        parts = msgpack.unpackb(
            frame, raw=False, strict_map_key=False, max_array_len=n, max_map_len=n,
            max_str_len=n, max_bin_len=n, max_ext_len=0,
        )  # fmt: skip
    except Exception as e:  # msgpack raises a family of unrelated types on bad bytes
        raise BadMessage(f"not a msgpack frame: {type(e).__name__}") from None
    if not isinstance(parts, list) or len(parts) < HEADER:
        raise BadMessage("a frame is an array that begins with five unsigned integers")
    version, tag, a, b, c = header = parts[:HEADER]
    for value in header:
        if type(value) is not int or value < 0:  # msgpack has none over 64 bits
            raise BadMessage("a frame is an array that begins with five unsigned integers")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"protocol version {version}; this side speaks {PROTOCOL_VERSION}",
            theirs=version,
            ours=PROTOCOL_VERSION,
        )
    cls = BY_TAG.get(tag)
    if cls is None:
        raise BadMessage(f"unknown tag {tag}")
    message = _unpack_fields(cls, parts[HEADER:])
    check = _SHAPES.get(cls)
    if check is not None:
        check(message)
    return Envelope(message, a, b, c)


def _row(value: Any) -> Row | int:
    if type(value) is int:
        return value
    if not isinstance(value, list):
        raise BadMessage("Run.rows: each row is a number or an array")
    row: Row = _unpack_fields(Row, value)
    if not row.path or any(len(stage) != 2 for stage in row.path):
        raise BadMessage(f"Row {row.row}: a path is a list of (batch, tokens)")
    return row


def _read_rows(message: Run) -> None:
    object.__setattr__(message, "rows", [_row(r) for r in message.rows])


def _check_tokens(message: Frames) -> None:
    """A reader would otherwise index past the tokens."""
    total = sum(message.count)
    if total != len(message.tokens):
        raise BadMessage(f"Frames: counts sum to {total}, {len(message.tokens)} tokens")


def _check_ends(message: End) -> None:
    for name in ("counts", "detail"):
        if len(getattr(message, name)) not in (0, len(message.stream)):
            raise BadMessage(f"End.{name}: one entry per stream expected")


# What a message's fields must be to each other, or become, once each is well-typed.
_SHAPES: dict[type, Callable[[Any], None]] = {
    Run: _read_rows, Frames: _check_tokens, End: _check_ends,
}  # fmt: skip
