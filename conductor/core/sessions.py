"""Hello: who may come in, and what a new session must repeat (rules 19 and 20)."""

from typing import Any, cast

from conductor.core import batching, loss, reports, requests, rows, walk
from conductor.core.commands import Forget
from conductor.core.records import PlacedRow, StandingBatch
from conductor.core.registry import Owner, Worker
from conductor.core.request_lifecycle import RequestState
from conductor.core.state import State
from conductor.core.worker_lifecycle import WorkerEvent
from protocol import PROTOCOL_VERSION
from protocol.errors import InvalidRequest
from protocol.graph import ModelSpec, spec_from_wire
from protocol.messages import Hello, Owners, Reason, Refuse, Welcome

ROLES = ("worker", "gateway", "client")


def hello(s: State, life: int, message: Hello) -> None:
    """Opens or renews a session, or refuses it with a code and a text."""
    known = s.registry.peer(life)
    if PROTOCOL_VERSION not in message.versions:
        ours = f"this conductor speaks protocol version {PROTOCOL_VERSION}"
        _refuse(s, life, message, "version", f"{ours}, the peer {message.versions}")
    elif message.life != life or message.role not in ROLES:
        _refuse(s, life, message, "resync", f"role {message.role!r} of life {message.life:#x}")
    elif s.registry.fenced(life):
        _refuse(s, life, message, "fenced", "this incarnation was given up; start a new one")
    elif known is not None and isinstance(known, Worker) != (message.role == "worker"):
        _refuse(s, life, message, "resync", f"this life is already {known.name}, in another role")
    elif message.role == "worker":
        _worker(s, life, message, known if isinstance(known, Worker) else None)
    else:
        _owner(s, life, message, known if isinstance(known, Owner) else None)


def _refuse(s: State, life: int, message: Hello, code: str, text: str) -> None:
    s.count("refused_hellos")
    s.out.note(
        "warning", "hello refused", name=message.name, role=message.role, code=code, why=text
    )
    s.out.send(life, Refuse(code, text))
    if (
        s.registry.peer(life) is None
    ):  # a bad Hello does not end the session that it could not renew
        s.out.say(Forget(life))


def _welcome(s: State, life: int) -> None:
    models = {n: {"context": m.context, "vocab": m.vocab} for n, m in s.registry.models.items()}
    limits: dict[str, Any] = {
        "models": models,
        "max_tokens": s.config.limits.max_tokens,
        "prefill_tokens": s.config.limits.prefill_tokens,
        "max_rows": s.config.limits.max_rows,
        "silence_ms": s.config.supervision.silence_ms,
    }
    beat_ms = s.config.supervision.beat_ms
    s.out.send(life, Welcome(s.life, PROTOCOL_VERSION, beat_ms, limits))


# ---- workers


def _worker(s: State, life: int, message: Hello, worker: Worker | None) -> None:
    new = worker is None
    if worker is None:
        taken = s.registry.worker_named(message.name)
        if taken is not None:
            _refuse(s, life, message, "name_taken", f"worker {message.name!r} is alive")
            return
        try:
            specs = _specs(s, message.specs)
        except InvalidRequest as error:
            _refuse(s, life, message, "version", error.message)
            return
        worker = Worker(
            name=message.name, life=life, last_heard=s.now, specs=specs, capacity=message.capacity
        )
        worker.advanced_at = s.now
        s.registry.add_worker(worker)
        s.out.note("info", "worker ready", worker=worker.name, models=sorted(specs))
    worker.lifecycle.on(WorkerEvent.HELLO)
    worker.linked, worker.exit_sent = True, False
    _welcome(s, life)
    if not new:  # those lost meanwhile: it may have missed the news
        for lost, endpoint in s.registry.lost_owners.items():
            s.out.send(life, Owners(lost, endpoint, False))
    for owner in s.registry.owners.values():
        s.out.send(life, Owners(owner.life, owner.endpoint, True))
    _worker_inventory(s, worker, message.inventory)
    s.dirty = True


def _specs(s: State, wire: list[dict[str, Any]]) -> dict[str, ModelSpec]:
    specs: dict[str, ModelSpec] = {}
    for entry in wire:
        spec = spec_from_wire(entry)
        walk.itinerary(spec.graph)
        conflict = s.registry.conflict(spec)
        if conflict:
            raise InvalidRequest(conflict)
        if spec.context < 2 or spec.vocab < 1 or min(spec.pages, spec.page_tokens) < 0:
            raise InvalidRequest(f"model {spec.model!r}: context, vocab or pages make no sense")
        if bool(spec.pages) != bool(spec.page_tokens) or any(
            rows < 1 for rows in spec.max_batch.values()
        ):
            raise InvalidRequest(f"model {spec.model!r}: an empty KV pool or batch serves nobody")
        specs[spec.model] = spec
    if not specs:
        raise InvalidRequest("a worker announces at least one model")
    return specs


