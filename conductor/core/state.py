"""Everything the core knows. Only functions called from `Machine.handle` change it."""

from conductor.core.admission import Queue
from conductor.core.deadlines import Deadlines
from conductor.core.outbox import Outbox
from conductor.core.records import Trial
from conductor.core.registry import Registry
from protocol import ids
from protocol.config import DaemonConfig
from protocol.messages import Reason

COUNTERS = (
    "dropped_messages", "duplicate_submits", "refused_hellos", "rejected", "rebased", "replayed",
    "preempted", "trials", "acquitted", "quarantined", "workers_lost", "owners_lost",
)  # fmt: skip


class State:
    """`submitted` = sum of `closed` + `open`, always. `dirty`: something may be placed now.

    `seed` keys the draws for requests that name no seed of their own.
    """

    def __init__(self, config: DaemonConfig, life: int, seed: int | None) -> None:
        self.config = config
        self.life = life
        self.seed = life if seed is None else seed
        self.now = 0.0
        self.registry = Registry()
        self.queue = Queue()
        self.deadlines = Deadlines()
        self.suspects: list[Trial] = []  # trial groups that wait for a worker of their own
        self.out = Outbox()
        self.row_ids = ids.row_counter(life)
        self.batch_ids = ids.Counter()
        self.sequences = ids.Counter()
        self.submitted = 0
        self.open = 0
        self.closed: dict[Reason, int] = {}
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.dirty = False
        self.next_beat: float | None = None
        self.ticked_at: float | None = None
        self.draining = False
        self.drain_ends: float | None = None  # the grace is over then; None: not draining or over
        self.give_up_at: float | None = None  # `Drained` then, whatever owners still owe
        self.drained = False
        self.fatal = ""

    @property
    def silence(self) -> float:
        """Seconds."""
        return self.config.supervision.silence_ms / 1000

    @property
    def beat(self) -> float:
        """Seconds."""
        return self.config.supervision.beat_ms / 1000

    def count(self, what: str, by: int = 1) -> None:
        self.counters[what] += by

    def drop(self) -> None:
        """A message, or an entry of one, that is late or unknown. Never an error: peers race."""
        self.counters["dropped_messages"] += 1
