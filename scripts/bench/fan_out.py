"""fan_out: tokens of one step to the histories of its streams, beside one columnar send.

The whole way: arrays of a step → `StreamSender` → ZeroMQ ipc → `StreamPort` → `Owner` (every
stream's history has its token), and then with a reader asleep on each stream of an `AsyncClient`.
"""

import asyncio
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import zmq

from protocol import columns
from protocol.channel.base import Channel
from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.client.async_client import AsyncClient
from protocol.client.async_stream import AsyncStream
from protocol.client.owner import Owner
from protocol.client.stream_port import StreamPort
from protocol.codec import decode, encode
from protocol.messages import Frames, Window
from protocol.stream_link import Plain, StreamSender, to_frames
from scripts.bench import record
from scripts.bench.record import Goal, Plot, Record, Table
from tests.support.fake_daemon import FakeDaemon

GOAL = 3.0
STREAMS = (1, 4, 16, 64, 256, 1024)
AT = 256  # where the goal is set
WORKER, LIFE = 11, 22
STEPS, ROUNDS = 200, 7


def measure(smoke: bool) -> Record:
    sizes, steps, rounds = ((4, 16), 5, 1) if smoke else (STREAMS, STEPS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        found = [_one(Path(folder), n, steps, rounds) for n in sizes]
        readers = _readers(Path(folder), sizes[-1] if smoke else AT, steps)
    return _record(found, readers, min(AT, sizes[-1]), steps, rounds)


# ---- a pair of sockets, as a worker and an owner have them


class Link:
    """Both ends in one thread; `pass_on` waits until a frame is there and takes all there are."""

    def __init__(self, folder: Path) -> None:
        self.network = ZmqNetwork()
        address = f"ipc://{folder}/owner.sock"
        self.owner_end: Channel = self.network.bind(address)
        self.worker_end: Channel = self.network.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self.owner_end.pollable, zmq.POLLIN)
        self.frames = 0

    def pass_on(self, read: Callable[[], int]) -> None:
        """`read` takes what waits and says how many frames that was."""
        while not (got := read()):
            self._poller.poll(1000)
        self.frames += got


class Whole:
    """Arrays in, histories out. `plain` False: one `Emit` a row, as for rows with flags."""

    def __init__(self, link: Link, n: int, plain: bool = True) -> None:
        self._link, self._plain = link, plain
        self.owner = Owner()
        self.streams = [self.owner.open("m", {}, {}, 0.0) for _ in range(n)]
        self._port = StreamPort(link.owner_end, LIFE)
        self._sender = StreamSender(WORKER, LIFE)
        self._ids = columns.u64(s.id for s in self.streams)
        self._attempts = columns.u16([1]) * n
        self._step = 0
        self.sent = 0

    def step(self) -> None:
        plain = Plain(
            self._ids, self._attempts, columns.u32([self._step]) * len(self._ids), self._tokens()
        )
        emits = () if self._plain else tuple(plain.emits())
        for frame in self._sender.emit(emits, 0.0, plain if self._plain else None):
            self._link.worker_end.send(frame)
            self.sent += 1
        self._link.pass_on(self._read)
        for _, data in self._link.worker_end.receive():
            message = decode(data).message
            assert isinstance(message, Window)
            self._sender.window(message, 0.0)
        self._step += 1

    def _tokens(self) -> "array[int]":
        return columns.u32([self._step & 0xFFFF]) * len(self._ids)

    def _read(self) -> int:
        _, messages = self._port.read(0.0)
        for message in messages:
            self.owner.frames(message)
        return len(messages)


def _columnar(link: Link, n: int) -> Callable[[], None]:
    """The least that any columnar message of these bytes costs: encode, send, take, decode."""
    rows = Plain(
        columns.u64(range(1, n + 1)), columns.u16([1]) * n, columns.u32([5]) * n,
        columns.u32([7]) * n,
    )  # fmt: skip
    frames = to_frames((), rows)

    def read() -> int:
        got = link.owner_end.receive()
        for _, data in got:
            assert isinstance(decode(data).message, Frames)
        return len(got)

    def step() -> None:
        link.worker_end.send(encode(frames, WORKER, LIFE, 1))
        link.pass_on(read)

    return step


def _one(folder: Path, n: int, steps: int, rounds: int) -> list[float]:
    """[streams, µs of CPU: one columnar send, the whole way, the whole way by rows, ratio]."""
    ways: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for i, make in enumerate((_columnar_of(n), _whole(n, True), _whole(n, False))):
            link = Link(folder)
            try:
                ways[i].append(_cpu(make(link), steps))
            finally:
                link.network.close()
    ratios = [whole / one for one, whole in zip(ways[0], ways[1], strict=True)]
    return [n, *(min(w) for w in ways), record.median(ratios)]


def _columnar_of(n: int) -> Callable[[Link], Callable[[], None]]:
    return lambda link: _columnar(link, n)


def _whole(n: int, plain: bool) -> Callable[[Link], Callable[[], None]]:
    def make(link: Link) -> Callable[[], None]:
        whole = Whole(link, n, plain)

        def step() -> None:
            whole.step()
            assert whole.sent == link.frames, "one frame a step"
            assert len(whole.streams[-1].tokens) == whole.sent

        return step

    return make


