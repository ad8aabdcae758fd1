"""A tokenizer from a GGUF file's metadata: byte-level BPE as its `tokenizer.ggml` keys tell it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from conductor.gateway.chat_template import ChatTemplate
from protocol.errors import ConfigError
from protocol.gguf_file import read_header

_CONTROL, _USER_DEFINED = 3, 4  # token types


def _split_digits() -> pre_tokenizers.PreTokenizer:
    """Digits one by one, then words: `"  12"` is two spaces, `1`, `2`.

    Some readers of GGUF files leave the digits to the words, and so cut a run of spaces before a
    number another way than the model was trained on.
    """
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _words()])  # type: ignore[return-value]


def _words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# `tokenizer.ggml.pre` -> how text is cut before the merges
_PRE = {"smollm": _split_digits, "gpt-2": _words}


def load_gguf(path: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    """Raises `ConfigError` that names the key and what is supported."""
    meta = read_header(path, arrays=lambda key: key.startswith("tokenizer.")).metadata
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE:
        raise ConfigError(
            f"{path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; supported is "
            f"'gpt2' with one of {sorted(_PRE)}. A folder with tokenizer.json works too."
        )
    tokens, merges = _list(meta, "tokens", path), _list(meta, "merges", path)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={t: i for i, t in enumerate(tokens)},
            merges=[_pair(m, path) for m in merges],
        )
    )
    tokenizer.pre_tokenizer = _PRE[pre]()  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    types = meta.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list):
        raise ConfigError(f"{path}: tokenizer.ggml.token_type: a list is expected, got {types!r}")
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            AddedToken(t, special=special, normalized=False)
            for t, kind in zip(tokens, types, strict=False)
            if kind == wanted
        ]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    return tokenizer, _template(meta, tokens)


def _template(meta: Mapping[str, Any], tokens: list[str]) -> ChatTemplate | None:
    source = meta.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    variables: dict[str, str] = {}
    for ours, theirs in names.items():
        i = meta.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(i, int) and 0 <= i < len(tokens):
            variables[f"{ours}_token"] = tokens[i]
    return ChatTemplate(source, variables)


def _list(meta: Mapping[str, Any], name: str, path: Path) -> list[str]:
    value = meta.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{path}: no tokenizer.ggml.{name}: this file has no BPE tokenizer")
    return value


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space:
        raise ConfigError(f"{path}: tokenizer.ggml.merges: {merge!r} is not two tokens")
    return left, right
