"""Tiny Llama checkpoints written by hand, in both formats, for tests that need no transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 32, 64, 2, 4, 2, 8
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
METADATA: dict[str, Any] = {
    "llama.vocab_size": VOCAB,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INTERMEDIATE,
    "llama.block_count": LAYERS,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 64,
    "llama.rope.freq_base": 1000.0,
    "llama.rope.dimension_count": HEAD_DIM,
    "tokenizer.ggml.eos_token_id": 2,
}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def tensors(tied: bool = True) -> dict[str, torch.Tensor]:
    """Random weights under their Hugging Face names, in its layout."""
    draw = torch.Generator().manual_seed(1)

    def w(*shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=draw) - 0.5) * 0.8

    found = {"model.embed_tokens.weight": w(VOCAB, HIDDEN), "model.norm.weight": w(HIDDEN) + 1}
    if not tied:
        found["lm_head.weight"] = w(VOCAB, HIDDEN)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        found |= {
            p + "input_layernorm.weight": w(HIDDEN) + 1,
            p + "post_attention_layernorm.weight": w(HIDDEN) + 1,
            p + "self_attn.q_proj.weight": w(HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.k_proj.weight": w(KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.v_proj.weight": w(KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj.weight": w(HIDDEN, HEADS * HEAD_DIM),
            p + "mlp.gate_proj.weight": w(INTERMEDIATE, HIDDEN),
            p + "mlp.up_proj.weight": w(INTERMEDIATE, HIDDEN),
            p + "mlp.down_proj.weight": w(HIDDEN, INTERMEDIATE),
        }
    return found


def write_hf(
    folder: Path, weights: Mapping[str, torch.Tensor] | None = None, **config: Any
) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors() if weights is None else weights), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def write_gguf(
    path: Path,
    weights: Mapping[str, torch.Tensor] | None = None,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    arch: str = "llama",
    **metadata: Any,
) -> Path:
    """`kinds` and `extra` go by GGUF names; a metadata value of None leaves that key out."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (METADATA | metadata).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_token_list([f"token {i}" for i in range(VOCAB)])
    writer.add_array("test.nested", [[1, 2], [3]])
    for name, w in (tensors() if weights is None else weights).items():
        _add(writer, gguf_name(name), _pairs(name, w).numpy(), kinds or {})
    for name, w in (extra or {}).items():
        _add(writer, name, w, {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        index, stem = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{index}.{_GGUF_NAMES[stem]}.weight"
    return f"{_GGUF_NAMES[stem]}.weight"


def _pairs(name: str, w: torch.Tensor) -> torch.Tensor:
    """q and k as GGUF stores them: of each head, element i next to i + HEAD_DIM / 2."""
    if "q_proj" not in name and "k_proj" not in name:
        return w
    half = HEAD_DIM // 2
    order = [
        head * HEAD_DIM + i + side * half
        for head in range(len(w) // HEAD_DIM)
        for i in range(half)
        for side in (0, 1)
    ]
    return w[order]


def _add(
    writer: gguf.GGUFWriter,
    name: str,
    w: np.ndarray,
    kinds: Mapping[str, gguf.GGMLQuantizationType],
) -> None:
    kind = kinds.get(name)
    data = np.ascontiguousarray(w)
    if kind is None:
        writer.add_tensor(name, data)
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
