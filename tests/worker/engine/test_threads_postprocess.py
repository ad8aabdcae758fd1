"""PostprocessThread: stops on the column, frames, ends before reports, faults of one row."""

import queue
import threading
import time

import pytest
import torch

from protocol.channel.memory import MemoryNetwork
from protocol.clock import SystemClock
from protocol.codec import decode, encode
from protocol.errors import CannotFit
from protocol.graph import GraphSpec, Loop, Step, Walk
from protocol.messages import FLAG_CLOSES, FLAG_END, Frames, Reason, Row, Window
from tests.support.fake_engine import DeviceLost, FakeEngine
from worker.api.inputs import RequestInfo
from worker.api.model import DONE, Next
from worker.api.outputs import StepOutputs
from worker.device.cpu import CpuDevice, CpuEvent
from worker.engine.executing_batch import ExecutingBatch
from worker.engine.orders import Attach, CloseEmpty, Detach, OwnerDown, OwnerUp, Settled
from worker.engine.postprocess_thread import PostprocessThread
from worker.engine.step_tail import ServedModel
from worker.micro_scheduler.events import EmptyClosed, OwnerGone, OwnerStalled, StepDone
from worker.resources.base import AdmitOutcome

LIFE, OWNER, EOS, DECODE = 5, 9, 256, 50


def next_walk(walk, facts):
    if facts["last"] == 13:
        raise ValueError("next_walk: planted")
    return Next("decode") if walk == "prefill" else DONE


GRAPH = GraphSpec(
    nodes=("node",),
    walks=(
        Walk("prefill", Step("node"), then="decode"),
        Walk("decode", Loop("tokens", Step("node"))),
        Walk("encode", Step("node")),
    ),
    entry="prefill",
)


class Bench:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.told: queue.SimpleQueue = queue.SimpleQueue()
        self.fatal: list[BaseException] = []
        self.broke = threading.Event()
        self.network = MemoryNetwork()
        self.owner = self.network.bind("memory://owner")
        self.thread = PostprocessThread(
            engine=self.engine,
            device=CpuDevice(),
            network=self.network,
            worker_life=LIFE,
            models={"m": ServedModel(GRAPH, next_walk, (EOS,))},
            tell_main=self.told.put,
            on_fatal=self._on_fatal,
            clock=SystemClock(),
        )
        self.thread.start()
        self.thread.order(OwnerUp(OWNER, "memory://owner"))
        self.steps = 0

    def _on_fatal(self, error: BaseException) -> None:
        self.fatal.append(error)
        self.broke.set()

    def attach(self, row: int, max_steps: int = 10, **fields) -> None:
        given = {
            "row": row, "owner": OWNER, "stream": row, "attempt": 1, "ordinal": 0,
            "path": [[1, 3], [DECODE, 0]], "base": [0], "handed": [], "inputs": {}, "params": {},
            "max_steps": max_steps,
        }  # fmt: skip
        self.thread.order(Attach(Row(**{**given, **fields}), "m"))

    def batch(self, tokens: dict[int, int], batch: int = DECODE, walk: str = "decode", rows=None):
        self.steps += 1
        rids = list(tokens) if rows is None else rows
        b = ExecutingBatch(
            self.steps, batch, "m/node", walk, rids, {r: RequestInfo(r, walk, {}) for r in rids}
        )
        b.outputs = StepOutputs(list(tokens), {"tokens": torch.tensor(list(tokens.values()))})
        b.completion_event = CpuEvent()
        b.outputs_ready.set()
        return b

    def step(self, tokens: dict[int, int], **kind) -> StepDone:
        self.thread.order(self.batch(tokens, **kind))
        return self.next()

    def next(self):
        got = self.told.get(timeout=10)
        return got if not isinstance(got, Settled) else self.next()

    def frames(self) -> list[Frames]:
        return [decode(f).message for _, f in self.owner.receive()]


@pytest.fixture
def bench():
    b = Bench()
    yield b
    assert b.thread.stop()
    assert b.fatal == [] or b.broke.is_set()


