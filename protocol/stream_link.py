"""The stream link from one worker to one owner: `Frames` one way, `Window` the other.

Pure: both sides take messages and time and return frames to send. The worker keeps frames until
they are acknowledged and sends them again from a hole when asked. Beyond the window, tokens
coalesce per row; beyond `HOLD_BYTES` the owner's rows must be held, after `FAIL_AFTER_S` they fail.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol import columns
from protocol.codec import encode
from protocol.messages import FLAG_END, Column, Frames, Message, Window

WINDOW_BYTES = 1 << 20  # in flight before coalescing begins; the owner may say otherwise
HOLD_BYTES = 8 << 20
FAIL_AFTER_S = 10.0
PROBE_AFTER_S = 0.5  # unacknowledged this long: an empty Frames shows a lost tail
ACK_EVERY = 32  # frames
ACK_BYTES = WINDOW_BYTES // 4
ACK_AFTER_S = 0.1


@dataclass(slots=True)
class Emit:
    """One row's tokens of one step, as the postprocess thread produces them."""

    stream: int
    attempt: int
    channel: int
    first: int
    tokens: Sequence[int]
    flags: int = 0
    reason: int = 0
    extra: dict[str, Any] | None = None


@dataclass(slots=True)
class Plain:
    """Rows of one step with one token each on channel 0 and nothing else to tell, as columns: what
    nearly all rows of nearly all steps are. All four have one length."""

    stream: Column = field(default_factory=columns.u64)
    attempt: Column = field(default_factory=columns.u16)
    first: Column = field(default_factory=columns.u32)
    tokens: Column = field(default_factory=columns.u32)

    def __len__(self) -> int:
        return len(self.stream)

    def emits(self) -> Iterator[Emit]:
        """The same rows one by one."""
        for stream, attempt, first, token in zip(
            self.stream, self.attempt, self.first, self.tokens, strict=True
        ):
            yield Emit(stream, attempt, 0, first, (token,))


@dataclass(slots=True)
class _Row:
    attempt: int
    first: int
    tokens: list[int] = field(default_factory=list[int])
    flags: int = 0
    reason: int = 0
    extra: dict[str, Any] | None = None


def to_frames(emits: Sequence[Emit], plain: Plain | None = None) -> Frames:
    """Rows of one step as one columnar message, the plain ones first."""
    if plain is None or not len(plain):
        return _from_rows(emits)
    n = len(plain)
    zeros = columns.u8(bytes(n))
    told = Frames(
        stream=plain.stream, attempt=plain.attempt, channel=zeros, first=plain.first,
        count=columns.u32([1]) * n, flags=zeros, reason=zeros, tokens=plain.tokens,
    )  # fmt: skip
    if not emits:
        return told
    rest = _from_rows(emits)
    return Frames(
        stream=told.stream + rest.stream,
        attempt=told.attempt + rest.attempt,
        channel=told.channel + rest.channel,
        first=told.first + rest.first,
        count=told.count + rest.count,
        flags=told.flags + rest.flags,
        reason=told.reason + rest.reason,
        tokens=told.tokens + rest.tokens,
        extras={n + i: extra for i, extra in rest.extras.items()},
    )


def _from_rows(emits: Sequence[Emit]) -> Frames:
    return Frames(
        stream=columns.u64([e.stream for e in emits]),
        attempt=columns.u16([e.attempt for e in emits]),
        channel=columns.u8([e.channel for e in emits]),
        first=columns.u32([e.first for e in emits]),
        count=columns.u32([len(e.tokens) for e in emits]),
        flags=columns.u8([e.flags for e in emits]),
        reason=columns.u8([e.reason for e in emits]),
        tokens=columns.u32([t for e in emits for t in e.tokens]),
        extras={i: e.extra for i, e in enumerate(emits) if e.extra},
    )


