"""The async client against a fake daemon, over both networks."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop

from protocol.channel.base import Channel, Network, Sent
from protocol.channel.endpoints import Endpoints
from protocol.channel.memory import MemoryNetwork
from protocol.channel.zeromq import ZmqNetwork
from protocol.client import async_client as async_client_module
from protocol.client.async_client import AsyncClient
from protocol.client.async_stream import AsyncStream
from protocol.client.stats import StatsReader, fetch_stats
from protocol.errors import (
    BadMessage,
    ConductorLost,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PodiumError,
    RequestFailed,
    Unavailable,
    VersionMismatch,
    WorkerLost,
)
from protocol.messages import Beat, Reason, Refuse
from tests.support.fake_daemon import FakeDaemon, FakeWorker, ShiftedClock, prompt_of


async def submitted(daemon: FakeDaemon, client: AsyncClient, **kw: int) -> AsyncStream:
    n = len(daemon.submits)
    stream = client.generate("m", [1, 2, 3], **kw)  # type: ignore[arg-type]
    await daemon.until(lambda: len(daemon.submits) > n)
    return stream


async def test_a_request_and_its_tokens(daemon: FakeDaemon, client: AsyncClient) -> None:
    daemon.auto = lambda s: prompt_of(s)[::-1]
    stream = client.generate(
        "m", [7, 8, 9], max_tokens=3, temperature=0.5, top_p=0.9, top_k=4, seed=1,
        stop_token_ids=[2], ignore_eos=True, priority=3,
    )  # fmt: skip
    got = [t async for chunk in stream for t in chunk]
    assert got == [9, 8, 7] == stream.tokens
    assert stream.reason is Reason.LENGTH
    (submit,) = daemon.submits
    assert (submit.model, submit.priority, submit.replay) == ("m", 3, "history")
    assert submit.params == {
        "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 1,
        "stop_token_ids": [2], "ignore_eos": True,
    }  # fmt: skip
    await daemon.until(lambda: daemon.closed)
    assert daemon.closed == [(stream.id, 1, Reason.LENGTH, 3)]


async def test_what_is_not_said_is_left_to_the_daemon(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    await submitted(daemon, client)
    assert daemon.submits[0].params == {}


async def test_many_streams_at_once(daemon: FakeDaemon, client: AsyncClient) -> None:
    daemon.auto = lambda s: [p * 10 for p in prompt_of(s)]
    streams = [client.generate("m", [i, i + 1]) for i in range(300)]
    results = await asyncio.gather(*(s.collect() for s in streams))
    assert results == [[i * 10, i * 10 + 10] for i in range(300)]
    await daemon.until(lambda: len(daemon.closed) == 300)
    assert client.statistics()["owner_open"] == 0


async def test_a_slow_reader_gets_what_came_as_one_chunk(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    stream = await submitted(daemon, client)
    for i in range(50):
        daemon.emit(stream.id, [i])
    daemon.finish(stream.id)
    await daemon.until(lambda: daemon.closed)
    assert [chunk async for chunk in stream] == [list(range(50))]


async def test_tokens_come_as_they_are_made(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = await submitted(daemon, client)
    for i in range(3):
        daemon.emit(stream.id, [i])
        assert await anext(stream) == [i]
    assert stream.reason is Reason.NONE


async def test_errors_come_from_iteration_and_the_tokens_stay(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    stream = await submitted(daemon, client)
    daemon.emit(stream.id, [4, 5])
    await daemon.until(lambda: stream.count == 2)
    daemon.end(stream.id, Reason.WORKER_LOST, error=WorkerLost("worker w0 was lost", worker="w0"))
    got: list[int] = []
    with pytest.raises(WorkerLost, match="worker w0 was lost") as e:  # noqa: PT012
        async for chunk in stream:
            got += chunk
    assert got == [4, 5] == stream.tokens
    assert e.value.detail == {"worker": "w0"}
    with pytest.raises(WorkerLost):
        await stream.collect()


async def test_rejection_carries_the_numbers(daemon: FakeDaemon, client: AsyncClient) -> None:
    daemon.auto = lambda s: Overloaded("queue is full", retry_after=3)
    with pytest.raises(Overloaded) as e:
        await client.generate("m", [1]).collect()
    assert e.value.detail == {"retry_after": 3}


async def test_a_lost_worker_is_rebased_and_nothing_is_seen_twice(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    stream = await submitted(daemon, client)
    daemon.emit(stream.id, [10, 11])
    await daemon.until(lambda: stream.count == 2)
    daemon.rebase(stream.id, 2)
    await daemon.until(lambda: daemon.histories)
    assert list(daemon.histories[0].tokens) == [10, 11]
    daemon.emit(stream.id, [99], attempt=1)  # the zombie's late frame
    other = FakeWorker(daemon)
    other.connect(client.life, daemon.endpoints.stream(client.life))
    daemon.emit(stream.id, [12], first=2, worker=other)
    await daemon.until(lambda: stream.count == 3)
    daemon.end(stream.id, Reason.DONE, [3])
    assert await stream.collect() == [10, 11, 12]
    assert stream.attempt == 2
    other.close()


async def test_lost_frames_are_asked_for_and_come_again(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    from protocol.stream_link import Emit

    stream = await submitted(daemon, client)
    daemon.worker.emit_but_lose(client.life, Emit(stream.id, 1, 0, 0, [1]))
    daemon.worker.emit_but_lose(client.life, Emit(stream.id, 1, 0, 1, [2]))
    daemon.emit(stream.id, [3], first=2)
    daemon.finish(stream.id)
    assert await stream.collect() == [1, 2, 3]
    assert any(w.resend for w in daemon.worker.windows)
    await daemon.until(lambda: not daemon.worker.unacknowledged(client.life))


# ---- cancel, deadline, close


async def test_cancel_is_told_at_once_and_ends_the_iteration(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    stream = await submitted(daemon, client)
    daemon.emit(stream.id, [1])
    assert await anext(stream) == [1]
    stream.cancel()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await daemon.until(lambda: daemon.closed)
    assert daemon.closed == [(stream.id, 1, Reason.CANCELLED, 1)]
    stream.cancel(Reason.STOP)
    assert stream.reason is Reason.CANCELLED


async def test_cancelling_who_collects_cancels_the_stream(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    stream = await submitted(daemon, client)
    task = asyncio.ensure_future(stream.collect())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await daemon.until(lambda: daemon.closed)
    assert stream.reason is Reason.CANCELLED


async def test_leaving_the_block_cancels(daemon: FakeDaemon, client: AsyncClient) -> None:
    async with client.generate("m", [1]) as stream:
        pass
    assert stream.reason is Reason.CANCELLED


async def test_one_reader_at_a_time(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = await submitted(daemon, client)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader"):
        await anext(stream)
    daemon.emit(stream.id, [1])
    assert await first == [1]


async def test_a_deadline_is_kept_without_the_conductor(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    stream = await submitted(daemon, client, deadline_ms=30)
    assert daemon.submits[0].deadline_ms == 30
    with pytest.raises(DeadlineExceeded, match="30 ms"):
        await stream.collect()
    await daemon.until(lambda: daemon.closed)
    assert daemon.closed == [(stream.id, 1, Reason.DEADLINE, 0)]


async def test_close_ends_everything(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = await submitted(daemon, client)
    reader = asyncio.ensure_future(stream.collect())
    await asyncio.sleep(0)
    client.close()
    assert await reader == []
    await daemon.until(lambda: daemon.byes)
    assert daemon.closed == [(stream.id, 1, Reason.CANCELLED, 0)]
    with pytest.raises(ConductorLost):
        client.generate("m", [1])
    client.close()


# ---- requests that can't travel


@pytest.mark.parametrize(
    ("kw", "text"),
    [
        ({"tokens": [-1]}, "32-bit"),
        ({"tokens": [1 << 32]}, "32-bit"),
        ({"tokens": ["a"]}, "32-bit"),
        ({"tokens": [1], "deadline_ms": -1}, "deadline_ms"),
        ({"tokens": [1], "replay": "maybe"}, "replay"),
    ],
)
async def test_values_that_cannot_travel_are_refused_here(
    client: AsyncClient, kw: dict[str, object], text: str
) -> None:
    with pytest.raises(InvalidRequest, match=text):
        client.generate("m", **kw)  # type: ignore[arg-type]


# ---- sockets


class EdgeChannel:
    """A channel as ZeroMQ's may behave: a send takes the edge of what arrived before it."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.close, self.statistics, self.fileno = inner.close, inner.statistics, inner.fileno
        self.pollable = inner.pollable

    def receive(self, limit: int = 512) -> list[tuple[bytes, bytes]]:
        os.eventfd_write(self.fileno(), 1)
        got = self._inner.receive(limit)
        if not got:
            os.eventfd_read(self.fileno())
        return got

    def send(self, frame: bytes, peer: bytes = b"") -> Sent:
        result = self._inner.send(frame, peer)
        with suppress(BlockingIOError):
            os.eventfd_read(self.fileno())
        return result


