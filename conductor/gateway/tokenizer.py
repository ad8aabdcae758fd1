"""What the gateway knows of a model's text: prompts in, tokens, text out."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from conductor.gateway.chat_template import ChatTemplate
from conductor.gateway.detokenizer import Detokenizer, TokenBytes
from conductor.gateway.gguf_tokenizer import load_gguf
from protocol.config import ModelConfig
from protocol.errors import ConfigError, InvalidRequest
from protocol.sources import resolve_source

Messages = Sequence[Mapping[str, Any]]


class Tokenizer(Protocol):
    """Thread-safe: prompts are rendered and encoded on a pool, detokenizers run on the loop."""

    def render(self, messages: Messages) -> str:
        """Messages as the prompt for the next turn; raises `InvalidRequest`."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def detokenizer(self) -> Detokenizer: ...


class ByteTokenizer:
    """Of the `reference` model: a token is a byte, 256 is the end. Messages are just joined."""

    EOS = 256

    def __init__(self) -> None:
        self._table = [bytes([b]) for b in range(256)]

    def render(self, messages: Messages) -> str:
        return "".join(str(m["content"]) for m in messages)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._table)


class ModelTokenizer:
    """A tokenizer that came with a model."""

    def __init__(self, backend: Backend, template: ChatTemplate | None) -> None:
        self._backend = backend
        self._template = template
        self._bytes = TokenBytes(backend)

    def render(self, messages: Messages) -> str:
        if self._template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        return self._template.render(messages)

    def encode(self, text: str) -> list[int]:
        """Special tokens in the text are taken as such, as templates need; none are added."""
        # the batch form lets other threads run meanwhile, the single form holds the GIL
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids

    def detokenizer(self) -> Detokenizer:
        return self._bytes.detokenizer()


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """Takes up to a second. Raises `ConfigError`."""
    if config.kind == "reference":
        return ByteTokenizer()
    path = resolve_source(config.source)
    if path.is_dir():
        return ModelTokenizer(*load_folder(path))
    if path.suffix == ".gguf":
        return ModelTokenizer(*load_gguf(path))
    raise ConfigError(f"{path}: neither a .gguf file nor a folder with tokenizer.json")


def load_folder(folder: Path) -> tuple[Backend, ChatTemplate | None]:
    """A Hugging Face folder. Raises `ConfigError` that names the file."""
    file = folder / "tokenizer.json"
    try:
        backend = Backend.from_file(str(file))
    except Exception as e:  # the backend raises plain Exception for whatever is wrong
        raise ConfigError(f"{file}: not a readable tokenizer: {e}") from None
    config = _json(folder / "tokenizer_config.json")
    source = _template_source(folder, config)
    if source is None:
        return backend, None
    variables = {
        k: v if isinstance(v, str) else str(v.get("content", ""))
        for k, v in config.items()
        if k.endswith("_token") and isinstance(v, str | dict)
    }
    return backend, ChatTemplate(source, variables)


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Its own file first; in the configuration a text, or a list of named ones."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file}: not readable JSON: {e}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: a JSON object is expected")
    return value
