import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from protocol.errors import ConfigError
from tests.worker.models.llama_files import tensors, write_hf
from worker.models.weights.checkpoint import check_tensors, interleave
from worker.models.weights.hf_checkpoint import HfCheckpoint
from worker.models.weights.hf_config import llama3_factors

Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as e:
        check_tensors(HfCheckpoint(folder))
    assert str(folder) in str(e.value)
    return str(e.value)


def shard(folder: Path) -> Path:
    """Split the single file of a folder in two shards with an index."""
    weights = tensors()
    names = sorted(weights)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, of in parts.items():
        save_file({n: weights[n] for n in of}, folder / file)
    index = {"weight_map": {n: f for f, of in parts.items() for n in of}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_tensors(tmp_path: Path, sharded: bool) -> None:
    folder = write_hf(tmp_path / "m")
    checkpoint = HfCheckpoint(shard(folder) if sharded else folder)
    check_tensors(checkpoint)
    for name, w in tensors().items():
        out = torch.empty(w.shape)
        checkpoint.read_into(name, out)
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        assert torch.equal(out, w if heads is None else interleave(w, heads)), name


def test_interleave_pairs_the_halves_of_each_head() -> None:
    rows = torch.arange(8).view(8, 1)
    assert interleave(rows, heads=2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("config", "theta", "scaled"),
    [
        ({"rope_theta": 5.0}, 5.0, False),
        ({"rope_theta": None}, 10000.0, False),
        ({"rope_theta": 5.0, "rope_scaling": None}, 5.0, False),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0,
         False),
        ({"rope_theta": 5.0, "rope_scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}}, 5.0, True),
    ],
)  # fmt: skip
def test_rope_settings(tmp_path: Path, config: dict[str, Any], theta: float, scaled: bool) -> None:
    c = HfCheckpoint(write_hf(tmp_path / "m", **config)).config
    assert c.rope.theta == theta
    assert (c.rope.factors is not None) == scaled


def test_llama3_factors_keep_fast_turns_and_stretch_slow_ones() -> None:
    found = llama3_factors(500_000.0, 128, factor=8.0, low=1.0, high=4.0, trained=8192)
    assert len(found) == 64
    assert found[0] == 1.0
    assert found[-1] == 8.0
    assert list(found) == sorted(found)
    waves = [8192 / (2 * math.pi * 500_000.0 ** (2 * i / 128)) for i in range(64)]
    assert all(f == 1.0 for f, w in zip(found, waves, strict=True) if w >= 4)
    assert all(f == 8.0 for f, w in zip(found, waves, strict=True) if w <= 1)
    assert any(1.0 < f < 8.0 for f in found)


def test_ends_come_from_generation_config_first(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    assert HfCheckpoint(folder).config.eos == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert HfCheckpoint(folder).config.eos == (5, 2)
    (folder / "generation_config.json").write_text("{}")
    assert HfCheckpoint(folder).config.eos == (2,)
    assert HfCheckpoint(write_hf(tmp_path / "n", eos_token_id=None)).config.eos == ()


def test_what_carries_nothing_is_left_out(tmp_path: Path) -> None:
    weights = tensors()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    check_tensors(HfCheckpoint(write_hf(tmp_path / "m", weights)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]},
         "architecture 'Qwen2ForCausalLM' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, "(none named) is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "(none named) is not supported"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"mlp_bias": True}, "mlp_bias: True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: gelu is not supported (only 'silu')"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: … is not"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
         "rope scaling 'yarn' is not supported; supported: default, llama3"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope factor must be a number, got None"),
        ({"rope_scaling": "linear"}, "rope settings must be an object"),
        ({"hidden_size": "32"}, "hidden_size must be an integer, got '32'"),
        ({"vocab_size": None}, "vocab_size must be an integer, got None"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide over 3 KV heads"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be"),
        ({"eos_token_id": [64]}, "token 64 is outside the vocabulary"),
        ({"tie_word_embeddings": False}, "1 missing: lm_head.weight"),
        ({"intermediate_size": 80}, "6 mis-shaped: model.layers.0.mlp.gate_proj.weight is "
         "[64, 32], not [80, 32]"),
        ({"num_hidden_layers": 1}, "9 not known: "),
        ({"num_hidden_layers": 4}, "18 missing: "),
    ],
)  # fmt: skip
def test_unusable_configurations(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    assert message in refusal(write_hf(tmp_path / "m", **config))


def test_tensors_that_are_missing_or_extra(tmp_path: Path) -> None:
    weights = tensors()
    del weights[Q], weights[K]
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    text = refusal(write_hf(tmp_path / "m", weights))
    assert f"2 missing: {Q}, {K}" in text
    assert "1 not known: model.layers.0.self_attn.q_proj.bias" in text


def test_a_dtype_that_is_not_read(tmp_path: Path) -> None:
    weights = tensors() | {Q: torch.zeros(32, 32, dtype=torch.int8)}
    assert f"{Q} is I8" in refusal(write_hf(tmp_path / "m", weights))


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    folder = write_hf(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "corrupt or truncated safetensors file" in refusal(folder)


def test_a_corrupt_header(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:20] = b"\xff" * 12
    file.write_bytes(data)
    assert "corrupt or truncated" in refusal(folder)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "weights are read from safetensors only" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json: cannot be read: No such file" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    folder = write_hf(tmp_path / "m")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert "JSON" in refusal(folder)


def test_shards_that_disagree_with_the_index(tmp_path: Path) -> None:
    folder = shard(write_hf(tmp_path / "m"))
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def with_map(change: dict[str, Any], drop: tuple[str, ...] = ()) -> str:
        kept = {n: f for n, f in (good["weight_map"] | change).items() if n not in drop}
        index.write_text(json.dumps({"weight_map": kept}))
        return refusal(folder)

    assert "1 tensors are in the shard or in" in with_map({}, drop=(Q,))
    assert "more.weight" in with_map({"more.weight": "a.safetensors"})
    assert "'../a.safetensors' of x is not a plain file name" in with_map({"x": "../a.safetensors"})
    index.write_text("{}")
    assert "'weight_map' must be an object" in refusal(folder)
    index.write_text(json.dumps(good))
    (folder / "b.safetensors").unlink()
    assert "b.safetensors: the shard that" in refusal(folder)
