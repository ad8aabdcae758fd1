"""Promises under faults, with real processes. What is tested elsewhere is only named here.

P1 P2  tests/chaos/test_chaos.py, with the checker of history.py; integration/test_kill_worker.py
P3     test_fault_points.py; integration/test_kill_worker.py
P4     here; in the core: test_core_supervision.py, properties of attempts
P5     here (slow); conductor/core/test_core_trials.py::test_poison_among_twenty_…
P6     here: a stopped worker, a GIL that is kept, a legal long step (slow)
P8     here (slow, under load); integration/test_daemon.py::test_a_killed_conductor_…,
       …_killed_while_workers_load_…
P9     here (slow: the whole group, with streams); integration/test_daemon.py::test_sigterm_lets_…;
       conductor/shell/test_app.py: a second signal, killpg, Ctrl-C at a terminal
P10    integration/test_daemon.py::test_a_crash_looping_worker_…, …_exits_78_…; test_app.py
P11    here: replicas. Parallel groups do not exist yet
P12    here: a stopped client; the log: conductor/shell/test_log.py
P14    here; conductor/core/test_core_deadlines.py by a fake clock
P15    here; conductor/gateway/test_http.py::test_a_client_that_leaves_frees_its_row
P16    the leak oracle of every test here; engine tests check each step
P19    here: raw bytes at every socket; fuzz: test_links.py, test_core_hostile.py, test_codec.py
P22    every scrape of every seed of test_chaos.py
P23    here (slow)
P24    here (slow); integration/test_daemon.py::test_a_second_daemon_…
P25    here; conductor/shell/test_links.py::test_another_version_…
"""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest

from protocol.channel.zeromq import ZmqNetwork
from protocol.client.async_client import AsyncClient
from protocol.codec import decode, encode
from protocol.errors import DeadlineExceeded, WorkerLost
from protocol.messages import Hello, Reason, Refuse
from tests.chaos.driver import Outcome
from tests.chaos.run import Chaos, line
from tests.chaos.scenario import PLAIN, SEGV, Ask, Scenario, Strike
from tests.support.processes import Daemon
from worker.models.reference_hash import reference_tokens

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

PROMPT = [50, 51, 52]
LONG = 3000  # tokens: 12 s of steps, and most of a pool


def play(shared: Chaos, asks: list[Ask], *strikes: Strike) -> Outcome:
    outcome = shared.play(Scenario(-1, tuple(asks), strikes))
    told = "\n  ".join([line(outcome), *outcome.story])
    print(told)
    assert not outcome.violations, shared.daemon.story("\n".join([told, *outcome.violations]))
    return outcome


def some(n: int, client: str = "a", count: int = 60) -> list[Ask]:
    return [Ask(f"{client}{i}", client, PLAIN, (60 + i, 70, 80), count) for i in range(n)]


@asynccontextmanager
async def connected(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.endpoints) as client:
        yield client


async def kill_where_it_runs(daemon: Daemon) -> None:
    """SIGKILL to the worker that has a row, once one has."""
    rows = lambda: [w for w in daemon.snapshot()["machine"]["workers"] if w["rows"]]  # noqa: E731
    worker = (await asyncio.to_thread(daemon.until, rows, "a row to be placed", 30.0))[0]
    print(f"SIGKILL to {worker['name']}, pid {worker['pid']}")
    os.kill(worker["pid"], signal.SIGKILL)


def wait_ready(daemon: Daemon) -> None:
    daemon.until(
        lambda: all(c["state"] == "ready" for c in daemon.snapshot()["children"]),
        "all children to be ready", 60,
    )  # fmt: skip


# ---- P4: replay is bounded


async def test_p4_never_means_never_and_the_error_says_that_it_may_be_retried(
    shared: Chaos,
) -> None:
    d = shared.daemon
    async with connected(d) as client:
        stream = client.generate(PLAIN, PROMPT, max_tokens=LONG, replay="never")
        await anext(stream)
        await kill_where_it_runs(d)
        with pytest.raises(WorkerLost) as e:
            await stream.collect()
        assert stream.reason is Reason.WORKER_LOST
        assert e.value.detail == {"retryable": True, "replays": 0}
        assert stream.tokens == reference_tokens(PROMPT, stream.count)
    await asyncio.to_thread(wait_ready, d)
    await d.wait_pages_free()


