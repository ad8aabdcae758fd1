"""What the micro-scheduler remembers of a row, a batch and a step in flight: data, no decisions.

"Planned" figures count every submitted step; "done" figures count those that came back.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from protocol.lifecycle import Lifecycle
from worker.micro_scheduler import batch_lifecycle, row_lifecycle
from worker.micro_scheduler.batch_lifecycle import BatchEvent, BatchState
from worker.micro_scheduler.decisions import PlannedStep
from worker.micro_scheduler.row_lifecycle import RowEvent, RowState

TRIAL_TOKENS = 4  # past its history, a row on trial is an ordinary row (rule 16)


@dataclass(slots=True, eq=False)
class PoolRecord:
    """The KV pages of one model. `waiting`: its rows that are held for want of space."""

    model: str
    waiting: "dict[int, RowRecord]" = field(default_factory=dict[int, "RowRecord"])
    may_retry: bool = False  # pages may have been freed since the last refusal
    freed_after: int = 0  # the last step submitted before pages were freed


class Place(NamedTuple):
    """Where a row stands: stage of its path, tokens in its state, outputs so far."""

    stage: int
    consumed: int
    produced: int


@dataclass(slots=True, eq=False)
class RowRecord:
    """`start` is the output position of its first own token; `max_steps` bounds those tokens."""

    row: int
    pool: PoolRecord
    owner: int
    path: tuple[tuple[int, int], ...]
    start: int
    max_steps: int
    trial: bool = False
    # planned
    stage: int = 0
    consumed: int = 0
    produced: int = 0
    in_flight: int = 0
    # done
    done_stage: int = 0
    emitted: int = 0
    told: int = 0  # emitted when last reported
    started: bool = False
    # why it is not stepping; for want of space: `no_space`
    stalled: bool = False
    returning: bool = False  # a step came back without it; later ones are still in flight
    closing: bool = False  # rule 11
    tried_alone: bool = False  # refused while no other row could have been in its way
    refusal: dict[str, object] | None = None
    nodes: set[str] = field(default_factory=set[str])
    life: Lifecycle[RowState, RowEvent] = field(init=False)

    def __post_init__(self) -> None:
        self.life = Lifecycle(f"row {self.row:#x}", RowState.WAITING, row_lifecycle.TABLE)

    @property
    def age(self) -> int:
        """Order of placement: the conductor mints row numbers upwards."""
        return self.row

    @property
    def no_space(self) -> bool:
        return self.row in self.pool.waiting

    @property
    def place(self) -> Place:
        return Place(self.stage, self.consumed, self.produced)

    @property
    def batch(self) -> int | None:
        """The batch of its planned stage; None past the last."""
        return self.path[self.stage][0] if self.stage < len(self.path) else None

    @property
    def position(self) -> int:
        """Output position reached, of steps that came back."""
        return self.start + self.emitted

    @property
    def ended(self) -> bool:
        return self.life.state is RowState.ENDED

    @property
    def on_trial(self) -> bool:
        return self.trial and self.emitted < TRIAL_TOKENS and not self.ended

    @property
    def may_step(self) -> bool:
        """Nothing about the row itself keeps it from its next step."""
        return (
            self.life.state in (RowState.WAITING, RowState.RUNNING)
            and not self.returning
            and not self.closing
            and self.produced < self.max_steps
        )

    @property
    def plain(self) -> bool:
        """It runs, and a step that did nothing special changes nothing but its counts."""
        return (
            self.life.state is RowState.RUNNING
            and self.started
            and not self.trial
            and not self.tried_alone
        )

    @property
    def may_retry(self) -> bool:
        """Held for space only, and nothing of it is in flight."""
        return (
            self.life.state is RowState.HELD
            and self.no_space
            and not self.stalled
            and not self.returning
            and self.in_flight == 0
        )


@dataclass(slots=True, eq=False)
class BatchRecord:
    """`rows`: of a one-shot batch, those that have neither done this stage nor ended; of a standing
    batch, those whose planned stage it is. `limit`: last step number that may be planned."""

    batch: int
    node: str
    walk: str
    priority: int
    standing: bool
    age: int
    limit: int | None = None
    steps: int = 0  # planned
    last_step: int = 0  # the worker's number of its last step
    rows: dict[int, RowRecord] = field(default_factory=dict[int, RowRecord])
    life: Lifecycle[BatchState, BatchEvent] = field(init=False)

    def __post_init__(self) -> None:
        state = BatchState.OPEN if self.standing else BatchState.PLANNED
        self.life = Lifecycle(f"batch {self.batch}", state, batch_lifecycle.TABLE)


@dataclass(slots=True, eq=False)
class StepRecord:
    """A submitted step: `rows[i]` is that of `planned.rows[i]`."""

    planned: PlannedStep
    batch: BatchRecord
    trial: bool
    rows: list[RowRecord]

    @property
    def step(self) -> int:
        return self.planned.step

    def before(self, i: int) -> Place:
        """Where row i stood before the step."""
        row = self.rows[i]
        stage = next(k for k, (b, _) in enumerate(row.path) if b == self.batch.batch)
        return Place(stage, self.planned.positions[i], self.planned.outputs[i] - row.start)
