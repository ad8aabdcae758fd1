"""The tail of a step, pure but for the table it advances: values → frames, ends and failures.

Works on whole columns; only rows that end cost Python per row beside their frame entry.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import PodiumError, RequestFailed
from protocol.graph import GraphSpec, Loop
from protocol.messages import FLAG_CLOSES, FLAG_END, Reason
from protocol.stream_link import Emit, Plain
from worker.api.model import Next
from worker.engine.executing_batch import ExecutingBatch
from worker.engine.row_table import RowStream, RowTable
from worker.micro_scheduler.events import RowEnd

NextWalk = Callable[[str, Mapping[str, Any]], Next]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the postprocess thread needs of a model."""

    graph: GraphSpec
    next_walk: NextWalk
    eos: tuple[int, ...]


@dataclass(slots=True)
class OwnerFrame:
    """One owner's part of a step: rows and what to emit for each, and the plain rows."""

    rows: list[int] = field(default_factory=list[int])
    emits: list[Emit] = field(default_factory=list[Emit])
    plain: Plain | None = None


@dataclass(slots=True)
class Tail:
    frames: dict[int, OwnerFrame] = field(default_factory=lambda: defaultdict(OwnerFrame))
    ends: dict[int, RowEnd] = field(default_factory=dict[int, RowEnd])
    failed: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    tokens: int = 0
    wasted: int = 0

    def emit(self, stream: RowStream, e: Emit) -> None:
        frame = self.frames[stream.owner]
        frame.rows.append(stream.row)
        frame.emits.append(e)


def wire_error(
    error: BaseException, stage: str, batch: ExecutingBatch | None = None
) -> dict[str, Any]:
    """The error as it travels: type, message, and the stage, node and step where it came up. The
    scheduler adds the row's last transitions as its `story`."""
    if not isinstance(error, PodiumError):
        error = RequestFailed(f"{type(error).__name__}: {error}", type=type(error).__name__)
    where = {"node": batch.node_name, "step": batch.step} if batch is not None else {}
    return {**error.to_wire(), "stage": stage, **where}


def last_walk(graph: GraphSpec, walk: str, reason: Reason) -> str:
    """The walk whose end this is. A stop or the length ends the loop that the walk leads to, even
    before the loop began (rule 3: the stages between are void)."""
    if reason is not Reason.DONE:
        then = graph.walk(walk).then
        while then is not None:
            walk, then = then, graph.walk(then).then
    return walk


class TailBuilder:
    """Advances `table` by steps; `models` by name."""

    def __init__(self, table: RowTable, models: Mapping[str, ServedModel]) -> None:
        self.table = table
        self._models = models

    def finish(
        self,
        tail: Tail,
        stream: RowStream,
        reason: Reason,
        *,
        walk: str,
        tokens: Sequence[int],
        count: int,
    ) -> None:
        """The row's last tokens (perhaps none) and its end, `count` being the output position
        reached; or its failure, if `next_walk` raises."""
        self.table.end(stream.row)
        last = tokens[-1] if tokens else None
        try:
            end = self._end(stream, walk, reason, count, last)
        except Exception as e:
            tail.failed[stream.row] = wire_error(e, "next_walk")
            return
        tail.ends[stream.row] = end
        flags = FLAG_END | (FLAG_CLOSES if end.closed else 0)
        first = count - len(tokens)
        tail.emit(stream, Emit(stream.stream, stream.attempt, 0, first, tokens, flags, int(reason)))

    def _end(
        self, stream: RowStream, walk: str, reason: Reason, count: int, last: int | None
    ) -> RowEnd:
        """Raises what the author's `next_walk` raises."""
        model = self._models[stream.model]
        walk = last_walk(model.graph, walk, reason)
        body = model.graph.walk(walk).body
        facts = {
            "stop": [body.name] if isinstance(body, Loop) and reason is Reason.STOP else [],
            "reason": reason.name.lower(),
            "count": count,
            "last": last,
        }
        following = model.next_walk(walk, facts)
        return RowEnd(reason, count, stream.may_close and following.walk is None, following.walk)

    def of_step(
        self,
        batch: ExecutingBatch,
        rows: Sequence[int],
        tokens: NDArray[np.int64],
        stopped: Mapping[int, set[str]],
        silent: Sequence[int],
    ) -> Tail:
        """`tokens[i]` is row i's output of this step. `stopped`: rows that the author's
        `check_stop` ends. `silent`: rows without an output, which end if this was their last batch.
        """
        table, tail = self.table, Tail()
        slots = table.slots(rows)
        live = ~table.over[slots]
        tail.tokens = int(live.sum())
        tail.wasted = len(rows) - tail.tokens
        first = table.position[slots]
        table.position[slots[live]] += 1
        stops = (table.stops[slots] == tokens[:, None]).any(axis=1)
        if stopped:
            stops |= np.fromiter((r in stopped for r in rows), np.bool_, len(rows))
        length = first + 1 >= table.ends_at[slots]
        final = table.final_batch[slots] == batch.batch
        reasons = np.where(
            stops, int(Reason.STOP), np.where(length, int(Reason.LENGTH), final * int(Reason.DONE))
        )
        plain = live & (reasons == 0)
        self._emit_plain(tail, slots[plain], first[plain], tokens[plain])
        ended = live & (reasons != 0)
        columns = zip(
            slots[ended].tolist(), first[ended].tolist(), tokens[ended].tolist(),
            reasons[ended].tolist(), strict=True,
        )  # fmt: skip
        for slot, at, token, reason in columns:
            stream = table.at(slot)
            if stream is not None:
                self.finish(
                    tail, stream, Reason(reason), walk=batch.walk, tokens=(token,), count=at + 1
                )
        for row in silent:
            stream = table.get(row)
            if stream is None or stream.final_batch != batch.batch or table.has_ended(row):
                continue
            at = table.position_of(row)
            self.finish(tail, stream, Reason.DONE, walk=batch.walk, tokens=(), count=at)
        return tail

    def _emit_plain(
        self,
        tail: Tail,
        slots: NDArray[np.intp],
        first: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> None:
        """Rows that only got a token: one set of columns for each owner."""
        if not len(slots):
            return
        table = self.table
        owners = table.owner[slots]
        for owner in owners[:1] if (owners == owners[0]).all() else np.unique(owners):
            own = owners == owner
            its = slots[own]
            tail.frames[int(owner)].plain = Plain(
                stream=array("Q", table.stream[its].tobytes()),
                attempt=array("H", table.attempt[its].tobytes()),
                first=array("I", first[own].astype(np.uint32).tobytes()),
                tokens=array("I", tokens[own].astype(np.uint32).tobytes()),
            )