def test_common_stops_are_decided_on_the_column(bench: Bench) -> None:
    bench.attach(1)
    bench.attach(2, params={"ignore_eos": True})
    bench.attach(3, params={"stop_token_ids": [70, 71]})
    bench.attach(4, max_steps=2)
    bench.attach(5)
    done = bench.step({1: EOS, 2: EOS, 3: 5, 4: 5, 5: 5})
    assert {r: e.reason for r, e in done.ends.items()} == {1: Reason.STOP}
    done = bench.step({2: 70, 3: 71, 4: 6, 5: 71})
    assert {r: (e.reason, e.count) for r, e in done.ends.items()} == {
        3: (Reason.STOP, 2),
        4: (Reason.LENGTH, 2),
    }


def test_a_steps_frames_are_sent_before_main_hears_of_it(bench: Bench) -> None:
    bench.attach(1)
    bench.attach(2, base=[7], max_steps=1)
    done = bench.step({1: 40, 2: 41})
    (frame,) = bench.frames()
    assert list(frame.stream) == [1, 2]
    assert list(frame.first) == [0, 7]
    assert list(frame.tokens) == [40, 41]
    assert list(frame.flags) == [0, FLAG_END | FLAG_CLOSES]
    assert list(frame.reason) == [0, Reason.LENGTH]
    assert done.ends[2].count == 8


def test_each_owner_gets_one_frame_with_its_own_rows(bench: Bench) -> None:
    others = {20: bench.network.bind("memory://twenty"), 3: bench.network.bind("memory://three")}
    bench.thread.order(OwnerUp(20, "memory://twenty"))
    bench.thread.order(OwnerUp(3, "memory://three"))
    for row, owner in {1: OWNER, 2: 20, 3: OWNER, 4: 20, 5: 3}.items():
        bench.attach(row, owner=owner, attempt=owner, base=[row])
    bench.step({1: 41, 2: 42, 3: EOS, 4: 44, 5: 45})
    (mine,) = bench.frames()
    assert (list(mine.stream), list(mine.tokens)) == ([1, 3], [41, EOS])
    assert list(mine.flags) == [0, FLAG_END | FLAG_CLOSES]
    found = {}
    for owner, channel in others.items():
        ((_, data),) = channel.receive()
        found[owner] = decode(data).message
    assert {o: list(m.stream) for o, m in found.items()} == {20: [2, 4], 3: [5]}
    assert list(found[20].first) == [2, 4]
    assert list(found[20].attempt) == [20, 20]
    assert list(found[3].tokens) == [45]


def test_tokens_after_the_end_are_discarded_and_counted(bench: Bench) -> None:
    bench.attach(1)
    bench.attach(2)
    bench.step({1: EOS, 2: 4})
    bench.frames()
    done = bench.step({1: 99, 2: 5})
    assert done.ends == {}
    (frame,) = bench.frames()
    assert list(frame.stream) == [2]
    assert bench.thread.statistics()["wasted"] == 1
    assert bench.thread.statistics()["tokens_out"] == 3


def test_the_authors_own_stop_ends_a_row(bench: Bench) -> None:
    bench.attach(1)
    bench.attach(2)
    bench.engine.stops = {2: {"tokens"}}
    done = bench.step({1: 4, 2: 5})
    assert {r: e.reason for r, e in done.ends.items()} == {2: Reason.STOP}


def test_an_end_in_prefill_ends_the_loop_that_never_began(bench: Bench) -> None:
    bench.attach(1)
    done = bench.step({1: EOS}, batch=1, walk="prefill")
    assert done.ends[1].closed
    assert done.ends[1].next is None


def test_a_path_that_ends_in_a_one_shot_batch_is_done_after_it(bench: Bench) -> None:
    bench.attach(1, path=[[8, 3]])
    bench.attach(2, path=[[8, 3]])
    done = bench.step({1: 40}, batch=8, walk="encode", rows=[1, 2])
    assert {r: (e.reason, e.count) for r, e in done.ends.items()} == {
        1: (Reason.DONE, 1),
        2: (Reason.DONE, 0),  # without an output
    }
    (frame,) = bench.frames()
    assert list(frame.count) == [1, 0]