@pytest.mark.slow
async def test_p4_four_replays_and_no_more(shared: Chaos) -> None:
    d = shared.daemon
    async with connected(d) as client:
        stream = client.generate(PLAIN, PROMPT, max_tokens=LONG)
        seen = 0
        for attempt in range(1, 6):
            while stream.attempt < attempt or stream.count <= seen:
                await anext(stream)
            assert stream.attempt == attempt
            seen = stream.count
            await kill_where_it_runs(d)
        with pytest.raises(WorkerLost) as e:
            await stream.collect()
        assert e.value.detail == {"retryable": True, "replays": 4}
        assert stream.tokens == reference_tokens(PROMPT, stream.count)
    await asyncio.to_thread(wait_ready, d)
    await d.wait_pages_free()


# ---- P5: a poisoned request is found, its neighbours live


@pytest.mark.slow
def test_p5_poison_among_twenty(shared: Chaos) -> None:
    poison = Ask("a99", "a", PLAIN, (60, SEGV, 61), 20, poison=SEGV)
    outcome = play(shared, [*some(20), poison])
    assert outcome.ends == {"length": 20, "quarantined": 1}


# ---- P6: hung is not busy


def test_p6_a_stopped_worker_is_replaced(shared: Chaos) -> None:
    outcome = play(shared, some(8), Strike(0.2, "SIGSTOP", "w0"))
    assert outcome.losses == 1
    assert "silent" in "".join(outcome.story)
    assert outcome.ends == {"length": 8}


def test_p6_a_kept_gil_is_a_hang(shared: Chaos) -> None:
    strike = Strike(0.2, "plant", "w1", "worker.gpu.launch", "hang_gil")
    outcome = play(shared, some(8), strike)
    assert outcome.losses == 1
    assert outcome.ends == {"length": 8}


# ---- P11: replicas restart one by one


def test_p11_each_replica_restarts_on_its_own(shared: Chaos) -> None:
    d = shared.daemon
    before = {c["name"]: c for c in d.snapshot()["children"]}
    outcome = play(shared, some(8), Strike(0.1, "SIGKILL", "w0"), Strike(0.5, "SIGKILL", "w1"))
    after = {c["name"]: c for c in d.snapshot()["children"]}
    assert outcome.ends == {"length": 8}
    for name in ("w0", "w1"):
        assert after[name]["restarts"] == before[name]["restarts"] + 1
        assert after[name]["pid"] != before[name]["pid"]
    assert after["gateway"]["pid"] == before["gateway"]["pid"]


# ---- P12: nobody waits for a peer that does not read


def test_p12_a_client_that_does_not_read_delays_nobody(shared: Chaos) -> None:
    """Its process is stopped for two seconds with twelve streams open."""
    d = shared.daemon
    before = d.snapshot()["ticks"]["counts"]
    stopped = Strike(0.1, "pause", "p", ms=2000)
    outcome = play(shared, [*some(8, count=100), *some(12, "p", 100)], stopped)
    assert outcome.pids, "the client process was not there to be stopped"
    after = d.snapshot()["ticks"]
    turns = [b - a for a, b in zip(before, after["counts"], strict=True)]
    slow = sum(n for n, bound in zip(turns[1:], after["bounds_ms"], strict=True) if bound >= 25)
    assert slow <= sum(turns) / 20, f"turns by size: {turns} of {after['bounds_ms']} ms"


@pytest.mark.slow
def test_p12_a_client_that_is_stopped_too_long_is_given_up(shared: Chaos) -> None:
    """ADR 0010: once it goes on, each of its streams has its end."""
    stopped = Strike(0.1, "pause", "p", ms=6000)
    outcome = play(shared, [*some(4), *some(8, "p", 1500)], stopped)
    assert outcome.ends == {"length": 4, "owner_lost": 8}


# ---- P14: deadlines, running and queued


