"""Beats, silence, hangs: with fake time."""

import pytest

from conductor.core.commands import Command, Forget, Kill, Send
from conductor.core.events import Tick
from protocol.messages import ROW_TRIAL, Beat, Kind, Leave, Leaving, Owners, Rebase
from tests.support.conductor_driver import Driver, rows, sent


def kills(out: list[Command]) -> list[int]:
    return [c.life for c in out if isinstance(c, Kill)]


def test_both_kinds_of_peers_get_beats_at_the_beat() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    assert d.machine.next_due() == d.now
    assert d.tick() == [Send(w, Beat()), Send(o, Beat())]
    assert d.machine.next_due() == pytest.approx(d.now + 0.2)
    d.now += 0.1
    assert d.tick() == []
    d.now += 0.1
    assert len(sent(d.tick(), Beat)) == 2


def test_with_nobody_there_nothing_is_due() -> None:
    d = Driver()
    assert d.machine.next_due() is None
    assert d.tick() == []


def test_a_silent_worker_is_killed_and_its_rows_charged_to_nobody() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    d.submit(o, 1)
    assert kills(d.wait(2.0, o)) == []
    out = d.wait(0.2, o)
    assert kills(out) == [w]
    assert Forget(w) in out
    assert len(sent(out, Rebase)) == 1
    d.worker()
    (row,) = rows(d.history(o, 1, 2, []))
    assert not row.flags & ROW_TRIAL


def test_any_message_is_a_sign_of_life() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    (row,) = rows(d.submit(o, 1))
    for _ in range(5):
        assert kills(d.wait(1.5, o)) == []
        d.report(w, row.row, Kind.PROGRESS, 1)


def test_a_lost_link_is_forgiven_when_the_worker_says_hello_in_time() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    d.link_down(w)
    assert kills(d.wait(1.8, o)) == []
    d.worker(life=w)
    assert kills(d.wait(1.8, o)) == []
    d.said(w, Beat())
    d.link_down(w)
    assert kills(d.wait(2.2, o)) == [w]


def test_a_silent_owner_is_lost_with_its_streams() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    d.submit(o, 1)
    out = d.wait(2.2, w)
    assert sent(out, Leave, w)
    assert sent(out, Owners, w) == [Owners(o, "ipc://gw", False)]
    assert d.requests["closed"] == {"owner_lost": 1}
    assert d.counters["owners_lost"] == 1


def test_a_conductor_that_slept_kills_nobody_for_it() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    d.submit(o, 1)
    d.wait(1.0, w, o)
    d.now += 30.0  # stopped, starved: everybody's messages wait in its sockets
    assert kills(d.event(Tick())) == []
    assert d.requests["open"] == 1
    assert kills(d.wait(1.6, o)) == []
    assert kills(d.wait(0.8, o)) == [w]  # who is silent from then on is silent


def hang(d: Driver, w: int, o: int, age_ms: int, steps: int) -> list[Command]:
    return d.wait(0.2, w, o, beat=Beat(steps, age_ms, {}))


def test_a_step_that_does_not_end_is_a_hang_and_charges_its_rows() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    d.submit(o, 1)
    hang(d, w, o, 5, 1)
    assert kills(hang(d, w, o, 2000, 1)) == []
    out = hang(d, w, o, 2100, 1)
    assert kills(out) == [w]
    assert "2.1 s" in next(c.why for c in out if isinstance(c, Kill))
    d.worker()
    (row,) = rows(d.history(o, 1, 2, []))
    assert row.flags & ROW_TRIAL


def test_busy_is_not_hung() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    assert kills(hang(d, w, o, 60_000, 0)) == []  # no rows: warming something up
    d.submit(o, 1)
    hang(d, w, o, 100, 1)
    for step in range(2, 5):  # its steps take 3 s each
        out = d.wait(2.8, w, o, beat=Beat(step - 1, 1900, {}))
        out += hang(d, w, o, 10, step)
        assert kills(out) == []
    assert kills(hang(d, w, o, 14_000, 4)) == []
    assert kills(hang(d, w, o, 16_000, 4)) == [w]


def test_idle_time_is_no_step_time() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    d.wait(60.0, w, o)
    d.submit(o, 1)
    hang(d, w, o, 10, 1)
    assert kills(hang(d, w, o, 2100, 1)) == [w]


def test_a_worker_may_announce_that_its_steps_are_long() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    d.submit(o, 1)
    beat = Beat(0, 10_000, {"step_ms": 3000})
    assert kills(d.wait(0.2, w, o, beat=beat)) == []
    assert kills(d.wait(0.2, w, o, beat=Beat(0, 16_000, {"step_ms": 3000}))) == [w]


def test_the_snapshot_says_who_is_there_and_ready() -> None:
    d = Driver()
    assert d.snapshot["ready"] is False
    w = d.worker(capacity={"pid": 12, "device": "cpu"})
    o = d.owner()
    d.submit(o, 1)
    d.said(w, Beat(7, 3, {"pages_free": 5}))
    d.now += 0.05
    assert d.snapshot["ready"] is True
    (worker,) = d.snapshot["workers"]
    assert worker == {
        "name": "w0", "life": w, "pid": 12, "state": "ready", "device": "cpu", "rows": 1,
        "batches": 2, "committed_pages": 1, "pages": 64, "steps": 7, "step_age_ms": 3,
        "last_heard_ms": 50, "load": {"pages_free": 5}, "models": ["m"],
    }  # fmt: skip
    assert d.snapshot["owners"] == [{"name": "gw", "role": "gateway", "life": o, "streams": 1}]
    assert d.requests == {
        "submitted": 1, "open": 1, "queued": 0, "queued_tokens": 0, "active": 1, "closed": {},
    }  # fmt: skip
    d.now += 2.1
    assert d.snapshot["ready"] is False
    d.link_down(w)
    assert d.snapshot["workers"][0]["state"] == "unlinked"


def test_the_timer_knows_when_a_draining_workers_grace_ends() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    d.tick()
    d.submit(owner, 1)
    assert d.machine.next_due() == pytest.approx(d.now + 0.2)
    d.said(worker, Leaving(50))
    assert d.machine.next_due() == pytest.approx(d.now + 0.05)
    d.exited(worker)
    assert d.machine.next_due() == pytest.approx(d.now + 0.2)
