"""A tiny pool, promised four times: 30 requests all finish with the oracle's tokens (P16, P18)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from protocol.client.async_client import AsyncClient
from protocol.messages import Reason
from tests.support.processes import Daemon, running_daemon
from worker.models.reference_hash import reference_tokens

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

REQUESTS, PROMPT, COUNT = 30, 20, 90
PAGES = 14  # of 16 tokens: two requests, of 7 pages each; 8 are promised theirs at once
CONFIG: dict[str, Any] = {
    "name": "overcommit",
    "models": {"reference": {"kind": "reference", "pages": PAGES}},
    "workers": [{"name": "w0", "threads": 1}],
    "gateway": None,
    "limits": {"overcommit": 4},
    "supervision": {"silence_ms": 10_000},
}


async def ask(client: AsyncClient, i: int) -> None:
    prompt = [(7 * i + k) % 256 for k in range(PROMPT)]
    stream = client.generate("reference", prompt, max_tokens=COUNT)
    got = [t async for chunk in stream for t in chunk]
    assert stream.reason is Reason.LENGTH
    assert got == reference_tokens(prompt, COUNT), f"request {i}"


async def ask_all(daemon: Daemon) -> None:
    async with AsyncClient(daemon.endpoints) as client, asyncio.timeout(120):
        await asyncio.gather(*(ask(client, i) for i in range(REQUESTS)))
    await daemon.wait_pages_free()


def test_thirty_requests_share_the_room_of_two(tmp_path: Path) -> None:
    with running_daemon(CONFIG, tmp_path) as daemon:
        asyncio.run(ask_all(daemon))
        snapshot = daemon.snapshot()
        machine = snapshot["machine"]
        assert machine["requests"]["closed"] == {"length": REQUESTS}
        assert machine["counters"]["preempted"] > 0, "the pool was not too small"
        assert machine["counters"]["preempted"] <= 4 * REQUESTS
        assert machine["counters"]["workers_lost"] == 0
        assert snapshot["bugs"] == 0
