import asyncio
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from conductor.gateway.health import FRESH_S, Health
from protocol.client.stats import StatsReader
from tests.support.fake_daemon import FakeDaemon, ShiftedClock


@pytest.fixture
async def polling(health: Health, daemon: FakeDaemon) -> AsyncIterator[Health]:
    task = asyncio.ensure_future(health.run())
    await until(lambda: health.live()[0])
    yield health
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def until(what: Callable[[], object], seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not what():  # noqa: ASYNC110 (the poll has no event to wait for)
            await asyncio.sleep(0.01)


async def status(http: httpx.AsyncClient, path: str) -> tuple[int, str]:
    r = await http.get(path)
    return r.status_code, r.json().get("reason", "")


async def test_before_any_snapshot(http: httpx.AsyncClient) -> None:
    assert await status(http, "/livez") == (503, "no snapshot of the conductor yet")
    assert await status(http, "/readyz") == (503, "no snapshot of the conductor yet")


async def test_a_fresh_snapshot_is_life(http: httpx.AsyncClient, polling: Health) -> None:
    assert await status(http, "/livez") == (200, "")
    assert await status(http, "/readyz") == (200, "")


async def test_an_old_snapshot_is_not(
    http: httpx.AsyncClient, polling: Health, daemon: FakeDaemon, clock: ShiftedClock
) -> None:
    daemon.silent = True
    clock.shift += FRESH_S
    code, reason = await status(http, "/livez")
    assert code == 503
    assert "snapshot is 2." in reason
    daemon.silent = False
    await until(lambda: polling.live()[0])
    assert await status(http, "/livez") == (200, "")


async def test_ready_needs_a_worker_and_the_phase(
    http: httpx.AsyncClient, polling: Health, daemon: FakeDaemon
) -> None:
    daemon.worker_ready = False
    await until(lambda: not polling.ready()[0])
    assert await status(http, "/readyz") == (503, "no worker is ready")
    assert await status(http, "/livez") == (200, "")
    daemon.phase = "draining"
    await until(lambda: "draining" in polling.ready()[1]["reason"])
    assert await status(http, "/readyz") == (503, "the daemon is draining")


async def test_ready_needs_the_session(http: httpx.AsyncClient, polling: Health, gateway) -> None:  # type: ignore[no-untyped-def]
    gateway.client.close()
    assert (await status(http, "/readyz"))[0] == 503


async def test_an_answer_that_is_no_snapshot_changes_nothing(
    network: object, endpoints: object, clock: ShiftedClock
) -> None:
    class Nonsense(StatsReader):
        asked = 0

        async def snapshot(self, timeout: float) -> object:  # type: ignore[override]  # noqa: ASYNC109
            from protocol.errors import BadMessage

            self.asked += 1
            raise BadMessage("nonsense")

    reader = Nonsense(endpoints, network)  # type: ignore[arg-type]
    health = Health(reader, clock)
    task = asyncio.ensure_future(health.run())
    await until(lambda: reader.asked)
    assert not health.live()[0]
    assert not task.done()
    task.cancel()
