"""A Hugging Face folder of one's own, served by the daemon: transformers' tokens, both ways in."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from protocol.client.async_client import AsyncClient
from tests.support import tiny_llama
from tests.support.processes import Daemon, running_daemon

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TOKENS = 40


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, tiny_llama.make(folder)


@pytest.fixture(scope="module")
def daemon(llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = {
        "name": "folder",
        "models": {"tiny": {"source": str(llama[0])}},
        "workers": [{"name": "w0", "threads": 1}],
        "gateway": {"port": 0},
        "limits": {"prefill_tokens": 64},  # the longer prompts below come in chunks
        "supervision": {"silence_ms": 10_000},
    }
    with running_daemon(config, tmp_path_factory.mktemp("daemon")) as d:
        yield d


async def test_tokens_are_transformers(daemon: Daemon, llama: tuple[Path, Any]) -> None:
    prompts = [[(i * 17 + j * j) % 256 for j in range(4 + 13 * i)] for i in range(12)]
    async with AsyncClient(daemon.endpoints) as client:
        got = await asyncio.gather(
            *(client.generate("tiny", tokens=p, max_tokens=TOKENS).collect() for p in prompts)
        )
    assert got == [tiny_llama.greedy(llama[1], p, TOKENS) for p in prompts]


async def test_an_answer_over_http_is_transformers(daemon: Daemon, llama: tuple[Path, Any]) -> None:
    tokenizer = Tokenizer.from_file(str(llama[0] / "tokenizer.json"))
    question = "What is in the folder?"
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": question}],
        "max_tokens": TOKENS, "temperature": 0,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=daemon.url, timeout=60) as http:
        r = await http.post("/v1/chat/completions", json=body)
    assert r.status_code == 200, r.text
    ids = tiny_llama.greedy(llama[1], tokenizer.encode(question).ids, TOKENS)
    assert r.json()["choices"][0]["message"]["content"] == tokenizer.decode(ids)
    assert r.json()["usage"]["completion_tokens"] == len(ids)