class EdgeNetwork(MemoryNetwork):
    """Connections to the conductor are such."""

    def connect(self, address: str) -> Channel:
        inner = super().connect(address)
        return EdgeChannel(inner) if address.endswith("control.sock") else inner


async def test_a_frame_whose_edge_a_send_took_is_still_read(
    endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_client_module, "TICK_S", 1000.0)  # no tick comes to the rescue
    net = EdgeNetwork()
    daemon = FakeDaemon(net, endpoints, beat_ms=600_000).start()
    client = AsyncClient(endpoints, net)
    await client.connect(10)
    first = await submitted(daemon, client)
    daemon.end(first.id, Reason.DONE, [0])  # arrives, and before it is read
    client.generate("m", [1])  # a send takes its edge
    assert await asyncio.wait_for(first.collect(), 10) == []
    client.close()
    daemon.close()
    net.close()


# ---- sessions


async def test_connect_says_that_nobody_answers(network: Network, endpoints: Endpoints) -> None:
    client = AsyncClient(endpoints, network)
    with pytest.raises(Unavailable, match=r"control\.sock within 0\.05 s"):
        await client.connect(0.05)
    with pytest.raises(ConductorLost):
        client.generate("m", [1])


@pytest.mark.parametrize(
    ("code", "kind"),
    [("version", VersionMismatch), ("fenced", ConductorLost), ("name_taken", Unavailable)],
)
async def test_a_refusal_is_raised_from_connect(
    daemon: FakeDaemon, network: Network, endpoints: Endpoints, code: str, kind: type[PodiumError]
) -> None:
    daemon.refuse_with = Refuse(code, "because")
    client = AsyncClient(endpoints, network)
    with pytest.raises(kind, match="because"):
        await client.connect(10)


