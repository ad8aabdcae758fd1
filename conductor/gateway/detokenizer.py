"""Tokens to text as they come, by way of bytes.

Every token of a supported tokenizer stands for some bytes, so text is what an incremental UTF-8
decoder makes of them: constant work per token, no character before it is whole, and the pieces
join to exactly the decoding of all tokens at once. Special tokens stand for no bytes.
"""

import codecs
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from protocol.errors import ConfigError


class Detokenizer:
    """One stream's text. `table[token]` are the token's bytes; tokens beyond it stand for none.

    `strip_first`: the text's first character is dropped if it is a space (tokenizers that mark the
    start of words put one there).
    """

    def __init__(self, table: Sequence[bytes], strip_first: bool = False) -> None:
        self._table = table
        self._strip = strip_first
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        table, n = self._table, len(self._table)
        data = b"".join([table[t] for t in tokens if t < n])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left of an unfinished character: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


def byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as: printable ones stand for themselves,
    the rest, in order, for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    alphabet = {chr(b): b for b in printable}
    return alphabet | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenBytes:
    """The bytes of every token of a `tokenizers` tokenizer, worked out once per model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `ConfigError` for a decoder that does not work token by token."""
        self.strip_first = False
        read = self._reader(json.loads(tokenizer.decoder.__getstate__() or b"null"))
        special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self.table: list[bytes] = [b""] * (max(vocab.values(), default=-1) + 1)
        for token, i in vocab.items():
            if i not in special:
                self.table[i] = read(token)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.table, self.strip_first)

    def _reader(self, decoder: Any) -> Any:
        kinds = [d["type"] for d in _flat(decoder)]
        if kinds == ["ByteLevel"]:
            return _ByteLevel().read
        if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            self.strip_first = "Strip" in kinds or "Metaspace" in kinds
            return _marked_words
        raise ConfigError(
            f"tokenizer decoder {' + '.join(kinds) or 'none'}: only ByteLevel and the "
            "SentencePiece decoders (Replace, ByteFallback, Fuse, Strip, Metaspace) are supported"
        )


class _ByteLevel:
    def __init__(self) -> None:
        alphabet = byte_alphabet()
        self._known = set(alphabet)
        self._map = {ord(c): b for c, b in alphabet.items()}

    def read(self, token: str) -> bytes:
        if self._known.issuperset(token):
            return token.translate(self._map).encode("latin-1")
        return token.encode()  # an added token is plain text


def _marked_words(token: str) -> bytes:
    """SentencePiece: `▁` is a space, `<0x0A>` a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()


def _flat(decoder: Any) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if decoder["type"] == "Sequence":
        return [d for part in decoder["decoders"] for d in _flat(part)]
    return [decoder]
