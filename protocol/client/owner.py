"""The owner of streams: what was delivered, and the one terminal event of each (docs/wire.md).

Pure: messages and time in, events out. It holds every stream of one owner life until it closes,
applies rules 7 to 11 and 20, and knows no socket, session or task.
"""

import heapq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from protocol import columns
from protocol.client.owned_stream import OwnedStream, default_error
from protocol.client.stream_states import Change
from protocol.errors import DeadlineExceeded, PodiumError, RequestFailed, from_wire
from protocol.ids import Counter
from protocol.messages import (
    FLAG_CLOSES,
    Closed,
    Column,
    End,
    Frames,
    History,
    Message,
    Reason,
    Rebase,
    Submit,
)

DEADLINE_GRACE_S = 0.05  # the conductor's own End(deadline) is given this long to arrive first


class Grew(NamedTuple):
    """New tokens of these streams are in their histories."""

    streams: list[int]


@dataclass(frozen=True, slots=True)
class Ended:
    """The terminal event of a stream; nothing about it follows."""

    stream: int
    reason: Reason
    error: PodiumError | None


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the conductor. `keep`: until acknowledged, over sessions too."""

    message: Message
    keep: bool = False


Event = Grew | Ended | Send


class Owner:
    """All open streams of one owner life. Closed ones are forgotten here; who reads them has the
    `OwnedStream`."""

    def __init__(self) -> None:
        self._streams: dict[int, OwnedStream] = {}
        self._ids = Counter()
        self._dues: list[tuple[float, int]] = []
        self._counts = {
            "opened": 0, "unknown_stream": 0, "other_attempt": 0, "repeated": 0, "stale": 0,
        }  # fmt: skip
        self._closed: dict[str, int] = {}

    # ---- requests

    def open(
        self,
        model: str,
        inputs: dict[str, Any],
        params: dict[str, Any],
        now: float,
        *,
        deadline_ms: int = 0,
        priority: int = 0,
        tenant: str = "",
        replay: str = "history",
    ) -> OwnedStream:
        """A new stream; it is not submitted yet (`submission`)."""
        submit = Submit(
            self._ids.next(), 1, model, inputs, params, deadline_ms, priority, tenant, replay
        )
        due = now + deadline_ms / 1000 + DEADLINE_GRACE_S if deadline_ms else None
        s = self._streams[submit.stream] = OwnedStream(submit, due)
        if due is not None:
            self._note_due(due, s.id)
        self._counts["opened"] += 1
        return s

    def submission(self, s: OwnedStream, now: float) -> Send:
        """The `Submit` of an open stream: its current attempt, and what is left of its deadline."""
        s.submitted = True
        left = 0
        if s.due is not None:
            left = max(1, round((s.due - DEADLINE_GRACE_S - now) * 1000))
        return Send(replace(s.submit, attempt=s.attempt, deadline_ms=left))

    def submissions(self, now: float) -> list[Send]:
        """Every open stream again, for a new session (rule 20)."""
        return [self.submission(s, now) for s in self._streams.values()]

    def inventory(self) -> dict[str, Any]:
        """For `Hello`: the streams that a conductor may know."""
        open_streams = [s for s in self._streams.values() if s.submitted]
        return {"streams": [[s.id, s.attempt, len(s.tokens)] for s in open_streams]}

    def cancel(self, stream: int, reason: Reason = Reason.CANCELLED) -> list[Event]:
        """End a stream from this side: a disconnect, or a stop string (`Reason.STOP`)."""
        s = self._streams.get(stream)
        if s is None:
            return []
        ends = _Ends()
        self._close(s, reason, default_error(reason), ends)
        return ends.events()

    def close_all(self, reason: Reason, error: PodiumError | None = None) -> list[Event]:
        ends = _Ends()
        for s in list(self._streams.values()):
            self._close(s, reason, error or default_error(reason), ends)
        return ends.events()

    # ---- from workers

    def frames(self, m: Frames) -> list[Event]:
        """One worker's step (rules 7, 8, 11).

        Nearly every frame has one token for each of its streams and nothing else, and nearly every
        row of it is the next token of an open stream: a step of 256 rows must cost a fraction of a
        millisecond.
        """
        grown: list[int] = []
        ends = _Ends()
        if not m.extras and _steady(m):
            for i in self._grow(m, grown):
                self._row(m, i, m.tokens[i : i + 1], grown, ends)
        else:
            at = 0
            for i, count in enumerate(m.count):
                self._row(m, i, m.tokens[at : at + count], grown, ends)
                at += count
        return [Grew(grown), *ends.events()] if grown else ends.events()

    def _grow(self, m: Frames, grown: list[int]) -> list[int]:
        """Take what is the next token of its stream; the indices of the other rows."""
        get = self._streams.get
        odd: list[int] = []
        rows = zip(m.stream, m.attempt, m.first, m.tokens, strict=True)
        for i, (stream, attempt, first, token) in enumerate(rows):
            s = get(stream)
            if (
                s is not None
                and attempt == s.attempt
                and first == len(s.tokens)
                and s.awaited is None
            ):
                s.tokens.append(token)
                grown.append(stream)
            else:
                odd.append(i)
        return odd

    def _row(self, m: Frames, i: int, tokens: Column, grown: list[int], ends: "_Ends") -> None:
        stream, channel, first = m.stream[i], m.channel[i], m.first[i]
        s = self._streams.get(stream)
        if s is None:
            self._counts["unknown_stream"] += 1
        elif m.attempt[i] != s.attempt:
            self._counts["other_attempt"] += 1
        elif channel:
            text = f"a frame of channel {channel}: only channel 0 carries tokens"
            self._close(s, Reason.FAILED, RequestFailed(text), ends)
        else:
            error = _error_of(m.extras.get(i, {}).get("error"))
            s.noted_error = error or s.noted_error
            if self._take(s, first, tokens, ends):
                grown.append(stream)
            if s.reason is Reason.NONE:
                closes = _reason_of(m.reason[i]) if m.flags[i] & FLAG_CLOSES else None
                self._maybe_end(s, first + len(tokens), closes, ends)

    def _take(self, s: OwnedStream, first: int, tokens: Column, ends: "_Ends") -> bool:
        """Rule 7: append what is new, and say if there was any; close on a gap or contradiction."""
        length = len(s.tokens)
        if first > length:
            text = f"tokens from position {first} arrived, {length} was next"
            self._close(s, Reason.FAILED, RequestFailed(text), ends)
            return False
        known = min(length - first, len(tokens))
        if known:
            self._counts["repeated"] += known
            if s.tokens[first : first + known] != tokens[:known]:
                self._close(s, Reason.DIVERGED, default_error(Reason.DIVERGED), ends)
                return False
        fresh = tokens[known:]
        if s.awaited is not None and length + len(fresh) > s.awaited[0]:
            text = f"{length + len(fresh)} tokens arrived of a stream that ended at {s.awaited[0]}"
            self._close(s, Reason.FAILED, RequestFailed(text), ends)
            return False
        s.tokens.extend(fresh)
        return bool(fresh)

    def _maybe_end(self, s: OwnedStream, end: int, closes: Reason | None, ends: "_Ends") -> None:
        """Rule 8, after the tokens of a frame that ends at position `end`."""
        if closes is not None:
            if end < len(s.tokens):
                text = f"the stream ended at {end}, {len(s.tokens)} tokens were delivered"
                self._close(s, Reason.DIVERGED, RequestFailed(text), ends)
            elif closes is Reason.NONE:
                text = "a worker closed the stream and gave no valid reason"
                self._close(s, Reason.FAILED, RequestFailed(text), ends)
            else:
                self._close(s, closes, _why(closes, s.noted_error), ends)
        elif s.awaited is not None and len(s.tokens) == s.awaited[0]:
            self._close(s, s.awaited[1], s.awaited[2], ends)

    # ---- from the conductor

    def end(self, m: End) -> list[Event]:
        """Rule 8: with counts once they are reached, without at once."""
        ends = _Ends()
        for i, stream in enumerate(m.stream):
            s = self._streams.get(stream)
            if s is None:
                self._counts["unknown_stream"] += 1
                continue
            counts = m.counts[i] if m.counts else []
            if m.attempt[i] < s.attempt or (counts and m.attempt[i] != s.attempt):
                self._counts["stale"] += 1
                continue
            reason = _reason_of(m.reason[i])
            if reason is Reason.NONE:
                reason = Reason.DONE if counts else Reason.FAILED
            told = _error_of(m.detail[i] if m.detail else None)
            error = _why(reason, told or s.noted_error)
            if not counts:
                self._close(s, reason, error, ends)
            elif any(counts[1:]) or counts[0] < len(s.tokens):
                text = f"an end at {counts}, {len(s.tokens)} tokens were delivered"
                self._close(s, Reason.FAILED, RequestFailed(text), ends)
            else:
                s.change(Change.END_COUNTED, f"at {counts[0]}")
                s.awaited = (counts[0], reason, error)
                self._maybe_end(s, len(s.tokens), None, ends)
        return ends.events()

    def rebase(self, m: Rebase) -> list[Event]:
        """Rule 9, one act per stream: attempt, a waiting `End` forgotten, `History`."""
        out: list[Event] = []
        for i, stream in enumerate(m.stream):
            s = self._streams.get(stream)
            if s is None:
                self._counts["unknown_stream"] += 1
            elif m.attempt[i] < s.attempt:
                self._counts["stale"] += 1
            else:
                s.change(Change.REBASE, f"to attempt {m.attempt[i]}")
                s.attempt = m.attempt[i]
                s.awaited = None
                s.noted_error = None
                counts = columns.u32([len(s.tokens)])
                out.append(Send(History(s.id, s.attempt, counts, s.tokens[:])))
        return out

    # ---- time

    def due(self) -> float | None:
        """When `tick` has something to do, monotonic seconds."""
        while self._dues and self._dues[0][1] not in self._streams:
            heapq.heappop(self._dues)
        return self._dues[0][0] if self._dues else None

    def tick(self, now: float) -> list[Event]:
        """Deadlines, for an owner whose conductor is late or gone."""
        ends = _Ends()
        while (due := self.due()) is not None and due <= now:
            s = self._streams[heapq.heappop(self._dues)[1]]
            text = f"the deadline of {s.submit.deadline_ms} ms passed"
            self._close(s, Reason.DEADLINE, DeadlineExceeded(text), ends)
        return ends.events()

    def statistics(self) -> dict[str, int]:
        """Opened = open + closed by reason, always. `deadlines`: of open and of closed streams."""
        closed = {f"closed_{reason}": n for reason, n in self._closed.items()}
        now = {"open": len(self._streams), "deadlines": len(self._dues)}
        return {**self._counts, **now, **closed}

    def _note_due(self, due: float, stream: int) -> None:
        if len(self._dues) > 2 * len(self._streams) + 64:  # mostly of streams that closed early
            self._dues = [d for d in self._dues if d[1] in self._streams]
            heapq.heapify(self._dues)
        heapq.heappush(self._dues, (due, stream))

    def _close(
        self, s: OwnedStream, reason: Reason, error: PodiumError | None, ends: "_Ends"
    ) -> None:
        s.change(Change.TERMINAL, reason.name.lower())
        s.reason, s.error = reason, error
        s.awaited = None
        del self._streams[s.id]
        name = reason.name.lower()
        self._closed[name] = self._closed.get(name, 0) + 1
        ends.add(s)


class _Ends:
    """The streams that closed in one call: their events, and one `Closed` for them all."""

    def __init__(self) -> None:
        self._streams: list[OwnedStream] = []

    def add(self, s: OwnedStream) -> None:
        self._streams.append(s)

    def events(self) -> list[Event]:
        out: list[Event] = [Ended(s.id, s.reason, s.error) for s in self._streams]
        told = [s for s in self._streams if s.submitted]
        if told:
            closed = Closed(
                stream=columns.u64([s.id for s in told]),
                attempt=columns.u16([s.attempt for s in told]),
                reason=columns.u8([s.reason for s in told]),
                count=columns.u32([len(s.tokens) for s in told]),
            )
            out.append(Send(closed, keep=True))
        return out


def _steady(m: Frames) -> bool:
    """Whether every row has one token of channel 0 and no flag; compared as bytes, not by row."""
    rows = len(m.stream)
    plain = bytes(rows)
    return (
        m.flags.tobytes() == plain
        and m.channel.tobytes() == plain
        and m.count == columns.u32([1]) * rows
    )


def _reason_of(value: int) -> Reason:
    """A reason that this side doesn't know reads as NONE, and the caller says what that means."""
    try:
        return Reason(value)
    except ValueError:
        return Reason.NONE


def _error_of(detail: Any) -> PodiumError | None:
    """An error in wire form; whatever its keys, a peer's map never raises here."""
    if not isinstance(detail, dict) or not detail:
        return None
    known = cast("dict[object, Any]", detail)
    return from_wire({k: v for k, v in known.items() if isinstance(k, str) and k != "self"})


def _why(reason: Reason, told: PodiumError | None) -> PodiumError | None:
    return None if reason.success else told or default_error(reason)