async def test_being_fenced_later_ends_the_streams(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = await submitted(daemon, client)
    daemon.send(client.life, Refuse("fenced", "you were silent"))
    with pytest.raises(ConductorLost, match="you were silent"):
        await stream.collect()
    assert stream.reason is Reason.OWNER_LOST
    with pytest.raises(ConductorLost, match="you were silent"):
        client.generate("m", [1])


async def test_a_resync_submits_open_streams_again_and_repeats_closed(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    stream = await submitted(daemon, client)
    daemon.emit(stream.id, [1, 2])
    await daemon.until(lambda: stream.count == 2)
    daemon.rebase(stream.id, 2)
    await daemon.until(lambda: daemon.histories)
    done = await submitted(daemon, client)
    daemon.silent = True  # the Closed below gets lost
    done.cancel()
    await asyncio.sleep(0)
    daemon.hear()
    daemon.silent = False
    daemon.send(client.life, Refuse("resync", "say Hello again"))
    await daemon.until(lambda: len(daemon.hellos) == 2 and daemon.closed)
    assert daemon.hellos[1].inventory == {"streams": [[stream.id, 2, 2]]}
    assert daemon.closed == [(done.id, 1, Reason.CANCELLED, 0)]
    await daemon.until(lambda: len(daemon.submits) == 3)
    assert (daemon.submits[2].stream, daemon.submits[2].attempt) == (stream.id, 2)
    daemon.finish(stream.id, tokens=[3])
    assert await stream.collect() == [1, 2, 3]


async def test_a_hole_begins_a_new_session(daemon: FakeDaemon, client: AsyncClient) -> None:
    stream = await submitted(daemon, client)
    daemon.send(client.life, Beat(), skip=1)
    daemon.rebase(stream.id, 2)
    await daemon.until(lambda: len(daemon.hellos) == 2)
    await daemon.until(lambda: len(daemon.submits) == 2)
    assert daemon.submits[1].attempt == 1  # the Rebase came after the hole
    assert client.connected


async def test_silence_begins_a_new_session(
    daemon: FakeDaemon, client: AsyncClient, clock: ShiftedClock
) -> None:
    stream = await submitted(daemon, client)
    daemon.silent = True
    clock.shift += 2.1
    await daemon.until(lambda: not client.connected)
    clock.shift += 1.1  # the Hello that was not heard is said again
    daemon.silent = False
    await daemon.until(lambda: len(daemon.hellos) >= 2 and len(daemon.submits) == 2)
    daemon.finish(stream.id, tokens=[5])
    assert await stream.collect() == [5]


async def test_without_a_conductor_streams_go_on_for_ten_seconds(
    daemon: FakeDaemon, client: AsyncClient, clock: ShiftedClock
) -> None:
    stream = await submitted(daemon, client)
    daemon.silent = True
    clock.shift += 9.0
    daemon.emit(stream.id, [1])
    assert await anext(stream) == [1]
    late = client.generate("m", [1])
    clock.shift += 2.0
    with pytest.raises(ConductorLost):
        await stream.collect()
    assert stream.reason is late.reason is Reason.CONDUCTOR_LOST
    assert stream.tokens == [1]
    with pytest.raises(ConductorLost, match="no conductor answers"):
        client.generate("m", [1])
    daemon.silent = False
    clock.shift += 1.1
    await daemon.until(lambda: daemon.closed)  # told as soon as somebody listens
    lost = Reason.CONDUCTOR_LOST
    assert daemon.closed == [(stream.id, 1, lost, 1), (late.id, 1, lost, 0)]
    assert client.connected


async def test_beats_keep_the_session_alive(daemon: FakeDaemon, client: AsyncClient) -> None:
    await daemon.until(lambda: daemon.beats >= 2)
    assert len(daemon.hellos) == 1


async def test_garbage_on_the_stream_port_is_counted_and_harmless(
    daemon: FakeDaemon, client: AsyncClient, network: Network, endpoints: Endpoints
) -> None:
    stream = await submitted(daemon, client)
    rogue = network.connect(endpoints.stream(client.life))
    for junk in (b"", b"\x90", b"x" * 100):
        rogue.send(junk)
    daemon.finish(stream.id, tokens=[1])
    assert await stream.collect() == [1]
    await daemon.until(lambda: client.statistics()["port_bad_frames"] == 3)
    rogue.close()


async def test_a_bug_in_a_message_fails_the_stream_not_the_client(
    daemon: FakeDaemon, client: AsyncClient
) -> None:
    stream = await submitted(daemon, client)
    daemon.emit(stream.id, [1], first=7)
    with pytest.raises(RequestFailed, match="position 7"):
        await stream.collect()
    daemon.auto = lambda s: [5]
    assert await client.generate("m", [1]).collect() == [5]


async def test_a_client_with_its_own_network_leaves_nothing_behind(tmp_path: Path) -> None:
    net = ZmqNetwork()
    daemon = FakeDaemon(net, Endpoints(tmp_path)).start()
    daemon.auto = lambda s: [1, 2]
    async with AsyncClient(Endpoints(tmp_path), name="me") as client:
        assert await client.generate("m", [1]).collect() == [1, 2]
        assert daemon.hellos[0].name == "me"
        endpoint = daemon.hellos[0].endpoint.removeprefix("ipc://")
        assert os.path.exists(endpoint)  # noqa: ASYNC240
    assert not os.path.exists(endpoint)  # noqa: ASYNC240
    daemon.close()
    net.close()


def test_all_of_it_under_uvloop(tmp_path: Path) -> None:
    async def main() -> None:
        net = ZmqNetwork()
        daemon = FakeDaemon(net, Endpoints(tmp_path)).start()
        daemon.auto = lambda s: prompt_of(s) * 50
        async with AsyncClient(Endpoints(tmp_path)) as client:
            streams = [client.generate("m", [i]) for i in range(100)]
            results = await asyncio.gather(*(s.collect() for s in streams))
            assert results == [[i] * 50 for i in range(100)]
            daemon.auto = None
            stream = await submitted(daemon, client)
            stream.cancel()
            await daemon.until(lambda: len(daemon.closed) == 101)
            assert (await fetch_stats(daemon.endpoints, 5, net))["schema"] == 1
        daemon.close()
        net.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# ---- stats


async def test_stats(daemon: FakeDaemon, network: Network, endpoints: Endpoints) -> None:
    snapshot = await fetch_stats(endpoints, 5, network)
    assert snapshot["conductor"]["life"] == daemon.life


async def test_stats_of_nobody(network: Network, endpoints: Endpoints) -> None:
    with pytest.raises(Unavailable, match=r"stats\.sock within 0\.05 s"):
        await fetch_stats(endpoints, 0.05, network)


async def test_a_reader_recovers_after_a_silence(
    daemon: FakeDaemon, network: Network, endpoints: Endpoints
) -> None:
    reader = StatsReader(endpoints, network)
    daemon.silent = True
    with pytest.raises(Unavailable):
        await reader.snapshot(0.05)
    daemon.silent = False
    assert (await reader.snapshot(5))["conductor"]["phase"] == "ready"
    assert (await reader.snapshot(5))["conductor"]["phase"] == "ready"
    reader.close()


async def test_questions_to_nobody_do_not_pile_up(endpoints: Endpoints) -> None:
    net = MemoryNetwork()
    reader = StatsReader(endpoints, net)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await reader.snapshot(0.01)
    server = net.bind(endpoints.stats)
    asking = asyncio.ensure_future(reader.snapshot(5))
    await asyncio.sleep(0)
    assert len(server.receive()) == 1
    asking.cancel()
    net.close()


async def test_an_answer_that_is_no_snapshot(endpoints: Endpoints) -> None:
    net = MemoryNetwork()
    server = net.bind(endpoints.stats)
    asking = asyncio.ensure_future(fetch_stats(endpoints, 5, net))
    await asyncio.sleep(0)
    ((peer, _),) = server.receive()
    server.send(b"\xc1", peer)
    with pytest.raises(BadMessage):
        await asking
    net.close()
