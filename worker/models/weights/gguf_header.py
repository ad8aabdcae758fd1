"""The header of a GGUF file: its metadata and where its tensors lie. No tensor is read.

A reader of our own because a vocabulary is three arrays of some 50,000 strings: the `gguf`
package turns each string into array objects and takes seconds; here arrays are stepped over.
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
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata, left unread: the type of its items and how many."""

    item: int
    count: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` as torch has it, slowest first; `kind` the GGML type; `offset` in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    size: int  # bytes of the whole file


def read_header(path: Path) -> GgufHeader:
    """Raises `ConfigError` where the file is absent, no GGUF, corrupt, or ends in its header."""
    try:
        with path.open("rb") as f:
            if not path.stat().st_size:
                raise ConfigError(f"{path}: the file is empty; fetch it again")
            with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).header()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror or e}") from None


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[:4] != _MAGIC:
            raise ConfigError(f"{self._path}: not a GGUF file: it does not start with 'GGUF'")
        self._at = 4
        version = self._scalar("<I")
        if version & 0xFFFF == 0:
            raise ConfigError(f"{self._path}: a big-endian GGUF file; only little-endian is read")
        if version not in _VERSIONS:
            raise ConfigError(f"{self._path}: GGUF version {version}; versions 2 and 3 are read")
        tensors, fields = self._scalar("<Q"), self._scalar("<Q")
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
        for _ in range(count):  # ends at the file's end at the latest: every item takes bytes
            name, value = read()
            if name in found:
                self._corrupt(f"{what} {name!r} occurs twice")
            found[name] = value
        return found

    def _field(self) -> tuple[str, Any]:
        return self._string(), self._value(self._scalar("<I"))

    def _tensor(self) -> tuple[str, GgufTensor]:
        name, dims = self._string(), self._scalar("<I")
        if dims > _MAX_DIMS:
            self._corrupt(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(dims))[::-1]
        if math.prod(shape) >> 48:
            self._corrupt(f"tensor {name!r} has shape {list(shape)}")
        kind, offset = self._scalar("<I"), self._scalar("<Q")
        return name, GgufTensor(name, shape, kind, offset)

    def _value(self, kind: int, nesting: int = 0) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or nesting >= _MAX_NESTING:
            self._corrupt(f"metadata of type {kind} at byte {self._at}")
        item, count = self._scalar("<I"), self._scalar("<Q")
        if item in _SCALARS:
            self._skip(struct.calcsize(_SCALARS[item]) * count)
        elif item == _STRING:
            self._skip_strings(count)
        else:
            for _ in range(count):
                self._value(item, nesting + 1)
        return GgufArray(item, count)

    def _skip_strings(self, count: int) -> None:
        length, data, at = struct.Struct("<Q").unpack_from, self._data, self._at
        try:
            for _ in range(count):
                at += 8 + length(data, at)[0]
        except (struct.error, OverflowError):
            at = self._size + 1
        self._skip(at - self._at)

    def _scalar(self, form: str) -> Any:
        at = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._data, at)[0]

    def _string(self) -> str:
        length = self._scalar("<Q")
        at = self._at
        self._skip(length)
        try:
            return self._data[at : at + length].decode("utf-8")
        except UnicodeDecodeError:
            self._corrupt(f"the string at byte {at} is not UTF-8")

    def _skip(self, count: int) -> None:
        if count > self._size - self._at:
            self._corrupt(f"it ends within its header ({self._size} bytes)")
        self._at += count

    def _corrupt(self, why: str) -> NoReturn:
        raise ConfigError(
            f"{self._path}: a corrupt or truncated GGUF file: {why}; fetch it again",
            path=str(self._path),
        )
