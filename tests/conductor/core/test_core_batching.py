"""Batches: what is ahead, what shares a batch, how long prompts are cut."""

from protocol.graph import GraphSpec, Loop, Step, Walk
from protocol.messages import Close, Kind, Open, Row, Run
from tests.support.conductor_driver import Driver, config, rows, sent, spec


def shape(run: Run) -> list[object]:
    """New rows by stream, known ones by '#' and number."""
    return [r.stream if isinstance(r, Row) else f"#{r & 0xFFFF}" for r in run.rows]


def test_two_one_shot_batches_are_ahead_and_a_move_lets_the_next_go() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    (first,) = rows(d.submit(owner, 1))
    (second,) = rows(d.submit(owner, 2))
    assert d.submit(owner, 3) == d.submit(owner, 4) == []
    assert d.report(worker, first.row, Kind.STARTED) == []
    (run,) = sent(d.report(worker, first.row, Kind.MOVED, 1), Run)
    assert shape(run) == [3, 4]  # what waited goes together
    assert d.submit(owner, 5) == []
    out = d.report(worker, second.row, Kind.FAILED)
    assert [shape(r) for r in sent(out, Run)] == [[5]]


def test_a_held_row_is_not_ahead_and_counts_again_when_resumed() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    (first,) = rows(d.submit(owner, 1))
    d.submit(owner, 2)
    d.submit(owner, 3)
    (run,) = sent(d.report(worker, first.row, Kind.HELD), Run)
    assert shape(run) == [3]
    d.report(worker, first.row, Kind.RESUMED)
    assert d.submit(owner, 4) == []
    assert d.report(worker, run.rows[0].row, Kind.MOVED, 1) == []  # two are still ahead
    assert len(rows(d.report(worker, first.row, Kind.MOVED, 1))) == 1


def test_prompts_share_a_batch_up_to_its_tokens_and_rows() -> None:
    d = Driver(config(prefill_tokens=16))
    worker, owner = d.worker("w0", spec(max_batch={"decoder/prefill": 3})), d.owner()
    (a,) = rows(d.submit(owner, 1))
    (b,) = rows(d.submit(owner, 2))
    for stream, prompt in ((3, 8), (4, 8), (5, 1), (6, 1), (7, 1), (8, 1)):
        d.submit(owner, stream, prompt=prompt)
    (run,) = sent(d.report(worker, a.row, Kind.MOVED, 1), Run)
    assert shape(run) == [3, 4]  # 16 tokens
    (run,) = sent(d.report(worker, b.row, Kind.MOVED, 1), Run)
    assert shape(run) == [5, 6, 7]  # 3 rows
    assert all(r.path[0][0] == run.batch for r in run.rows if isinstance(r, Row))


def test_batches_of_different_priority_or_model_are_not_mixed() -> None:
    d = Driver()
    worker, owner = d.worker("w0", spec("m"), spec("n")), d.owner()
    (a,) = rows(d.submit(owner, 1))
    (b,) = rows(d.submit(owner, 2))
    d.submit(owner, 3)
    d.submit(owner, 4, priority=1)
    d.submit(owner, 5, model="n", priority=1)
    (run,) = sent(d.report(worker, a.row, Kind.MOVED, 1), Run)
    assert (shape(run), run.priority, run.node) == ([4], 1, "m/decoder")
    (run,) = sent(d.report(worker, b.row, Kind.MOVED, 1), Run)
    assert (shape(run), run.priority, run.node) == ([5], 1, "n/decoder")


def test_a_long_prompt_is_cut_and_its_later_stages_name_it_by_number() -> None:
    d = Driver(config(prefill_tokens=16))
    worker, owner = d.worker(), d.owner()
    out = d.submit(owner, 1, prompt=50)
    (row,) = rows(out)
    assert row.path == [[1, 16], [2, 16], [3, 16], [4, 2], [5, 0]]
    assert [(r.batch, shape(r)) for r in sent(out, Run)] == [(1, [1]), (2, ["#1"])]
    d.submit(owner, 2)  # behind it, in the batch that its last tokens leave room in
    out = d.report(worker, row.row, Kind.MOVED, 1)
    assert [(r.batch, shape(r)) for r in sent(out, Run)] == [(3, ["#1"])]
    out = d.report(worker, row.row, Kind.MOVED, 2)
    assert [(r.batch, shape(r)) for r in sent(out, Run)] == [(4, ["#1", 2])]
    assert rows(out)[0].path == [[4, 4], [5, 0]]


