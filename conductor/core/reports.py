"""What a worker reports of its rows. Late and unknown entries are counted and dropped."""

from dataclasses import dataclass
from typing import Any, cast

from conductor.core import batching, requests, rows, trials
from conductor.core.records import PlacedRow
from conductor.core.registry import Worker
from conductor.core.request_lifecycle import RequestState
from conductor.core.state import State
from protocol.errors import RequestFailed
from protocol.messages import Kind, Reason, Report

_PROGRESS = int(Kind.PROGRESS)


@dataclass(frozen=True, slots=True)
class Entry:
    """One row's news, as `Report` or an inventory tells it. `extra["closed"]`: the row's last frame
    carried `closes`."""

    row: int
    kind: int
    value: int
    acked: int
    extra: dict[str, Any]


def report(s: State, worker: Worker, message: Report) -> None:
    """Entries of one report, in order. Progress matters to trials alone: without one, a worker may
    report on a thousand rows for the price of one."""
    if worker.trial is None and message.kind.tobytes().count(_PROGRESS) == len(message.row):
        return
    columns = zip(message.row, message.kind, message.value, message.acked, strict=True)
    for i, (row, kind, value, acked) in enumerate(columns):
        take(s, worker, Entry(row, kind, value, acked, message.extras.get(i, {})))


def take(s: State, worker: Worker, entry: Entry) -> None:
    """One row's news. What is late or unknown is counted and dropped."""
    row, kind = worker.rows.get(entry.row), entry.kind
    if row is None:
        request = worker.stakes.get(entry.row)
        if kind == Kind.SETTLED and request is not None:
            requests.settled(s, request)
        else:
            s.drop()
    elif kind == Kind.PROGRESS:
        _reached(s, row, entry.value)
    elif kind == Kind.MOVED:
        if batching.advance(row, entry.value):
            s.dirty = True
        else:
            s.drop()
    elif kind == Kind.HELD:
        if not row.held:
            batching.hold(row)
            s.dirty = True
    elif kind == Kind.RESUMED:
        if row.held:
            batching.resume(row)
    elif kind >= Kind.FINISHED:
        _ended(s, row, entry)
    elif kind not in (Kind.STARTED, Kind.SETTLED):
        s.drop()


def _reached(s: State, row: PlacedRow, position: int) -> None:
    if position > row.position:
        row.position = position
        trials.progressed(s, row)


def _ended(s: State, row: PlacedRow, entry: Entry) -> None:
    row.position = max(row.position, entry.value)
    rows.end(s, row)
    request, kind, extra = row.request, entry.kind, entry.extra
    if request.row is not row or request.state is not RequestState.ACTIVE:
        return  # it was leaving: this is the end that was asked for, or one that crossed it
    closed = extra.get("closed") is True
    if kind == Kind.FINISHED:
        following = _next_walk(extra)
        if following is not None:
            error = RequestFailed(f"the worker asks for walk {following!r}, which nothing drives")
            requests.propose_end(s, request, Reason.FAILED, error)
            return
        reason = _reason(extra, Reason.DONE)
        requests.finish(s, request, reason, [row.position], closed)
        if not closed and entry.acked >= row.position:
            requests.settled(s, request)
    elif kind in (Kind.FAILED, Kind.REFUSED):
        reason = _reason(extra, Reason.FAILED)
        if closed:
            requests.finish(s, request, reason, [row.position], closed)
        else:
            requests.propose_end_detail(s, request, reason, _error(extra, kind))
    elif kind == Kind.PREEMPTED:
        requests.preempted(s, request)
    else:  # left, though it was wanted; or an end that this version doesn't know
        requests.rebase(s, request, f"worker {row.worker.name} gave up the row", replay=True)


def _next_walk(extra: dict[str, Any]) -> object:
    """The walk that `next_walk` answered with; None for done."""
    answer: Any = extra.get("next")
    if isinstance(answer, dict):
        return cast("dict[str, Any]", answer).get("walk")
    return None if answer == "done" else answer


def _error(extra: dict[str, Any], kind: int) -> dict[str, Any]:
    told: Any = extra.get("error")
    if isinstance(told, dict):
        return cast("dict[str, Any]", told)
    what = "failed" if kind == Kind.FAILED else "refused"
    return RequestFailed(f"the worker {what} the row and gave no reason").to_wire()


def _reason(extra: dict[str, Any], default: Reason) -> Reason:
    """The reported reason where it is of the default's kind: a failure can't pass for a success."""
    try:
        reason = Reason(extra.get("reason", default))
    except ValueError:
        return default
    return reason if reason.success == default.success and reason else default
