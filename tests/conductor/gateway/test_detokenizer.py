"""Incremental text against the decoding of all tokens at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from conductor.gateway.detokenizer import Detokenizer, TokenBytes, byte_alphabet
from protocol.errors import ConfigError

TEXTS = [
    "The quick brown fox", "naïve façade — “quotes”", "日本語のテキスト", "🙂👩‍👩‍👧‍👦🇫🇷",
    "def f(x):\n\treturn x",
    "Ελληνικά и кириллица", "   spaces  \r\n", "",
]  # fmt: skip


def byte_level() -> Tokenizer:
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    t.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )  # type: ignore[call-arg]
    t.train_from_iterator(TEXTS * 3, trainer)
    t.add_special_tokens(["<|end|>"])
    t.add_tokens([AddedToken("a tool", normalized=False)])
    return t


def sentence_piece() -> Tokenizer:
    base = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words = ["▁", "▁the", "▁cat", "s", "at", "é", "日"]
    t = Tokenizer(
        models.BPE(
            vocab={w: i for i, w in enumerate(base + words)}, merges=[], byte_fallback=True,
            unk_token="<unk>",
        )
    )  # fmt: skip
    t.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # type: ignore[assignment]  # fmt: skip
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    return t


BYTE_LEVEL = byte_level()
BYTES = TokenBytes(BYTE_LEVEL)
SENTENCE_PIECE = sentence_piece()


def pieces(detokenizer: Detokenizer, chunks: list[list[int]]) -> list[str]:
    return [detokenizer.push(c) for c in chunks] + [detokenizer.finish()]


def test_the_alphabet_is_that_of_the_library() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_token_by_token(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    got = pieces(BYTES.detokenizer(), [[i] for i in ids])
    assert "".join(got) == text
    assert not any("�" in p for p in got)


@given(st.lists(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=4), max_size=12))
@settings(max_examples=500, deadline=None)
def test_any_tokens_in_any_pieces_give_the_full_decoding(chunks: list[list[int]]) -> None:
    ids = [i for c in chunks for i in c]
    got = pieces(BYTES.detokenizer(), chunks)
    assert "".join(got) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=40), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_real_text_never_shows_a_broken_character(text: str, size: int) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    got = pieces(BYTES.detokenizer(), [ids[i : i + size] for i in range(0, len(ids), size)])
    assert "".join(got) == BYTE_LEVEL.decode(ids)
    if "�" not in text:
        assert not any("�" in p for p in got)


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    emoji = [BYTE_LEVEL.token_to_id(c) for c in pre_emoji()]
    d = BYTES.detokenizer()
    assert d.push(emoji[:3]) == ""
    assert d.finish() == "�"


def pre_emoji() -> list[str]:
    letters = {b: c for c, b in byte_alphabet().items()}
    return [letters[b] for b in "🐈".encode()]


def test_special_tokens_are_silent_and_added_ones_are_text() -> None:
    end, tool = BYTE_LEVEL.token_to_id("<|end|>"), BYTE_LEVEL.token_to_id("a tool")
    assert BYTES.detokenizer().push([end, tool, end]) == "a tool"
    assert BYTES.detokenizer().push([10**6]) == ""


@given(st.lists(st.sampled_from(["▁", "▁the", "▁cat", "s", "at", "é", "日", "</s>", "cat🙂"])))
@settings(max_examples=200, deadline=None)
def test_sentence_piece_tokens(words: list[str]) -> None:
    ids: list[int] = []
    for w in words:
        if w == "cat🙂":
            ids += [SENTENCE_PIECE.token_to_id(f"<0x{b:02X}>") for b in "🙂".encode()]
        else:
            ids.append(SENTENCE_PIECE.token_to_id(w))
    got = pieces(TokenBytes(SENTENCE_PIECE).detokenizer(), [[i] for i in ids])
    assert "".join(got) == SENTENCE_PIECE.decode(ids, skip_special_tokens=True)


def test_a_decoder_that_looks_beyond_a_token_is_refused_by_name() -> None:
    t = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    t.decoder = decoders.WordPiece()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="decoder WordPiece: only ByteLevel"):
        TokenBytes(t)
