"""A conductor and a worker that do as the test says, over any `Network`.

It speaks the real protocol (sessions, stream links) and decides nothing: without `auto` it only
records, and the test emits, ends and rebases by hand.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from protocol import columns, stats
from protocol.channel.base import Channel, Network
from protocol.channel.endpoints import Endpoints
from protocol.codec import decode, encode
from protocol.errors import PodiumError
from protocol.ids import new_life
from protocol.messages import (
    FLAG_CLOSES,
    FLAG_END,
    Beat,
    Bye,
    Closed,
    End,
    Hello,
    History,
    Message,
    Reason,
    Rebase,
    Refuse,
    Submit,
    Welcome,
    Window,
)
from protocol.session import Session, SessionHole
from protocol.stream_link import Emit, StreamSender


class ShiftedClock:
    """The machine's clock, moved by hand."""

    def __init__(self) -> None:
        self.shift = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.shift

    def wall(self) -> float:
        return time.time()


def prompt_of(submit: Submit) -> list[int]:
    return list(columns.from_bytes("I", submit.inputs["tokens"], "tokens"))


class FakeWorker:
    """One worker life: a stream link to every owner that said Hello."""

    def __init__(self, daemon: "FakeDaemon") -> None:
        self.life = new_life()
        self._daemon = daemon
        self._links: dict[int, tuple[Channel, StreamSender]] = {}
        self.windows: list[Window] = []

    def connect(self, owner: int, endpoint: str) -> None:
        if owner in self._links:
            return
        channel = self._daemon.network.connect(endpoint)
        self._links[owner] = channel, StreamSender(self.life, owner)
        self._daemon.loop.add_reader(channel.fileno(), self._hear, owner)

    def emit(self, owner: int, *emits: Emit) -> None:
        channel, sender = self._links[owner]
        for frame in sender.emit(emits, time.monotonic()):
            channel.send(frame)
        self._hear(owner)

    def emit_but_lose(self, owner: int, *emits: Emit) -> None:
        """The frames are kept as sent, and never arrive."""
        self._links[owner][1].emit(emits, time.monotonic())

    def _hear(self, owner: int) -> None:
        if owner not in self._links:
            return
        channel, sender = self._links[owner]
        while batch := channel.receive():
            for _, data in batch:
                message = decode(data).message
                assert isinstance(message, Window)
                self.windows.append(message)
                for frame in sender.window(message, time.monotonic()):
                    channel.send(frame)
        self._daemon.changed()

    def unacknowledged(self, owner: int) -> bool:
        return not self._links[owner][1].idle

    def close(self) -> None:
        for channel, _ in self._links.values():
            self._daemon.loop.remove_reader(channel.fileno())
            channel.close()
        self._links.clear()


