"""The conductor's core: events in, commands out. Knows no socket, thread, clock or chance."""

from typing import Any

from conductor.core import (
    invariants,
    loss,
    reports,
    requests,
    scheduler,
    sessions,
    snapshot,
    supervision,
)
from conductor.core.commands import Command
from conductor.core.events import Drain, Event, Fatal, LinkDown, Received, Tick, WorkerExited
from conductor.core.registry import Owner, Worker
from conductor.core.state import State
from protocol.config import DaemonConfig
from protocol.errors import WorkerLost
from protocol.messages import (
    Beat,
    Bye,
    Closed,
    Hello,
    History,
    Leaving,
    Message,
    Reason,
    Report,
    Submit,
)


class Machine:
    """Decides everything, does nothing: the same events at the same times give the same commands.

    `life` is the conductor's incarnation, which also prefixes row ids. `seed` keys the draws for
    requests that name no seed; by default `life` does.
    """

    def __init__(self, config: DaemonConfig, life: int, seed: int | None = None) -> None:
        self._state = State(config, life, seed)

    def handle(self, event: Event, now: float) -> list[Command]:
        """The sole mutator. `now`: monotonic seconds, never going back. Commands are to be done in
        order. Raises only for bugs of the conductor itself (`IllegalTransition`), never for what a
        peer sent."""
        s = self._state
        s.now = max(s.now, now)
        match event:
            case Received(life, message):
                _received(s, life, message)
            case Tick():
                supervision.tick(s)
            case LinkDown(life):
                peer = s.registry.peer(life)
                if peer is not None and peer.linked:
                    peer.linked, peer.down_since = False, s.now
            case WorkerExited(life, outside, why):
                worker = s.registry.workers.get(life)
                if worker is not None:
                    loss.lose_worker(s, worker, why, charged=not outside, kill=False)
                else:
                    s.registry.fence(life)  # its Hello may still be on its way
            case Drain(grace_ms):
                supervision.drain(s, grace_ms)
            case Fatal(why, detail):
                s.fatal = s.fatal or why
                requests.end_all(s, Reason.WORKER_LOST, WorkerLost(why, cause=detail))
        supervision.pass_time(s)
        scheduler.schedule(s)
        return s.out.take()

    def next_due(self) -> float | None:
        """When a `Tick` is wanted next, in monotonic seconds; None: not before another event."""
        return supervision.next_due(self._state)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Numbers and names for the stats socket; plain data."""
        return snapshot.take(self._state, now)

    def check(self) -> None:
        """Raises `InvariantViolation`, naming what contradicts what."""
        invariants.check(self._state)


def _received(s: State, life: int, message: Message) -> None:
    if isinstance(message, Hello):
        sessions.hello(s, life, message)
        if (peer := s.registry.peer(life)) is not None:
            peer.last_heard = s.now
        return
    peer = s.registry.peer(life)
    if peer is None or not peer.linked:
        s.drop()
        return
    peer.last_heard = s.now
    match peer, message:
        case _, Bye(reason):
            sessions.bye(s, peer, reason)
        case Worker(), Beat():
            supervision.beat(s, peer, message)
        case Worker(), Report():
            reports.report(s, peer, message)
        case Worker(), Leaving(grace_ms):
            supervision.worker_leaving(s, peer, grace_ms)
        case Owner(), Beat():
            pass  # it was heard
        case Owner(), Submit():
            requests.submit(s, peer, message)
        case Owner(), Closed():
            requests.closed(s, peer, message)
        case Owner(), History():
            requests.history(s, peer, message)
        case _:
            s.drop()
