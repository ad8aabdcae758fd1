"""Numeric columns: what makes a message cost its bytes and not its rows.

A column is an `array.array`; on the wire it is a little-endian byte string. For 256 rows a column
encodes and decodes in about a microsecond, a list of dicts in hundreds.
"""

import sys
from array import array
from collections.abc import Iterable

from protocol.errors import BadMessage

TYPECODES = {"B": 1, "H": 2, "I": 4, "Q": 8}
_SWAP = sys.byteorder == "big"

if array("I").itemsize != 4 or array("Q").itemsize != 8:  # pragma: no cover
    raise ImportError("protocol.columns needs a platform where array('I') is 4 bytes, 'Q' 8")


def u8(values: Iterable[int] = ()) -> "array[int]":
    return array("B", values)


def u16(values: Iterable[int] = ()) -> "array[int]":
    return array("H", values)


def u32(values: Iterable[int] = ()) -> "array[int]":
    return array("I", values)


def u64(values: Iterable[int] = ()) -> "array[int]":
    return array("Q", values)


def to_bytes(column: "array[int]") -> bytes:
    if _SWAP:  # pragma: no cover
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def from_bytes(typecode: str, data: object, what: str) -> "array[int]":
    """Decode one column; raises `BadMessage` naming `what` if the bytes are no whole numbers."""
    if not isinstance(data, bytes):
        raise BadMessage(f"{what}: a column must be a byte string, got {type(data).__name__}")
    if len(data) % TYPECODES[typecode]:
        raise BadMessage(f"{what}: {len(data)} bytes are no multiple of {TYPECODES[typecode]}")
    column: array[int] = array(typecode, data)
    if _SWAP:  # pragma: no cover
        column.byteswap()
    return column