def _worker_inventory(s: State, worker: Worker, inventory: dict[str, Any]) -> None:
    """Rule 19. Ends first: they explain rows that are absent."""
    for row_id, kind, value, *more in _entries(inventory, "ends", 3):
        extra = cast("dict[str, Any]", more[0]) if more and isinstance(more[0], dict) else {}
        reports.take(s, worker, reports.Entry(row_id, kind, value, 0, extra))
    present = {item[0]: item for item in _entries(inventory, "rows", 3)}
    known = _numbers(inventory.get("batches"))
    for row_id, item in present.items():
        row = worker.rows.get(row_id)
        if row is None or row.leaving:
            s.out.leave(worker.life, row_id)
            continue
        if batching.advance(row, item[1]):
            row.position = max(row.position, item[2])
        if known is not None and _misses(row, known):
            _give_up(s, row)  # a Run of a later stage was lost with the session
    for row in [r for r in worker.rows.values() if r.sent and r.id not in present]:
        rows.end(s, row)
        _give_up(s, row)
    if known is not None:
        for key, batch in list(worker.standing.items()):
            if batch.id in known:
                continue
            if batch.rows:  # some are planned and name it in their path
                s.out.follow(rows.opening(batch, worker))
            else:
                del worker.standing[key]


def _give_up(s: State, row: PlacedRow) -> None:
    request = row.request
    if request.row is row and request.state is RequestState.ACTIVE:
        requests.rebase(s, request, f"worker {row.worker.name} lost the row", replay=True)


def _misses(row: PlacedRow, known: set[int]) -> bool:
    """Whether the worker lacks a batch of the row's path that it has been sent."""
    return any(
        batch.id not in known
        for batch, _ in row.path[row.stage :]
        if isinstance(batch, StandingBatch) or batch.sent
    )


# ---- owners


def _owner(s: State, life: int, message: Hello, owner: Owner | None) -> None:
    announce = owner is None or owner.endpoint != message.endpoint
    if owner is None:
        owner = Owner(name=message.name, life=life, last_heard=s.now, role=message.role)
        s.registry.add_owner(owner)
        s.out.note("info", "owner joined", owner=owner.name, role=owner.role)
    owner.linked, owner.endpoint = True, message.endpoint
    _welcome(s, life)
    if announce:
        for worker in s.registry.workers.values():
            if worker.linked:
                s.out.send(worker.life, Owners(life, owner.endpoint, True))
    _owner_inventory(s, owner, message.inventory)


def _owner_inventory(s: State, owner: Owner, inventory: dict[str, Any]) -> None:
    """Rule 20: repeat what awaits an answer; streams unknown here will be submitted again."""
    present = {item[0]: item[1] for item in _entries(inventory, "streams", 2)}
    for request in list(owner.streams.values()):
        if request.stream not in present:
            # It closed the stream, and says so again after Welcome; until then, no work for it.
            if request.state is not RequestState.ENDING:
                requests.propose_end(s, request, Reason.ABORTED, None, tell=False)
        elif request.state is RequestState.REBASING:
            s.out.rebase(request)
        elif request.end is not None:
            s.out.end(request)
    owner.resubmits = {k: max(1, a) for k, a in present.items() if k not in owner.streams}


def bye(s: State, peer: Worker | Owner, reason: str) -> None:
    if isinstance(peer, Worker):
        loss.dismiss_worker(s, peer, reason)
    else:
        loss.lose_owner(s, peer, f"it said bye: {reason}")


# ---- inventories come from outside: what is no list of numbers is not there


def _numbers(value: Any) -> set[int] | None:
    if not isinstance(value, list):
        return None
    items = cast("list[Any]", value)
    return set(items) if all(type(x) is int and 0 <= x < 1 << 64 for x in items) else None


def _entries(inventory: dict[str, Any], name: str, least: int) -> list[list[Any]]:
    """Those entries of a list that begin with at least that many numbers."""
    found: list[list[Any]] = []
    items: Any = inventory.get(name)
    for item in cast("list[Any]", items) if isinstance(items, list) else ():
        if isinstance(item, list):
            entry = cast("list[Any]", item)
            if len(entry) >= least and _numbers(entry[:least]) is not None:
                found.append(entry)
    return found