def test_a_row_that_ends_is_not_named_in_its_later_stages() -> None:
    d = Driver(config(prefill_tokens=16))
    worker, owner = d.worker(), d.owner()
    (row,) = rows(d.submit(owner, 1, prompt=50))
    d.submit(owner, 2)
    d.closed(owner, 1)
    out = d.report(worker, row.row, Kind.LEFT)
    assert [shape(r) for r in sent(out, Run)] == [[2]]


def test_a_higher_priority_overtakes_what_was_only_planned() -> None:
    d = Driver(config(prefill_tokens=16))
    worker, owner = d.worker(), d.owner()
    (row,) = rows(d.submit(owner, 1, prompt=80))
    d.submit(owner, 2, priority=1)
    (run,) = sent(d.report(worker, row.row, Kind.MOVED, 1), Run)
    assert shape(run) == [2]


def test_a_row_moves_only_along_its_path() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    (row,) = rows(d.submit(owner, 1))
    for stage in (2, 9):
        assert d.report(worker, row.row, Kind.MOVED, stage) == []
    assert d.counters["dropped_messages"] == 2
    d.report(worker, row.row, Kind.MOVED, 1)
    d.report(worker, row.row, Kind.MOVED, 0)
    assert d.counters["dropped_messages"] == 3


def test_a_standing_batch_is_opened_once_per_walk_and_priority() -> None:
    d = Driver()
    d.worker()
    owner = d.owner()
    opened = [
        [o.priority for o in sent(d.submit(owner, s, priority=p), Open)]
        for s, p in ((1, 0), (2, 1))
    ]
    assert opened == [[0], [1]]
    d = Driver()
    worker, owner = d.worker(), d.owner()
    (row,) = rows(d.submit(owner, 1))
    d.report(worker, row.row, Kind.FINISHED, 8, closed=True)
    assert sent(d.submit(owner, 2), Open) == []  # it stays open while empty


def test_empty_standing_batches_do_not_pile_up() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    opened: list[int] = []
    closed: list[int] = []
    for priority in range(20):
        out = d.submit(owner, priority, priority=priority)
        opened += [o.batch for o in sent(out, Open)]
        closed += [c.batch for c in sent(out, Close)]
        (row,) = rows(out)
        d.now += 1
        d.report(worker, row.row, Kind.FINISHED, 8, closed=True)
    assert len(opened) == 20
    assert closed == opened[:12]  # the longest empty goes first


def test_a_model_that_begins_with_a_loop_joins_its_standing_batch_directly() -> None:
    graph = GraphSpec(("d",), (Walk("denoise", Loop("steps", Step("d"), 50)),), "denoise")
    d = Driver()
    d.worker("w0", spec(graph=graph))
    owner = d.owner()
    out = d.submit(owner, 1)
    (opened,), (run,) = sent(out, Open), sent(out, Run)
    assert run.batch == opened.batch
    assert rows(out)[0].path == [[run.batch, 0]]
    assert len(rows(d.submit(owner, 2)) + rows(d.submit(owner, 3))) == 2


def test_several_output_channels_leave_the_end_to_the_conductor() -> None:
    d = Driver()
    graph = spec().graph
    two = GraphSpec(graph.nodes, graph.walks, graph.entry, outputs=("tokens", "audio"))
    worker, owner = d.worker("w0", spec(graph=two)), d.owner()
    (row,) = rows(d.submit(owner, 1))
    assert (row.flags, row.base, row.outputs) == (0, [0, 0], ["tokens", "audio"])
    d.exited(worker, outside=True)