class StreamSender:
    """The worker's side, one per owner.

    Every method returns the encoded frames to push on the link now. `ended` marks are settled when
    every frame that carried them is acknowledged: `settled()` hands them out once.
    """

    def __init__(self, worker_life: int, owner_life: int) -> None:
        self._lives = (worker_life, owner_life)
        self._seq = 0
        self._acked = 0
        self._window = WINDOW_BYTES
        self._kept: deque[tuple[int, bytes]] = deque()
        self._in_flight = 0
        self._pending: dict[tuple[int, int], _Row] = {}
        self._pending_bytes = 0
        self._marks: deque[tuple[int, int]] = deque()  # (seq, stream) of ends
        self._settled: list[int] = []
        self._last_sent = 0.0
        self._probe = 0  # sequence number of the last empty frame
        self._over_since: float | None = None

    def emit(self, emits: Sequence[Emit], now: float, plain: Plain | None = None) -> list[bytes]:
        """One step's rows. Sent at once, or coalesced when the window is full. `plain` rows cost
        what their bytes cost; no stream is in both."""
        if self._pending or self._in_flight >= self._window:
            for e in (*(plain.emits() if plain is not None else ()), *emits):
                self._coalesce(e)
            self._note_pressure(now)
            return self._drain(now)
        return [self._frame(emits, now, plain)] if emits or plain else []

    def window(self, message: Window, now: float) -> list[bytes]:
        """The owner acknowledged, or asks for a repeat."""
        self._window = message.size or WINDOW_BYTES
        acked = min(message.acked, self._seq)
        self._acked = max(self._acked, acked)
        while self._kept and self._kept[0][0] <= self._acked:
            self._in_flight -= len(self._kept.popleft()[1])
        while self._marks and self._marks[0][0] <= self._acked:
            self._settled.append(self._marks.popleft()[1])
        again = [f for _, f in self._kept] if message.resend else []
        if again:
            self._last_sent = now
        again.extend(self._drain(now))
        self._note_pressure(now)
        return again

    def tick(self, now: float) -> list[bytes]:
        """Call every 100 ms or so: drains what waits and probes a silent owner."""
        out = self._drain(now)
        if self._kept and not out and now - self._last_sent >= PROBE_AFTER_S:
            if self._probe == self._seq:  # the last probe is unanswered: the same one again
                out.append(self._kept[-1][1])
                self._last_sent = now
            else:
                out.append(self._frame((), now))
                self._probe = self._seq
        return out

    def settled(self) -> list[int]:
        """Streams whose end was acknowledged since the last call."""
        got, self._settled = self._settled, []
        return got

    @property
    def must_hold(self) -> bool:
        return self._over_since is not None

    def must_fail(self, now: float) -> bool:
        return self._over_since is not None and now - self._over_since >= FAIL_AFTER_S

    @property
    def idle(self) -> bool:
        return not self._kept and not self._pending

    def statistics(self) -> dict[str, int]:
        return {
            "sent": self._seq,
            "acked": self._acked,
            "in_flight_bytes": self._in_flight,
            "pending_bytes": self._pending_bytes,
        }

    def _frame(self, emits: Sequence[Emit], now: float, plain: Plain | None = None) -> bytes:
        self._seq += 1
        data = encode(to_frames(emits, plain), *self._lives, self._seq)
        self._kept.append((self._seq, data))
        self._in_flight += len(data)
        self._last_sent = now
        for e in emits:
            if e.flags & FLAG_END:
                self._marks.append((self._seq, e.stream))
        return data

    def _coalesce(self, e: Emit) -> None:
        row = self._pending.get((e.stream, e.channel))
        if row is None or row.attempt != e.attempt:
            row = self._pending[e.stream, e.channel] = _Row(e.attempt, e.first)
            self._pending_bytes += 32
        row.tokens.extend(e.tokens)
        row.flags |= e.flags
        row.reason = e.reason or row.reason
        row.extra = e.extra or row.extra
        self._pending_bytes += 4 * len(e.tokens)

    def _drain(self, now: float) -> list[bytes]:
        out: list[bytes] = []
        while self._pending and self._in_flight < self._window:
            room = max(1, (self._window - self._in_flight) // 4)
            batch: list[Emit] = []
            for key in list(self._pending):
                if room <= 0:
                    break
                row = self._pending.pop(key)
                self._pending_bytes -= 32 + 4 * len(row.tokens)
                room -= 8 + len(row.tokens)
                batch.append(
                    Emit(
                        key[0], row.attempt, key[1], row.first, row.tokens, row.flags, row.reason,
                        row.extra,
                    )
                )  # fmt: skip
            out.append(self._frame(batch, now))
        return out

    def _note_pressure(self, now: float) -> None:
        if self._pending_bytes <= HOLD_BYTES:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = now


class StreamReceiver:
    """The owner's side, one per worker life: order, holes and acknowledgements."""

    def __init__(self, worker_life: int, owner_life: int) -> None:
        self._lives = (worker_life, owner_life)
        self._received = 0
        self._told = 0
        self._bytes = 0
        self._asked_at: float | None = None
        self._heard_at = 0.0
        self._seq = 0

    def accept(self, seq: int, size: int, now: float) -> tuple[bool, list[bytes]]:
        """(deliver?, frames to send back) for a frame with this sequence number and byte size."""
        self._heard_at = now
        if seq <= self._received:
            return False, [self._window(now)]  # a repeat: our acknowledgement was lost
        if seq > self._received + 1:
            if self._asked_at is not None and now - self._asked_at < ACK_AFTER_S:
                return False, []
            self._asked_at = now
            return False, [self._window(now, resend=True)]
        self._received = seq
        self._asked_at = None
        self._bytes += size
        due = self._received - self._told >= ACK_EVERY or self._bytes >= ACK_BYTES
        return True, [self._window(now)] if due else []

    def tick(self, now: float) -> list[bytes]:
        """Acknowledge what a quiet link has not been told yet."""
        return [self._window(now)] if self._told < self._received else []

    def _window(self, now: float, resend: bool = False) -> bytes:
        self._told = self._received
        self._bytes = 0
        self._seq += 1
        message: Message = Window(self._received, WINDOW_BYTES, resend)
        return encode(message, *self._lives, self._seq)
