import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from protocol.errors import ConfigError
from protocol.gguf_file import read_header
from tests.worker.models.llama_files import HEADS, gguf_name, tensors, write_gguf
from worker.models.weights.checkpoint import check_tensors, interleave
from worker.models.weights.dequantize import block_sizes, dequantize_into
from worker.models.weights.gguf_checkpoint import GgufCheckpoint

Q = "model.layers.1.self_attn.q_proj.weight"


def test_config_and_tensors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", **{"tokenizer.ggml.eot_token_id": 7})
    checkpoint = GgufCheckpoint(path)
    check_tensors(checkpoint)
    c = checkpoint.config
    assert (c.heads, c.kv_heads, c.head_dim, c.layers, c.context) == (4, 2, 8, 2, 64)
    assert c.tied
    assert c.eos == (2, 7)
    for name, w in tensors().items():
        out = torch.empty(w.shape)
        checkpoint.read_into(name, out)
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        assert torch.equal(out, w if heads is None else interleave(w, heads)), name


def test_untied(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors(tied=False)))
    check_tensors(checkpoint)
    assert not checkpoint.config.tied


@pytest.mark.parametrize(
    "kind",
    [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0],
    ids=lambda k: k.name,
)
def test_quantized_tensors_equal_the_gguf_package(tmp_path: Path, kind: Kind) -> None:
    w = tensors()[Q]
    path = write_gguf(tmp_path / "m.gguf", kinds={gguf_name(Q): kind})
    reader = next(t for t in gguf.GGUFReader(path).tensors if t.name == gguf_name(Q))
    assert reader.tensor_type == kind
    expected = torch.from_numpy(gguf.quants.dequantize(reader.data, kind).copy())
    assert not torch.equal(expected, interleave(w, HEADS))
    for dtype in (torch.float32, torch.bfloat16):
        # A slice of a larger parameter, as the loader fills it.
        out = torch.zeros(3 * len(w), w.shape[1], dtype=dtype)
        GgufCheckpoint(path).read_into(Q, out[len(w) : 2 * len(w)])
        assert torch.equal(out[len(w) : 2 * len(w)], expected.to(dtype))
        assert not out[: len(w)].any()
        assert not out[2 * len(w) :].any()


def test_every_type_that_gguf_dequantizes_is_read() -> None:
    """Random bytes as blocks of each type; float16 scales that are no numbers are left out."""
    readable = [k for k in Kind if block_sizes(k) is not None]
    assert {Kind.Q4_K, Kind.Q6_K, Kind.IQ4_NL, Kind.Q2_K} <= set(readable)
    assert Kind.I32 not in readable
    assert block_sizes(999) is None
    rng = np.random.default_rng(0)
    for kind in readable:
        weights, size = block_sizes(kind) or (0, 0)
        raw = rng.integers(0, 60, (6, 4 * size), dtype=np.uint8)  # exponents below infinity
        out = torch.empty(6, 4 * weights)
        dequantize_into(out, raw.reshape(-1), kind)
        expected = gguf.quants.dequantize(raw, kind)
        assert np.array_equal(out.numpy(), expected), kind.name


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as e:
        check_tensors(GgufCheckpoint(path))
    assert str(path) in str(e.value)
    return str(e.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.block_count": "2"}, "'llama.block_count' must be one int, not str"),
        ({"llama.attention.head_count_kv": [2, 2]}, "must be one int, not GgufArray"),
        ({"llama.attention.head_count_kv": 3}, "do not divide"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"llama.rope.dimension_count": 4}, "must equal the head size, 8"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"split.count": 2}, "one part of a split"),
        ({"llama.context_length": 0}, "context is 0"),
        ({"tokenizer.ggml.eos_token_id": 64}, "token 64 is outside the vocabulary of 64"),
        ({"llama.block_count": 3}, "9 missing: model.layers.2.input_layernorm.weight, "),
        ({"llama.block_count": 1}, "9 not known: model.layers.1."),
        ({"llama.feed_forward_length": 96}, r"6 mis-shaped: model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_unusable_metadata(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    assert message in refusal(write_gguf(tmp_path / "m.gguf", **metadata))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    text = refusal(write_gguf(tmp_path / "m.gguf", arch="qwen2"))
    assert "'qwen2' is not supported; supported in GGUF files: llama" in text


def test_unknown_quantization(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    name = gguf_name(Q).encode()
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 2 * 8  # after the name: dimensions, then the type
    assert struct.unpack_from("<I", data, at) == (Kind.F32,)
    for kind, said in ((Kind.I32, "I32"), (777, "type 777")):
        struct.pack_into("<I", data, at, kind)
        path.write_bytes(data)
        assert f"{gguf_name(Q)} is quantized as {said}, which cannot be read" in refusal(path)


def test_missing_and_extra_tensors_are_counted_and_named(tmp_path: Path) -> None:
    weights = tensors()
    del weights[Q]
    extra = {f"blk.{i}.attn_q.bias": np.zeros(32, np.float32) for i in range(6)}
    text = refusal(write_gguf(tmp_path / "m.gguf", weights, extra=extra))
    assert f"1 missing: {Q}; " in text
    assert "6 not known: blk.0.attn_q.bias, blk.1.attn_q.bias" in text
    assert "blk.5" not in text


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.05, 0.2, 0.5, 0.9, 0.9999])
def test_a_truncated_file(tmp_path: Path, share: float) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    text = refusal(path)
    assert any(w in text for w in ("truncated", "empty", "not a GGUF"))
    assert share == 0.0001 or "fetch it again" in text


def test_flipped_header_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    """Whatever a damaged header says, the answer is a checkpoint or a ConfigError."""
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    end = min(t.offset for t in read_header(path).tensors.values())
    rng = np.random.default_rng(5)
    for _ in range(300):
        damaged = bytearray(data)
        for at in rng.integers(0, end, 3):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            check_tensors(GgufCheckpoint(path))
        except ConfigError:
            continue
