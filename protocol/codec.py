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
from protocol.messages import BY_TAG, Column, Message, Row, Run

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
    name: str
    column: str | None
    default: int
    of: str
    check: Callable[[object], bool]
    wants: str


def _is_int(v: object) -> bool:
    return type(v) is int and 0 <= v < 1 << 64


def _list_of(each: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda v: isinstance(v, list) and all(map(each, v))


def _map_of(
    key: Callable[[object], bool], value: Callable[[object], bool]
) -> Callable[[object], bool]:
    return lambda v: isinstance(v, dict) and all(key(k) and value(x) for k, x in v.items())


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
    layout: list[_Field] = []
    for f in fields(cls):
        check, wants = _CHECKS[hints[f.name]]
        meta = f.metadata
        layout.append(
            _Field(
                f.name, meta.get("column"), meta.get("default", 0), meta.get("of", ""), check, wants
            )
        )
    return tuple(layout)


def _pack_fields(value: Any) -> list[Any]:
    out: list[Any] = []
    for f in _layout(type(value)):
        v = getattr(value, f.name)
        if f.column:
            if f.of and v.count(f.default) == len(v) and len(v) in (0, len(getattr(value, f.of))):
                v = None
            else:
                v = columns.to_bytes(v)
        out.append(v)
    return out


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
    values: dict[str, Any] = {}
    for f, v in zip(layout, body, strict=True):
        what = f"{cls.__name__}.{f.name}"
        if f.column:
            rows = len(values[f.of]) if f.of else None
            if v is None and rows is not None:
                values[f.name] = array(f.column, [f.default]) * rows
                continue
            values[f.name] = col = columns.from_bytes(f.column, v, what)
            if rows is not None and len(col) != rows:
                raise BadMessage(f"{what}: {len(col)} values for {rows} rows")
        elif not f.check(v):
            raise BadMessage(f"{what}: {f.wants} expected, got {type(v).__name__}")
        else:
            values[f.name] = v
    return cls(**values)


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
    if not isinstance(parts, list) or len(parts) < HEADER or not _is_ints(parts[:HEADER]):
        raise BadMessage("a frame is an array that begins with five unsigned integers")
    version, tag, a, b, c = parts[:HEADER]
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
    if isinstance(message, Run):
        object.__setattr__(message, "rows", [_row(r) for r in message.rows])
    _check_shape(message)
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


def _check_shape(message: Any) -> None:
    """Relations between columns that a reader would otherwise index past."""
    name = type(message).__name__
    if name == "Frames" and sum(message.count) != len(message.tokens):
        raise BadMessage(
            f"Frames: counts sum to {sum(message.count)}, {len(message.tokens)} tokens"
        )
    if name == "End":
        for field_name in ("counts", "detail"):
            if len(getattr(message, field_name)) not in (0, len(message.stream)):
                raise BadMessage(f"End.{field_name}: one entry per stream expected")
