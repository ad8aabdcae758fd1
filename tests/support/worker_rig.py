"""A whole worker in one process: real engine and threads, a scripted conductor, recording owners.

The main loop is turned by the test's own thread. Every wait is for an event and has a bound that
only a broken worker reaches.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol import PROTOCOL_VERSION, columns
from protocol.channel.base import Channel, Network
from protocol.channel.memory import MemoryNetwork
from protocol.codec import decode
from protocol.config import parse
from protocol.messages import (
    FLAG_CLOSES,
    FLAG_END,
    Beat,
    Exit,
    Frames,
    Hello,
    Kind,
    Leave,
    Message,
    Open,
    Owners,
    Reason,
    Report,
    Row,
    Run,
    Welcome,
)
from protocol.session import Session
from protocol.stream_link import StreamReceiver
from worker.device.base import Device
from worker.device.cpu import CpuDevice
from worker.engine.engine import Engine
from worker.process.app import Worker

LIFE = 0xAA
CONTROL = "memory://control"
DECODE = 1000
BOUND_S = 20.0


class QuietLog:
    name = "w0"

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def say(self, level: str, text: str) -> None:
        self.lines.append((level, text))

    def last_words(self, text: str) -> None:
        self.lines.append(("last", text))

    def detach(self) -> None: ...

    def close(self) -> None: ...


class FakeConductor:
    """The other end of the control link, one peer. `reports` in order; beats counted."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.session: Session | None = None
        self.peer = b""
        self.hellos: list[Hello] = []
        self.received: list[Message] = []
        self.lines: list[tuple[int, Kind, int, dict[str, Any]]] = []
        self.counts: Counter[str] = Counter()
        self.acknowledges = True
        self.last_beat = Beat()

    def listen(self) -> None:
        for peer, frame in self.channel.receive():
            envelope = decode(frame)
            m = envelope.message
            if isinstance(m, Hello):
                self.peer, self.session = peer, Session(envelope.a)
                self.hellos.append(m)
            assert self.session is not None
            if not self.session.accept(envelope):
                continue
            self.counts[type(m).__name__] += 1
            self.received.append(m)
            if isinstance(m, Hello):
                self.say(Welcome(0xC0, PROTOCOL_VERSION, 200))
            elif isinstance(m, Beat):
                self.last_beat = m
                if self.acknowledges:
                    self.say(Beat())
            elif isinstance(m, Report):
                for i, (row, kind, value) in enumerate(zip(m.row, m.kind, m.value, strict=True)):
                    self.lines.append((row, Kind(kind), value, m.extras.get(i, {})))

    def say(self, message: Message) -> None:
        assert self.session is not None
        self.channel.send(self.session.stamp(message), self.peer)

    def kinds(self, row: int) -> list[Kind]:
        return [k for r, k, _, _ in self.lines if r == row and k is not Kind.PROGRESS]

    def end(self, row: int) -> tuple[Kind, int, dict[str, Any]]:
        ends = [(k, v, x) for r, k, v, x in self.lines if r == row and k.ends]
        assert len(ends) == 1, f"row {row:#x} ended {len(ends)} times: {ends}"
        return ends[0]

    def ended(self, *rows: int) -> bool:
        done = {r for r, k, _, _ in self.lines if k.ends}
        return done.issuperset(rows)


@dataclass(slots=True)
class Stream:
    tokens: list[int] = field(default_factory=list[int])
    flags: int = 0
    reason: Reason = Reason.NONE


class Owner:
    """A stream owner: accepts tokens by position, acknowledges, or doesn't (`mute`)."""

    def __init__(self, network: Network, life: int, address: str = "") -> None:
        self.life = life
        self.address = address or f"memory://owner-{life}"
        self.channel = network.bind(self.address)
        self.receiver = StreamReceiver(LIFE, life)
        self.streams: dict[tuple[int, int], Stream] = {}
        self.frames: list[Frames] = []
        self.lose = 0  # this many frames vanish
        self.mute = False

    def listen(self) -> None:
        now = time.monotonic()
        for peer, frame in self.channel.receive():
            if self.mute:
                continue
            if self.lose:
                self.lose -= 1
                continue
            envelope = decode(frame)
            assert (envelope.a, envelope.b) == (LIFE, self.life)
            deliver, answers = self.receiver.accept(envelope.c, len(frame), now)
            if deliver and isinstance(envelope.message, Frames):
                self._take(envelope.message)
            answers += self.receiver.tick(now)
            for a in answers:
                self.channel.send(a, peer)

    def _take(self, m: Frames) -> None:
        self.frames.append(m)
        at = 0
        rows = zip(m.stream, m.attempt, m.first, m.count, m.flags, m.reason, strict=True)
        for stream, attempt, first, count, flags, reason in rows:
            tokens = list(m.tokens[at : at + count])
            at += count
            s = self.streams.setdefault((stream, attempt), Stream())
            assert not s.flags, f"frames after the end of stream {stream}"
            assert first == BASES.get((stream, attempt), 0) + len(s.tokens), "a gap or a repeat"
            s.tokens += tokens
            s.flags, s.reason = flags, Reason(reason)

    def tokens(self, stream: int, attempt: int = 1) -> list[int]:
        found = self.streams.get((stream, attempt))
        return found.tokens if found else []

    def closed(self, stream: int, attempt: int = 1) -> bool:
        found = self.streams.get((stream, attempt))
        return found is not None and found.flags == FLAG_END | FLAG_CLOSES


