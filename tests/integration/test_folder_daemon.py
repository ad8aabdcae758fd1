"""A Hugging Face folder of one's own, served by the daemon: transformers' tokens, both ways in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
    await tiny_llama.check_tokens(daemon, llama[1], prompts, TOKENS)


async def test_an_answer_over_http_is_transformers(daemon: Daemon, llama: tuple[Path, Any]) -> None:
    await tiny_llama.check_http(daemon, *llama, TOKENS)
