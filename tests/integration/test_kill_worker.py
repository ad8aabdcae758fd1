"""A worker is killed in the middle of 100 streams: every client gets exactly its tokens (P1–P3)."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.client.async_client import AsyncClient
from protocol.messages import Reason
from tests.support.processes import Daemon, running_daemon
from worker.models.reference_hash import reference_tokens

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

REQUESTS = 100
CONFIG: dict[str, Any] = {
    "name": "kill",
    "models": {"reference": {"kind": "reference", "options": {"step_ms": 10}}},
    "workers": [{"name": "w0", "threads": 1}, {"name": "w1", "threads": 1}],
    "gateway": None,
    # two cores are shared by all: a busy machine is not a hung worker
    "supervision": {"silence_ms": 10_000},
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(CONFIG, tmp_path_factory.mktemp("kill")) as d:
        yield d


class Progress:
    """All tokens that came; `reached` is set at `target`."""

    def __init__(self) -> None:
        self.count = 0
        self.target = 0.0
        self.reached = asyncio.Event()

    def add(self, tokens: int) -> None:
        self.count += tokens
        if self.count >= self.target:
            self.reached.set()


class Asked:
    """One request, what came of it, and the rule that says what should have."""

    def __init__(self, rng: random.Random, progress: Progress) -> None:
        self.progress = progress
        self.prompt = [rng.randrange(257) for _ in range(rng.randint(1, 60))]
        self.count = rng.randint(40, 120)
        self.got: list[int] = []
        self.ends: list[Reason] = []

    async def run(self, client: AsyncClient) -> None:
        stream = client.generate("reference", self.prompt, max_tokens=self.count)
        async for chunk in stream:
            assert not self.ends, "tokens after the end"
            self.got += chunk
            self.progress.add(len(chunk))
        self.ends.append(stream.reason)

    def check(self) -> None:
        assert self.ends == [Reason.LENGTH]
        assert self.got == reference_tokens(self.prompt, self.count)


async def run_all(daemon: Daemon, victim: str, seed: int, at: float) -> None:
    """100 requests; `victim` is killed once that part of all tokens has come."""
    rng = random.Random(seed)
    progress = Progress()
    asked = [Asked(rng, progress) for _ in range(REQUESTS)]
    total = sum(a.count for a in asked)
    progress.target = at * total
    async with AsyncClient(daemon.endpoints) as client:
        jobs = [asyncio.create_task(a.run(client)) for a in asked]
        async with asyncio.timeout(60):
            await progress.reached.wait()
        child = await asyncio.to_thread(daemon.child, victim)
        told = f"after {progress.count} of {total} tokens"
        print(f"SIGKILL to {victim}, pid {child['pid']}, {told}")
        os.kill(child["pid"], signal.SIGKILL)
        done, waiting = await asyncio.wait(jobs, timeout=120)
        assert not waiting, daemon.story(f"{len(waiting)} of {REQUESTS} streams never ended")
        for job in done:
            job.result()
    for a in asked:
        a.check()
    await asyncio.to_thread(daemon.wait_child, victim, child["pid"])


@pytest.mark.parametrize(("victim", "seed", "at"), [("w0", 1, 0.2), ("w1", 2, 0.6)])
async def test_every_stream_ends_once_with_the_oracles_tokens(
    daemon: Daemon, victim: str, seed: int, at: float
) -> None:
    before = daemon.snapshot()["machine"]
    await run_all(daemon, victim, seed, at)
    await daemon.wait_pages_free()
    after = daemon.snapshot()["machine"]
    assert after["counters"]["workers_lost"] == before["counters"]["workers_lost"] + 1
    assert after["counters"]["replayed"] > before["counters"]["replayed"], "nothing was in flight"
    assert after["counters"]["quarantined"] == 0
    assert after["requests"]["submitted"] == before["requests"]["submitted"] + REQUESTS
    assert after["requests"]["closed"] == {"length": after["requests"]["submitted"]}
    assert len(after["workers"]) == 2
    assert daemon.snapshot()["bugs"] == 0