def _cpu(step: Callable[[], None], steps: int) -> float:
    """µs of this process a step, ZeroMQ's thread included."""
    for _ in range(max(2, steps // 10)):
        step()
    start = time.process_time()
    for _ in range(steps):
        step()
    return 1e6 * (time.process_time() - start) / steps


# ---- with readers


def _readers(folder: Path, n: int, steps: int) -> tuple[float, float]:
    """(µs of CPU a step with n readers that each take every token, µs to wake n tasks and no more).

    One process: the client's loop also runs the worker's side, as in `fan_out` itself.
    """
    return asyncio.run(_with_readers(folder, n, steps)), asyncio.run(_wake_only(n, steps))


async def _with_readers(folder: Path, n: int, steps: int) -> float:
    network, endpoints = ZmqNetwork(), Endpoints(folder)
    daemon = FakeDaemon(network, endpoints).start()
    try:
        async with AsyncClient(endpoints, network) as client:
            streams = [client.generate("m", [1]) for _ in range(n)]
            await daemon.until(lambda: len(daemon.submits) == n)
            told = 0
            all_told = asyncio.Event()

            async def read(stream: AsyncStream) -> None:
                nonlocal told
                async for chunk in stream:
                    told += len(chunk)
                    if told % n == 0:
                        all_told.set()

            tasks = [asyncio.create_task(read(s)) for s in streams]
            worker = _Worker(network.connect(endpoints.stream(client.life)), client.life)
            ids = columns.u64(s.id for s in streams)
            start = time.process_time()
            for step in range(steps):
                worker.emit(ids, step)
                all_told.clear()
                await all_told.wait()
            spent = time.process_time() - start
            for s in streams:
                s.cancel()
            await asyncio.gather(*tasks)
            return 1e6 * spent / steps
    finally:
        daemon.close()
        network.close()


class _Worker:
    def __init__(self, channel: Channel, owner: int) -> None:
        self._channel = channel
        self._sender = StreamSender(WORKER, owner)

    def emit(self, ids: "array[int]", step: int) -> None:
        n = len(ids)
        rows = Plain(ids, columns.u16([1]) * n, columns.u32([step]) * n, columns.u32([7]) * n)
        frames = self._sender.emit((), 0.0, rows)
        for _, data in self._channel.receive():
            message = decode(data).message
            assert isinstance(message, Window)
            frames += self._sender.window(message, 0.0)
        for frame in frames:
            self._channel.send(frame)


async def _wake_only(n: int, steps: int) -> float:
    loop = asyncio.get_running_loop()
    waiting: list[asyncio.Future[None]] = []

    async def read() -> None:
        for _ in range(steps):
            future: asyncio.Future[None] = loop.create_future()
            waiting.append(future)
            await future

    tasks = [asyncio.create_task(read()) for _ in range(n)]
    await asyncio.sleep(0)
    start = time.process_time()
    while waiting:
        now, waiting = waiting, []
        for future in now:
            future.set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    spent = time.process_time() - start
    await asyncio.gather(*tasks)
    return 1e6 * spent / steps


# ---- the record


def _record(
    found: list[list[float]], readers: tuple[float, float], at: int, steps: int, rounds: int
) -> Record:
    ratio = next(f[4] for f in found if f[0] == at)
    by_rows = next(f[3] / f[2] for f in found if f[0] == at)
    return Record(
        name="fan_out",
        what="CPU of one step's tokens on their way from a worker's arrays to the histories of "
        "the streams.",
        against="one columnar send of the same bytes (encode, ZeroMQ ipc, decode)",
        config={"steps": steps, "rounds": rounds, "taken": "least of rounds, median of ratios"},
        seeds=[],
        summary=[
            Goal(f"{at} streams ÷ one columnar send", _r(ratio), "×", f"≤ {GOAL:g}", ratio <= GOAL),
            Goal("an object per row ÷ columns", _r(by_rows), "×"),
            Goal(f"{at} readers that each take every token, per step", _r(readers[0]), "µs"),
        ],
        tables=[
            Table(
                "µs of CPU a step, both ends and ZeroMQ's thread",
                ["streams", "one columnar send", "to all histories", "to all histories, by rows",
                 "ratio"],
                [[int(f[0]), *(_r(x) for x in f[1:])] for f in found],
            ),
            Table(
                f"With {at} readers asleep on their streams, each taking every token",
                ["the whole step, µs", "asyncio waking as many tasks, µs"],
                [[_r(readers[0]), _r(readers[1])]],
            ),
        ],
        notes=[
            "A stream costs its look-up, three comparisons and an append; the rest of a row is "
            "bytes in a column. Readers are the client's own program: most of what they cost is "
            "asyncio's, and one that reads less often costs less, since what came meanwhile is "
            "one chunk.",
        ],
        plot=Plot(
            "One step's tokens to its streams",
            "streams",
            "µs of CPU a step",
            {
                label: [(f[0], f[i]) for f in found]
                for i, label in ((1, "one columnar send"), (2, "to all histories"),
                                 (3, "by rows"))
            },
            "xy",
        ),
    )  # fmt: skip


def _r(value: float) -> float:
    return record.rounded(value)


if __name__ == "__main__":
    record.main(measure, __doc__ or "")
