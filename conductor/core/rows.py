"""Placing a row on a worker, asking it to leave, and taking its end."""

from conductor.core import batching, placement, walk
from conductor.core.commands import Send
from conductor.core.records import OneShotBatch, PlacedRow, Request, StandingBatch
from conductor.core.registry import Worker
from conductor.core.request_lifecycle import RequestEvent
from conductor.core.state import State
from protocol import columns
from protocol.messages import ROW_MAY_CLOSE, ROW_TRIAL, Close, Open, Row, Run


def place(s: State, request: Request, worker: Worker) -> None:
    """Give a queued request a row there. Its one-shot stages are planned; `send_planned` sends."""
    spec, limits = worker.specs[request.model], s.config.limits
    row = PlacedRow(
        id=s.row_ids.next(),
        request=request,
        attempt=request.attempt,
        worker=worker,
        model=request.model,
        pages=placement.pages_for(spec, request.total_tokens),
        base=request.base,
        path=[],
        position=request.base,
    )
    worker.rows[row.id] = row
    worker.stakes[row.id] = request
    worker.pages[row.model] = worker.pages.get(row.model, 0) + row.pages
    request.row = row
    request.lifecycle.on(RequestEvent.PLACED, worker.name)
    path = walk.path(spec.graph, request.input_tokens, limits.prefill_tokens)
    if path.one_shot is not None:
        batching.plan_one_shot(
            row, spec, path.one_shot, path.chunks, limits=limits, mint=s.batch_ids
        )
    if path.standing is not None:
        batch, opened, stale = batching.open_standing(
            worker,
            spec,
            path.standing,
            priority=request.priority,
            limits=limits,
            mint=s.batch_ids,
        )
        if stale is not None:
            s.out.follow(Send(worker.life, Close(stale.id)))
        if opened:
            s.out.follow(opening(batch, worker))
        batch.rows.add(row)
        row.path.append((batch, 0))
        if path.one_shot is None:
            _run(s, worker, batch, [row])


def opening(batch: StandingBatch, worker: Worker) -> Send:
    message = Open(batch.id, batch.node, batch.walk, batch.priority, batch.max_rows)
    return Send(worker.life, message)


def send_planned(s: State, worker: Worker) -> None:
    """Keep the worker's two batches ahead (rule 5)."""
    for batch in batching.take_next(worker):
        _run(s, worker, batch, list(batch.rows))


def leave(s: State, row: PlacedRow) -> None:
    """Ask for its end. One that the worker was never told of ends here and now."""
    if row.ended or row.leaving:
        return
    if not row.sent:
        end(s, row)
        return
    row.leaving = True
    batching.leave_planned(row)
    if row.worker.linked:  # else its next inventory shows it as unwanted
        s.out.leave(row.worker.life, row.id)


def end(s: State, row: PlacedRow) -> None:
    """The row ended, or its worker is lost: pages and seats are free again."""
    row.ended = True
    worker = row.worker
    del worker.rows[row.id]
    worker.pages[row.model] -= row.pages
    batching.leave_all(row, s.now)
    s.dirty = True


def _run(
    s: State, worker: Worker, batch: OneShotBatch | StandingBatch, rows: list[PlacedRow]
) -> None:
    told: list[Row | int] = [row.id if row.sent else _row(row) for row in rows]
    for row in rows:
        row.sent = True
    s.out.follow(Send(worker.life, Run(batch.id, batch.node, batch.walk, batch.priority, told)))


def _row(row: PlacedRow) -> Row:
    request = row.request
    outputs = row.worker.specs[row.model].graph.outputs
    tokens, others = request.prompt, [0] * (len(outputs) - 1)
    if request.replay == "history":
        tokens += columns.to_bytes(request.history)
        others = [*request.counts[1:], *others][: len(others)]
    flags = ROW_MAY_CLOSE if len(outputs) == 1 else 0
    if request.trial is not None:
        flags |= ROW_TRIAL
    return Row(
        row=row.id,
        owner=request.owner.life,
        stream=request.stream,
        attempt=row.attempt,
        ordinal=0,
        path=[[batch.id, tokens_here] for batch, tokens_here in row.path],
        base=[row.base, *others],
        handed=[],
        inputs={"tokens": tokens},
        params=request.params,
        max_steps=max(0, request.max_tokens - row.base),
        flags=flags,
        outputs=list(outputs),
    )