BASES: dict[tuple[int, int], int] = {}


class Rig:
    """`engine`: a subclass of Engine with planted faults, or what makes one on a device.
    `standing`: the decode batches that are opened. `options`: of the reference model."""

    def __init__(
        self,
        *,
        pages: int = 512,
        depth: int = 2,
        engine: Callable[[Device], Engine] | None = None,
        device: Device | None = None,
        standing: Sequence[int] = (DECODE,),
        after_turn: Callable[[], None] = lambda: None,
        owners: Sequence[int] = (1,),
        death_fd: int | None = None,
        **options: Any,
    ) -> None:
        BASES.clear()
        config = parse(
            {
                "models": {"m": {"kind": "reference", "pages": pages, "options": options}},
                "workers": [{"name": "w0", "depth": depth, "threads": 1}],
                "supervision": {"drain_s": 1},
            }
        )
        assert config.workers != "auto"
        self.after_turn = after_turn
        self.log = QuietLog()
        self.fatal: list[BaseException] = []
        self.worker = Worker(
            config, config.workers[0], LIFE, self.log,  # type: ignore[arg-type]
            engine=(engine or Engine)(device or CpuDevice()), on_fatal=self.fatal.append,
        )  # fmt: skip
        self.worker.load()
        self.network = MemoryNetwork(capacity=1 << 16)
        self.conductor = FakeConductor(self.network.bind(CONTROL))
        self.owners = {life: Owner(self.network, life) for life in owners}
        self.loop = self.worker.wire(self.network, CONTROL, death_fd)
        self.status: int | None = None
        self.next_batch = 0
        self.worker.link.open()
        self.until(lambda: self.worker.link.welcomed)
        for owner in self.owners.values():
            self.say(Owners(owner.life, owner.address, True))
        for batch in standing:
            self.say(Open(batch, "m/decoder", "decode", 0, 256))

    # ---- turning

    def turn(self) -> None:
        self.conductor.listen()
        for owner in self.owners.values():
            owner.listen()
        if self.status is None:
            self.status = self.loop.turn()
            self.worker.scheduler.check()
            self.after_turn()

    def until(self, reached: Callable[[], bool]) -> None:
        limit = time.monotonic() + BOUND_S
        while not reached():
            assert not self.fatal, f"a thread broke: {self.fatal}"
            assert time.monotonic() < limit, f"it never comes to that: {self.conductor.lines[-9:]}"
            self.turn()

    def until_ended(self, *rows: int) -> None:
        self.until(lambda: self.conductor.ended(*rows))

    def rest(self) -> None:
        """Until nothing is in flight, unsaid or unacknowledged."""
        self.until(lambda: self.worker.scheduler.idle and self.worker.post.settled)
        self.worker.gpu.call(lambda: None)  # removals ordered before are done
        self.turn()

    # ---- the conductor's words

    def say(self, *messages: Message) -> None:
        for m in messages:
            self.conductor.say(m)

    def run(self, rows: Sequence[Row], priority: int = 0) -> None:
        """One `Run` per first batch of these rows."""
        by_batch: dict[int, list[Row | int]] = {}
        for row in rows:
            by_batch.setdefault(row.path[0][0], []).append(row)
        for batch, members in by_batch.items():
            self.say(Run(batch, "m/decoder", "prefill", priority, members))

    def run_chunk(self, batch: int, *rows: int) -> None:
        """A later chunk's batch names its rows by number."""
        self.say(Run(batch, "m/decoder", "prefill", 0, list(rows)))

    def leave(self, *rows: int) -> None:
        self.say(Leave(columns.u64(rows), columns.u8([0] * len(rows))))

    def row(
        self,
        number: int,
        prompt: Sequence[int],
        max_steps: int,
        *,
        batch: int | None = None,
        owner: int = 1,
        attempt: int = 1,
        base: int = 0,
        chunks: Sequence[int] = (),
        prefill: Sequence[tuple[int, int]] = (),
        decode: int = DECODE,
        flags: int = 1,
        **params: Any,
    ) -> Row:
        """A row whose path is its prompt (whole, in chunks of fresh batches, or by (batch, tokens)
        of `prefill`) and decode."""
        BASES[number, attempt] = base
        path = [[batch or self.batch(), len(prompt)]]
        if chunks:
            path = [[self.batch(), n] for n in chunks]
        if prefill:
            path = [[b, n] for b, n in prefill]
        data = columns.to_bytes(columns.u32(prompt))
        return Row(
            row=number, owner=owner, stream=number, attempt=attempt, ordinal=0,
            path=[*path, [decode, 0]], base=[base], handed=[], inputs={"tokens": data},
            params=params, max_steps=max_steps, flags=flags,
        )  # fmt: skip

    def batch(self) -> int:
        self.next_batch += 1
        return self.next_batch

    # ---- looking

    @property
    def owner(self) -> Owner:
        return next(iter(self.owners.values()))

    def pages_used(self) -> int:
        return int(self.worker.engine.statistics()["pages_used"])

    def close(self) -> None:
        if self.status is None:
            self.say(Exit(0))
            self.until(lambda: self.status is not None)
        self.worker.close(self.network, self.status or 0)
