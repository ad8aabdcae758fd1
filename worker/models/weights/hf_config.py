"""A Hugging Face folder's config.json and generation_config.json → `LlamaConfig`."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from worker.models.weights.checkpoint import LlamaConfig, RopeSettings

SUPPORTED = ("LlamaForCausalLM",)


def read_config(folder: Path) -> LlamaConfig:
    """Raises `ConfigError`: unreadable, or an architecture or feature that is not supported."""
    path = folder / "config.json"
    reader = _Reader(path, read_json(path))
    archs = reader.values.get("architectures") or []
    if not isinstance(archs, list) or not set(archs) & set(SUPPORTED):
        raise ConfigError(
            f"{path}: architecture {_listed(archs)} is not supported; "
            f"supported: {', '.join(SUPPORTED)}"
        )
    for key, only in (
        ("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"),
        ("quantization_config", None), ("partial_rotary_factor", 1.0),
    ):  # fmt: skip
        value = reader.values.get(key, only)
        if value is not None and value != only:
            shown = value if isinstance(value, str | int | float) else "…"
            raise ConfigError(f"{path}: {key}: {shown} is not supported (only {only!r})")
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = reader.integer("head_dim", hidden // max(1, heads))
    config = LlamaConfig(
        vocab=reader.integer("vocab_size"),
        hidden=hidden,
        intermediate=reader.integer("intermediate_size"),
        layers=reader.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        context=reader.integer("max_position_embeddings"),
        rope=_rope(reader, head_dim),
        tied=bool(reader.values.get("tie_word_embeddings", False)),
        eos=_eos(folder, reader),
    )
    config.check(path)
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `ConfigError` where it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror or e}") from None
    except ValueError as e:  # broken JSON, or not UTF-8
        raise ConfigError(f"{path}: not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is expected, got {type(value).__name__}")
    return value


class _Reader:
    def __init__(self, path: Path, values: Mapping[str, Any], inside: str = "") -> None:
        self.path, self.values, self.inside = path, values, inside

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{self.path}: {self.inside}{key} must be an integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"{self.path}: {self.inside}{key} must be a number, got {value!r}")
        return float(value)


def _rope(reader: _Reader, head_dim: int) -> RopeSettings:
    """`rope_theta` and `rope_scaling`, or `rope_parameters`, which holds both."""
    scaling = reader.values.get("rope_parameters") or reader.values.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"{reader.path}: rope settings must be an object")
    inner = _Reader(reader.path, scaling, "rope ")
    theta = inner.number("rope_theta", reader.number("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeSettings(theta)
    if kind != "llama3":
        raise ConfigError(
            f"{reader.path}: rope scaling {kind!r} is not supported; supported: default, llama3"
        )
    factors = llama3_factors(
        theta,
        head_dim,
        factor=inner.number("factor"),
        low=inner.number("low_freq_factor"),
        high=inner.number("high_freq_factor"),
        trained=inner.number("original_max_position_embeddings"),
    )
    return RopeSettings(theta, factors)


def llama3_factors(
    theta: float, head_dim: int, *, factor: float, low: float, high: float, trained: float
) -> tuple[float, ...]:
    """Divisors [head_dim / 2] of the rotary frequencies, as Llama 3.1 scales them.

    Wavelengths below `trained / high` positions stay, those above `trained / low` are stretched by
    `factor`, those between change smoothly.
    """
    found: list[float] = []
    for i in range(head_dim // 2):
        waves = trained / (2 * math.pi * theta ** (2 * i / head_dim))  # turns within `trained`
        kept = (
            min(1.0, max(0.0, (waves - low) / (high - low))) if high != low else float(waves > low)
        )
        found.append(1.0 / ((1.0 - kept) / factor + kept))
    return tuple(found)


def _eos(folder: Path, reader: _Reader) -> tuple[int, ...]:
    """generation_config.json speaks first: chat models often name more ends there."""
    path = folder / "generation_config.json"
    if path.exists():
        values = read_json(path)
        if values.get("eos_token_id") is not None:
            reader = _Reader(path, values)
    found = reader.values.get("eos_token_id")
    found = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(t, int) and not isinstance(t, bool) for t in found):
        raise ConfigError(f"{reader.path}: eos_token_id must be an integer or a list of them")
    return tuple(found)


def _listed(archs: Any) -> str:
    return ", ".join(map(repr, archs)) if isinstance(archs, list) and archs else "(none named)"
