"""A GGUF file of the llama architecture as a `Checkpoint`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protocol.errors import ConfigError
from protocol.gguf_file import GgufHeader, GgufTensor, read_header
from worker.models.weights.checkpoint import LlamaConfig, RopeSettings
from worker.models.weights.dequantize import block_sizes, dequantize_into, kind_name

_ROPE_FACTORS = "rope_freqs.weight"  # how GGUF carries llama3 rope scaling
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _common_name(name: str) -> str:
    """GGUF's tensor name → Hugging Face's; a name that no Llama model has stays as it is."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    return name


class GgufCheckpoint:
    """Opens a `.gguf` file and reads its header; see `Checkpoint`.

    GGUF already stores q and k rows as the pairs that rotate together. Raises `ConfigError`: no
    GGUF, truncated, another architecture, a tensor type that cannot be dequantized.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self._tensors = {
            _common_name(n): t for n, t in header.tensors.items() if n != _ROPE_FACTORS
        }
        self._bytes = {t.name: self._size(t, header.size) for t in header.tensors.values()}
        self.shapes: Mapping[str, tuple[int, ...]] = {n: t.shape for n, t in self._tensors.items()}
        self.config = self._config(header)
        self.config.check(path)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        t = self._tensors[name]
        dequantize_into(out, self._read(t), t.kind)

    def _read(self, t: GgufTensor) -> np.ndarray:
        # Read, not mapped: a file that shrinks meanwhile is an error here, a SIGBUS there.
        try:
            raw = np.fromfile(self.path, np.uint8, self._bytes[t.name], offset=t.offset)
        except OSError as e:
            raise ConfigError(f"{self.path}: cannot be read: {e.strerror or e}") from None
        if raw.size != self._bytes[t.name]:
            raise ConfigError(f"{self.path}: the file changed while it was read; start again")
        return raw

    def _size(self, t: GgufTensor, file_size: int) -> int:
        sizes = block_sizes(t.kind)
        if sizes is None:
            raise ConfigError(
                f"{self.path}: tensor {t.name} is quantized as {kind_name(t.kind)}, which cannot "
                "be read here; use a file in another quantization, such as Q4_1, Q8_0 or F16"
            )
        weights, size = sizes
        if not t.shape or t.shape[-1] % weights:
            raise ConfigError(
                f"{self.path}: corrupt GGUF file: tensor {t.name} of shape {list(t.shape)} does "
                f"not consist of {kind_name(t.kind)} blocks of {weights}; fetch it again"
            )
        count = math.prod(t.shape) // weights * size
        if t.offset + count > file_size:
            raise ConfigError(
                f"{self.path}: the file is truncated: tensor {t.name} ends at byte "
                f"{t.offset + count}, the file at {file_size}; fetch it again"
            )
        return count

    def _config(self, header: GgufHeader) -> LlamaConfig:
        meta = _Metadata(self.path, header)
        arch = meta.get("general.architecture", str)
        if arch != "llama":
            raise ConfigError(
                f"{self.path}: architecture {arch!r} is not supported; "
                "supported in GGUF files: llama"
            )
        if meta.get("split.count", int, 1) > 1:
            raise ConfigError(f"{self.path}: one part of a split GGUF file; merge the parts first")
        if meta.get("llama.expert_count", int, 0):
            raise ConfigError(f"{self.path}: mixture-of-experts models are not supported")
        scaling = meta.get("llama.rope.scaling.type", str, "none")
        if scaling != "none":
            raise ConfigError(
                f"{self.path}: rope scaling {scaling!r} is not supported; supported: none, llama3"
            )
        hidden = meta.get("llama.embedding_length", int)
        heads = meta.get("llama.attention.head_count", int)
        head_dim = meta.get("llama.attention.key_length", int, hidden // max(1, heads))
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            if meta.get(key, int, head_dim) != head_dim:
                raise ConfigError(f"{self.path}: {key} must equal the head size, {head_dim}")
        vocab = self.shapes.get("model.embed_tokens.weight", (0,))[0]
        eos = {meta.get(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("eos", "eot")} - {
            -1
        }
        return LlamaConfig(
            vocab=meta.get("llama.vocab_size", int, vocab),
            hidden=hidden,
            intermediate=meta.get("llama.feed_forward_length", int),
            layers=meta.get("llama.block_count", int),
            heads=heads,
            kv_heads=meta.get("llama.attention.head_count_kv", int, heads),
            head_dim=head_dim,
            norm_eps=meta.get("llama.attention.layer_norm_rms_epsilon", float),
            context=meta.get("llama.context_length", int),
            rope=RopeSettings(
                meta.get("llama.rope.freq_base", float, 10000.0),
                self._rope_factors(header, head_dim),
            ),
            tied="lm_head.weight" not in self.shapes,
            eos=tuple(sorted(eos)),
        )

    def _rope_factors(self, header: GgufHeader, head_dim: int) -> tuple[float, ...] | None:
        t = header.tensors.get(_ROPE_FACTORS)
        if t is None:
            return None
        if t.shape != (head_dim // 2,):
            raise ConfigError(
                f"{self.path}: {_ROPE_FACTORS} is {list(t.shape)}, not [{head_dim // 2}]"
            )
        factors = torch.empty(t.shape)
        dequantize_into(factors, self._read(t), t.kind)
        return tuple(factors.tolist())


class _Metadata:
    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path, self._values = path, header.metadata

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """A value of `kind`; raises `ConfigError` naming the key that is absent or of another."""
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self._path}: metadata key {key!r} is missing")
            return default
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(
                f"{self._path}: metadata key {key!r} must be one {kind.__name__}, "
                f"not {type(value).__name__}"
            )
        return value