def test_next_walk_that_raises_fails_its_row_alone(bench: Bench) -> None:
    bench.attach(1, params={"stop_token_ids": [13]})
    bench.attach(2)
    done = bench.step({1: 13, 2: 5})
    assert "next_walk: planted" in done.failed[1]["message"]
    assert done.ends == {}
    (frame,) = bench.frames()
    assert list(frame.stream) == [2]


def test_failed_refused_and_skipped_rows_are_told_apart(bench: Bench) -> None:
    for r in (1, 2, 3, 4):
        bench.attach(r)
    b = bench.batch({4: 44}, rows=[4])
    b.fail(1, "forward", ValueError("planted"))
    b.fail(2, "admit", CannotFit("9 pages of 4"))
    b.skipped_rids.append(3)
    bench.thread.order(b)
    done = bench.next()
    assert list(done.failed) == [1]
    assert done.never[2]["message"] == "9 pages of 4"
    assert done.returned == {3}
    assert list(bench.frames()[0].stream) == [4]
    done = bench.step({1: 4, 2: 4, 3: 4})
    assert list(bench.frames()[0].stream) == [3]


def test_a_refused_step_has_no_frames_and_its_rows_go_on_later(bench: Bench) -> None:
    bench.attach(1)
    b = bench.batch({}, rows=[1])
    b.outputs = StepOutputs()
    b.admit_error, b.failed_resource = AdmitOutcome(False, detail="needs 2 pages, 1 free"), "kv"
    bench.thread.order(b)
    done = bench.next()
    assert done.refusal is not None
    assert done.refusal.error["message"] == "kv: needs 2 pages, 1 free"
    bench.step({1: 40})
    assert list(bench.frames()[0].first) == [0]


def test_an_error_fails_the_whole_step_and_no_other(bench: Bench) -> None:
    bench.attach(1)
    bench.attach(2)
    b = bench.batch({1: 5})
    b.error = ValueError("planted")
    b.outputs = StepOutputs()
    bench.thread.order(b)
    assert bench.next().error == {
        "code": "failed", "message": "ValueError: planted", "type": "ValueError",
        "stage": "step", "node": b.node_name, "step": b.step,
    }  # fmt: skip
    assert bench.step({1: 6, 2: 7}).error is None
    assert list(bench.frames()[0].stream) == [2]


def test_device_work_that_fails_late_is_the_steps_error_or_fatal(bench: Bench) -> None:
    class Broken(CpuEvent):
        def __init__(self, error: Exception) -> None:
            self.error = error

        def synchronize(self) -> None:
            raise self.error

    bench.attach(1)
    b = bench.batch({1: 5})
    b.completion_event = Broken(ValueError("late"))
    bench.thread.order(b)
    assert (bench.next().error or {})["message"] == "ValueError: late"
    b = bench.batch({1: 5})
    b.completion_event = Broken(DeviceLost("sticky"))
    bench.thread.order(b)
    assert bench.broke.wait(10)
    assert isinstance(bench.fatal[0], DeviceLost)


def test_outputs_that_are_no_column_are_read_too(bench: Bench) -> None:
    for r in (1, 2, 3):
        bench.attach(r)
    b = bench.batch({1: 41, 2: 42}, rows=[1, 2, 3])
    b.outputs.drop(1)
    b.outputs.set_row(3, {"tokens": [torch.tensor([43])]})
    bench.thread.order(b)
    bench.next()
    (frame,) = bench.frames()
    assert dict(zip(frame.stream, frame.tokens, strict=True)) == {2: 42, 3: 43}


def test_handed_tokens_are_sent_again_from_base(bench: Bench) -> None:
    bench.attach(1, handed=[7, 8], base=[3])
    bench.step({1: 9})
    a, b = bench.frames()
    assert (list(a.first), list(a.tokens)) == ([3], [7, 8])
    assert (list(b.first), list(b.tokens)) == ([5], [9])


