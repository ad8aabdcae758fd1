"""Who gets in, who doesn't, and with which numbers."""

from typing import Any

import pytest

from conductor.core.commands import Send
from conductor.core.events import Drain, Fatal
from protocol.messages import End, Reason, Run
from tests.support.conductor_driver import Driver, config, rows, sent, spec, tokens


def refusal(out: list[Any]) -> dict[str, Any]:
    (end,) = sent(out, End)
    assert list(end.reason) == [Reason.REJECTED]
    assert end.counts == [[]]
    assert not sent(out, Run)
    return end.detail[0]


@pytest.fixture
def ready() -> tuple[Driver, int]:
    d = Driver()
    d.worker()
    return d, d.owner()


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"model": "x"}, "unknown_model", ["'x'", "m"]),
        ({"prompt": 256}, "prompt_too_long", ["256 tokens", "takes 256"]),
        ({"prompt": 300}, "prompt_too_long", ["300 tokens", "256"]),
        ({"prompt": []}, "invalid_request", ["empty"]),
        ({"prompt": [1000]}, "invalid_request", ["1000", "vocabulary"]),
        ({"inputs": {}}, "invalid_request", ["inputs.tokens"]),
        ({"inputs": {"tokens": b"abc"}}, "invalid_request", ["3 bytes"]),
        ({"params": {"max_tokens": 0}}, "invalid_request", ["max_tokens is 0"]),
        ({"params": {"max_tokens": "9"}}, "invalid_request", ["max_tokens", "str"]),
        ({"params": {"max_tokens": True}}, "invalid_request", ["max_tokens", "bool"]),
        ({"params": {"seed": 1.5}}, "invalid_request", ["seed", "float"]),
        ({"replay": "twice"}, "invalid_request", ["'twice'", "history, restart, never"]),
    ],
)
def test_a_bad_request_is_told_why(
    ready: tuple[Driver, int], changes: dict[str, Any], code: str, says: list[str]
) -> None:
    d, owner = ready
    detail = refusal(d.submit(owner, 1, **changes))
    assert detail["code"] == code
    for text in says:
        assert text in detail["message"]
    assert d.requests["open"] == 1  # until its owner says Closed
    d.closed(owner, 1, reason=Reason.REJECTED)
    assert d.requests["closed"] == {"rejected": 1}


def test_a_request_that_no_pool_could_hold_is_refused_with_numbers() -> None:
    d = Driver()
    d.worker("w0", spec(pages=4))
    d.worker("w1", spec(pages=5))
    owner = d.owner()
    detail = refusal(d.submit(owner, 1, prompt=70, params={"max_tokens": 20}))
    assert detail["code"] == "cannot_fit"
    assert (detail["prompt_tokens"], detail["max_tokens"], detail["pool_tokens"]) == (70, 20, 80)
    assert rows(d.submit(owner, 2, prompt=70, params={"max_tokens": 10}))


def test_max_tokens_is_what_the_context_the_limit_and_the_pool_leave() -> None:
    def given(cfg: Any, model: Any, **params: Any) -> int:
        d = Driver(cfg)
        d.worker("w0", model)
        (row,) = rows(d.submit(d.owner(), 1, prompt=10, params=params))
        assert row.params["max_tokens"] == row.max_steps
        return row.max_steps

    assert given(config(), spec()) == 246
    assert given(config(), spec(), max_tokens=1000) == 246
    assert given(config(max_tokens=50), spec()) == 50
    assert given(config(max_tokens=50), spec(), max_tokens=60) == 50
    assert given(config(), spec(pages=2)) == 22
    assert given(config(), spec(pages=0, page_tokens=0)) == 246


def test_a_seed_is_drawn_once_per_request_and_kept_by_its_attempts() -> None:
    def drawn(seed: int | None, stream: int) -> int:
        d = Driver(seed=seed)
        worker, owner = d.worker(), d.owner()
        (row,) = rows(d.submit(owner, stream, params={"max_tokens": 8}))
        d.exited(worker, outside=True)
        d.worker()
        (again,) = rows(d.history(owner, stream, 2, [5]))
        assert again.params["seed"] == row.params["seed"]
        return row.params["seed"]

    draws = {drawn(1, 1), drawn(1, 2), drawn(2, 1), drawn(None, 1)}
    assert len(draws) == 4
    assert all(0 <= x < 1 << 63 for x in draws)
    assert drawn(1, 1) in draws


def test_a_named_seed_is_kept() -> None:
    d = Driver()
    d.worker()
    (row,) = rows(d.submit(d.owner(), 1, params={"max_tokens": 2, "seed": 0, "top_p": 0.5}))
    assert row.params == {"max_tokens": 2, "seed": 0, "top_p": 0.5}