async def test_p14_a_deadline_holds_running_and_queued(shared: Chaos) -> None:
    d = shared.daemon
    async with connected(d) as client:
        running = client.generate(PLAIN, PROMPT, max_tokens=LONG, deadline_ms=400)
        with pytest.raises(DeadlineExceeded):
            await running.collect()
        assert running.reason is Reason.DEADLINE
        assert 0 < running.count < LONG
        assert running.tokens == reference_tokens(PROMPT, running.count)

        hogs = [client.generate(PLAIN, [40 + i], max_tokens=LONG) for i in range(2)]
        for hog in hogs:
            await anext(hog)
        queued = client.generate(PLAIN, PROMPT, max_tokens=LONG, deadline_ms=400)
        with pytest.raises(DeadlineExceeded):
            await queued.collect()
        assert (queued.reason, queued.count) == (Reason.DEADLINE, 0)
        for hog in hogs:
            hog.cancel()
    await d.wait_pages_free()


# ---- P15: who leaves frees what it held


@pytest.mark.parametrize("index", [0, 1, 2, 7, 31])
async def test_p15_a_disconnect_frees_its_pages(shared: Chaos, index: int) -> None:
    d = shared.daemon
    async with connected(d) as client:
        stream = client.generate(PLAIN, PROMPT, max_tokens=LONG)
        while stream.count < index:
            await anext(stream)
        stream.cancel()
        assert stream.reason is Reason.CANCELLED
        await d.wait_pages_free(5.0)  # left alone it would run for 12 s


async def test_p15_a_client_that_says_goodbye_frees_its_pages(shared: Chaos) -> None:
    d = shared.daemon
    async with connected(d) as client:
        streams = [client.generate(PLAIN, [40 + i], max_tokens=LONG) for i in range(2)]
        for stream in streams:
            await anext(stream)
    await d.wait_pages_free(5.0)


# ---- P19: any bytes at any socket


async def test_p19_garbage_at_every_socket_is_dropped(shared: Chaos) -> None:
    d = shared.daemon
    conductor = psutil.Process(d.process.pid)
    size = conductor.memory_info().rss
    garbage = [b"\x00" * 64, b"GET / HTTP/1.0\r\n\r\n", bytes(range(256)) * 16, b"\xff" * 4096]
    for path in d.root.glob("*.sock"):
        for data in garbage:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
                s.connect(str(path))
                s.sendall(data)
    address = httpx.URL(d.url)
    for data in (
        *garbage,
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 99999999\r\n\r\n",
    ):
        with socket.socket() as s:
            s.connect((address.host, address.port))
            s.sendall(data)
    network = ZmqNetwork()
    for path in d.root.glob("*.sock"):
        channel = network.connect(f"ipc://{path}")
        for data in (b"", b"\xc1" * 40, b"\x95\x01\x10\x01\x01\x01", b"\xdd\xff\xff\xff\xff"):
            channel.send(data)
    async with connected(d) as client:
        got = await client.generate(PLAIN, PROMPT, max_tokens=20).collect()
    network.close()
    assert got == reference_tokens(PROMPT, 20)
    async with httpx.AsyncClient(timeout=10) as http:
        assert (await http.get(f"{d.url}/readyz")).status_code == 200
    assert conductor.memory_info().rss < size + (64 << 20)
    dropped = d.snapshot()["links"]["dropped"]
    assert dropped.get("malformed", 0) >= 3, dropped


# ---- P25: versions that do not mix say so


@pytest.mark.parametrize("role", ["client", "worker"])
def test_p25_another_version_is_refused_at_the_handshake(shared: Chaos, role: str) -> None:
    d = shared.daemon
    network = ZmqNetwork()
    try:
        for hello_versions, header in (([2, 3], 1), ([2], 2)):
            channel = network.connect(d.endpoints.control)
            hello = Hello(role, "old", 77, hello_versions, d.endpoints.stream(77))
            channel.send(encode(hello, 5, 1, 0, header))
            ((_, frame),) = d.until(channel.receive, "an answer", 10)
            answer = decode(bytes(frame) if header == 1 else _as_version_1(frame)).message
            assert isinstance(answer, Refuse)
            assert answer.code == "version"
            assert "speaks protocol version 1" in answer.text
            channel.close()
    finally:
        network.close()
    names = [o["name"] for o in d.snapshot()["machine"]["owners"]]
    assert "old" not in names


def _as_version_1(frame: bytes) -> bytes:
    """The header's first number is the version that the peer speaks; the rest never changes."""
    assert frame[1] == 2
    return frame[:1] + b"\x01" + frame[2:]
