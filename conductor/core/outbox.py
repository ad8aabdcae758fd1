"""Collects one event's commands, so that many rows or streams make one message per peer.

Order of what comes out: what was said first (`say`), then `Leave`, `Rebase` and `End`, then what
must follow them (`follow`: `Owners` down, `Open`, `Run`, `Close`, `Exit`, `Beat`). A row is never
left in the event that placed it, so taking `Leave` ahead of `Run` reorders nothing of one row.
"""

from typing import Any

from conductor.core.commands import Command, Note, Send
from conductor.core.records import Request
from protocol import columns
from protocol.messages import End, Leave, Message, Rebase


class Outbox:
    def __init__(self) -> None:
        self._said: list[Command] = []
        self._leaves: dict[int, list[int]] = {}
        self._rebases: dict[int, list[Request]] = {}
        self._ends: dict[int, list[Request]] = {}
        self._following: list[Command] = []

    def say(self, command: Command) -> None:
        self._said.append(command)

    def send(self, life: int, message: Message) -> None:
        self._said.append(Send(life, message))

    def follow(self, command: Command) -> None:
        self._following.append(command)

    def note(self, level: str, text: str, **detail: object) -> None:
        self._said.append(Note(level, text, tuple(detail.items())))

    def leave(self, worker: int, row: int) -> None:
        self._leaves.setdefault(worker, []).append(row)

    def rebase(self, request: Request) -> None:
        self._rebases.setdefault(request.owner.life, []).append(request)

    def end(self, request: Request) -> None:
        """Tell the owner `request.end`."""
        self._ends.setdefault(request.owner.life, []).append(request)

    def drop_peer(self, life: int) -> None:
        """Forget what was collected for a peer that is gone."""
        for collected in (self._leaves, self._rebases, self._ends):
            collected.pop(life, None)

    def take(self) -> list[Command]:
        out = self._said
        if not (out or self._leaves or self._rebases or self._ends or self._following):
            return []  # as after nearly every event
        for life, rows in self._leaves.items():
            message = Leave(row=columns.u64(rows), publish=columns.u8(bytes(len(rows))))
            out.append(Send(life, message))
        for life, requests in self._rebases.items():
            out.append(
                Send(
                    life,
                    Rebase(
                        stream=columns.u64(r.stream for r in requests),
                        attempt=columns.u16(r.attempt for r in requests),
                    ),
                )
            )
        out.extend(Send(life, _end(requests)) for life, requests in self._ends.items())
        out.extend(self._following)
        self._said, self._following = [], []
        self._leaves, self._rebases, self._ends = {}, {}, {}
        return out


def _end(requests: list[Request]) -> End:
    ends = [(r, r.end) for r in requests if r.end is not None]
    counts: list[list[int]] = [e.counts for _, e in ends]
    detail: list[dict[str, Any]] = [e.detail for _, e in ends]
    return End(
        stream=columns.u64(r.stream for r, _ in ends),
        attempt=columns.u16(r.attempt for r, _ in ends),
        reason=columns.u8(e.reason for _, e in ends),
        counts=counts,
        detail=detail,
    )
