"""Deadlines hold, queued or running, with fake time."""

import pytest

from conductor.core.events import Tick
from protocol.messages import End, Kind, Leave, Reason, Rebase
from tests.support.conductor_driver import Driver, config, rows, sent


def test_the_next_due_time_is_the_earliest_deadline() -> None:
    d = Driver()
    d.worker()
    owner = d.owner()
    d.tick()
    d.submit(owner, 1, deadline_ms=150)
    d.submit(owner, 2, deadline_ms=100)
    assert d.machine.next_due() == pytest.approx(d.now + 0.1)
    d.closed(owner, 2)
    assert d.machine.next_due() == pytest.approx(d.now + 0.15)
    d.closed(owner, 1)
    assert d.machine.next_due() == pytest.approx(d.now + 0.2)  # the beat


@pytest.mark.parametrize("where", ["queued", "running", "rebasing", "settling"])
def test_it_holds_in_every_state(where: str) -> None:
    d = Driver(config(max_rows=1))
    worker, owner = d.worker(), d.owner()
    if where == "queued":
        d.submit(owner, 9)
    out = d.submit(owner, 1, deadline_ms=100)
    if where == "rebasing":
        d.exited(worker, outside=True)
    if where == "settling":
        d.report(worker, rows(out)[0].row, Kind.FINISHED, 8, reason=Reason.LENGTH, closed=True)
    d.now += 0.099
    assert sent(d.event(Tick()), End) == []
    d.now += 0.001
    out = d.event(Tick())
    (told,) = sent(out, End)
    assert list(told.stream) == [1]
    assert list(told.reason) == [Reason.DEADLINE]
    assert len(sent(out, Leave)) == (where == "running")
    assert sent(d.event(Tick()), End) == []
    d.closed(owner, 1, reason=Reason.DEADLINE)
    assert d.requests["closed"] == {"deadline": 1}


def test_requests_that_name_none_get_the_default() -> None:
    d = Driver(config(default_deadline_ms=500))
    d.worker()
    d.submit(d.owner(), 1)
    d.now += 0.5
    assert len(sent(d.tick(), End)) == 1


def test_a_deadline_survives_replays() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    d.submit(owner, 1, deadline_ms=1000)
    d.exited(worker, outside=True)
    w = d.worker()
    d.history(owner, 1, 2, [])
    out = d.wait(1.0, w, owner)
    assert [list(e.reason) for e in sent(out, End)] == [[Reason.DEADLINE]]
    assert sent(out, Rebase) == []


def test_many_deadlines_at_once_make_one_message() -> None:
    d = Driver()
    d.worker()
    owner = d.owner()
    for stream in range(1, 21):
        d.submit(owner, stream, deadline_ms=100)
    d.now += 0.1
    (told,) = sent(d.tick(), End)
    assert list(told.stream) == list(range(1, 21))


def test_a_deadline_beyond_all_time_is_no_trouble() -> None:
    d = Driver()
    d.worker()
    assert rows(d.submit(d.owner(), 1, deadline_ms=(1 << 64) - 1))
