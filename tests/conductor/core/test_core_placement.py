"""Where requests go."""

from collections import Counter

from protocol.messages import Kind
from tests.support.conductor_driver import Driver, config, rows, spec


def served_by(out: list, lives: dict[int, str]) -> list[str]:
    return [lives[life] for life in lives for _ in rows(out, life)]


def test_replicas_share_equal_requests_equally() -> None:
    d = Driver(config(max_rows=64))
    lives = {d.worker(name): name for name in ("w2", "w0", "w1")}
    owner = d.owner()
    got: Counter[str] = Counter()
    for stream in range(6):
        out = d.submit(owner, stream)
        got.update(served_by(out, lives))
    assert got == {"w0": 2, "w1": 2, "w2": 2}


def test_a_tie_goes_to_the_first_name() -> None:
    d = Driver()
    d.worker("wb")
    a = d.worker("wa")
    assert len(rows(d.submit(d.owner(), 1), a)) == 1


def test_the_fewest_promised_pages_win_over_the_fewest_rows() -> None:
    d = Driver()
    big, small = d.worker("wa"), d.worker("wb")
    owner = d.owner()
    assert rows(d.submit(owner, 1, prompt=100, params={"max_tokens": 100}), big)
    assert rows(d.submit(owner, 2, params={"max_tokens": 8}), small)
    assert rows(d.submit(owner, 3, params={"max_tokens": 8}), small)


def test_without_kv_the_fewest_rows_win() -> None:
    d = Driver()
    bare = spec(pages=0, page_tokens=0)
    a, b = d.worker("wa", bare), d.worker("wb", bare)
    owner = d.owner()
    assert rows(d.submit(owner, 1), a)
    assert rows(d.submit(owner, 2), b)


def test_promised_pages_never_pass_the_pool() -> None:
    d = Driver()
    worker, owner = d.worker("w0", spec(pages=10)), d.owner()
    (first,) = rows(d.submit(owner, 1, prompt=40, params={"max_tokens": 40}))  # 5 pages
    assert rows(d.submit(owner, 2, prompt=40, params={"max_tokens": 40}))
    assert d.snapshot["workers"][0]["committed_pages"] == 10
    assert d.submit(owner, 3, prompt=1, params={"max_tokens": 1}) == []
    d.report(worker, first.row, Kind.MOVED, 1)
    out = d.report(worker, first.row, Kind.FINISHED, 40, closed=True)
    assert [r.stream for r in rows(out)] == [3]


def test_who_came_later_does_not_overtake_who_needs_more() -> None:
    d = Driver()
    d.worker("w0", spec(pages=10))
    owner = d.owner()
    d.submit(owner, 1, prompt=40, params={"max_tokens": 40})
    assert d.submit(owner, 2, prompt=80, params={"max_tokens": 40}) == []
    assert d.submit(owner, 3, prompt=1, params={"max_tokens": 1}) == []


def test_a_cancel_at_the_head_of_the_queue_lets_the_next_in() -> None:
    d = Driver()
    d.worker("w0", spec(pages=10))
    owner = d.owner()
    d.submit(owner, 1, prompt=40, params={"max_tokens": 40})
    d.submit(owner, 2, prompt=80, params={"max_tokens": 40})
    d.submit(owner, 3, prompt=1, params={"max_tokens": 1})
    assert [r.stream for r in rows(d.closed(owner, 2))] == [3]


def test_rows_of_a_standing_batch_are_bounded_by_limit_and_spec() -> None:
    for cfg, model, most in (
        (config(max_rows=2), spec(), 2),
        (config(max_rows=9), spec(max_batch={"decoder/decode": 3}), 3),
    ):
        d = Driver(cfg)
        worker, owner = d.worker("w0", model), d.owner()
        placed = []
        for stream in range(6):
            placed += rows(d.submit(owner, stream))
            for row in placed:
                placed += rows(d.report(worker, row.row, Kind.MOVED, 1))
        assert len(placed) == most


def test_priority_goes_first_then_order_of_arrival() -> None:
    d = Driver(config(max_rows=1))
    worker, owner = d.worker("w0", spec(pages=1)), d.owner()
    (row,) = rows(d.submit(owner, 1))
    for stream, priority in ((2, 0), (3, 5), (4, 5), (5, 0)):
        d.submit(owner, stream, priority=priority)
    order = []
    for _ in range(4):
        (row,) = rows(d.report(worker, row.row, Kind.FINISHED, 8, closed=True))
        order.append(row.stream)
    assert order == [3, 4, 2, 5]


def test_a_replayed_request_goes_ahead_of_those_that_came_later() -> None:
    d = Driver(config(max_rows=1))
    worker, owner = d.worker(), d.owner()
    d.submit(owner, 1)
    d.submit(owner, 2)
    d.exited(worker, outside=True)
    d.history(owner, 1, 2, [4])
    d.worker()
    assert [r.stream for r in rows(d.last)] == [1]


def test_a_full_model_does_not_block_another() -> None:
    d = Driver(config())
    d.worker("w0", spec("m", pages=1), spec("n", pages=1))
    owner = d.owner()
    assert rows(d.submit(owner, 1, model="m"))
    assert d.submit(owner, 2, model="m") == []
    assert [r.stream for r in rows(d.submit(owner, 3, model="n"))] == [3]


def test_a_worker_without_a_link_gets_nothing() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    d.link_down(worker)
    assert d.submit(owner, 1) == []
