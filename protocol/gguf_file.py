"""The header of a GGUF file: its metadata and where its tensors lie. No tensor is read.

A worker takes its weights from the file and the gateway its tokenizer, each at every start. Why
neither uses the `gguf` package for that: docs/adr/0002-one-gguf-header-reader.md.
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from protocol.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_NESTING = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata that was stepped over: the type of its items and how many."""

    item: int
    count: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` slowest dimension first; `kind` the GGML type; `offset` in bytes, in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`metadata`: key → number, bool, string, list or `GgufArray`; `size`: bytes of the file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    size: int


def _none(key: str) -> bool:
    return False


def read_header(path: Path, arrays: Callable[[str], bool] = _none) -> GgufHeader:
    """`arrays` says of which keys an array is read, into a list; the others are stepped over.

    Raises `ConfigError` where the file is absent, no GGUF, corrupt, or ends in its header.
    """
    try:
        with path.open("rb") as f:
            if not path.stat().st_size:
                raise ConfigError(f"{path}: the file is empty; fetch it again", path=str(path))
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data, arrays).header()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror or e}", path=str(path)) from None


class _Parser:
    """No count is trusted: every item takes bytes, and reading ends where the file does."""

    def __init__(self, path: Path, data: mmap.mmap, arrays: Callable[[str], bool]) -> None:
        self._path = path
        self._data = data
        self._arrays = arrays
        self._size = len(data)
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            self._refuse("not a GGUF file: it does not start with 'GGUF'")
        self._at = 4
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            self._refuse("a big-endian GGUF file; only little-endian is read")
        if version not in _VERSIONS:
            self._refuse(f"GGUF version {version}; versions 2 and 3 are read")
        tensors, fields = self._scalar("Q"), self._scalar("Q")
        metadata = self._unique("metadata key", fields, self._field)
        infos = self._unique("tensor", tensors, self._tensor)
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            self._corrupt(f"general.alignment is {align!r}, not a power of two")
        start = -(-self._at // align) * align
        placed = {n: GgufTensor(n, t.shape, t.kind, start + t.offset) for n, t in infos.items()}
        return GgufHeader(metadata, placed, self._size)

    def _unique(self, what: str, count: int, read: Callable[[], tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            name, value = read()
            if name in found:
                self._corrupt(f"{what} {name!r} occurs twice")
            found[name] = value
        return found

    def _field(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(self._scalar("I"), self._arrays(key))

    def _tensor(self) -> tuple[str, GgufTensor]:
        name, dims = self._string(), self._scalar("I")
        if dims > _MAX_DIMS:
            self._corrupt(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        if math.prod(shape) >> 48:
            self._corrupt(f"tensor {name!r} has shape {list(shape)}")
        kind, offset = self._scalar("I"), self._scalar("Q")
        return name, GgufTensor(name, shape, kind, offset)

    def _value(self, kind: int, keep: bool, nesting: int = 0) -> Any:
        """`keep`: an array becomes a list."""
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or nesting >= _MAX_NESTING:
            self._corrupt(f"metadata of type {kind} at byte {self._at}")
        item, count = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            found = self._numbers(_SCALARS[item], count, keep)
        elif item == _STRING:
            found = self._strings(count, keep)
        else:
            found = [self._value(item, keep, nesting + 1) for _ in range(count)]
        return found if keep else GgufArray(item, count)

    def _numbers(self, form: str, count: int, keep: bool) -> list[Any]:
        at = self._at
        self._skip(struct.calcsize("<" + form) * count)
        return list(struct.unpack_from(f"<{count}{form}", self._data, at)) if keep else []

    def _strings(self, count: int, keep: bool) -> list[str]:
        """A vocabulary's time goes here, so its bounds are checked in place, on locals."""
        data, at, size = self._data, self._at, self._size
        found: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > size:  # also if the length itself was cut: then `start` lies beyond the end
                break
            if keep:
                found.append(self._text(start, at))
        self._skip(at - self._at)
        return found

    def _scalar(self, form: str) -> Any:
        at = self._at
        self._skip(struct.calcsize("<" + form))
        return struct.unpack_from("<" + form, self._data, at)[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        self._skip(length)
        return self._text(self._at - length, self._at)

    def _text(self, start: int, end: int) -> str:
        try:
            return self._data[start:end].decode("utf-8")
        except UnicodeDecodeError:
            self._corrupt(f"the string at byte {start} is not UTF-8")

    def _skip(self, count: int) -> None:
        if count > self._size - self._at:
            self._corrupt(f"it ends within its header ({self._size} bytes)")
        self._at += count

    def _corrupt(self, why: str) -> NoReturn:
        self._refuse(f"a corrupt or truncated GGUF file: {why}; fetch it again")

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(f"{self._path}: {why}", path=str(self._path))
