"""A random Llama as a Hugging Face folder, with a tokenizer of bytes and a chat template."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from protocol.client.async_client import AsyncClient
from tests.support.processes import Daemon

EOS = 256


def make(folder: Path) -> Any:
    """Writes the folder and returns transformers' model of it, on the CPU."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.3, eos_token_id=EOS, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    _byte_tokenizer(folder)
    return model.eval()


def _byte_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"</s>": EOS}
    t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    t.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    t.add_special_tokens(["</s>"])
    t.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    settings = {"eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@torch.no_grad()
def greedy(model: Any, ids: list[int], tokens: int) -> list[int]:
    """What transformers generates after `ids`, the EOS included where it comes."""
    given = torch.tensor([ids], device=model.device)
    out = model.generate(
        given, max_new_tokens=tokens, do_sample=False, pad_token_id=EOS,
        attention_mask=torch.ones_like(given),
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


async def check_tokens(daemon: Daemon, model: Any, prompts: list[list[int]], tokens: int) -> None:
    """All prompts at once, straight over the protocol: transformers' tokens, each."""
    async with AsyncClient(daemon.endpoints) as client:
        got = await asyncio.gather(
            *(client.generate("tiny", tokens=p, max_tokens=tokens).collect() for p in prompts)
        )
    assert got == [greedy(model, p, tokens) for p in prompts]


async def check_http(daemon: Daemon, folder: Path, model: Any, tokens: int) -> None:
    """One answer over HTTP: transformers' text and count."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    question = "What is in the folder?"
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens, "temperature": 0,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=daemon.url, timeout=60) as http:
        r = await http.post("/v1/chat/completions", json=body)
    assert r.status_code == 200, r.text
    ids = greedy(model, tokenizer.encode(question).ids, tokens)
    assert r.json()["choices"][0]["message"]["content"] == tokenizer.decode(ids)
    assert r.json()["usage"]["completion_tokens"] == len(ids)
