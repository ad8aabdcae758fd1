"""The whole daemon on a CUDA worker: HTTP in, transformers' tokens out, and a worker killed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.client.async_client import AsyncClient
from tests.support import tiny_llama
from tests.support.processes import Daemon, running_daemon
from worker.models.reference_hash import reference_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOKENS = 40


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, tiny_llama.make(folder).cuda()


@pytest.fixture(scope="module")
def daemon(llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = {
        "name": "gpu",
        "models": {
            "tiny": {"source": str(llama[0]), "dtype": "float32", "pages": 2000},
            "reference": {"kind": "reference", "pages": 2000},
        },
        "workers": [{"name": "g0", "device": "cuda:0"}],
        "gateway": {"port": 0},
    }
    with running_daemon(config, tmp_path_factory.mktemp("daemon")) as d:
        yield d


async def test_tokens_are_transformers(daemon: Daemon, llama: tuple[Path, Any]) -> None:
    prompts = [[(i * 17 + j * j) % 256 for j in range(4 + 9 * i)] for i in range(16)]
    await tiny_llama.check_tokens(daemon, llama[1], prompts, TOKENS)


async def test_an_answer_over_http_is_transformers(daemon: Daemon, llama: tuple[Path, Any]) -> None:
    await tiny_llama.check_http(daemon, *llama, TOKENS)


async def test_a_killed_gpu_worker_loses_nothing(daemon: Daemon) -> None:
    prompts = [[(i * 31 + j) % 256 for j in range(10 + i)] for i in range(24)]
    async with AsyncClient(daemon.endpoints) as client:
        streams = [client.generate("reference", tokens=p, max_tokens=300) for p in prompts]
        seen = [await anext(aiter(s)) for s in streams]
        assert all(seen)
        pid = daemon.child("g0")["pid"]
        print(f"SIGKILL to GPU worker {pid}")
        os.kill(pid, signal.SIGKILL)
        got = await asyncio.gather(*(s.collect() for s in streams))
    assert got == [reference_tokens(p, 300) for p in prompts]
    assert daemon.child("g0")["pid"] != pid
    await daemon.wait_pages_free()