def test_an_empty_close_carries_the_reason_and_no_token(bench: Bench) -> None:
    bench.attach(1, base=[4], max_steps=0)
    bench.thread.order(CloseEmpty(1, Reason.LENGTH))
    told = bench.next()
    assert isinstance(told, EmptyClosed)
    assert (told.end.reason, told.end.count, told.end.closed) == (Reason.LENGTH, 4, True)
    (frame,) = bench.frames()
    assert list(frame.count) == [0]
    assert list(frame.first) == [4]
    assert list(frame.flags) == [FLAG_END | FLAG_CLOSES]


def test_a_row_is_settled_when_its_end_is_acknowledged(bench: Bench) -> None:
    bench.attach(1, max_steps=1)
    bench.step({1: 40})
    assert not bench.thread.settled
    peer = next(iter(bench.owner.peers))
    bench.owner.send(encode(Window(1, 1 << 20), LIFE, OWNER, 1), peer)
    assert bench.told.get(timeout=10) == Settled(((1, 1),))
    assert bench.thread.settled


def test_frames_for_an_owner_that_went_are_counted_not_sent(bench: Bench) -> None:
    bench.attach(1)
    bench.thread.order(OwnerDown(OWNER))
    done = bench.step({1: 40})
    assert done.error is None
    assert bench.thread.statistics()["frames_without_owner"] == 1
    assert bench.thread.settled


def test_detached_rows_give_their_slots_back(bench: Bench) -> None:
    for r in range(1, 200):
        bench.attach(r)
    bench.step({r: r for r in range(1, 200)})
    for r in range(1, 200):
        bench.thread.order(Detach(r))
    bench.attach(500, base=[2])
    done = bench.step({500: EOS})
    assert done.ends[500].count == 3
    assert bench.thread.statistics()["rows"] == 1


def test_a_slot_forgets_the_stops_of_the_row_before(bench: Bench) -> None:
    bench.attach(1, params={"stop_token_ids": [70, 71]})
    bench.step({1: 70})
    bench.thread.order(Detach(1))
    bench.attach(2)
    assert bench.step({2: 71}).ends == {}


def test_a_backlog_over_the_limit_stalls_the_owner_and_relief_ends_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.stream_link.HOLD_BYTES", 2000)
    monkeypatch.setattr("protocol.stream_link.FAIL_AFTER_S", 0.0)
    bench.attach(1, max_steps=10_000)
    peer_of = bench.owner.peers
    bench.step({1: 1})
    # The owner takes one byte at a time from here on.
    bench.owner.send(encode(Window(0, 1), LIFE, OWNER, 1), next(iter(peer_of)))
    seen: list[object] = []
    limit = time.monotonic() + 10
    while not any(isinstance(t, OwnerStalled) for t in seen) and time.monotonic() < limit:
        bench.thread.order(bench.batch({1: 1}))
        seen.append(bench.told.get(timeout=10))
    assert OwnerStalled(OWNER, True) in seen
    while not any(isinstance(t, OwnerGone) for t in seen):
        seen.append(bench.told.get(timeout=10))
    bench.owner.send(encode(Window(1, 1 << 20), LIFE, OWNER, 2), next(iter(peer_of)))
    while OwnerStalled(OWNER, False) not in seen:
        seen.append(bench.told.get(timeout=10))
    tokens = sum(len(f.tokens) for f in bench.frames())
    assert tokens == bench.thread.statistics()["tokens_out"]


def test_outputs_are_read_only_after_they_are_ready(bench: Bench) -> None:
    bench.attach(1)
    b = bench.batch({1: 40})
    b.outputs_ready.clear()
    bench.thread.order(b)
    with pytest.raises(queue.Empty):
        bench.told.get(timeout=0.05)
    b.outputs_ready.set()
    assert bench.next().step == b.step
