"""MicroScheduler: events in, decisions out.

The conductor decides who is in a batch, in what order and at what priority; this decides which
batch steps now, masks held rows, and never merges or reorders rows. The engine's request id is the
row number.
"""

from collections.abc import Callable, Mapping
from typing import Any

from protocol.messages import Close, Kind, Leave, Limit, Message, Open, Owners, Run
from worker.micro_scheduler import completion, invariants, membership, select
from worker.micro_scheduler.decisions import Decision, Say
from worker.micro_scheduler.events import EmptyClosed, OwnerGone, OwnerStalled, StepDone
from worker.micro_scheduler.row_lifecycle import RowState
from worker.micro_scheduler.state import State

Event = (
    Open | Run | Leave | Limit | Close | Owners | StepDone | EmptyClosed | OwnerStalled | OwnerGone
)

_HANDLERS: dict[type, Callable[[State, Any], None]] = {
    Open: membership.opened,
    Run: membership.ran,
    Leave: membership.left,
    Limit: membership.limited,
    Close: membership.closed,
    Owners: membership.owners,
    StepDone: completion.step_done,
    EmptyClosed: membership.empty_closed,
    OwnerStalled: membership.owner_stalled,
    OwnerGone: membership.owner_gone,
}


class MicroScheduler:
    """`depth`: most steps in flight. `models`: name → ids that end its streams."""

    def __init__(self, depth: int, models: Mapping[str, frozenset[int]]) -> None:
        self._state = State(depth, models)

    def handle(self, event: Event) -> list[Decision]:
        """Raises `IllegalTransition` or `InvariantViolation` on what may never happen."""
        _HANDLERS[type(event)](self._state, event)
        return self._take()

    @staticmethod
    def takes(message: Message) -> bool:
        """Whether `handle` takes this message of the conductor's."""
        return type(message) in _HANDLERS

    def plan(self) -> list[Decision]:
        """Steps to submit now. Call after a round of events, so that one step sees them all."""
        select.plan(self._state)
        return self._take()

    def progress(self) -> list[Say]:
        """Rows that came further since they were last reported."""
        changed = [r for r in self._state.rows.values() if r.emitted != r.told and not r.ended]
        for row in changed:
            self._state.say(row, Kind.PROGRESS)
        return [d for d in self._take() if isinstance(d, Say)]

    def inventory(self) -> dict[str, Any]:
        """Live rows and batches, as `Hello.inventory` carries them."""
        rows = [[r.row, r.done_stage, r.position] for r in self._state.rows.values() if not r.ended]
        return {"rows": rows, "batches": list(self._state.batches)}

    @property
    def live(self) -> int:
        """Rows that have not ended."""
        return sum(1 for r in self._state.rows.values() if not r.ended)

    @property
    def idle(self) -> bool:
        """No row is left, not even one that only waits to be removed."""
        return not self._state.rows and not self._state.flights

    def check(self) -> None:
        invariants.check(self._state)

    def statistics(self) -> dict[str, int]:
        s = self._state
        return {
            "rows": self.live,
            "held": sum(1 for r in s.rows.values() if r.life.state is RowState.HELD),
            "one_shot": sum(1 for b in s.batches.values() if not b.standing),
            "standing": sum(1 for b in s.batches.values() if b.standing),
            "in_flight": len(s.flights),
            **s.counts,
        }

    def _take(self) -> list[Decision]:
        got, self._state.decisions = self._state.decisions, []
        return got
