"""Who is there: workers and what they serve, owners and their streams, lives that are fenced."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from conductor.core import worker_lifecycle
from conductor.core.records import OneShotBatch, PlacedRow, Request, StandingBatch, Trial
from conductor.core.worker_lifecycle import WorkerEvent, WorkerState
from protocol.graph import ModelSpec
from protocol.lifecycle import Lifecycle

REMEMBERED = 1024  # lives of the dead that are still known


@dataclass(slots=True, eq=False)
class Peer:
    """The other end of a control link."""

    name: str
    life: int
    last_heard: float
    linked: bool = True
    down_since: float = 0.0


@dataclass(slots=True, eq=False)
class Owner(Peer):
    """A gateway or client. `resubmits`: its streams that are unknown here (rule 20)."""

    role: str = "client"
    endpoint: str = ""
    streams: dict[int, Request] = field(default_factory=dict[int, Request])
    resubmits: dict[int, int] = field(default_factory=dict[int, int])  # stream -> attempt


@dataclass(slots=True, eq=False)
class Worker(Peer):
    """A worker and the conductor's account of what it put there.

    `rows`: live rows by id. `stakes`: by row id, the open requests that must be rebased if this
    worker is lost: those whose current attempt's row is or was here, unless settled or given a
    failing end (rule 14). `ahead`: one-shot batches sent and not yet worked off. `planned`:
    one-shot batches not sent yet. `pages`: KV pages promised, by model.
    """

    specs: dict[str, ModelSpec] = field(default_factory=dict[str, ModelSpec])
    capacity: dict[str, Any] = field(default_factory=dict[str, Any])
    rows: dict[int, PlacedRow] = field(default_factory=dict[int, PlacedRow])
    stakes: dict[int, Request] = field(default_factory=dict[int, Request])
    ahead: dict[int, OneShotBatch] = field(default_factory=dict[int, OneShotBatch])
    planned: list[OneShotBatch] = field(default_factory=list[OneShotBatch])
    standing: dict[tuple[str, str, int], StandingBatch] = field(
        default_factory=dict[tuple[str, str, int], StandingBatch]
    )
    pages: dict[str, int] = field(default_factory=dict[str, int])
    trial: Trial | None = None
    steps: int = 0
    step_age: float = 0.0  # seconds, as the last beat told
    step_time: float = 0.0  # seconds: the slowest of late, decaying towards the mean
    advanced_at: float = 0.0  # when `steps` last rose
    load: dict[str, Any] = field(default_factory=dict[str, Any])
    drain_at: float | None = None  # when its rows are moved away
    exit_sent: bool = False
    lifecycle: Lifecycle[WorkerState, WorkerEvent] = field(init=False)

    def __post_init__(self) -> None:
        what = f"worker {self.name} ({self.life:#x})"
        self.lifecycle = Lifecycle(what, WorkerState.STARTING, worker_lifecycle.TABLE)

    @property
    def state(self) -> WorkerState:
        return self.lifecycle.state

    @property
    def placeable(self) -> bool:
        return self.linked and self.lifecycle.state is WorkerState.READY

    @property
    def committed_pages(self) -> int:
        return sum(self.pages.values())


class Registry:
    """Peers by life; workers by name; every model that was ever announced. `draining`: those
    workers that are asked after at each event, because their grace may end."""

    def __init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.draining: dict[int, Worker] = {}
        self.owners: dict[int, Owner] = {}
        self.models: dict[str, ModelSpec] = {}
        self.lost_owners: OrderedDict[int, str] = OrderedDict()  # life -> endpoint
        self._fenced: OrderedDict[int, None] = OrderedDict()

    def peer(self, life: int) -> Worker | Owner | None:
        return self.workers.get(life) or self.owners.get(life)

    def peers(self) -> list[Worker | Owner]:
        return [*self.workers.values(), *self.owners.values()]

    def worker_named(self, name: str) -> Worker | None:
        return next((w for w in self.workers.values() if w.name == name), None)

    def serving(self, model: str) -> list[Worker]:
        """Workers that may be given rows of this model now."""
        return [w for w in self.workers.values() if w.placeable and model in w.specs]

    def conflict(self, spec: ModelSpec) -> str:
        """How this spec differs from what a living worker announced of the model, or ''.

        Replicas must agree, or a replay would continue a stream with another model's tokens. Their
        pools and batch sizes may differ.
        """
        for worker in self.workers.values():
            other = worker.specs.get(spec.model)
            if other is None:
                continue
            for name in ("graph", "context", "vocab", "eos"):
                mine, theirs = getattr(spec, name), getattr(other, name)
                if mine != theirs:
                    told = "" if name == "graph" else f": {mine} here, {theirs} there"
                    return f"model {spec.model!r} differs from worker {worker.name} in {name}{told}"
        return ""

    def add_worker(self, worker: Worker) -> None:
        self.workers[worker.life] = worker
        self.models.update(worker.specs)

    def add_owner(self, owner: Owner) -> None:
        self.owners[owner.life] = owner

    def drop_worker(self, worker: Worker) -> None:
        self.workers.pop(worker.life, None)
        self.draining.pop(worker.life, None)
        self.fence(worker.life)

    def drop_owner(self, owner: Owner) -> None:
        self.owners.pop(owner.life, None)
        self.lost_owners[owner.life] = owner.endpoint
        while len(self.lost_owners) > REMEMBERED:
            self.lost_owners.popitem(last=False)
        self.fence(owner.life)

    def fence(self, life: int) -> None:
        """This incarnation is never taken back (rule 14). An owner neither: its streams are closed
        and counted, and workers have forgotten how far their links to it were."""
        self._fenced[life] = None
        while len(self._fenced) > REMEMBERED:
            self._fenced.popitem(last=False)

    def fenced(self, life: int) -> bool:
        return life in self._fenced

    def largest_pool(self, model: str) -> tuple[int, int]:
        """(pages, tokens per page) of the largest KV pool of a living worker that serves it, else
        of the last that did; (0, 0) where the model has no KV."""
        known = [w.specs[model] for w in self.workers.values() if model in w.specs]
        pools = [(s.pages, s.page_tokens) for s in (known or [self.models[model]])]
        if any(pages == 0 for pages, _ in pools):
            return 0, 0
        return max(pools, key=lambda p: p[0] * p[1])