def test_the_queue_is_bounded_in_requests() -> None:
    d = Driver(config(max_queued=2, max_rows=1))
    d.worker()
    owner = d.owner()
    assert rows(d.submit(owner, 1))
    assert d.submit(owner, 2) == d.submit(owner, 3) == []
    detail = refusal(d.submit(owner, 4))
    assert detail["code"] == "overloaded"
    assert (detail["queued"], detail["limit"]) == (2, 2)
    assert detail["retry_after"] >= 1
    d.closed(owner, 2)
    assert d.submit(owner, 5) == []


def test_the_queue_is_bounded_in_tokens() -> None:
    d = Driver(config(max_queued_tokens=20, max_rows=1))
    d.worker()
    owner = d.owner()
    d.submit(owner, 1)
    d.submit(owner, 2, prompt=15)
    assert refusal(d.submit(owner, 3, prompt=6))["limit"] == 20
    assert d.submit(owner, 4, prompt=5) == []
    assert d.requests["queued_tokens"] == 20


def test_one_request_larger_than_the_token_bound_may_wait_alone() -> None:
    d = Driver(config(max_queued_tokens=20, max_rows=1))
    d.worker()
    owner = d.owner()
    d.submit(owner, 1)
    assert d.submit(owner, 2, prompt=60) == []
    assert refusal(d.submit(owner, 3, prompt=1))["code"] == "overloaded"


def test_retry_after_follows_the_rate_at_which_the_queue_moves() -> None:
    d = Driver(config(max_queued=8, max_rows=1))
    worker, owner = d.worker(), d.owner()
    (row,) = rows(d.submit(owner, 1))
    for stream in range(2, 10):
        d.submit(owner, stream)
    idle = refusal(d.submit(owner, 99))["retry_after"]
    for stream in range(10, 40):
        d.now += 0.1
        (row,) = rows(d.report(worker, row.row, 16, 8, reason=2, closed=True))
        d.submit(owner, stream)
    busy = refusal(d.submit(owner, 100))["retry_after"]
    assert busy < idle <= 60


def test_before_a_worker_is_ready_and_while_draining_nothing_is_admitted() -> None:
    d = Driver()
    owner = d.owner()
    starting = refusal(d.submit(owner, 1))
    assert starting["code"] == "unavailable"
    assert "starting" in starting["message"]
    d.worker()
    d.event(Drain(5000))
    draining = refusal(d.submit(owner, 2))
    assert draining["code"] == "unavailable"
    assert "draining" in draining["message"]


def test_after_a_fatal_nothing_is_admitted_and_what_was_open_ends() -> None:
    d = Driver(config(max_rows=1))
    d.worker()
    owner = d.owner()
    d.submit(owner, 1)
    d.submit(owner, 2)
    out = d.event(Fatal("w0 crashes in a loop", {"message": "m", "restarts": 5}))
    (end,) = sent(out, End)
    assert list(end.stream) == [1, 2]
    assert list(end.reason) == [Reason.WORKER_LOST] * 2
    assert "crashes in a loop" in end.detail[0]["message"]
    assert "crashes in a loop" in refusal(d.submit(owner, 3))["message"]


def test_a_model_whose_workers_are_away_is_queued_for() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    d.exited(worker, outside=True)
    assert d.submit(owner, 1) == []
    life = d.worker()
    assert [c.life for c in d.last if isinstance(c, Send) and isinstance(c.message, Run)] == [life]


def test_what_waits_and_can_never_fit_any_more_ends_and_blocks_nobody() -> None:
    d = Driver()
    worker, owner = d.worker("w0", spec(pages=16)), d.owner()
    d.exited(worker, outside=True)
    d.submit(owner, 1, prompt=200, params={"max_tokens": 56})
    d.submit(owner, 2)
    d.worker("w0", spec(pages=8))
    (end,) = sent(d.last, End)
    assert list(end.stream) == [1]
    assert end.detail[0]["code"] == "cannot_fit"
    assert end.detail[0]["pool_tokens"] == 128
    assert [r.stream for r in rows(d.last)] == [2]


def test_tokens_travel_as_little_endian_words() -> None:
    d = Driver()
    d.worker()
    (row,) = rows(d.submit(d.owner(), 1, prompt=[1, 258]))
    assert row.inputs == {"tokens": bytes([1, 0, 0, 0, 2, 1, 0, 0])}
    assert row.inputs["tokens"] == tokens([1, 258])