class FakeDaemon:
    """`auto(submit)` gives the answer to a request at once: tokens to finish with, or an error.

    `silent`: hears nothing and says nothing, as a stopped process.
    """

    def __init__(self, network: Network, endpoints: Endpoints, beat_ms: int = 50) -> None:
        self.network = network
        self.endpoints = endpoints
        self.beat_ms = beat_ms
        self.life = new_life()
        self.auto: Callable[[Submit], Sequence[int] | PodiumError | None] | None = None
        self.refuse_with: Refuse | None = None
        self.silent = False
        self.phase: str = "ready"
        self.worker_ready = True
        self.hellos: list[Hello] = []
        self.submits: list[Submit] = []
        self.closed: list[tuple[int, int, Reason, int]] = []
        self.histories: list[History] = []
        self.byes = 0
        self.beats = 0
        self.holes = 0
        self.owner_of: dict[int, int] = {}  # stream -> owner life
        self._delivered: dict[int, int] = {}
        self._attempts: dict[int, int] = {}
        self._sessions: dict[bytes, Session] = {}
        self._lives: dict[bytes, int] = {}
        self._waiters: list[asyncio.Future[None]] = []

    # ---- life

    def start(self) -> "FakeDaemon":
        self.loop = asyncio.get_running_loop()
        self.worker = FakeWorker(self)
        self.control = self.network.bind(self.endpoints.control)
        self.stats = self.network.bind(self.endpoints.stats)
        self.loop.add_reader(self.control.fileno(), self.hear)
        self.loop.add_reader(self.stats.fileno(), self._answer_stats)
        self._timer = self.loop.call_later(self.beat_ms / 1000, self._beat)
        return self

    def close(self) -> None:
        self._timer.cancel()
        self.worker.close()
        for channel in (self.control, self.stats):
            self.loop.remove_reader(channel.fileno())
            channel.close()

    async def until(self, what: Callable[[], object], seconds: float = 10.0) -> None:
        """Wait until `what()` holds; it is looked at whenever something arrives."""
        async with asyncio.timeout(seconds):
            while not what():
                waiter = self.loop.create_future()
                self._waiters.append(waiter)
                await waiter

    def changed(self) -> None:
        waiters, self._waiters = self._waiters, []
        for w in waiters:
            if not w.done():
                w.set_result(None)

    # ---- what a test makes it do

    def emit(
        self, stream: int, tokens: Sequence[int], flags: int = 0, reason: int = 0, *,
        attempt: int | None = None, first: int | None = None,
        extra: dict[str, Any] | None = None, worker: FakeWorker | None = None,
    ) -> None:  # fmt: skip
        at = self._delivered.get(stream, 0) if first is None else first
        self._delivered[stream] = max(self._delivered.get(stream, 0), at + len(tokens))
        attempt = self._attempts.get(stream, 1) if attempt is None else attempt
        e = Emit(stream, attempt, 0, at, tokens, flags, reason, extra)
        (worker or self.worker).emit(self.owner_of[stream], e)

    def finish(self, stream: int, reason: Reason = Reason.STOP, tokens: Sequence[int] = ()) -> None:
        self.emit(stream, tokens, FLAG_END | FLAG_CLOSES, reason)

    def end(
        self, stream: int, reason: Reason, counts: list[int] | None = None,
        error: PodiumError | None = None,
    ) -> None:  # fmt: skip
        self.send(
            self.owner_of[stream],
            End(
                columns.u64([stream]), columns.u16([self._attempts.get(stream, 1)]),
                columns.u8([reason]), [counts or []], [error.to_wire() if error else {}],
            ),
        )  # fmt: skip

    def rebase(self, stream: int, attempt: int) -> None:
        self._attempts[stream] = attempt
        self.send(self.owner_of[stream], Rebase(columns.u64([stream]), columns.u16([attempt])))

    def send(self, owner: int, message: Message, skip: int = 0) -> None:
        """`skip`: lose that many messages first, which makes a hole."""
        for peer, life in self._lives.items():
            if life == owner:
                for _ in range(skip):
                    self._sessions[peer].stamp(message)
                self.control.send(self._sessions[peer].stamp(message), peer)
        self.hear()

    def hear(self) -> None:
        while batch := self.control.receive():
            for peer, data in batch:
                if not self.silent:
                    self._take(peer, data)
        self.changed()

    # ---- inside

    def _take(self, peer: bytes, data: bytes) -> None:
        envelope = decode(data)
        message = envelope.message
        if isinstance(message, Hello):
            self._hello(peer, envelope.a, message)
        session = self._sessions.get(peer)
        if session is None:
            self.control.send(encode(Refuse("resync", "say Hello"), envelope.a, 1, 0), peer)
            return
        try:
            if not session.accept(envelope):
                return
        except SessionHole:
            self.holes += 1
            return
        if isinstance(message, Hello):
            self._welcome(peer)
        elif isinstance(message, Submit):
            self._submit(self._lives[peer], message)
        elif isinstance(message, Closed):
            rows = zip(message.stream, message.attempt, message.reason, message.count, strict=True)
            self.closed += [(s, a, Reason(r), n) for s, a, r, n in rows]
        elif isinstance(message, History):
            self.histories.append(message)
        elif isinstance(message, Bye):
            self.byes += 1
        elif isinstance(message, Beat):
            self.beats += 1

    def _hello(self, peer: bytes, session: int, hello: Hello) -> None:
        self.hellos.append(hello)
        self._sessions[peer] = Session(session)
        self._lives[peer] = hello.life
        self.worker.connect(hello.life, hello.endpoint)

    def _welcome(self, peer: bytes) -> None:
        answer = self.refuse_with or Welcome(self.life, 1, self.beat_ms)
        self.control.send(self._sessions[peer].stamp(answer), peer)

    def _submit(self, owner: int, submit: Submit) -> None:
        self.submits.append(submit)
        if submit.stream in self.owner_of:
            return
        self.owner_of[submit.stream] = owner
        answer = self.auto(submit) if self.auto else None
        if isinstance(answer, PodiumError):
            self.end(submit.stream, Reason.REJECTED, error=answer)
        elif answer is not None:
            for token in answer[:-1]:
                self.emit(submit.stream, [token])
            self.finish(submit.stream, Reason.LENGTH, answer[-1:])

    def _beat(self) -> None:
        self._timer = self.loop.call_later(self.beat_ms / 1000, self._beat)
        if not self.silent:
            for peer, session in self._sessions.items():
                self.control.send(session.stamp(Beat()), peer)
        self.hear()
        self._answer_stats()

    def _answer_stats(self) -> None:
        while batch := self.stats.receive():
            for peer, _ in batch:
                if not self.silent:
                    self.stats.send(stats.encode(self.snapshot()), peer)

    def snapshot(self) -> stats.Snapshot:
        return {
            "schema": stats.SCHEMA,
            "conductor": {
                "name": "fake", "life": self.life, "pid": 1, "version": "0",
                "phase": self.phase, "uptime_s": 1.0,  # type: ignore[typeddict-item]
            },
            "machine": {"ready": self.worker_ready},
            "children": [],
            "gateway_url": "",
            "links": {
                "peers": 0, "sent": 0, "received": 0, "refused": 0, "waiting_bytes": 0,
                "dropped": {},
            },
            "ticks": {"bounds_ms": [], "counts": [0], "total_ms": 0.0, "max_ms": 0.0},
            "bugs": 0,
            "log": {},
        }  # fmt: skip
