"""Control sessions: order, holes, acknowledgements, what is kept for the next session."""

import pytest

from protocol import columns
from protocol.channel.memory import MemoryNetwork
from protocol.codec import decode
from protocol.messages import Beat, Closed, Kind, Report
from protocol.session import Outbox, Session, SessionHole


def closed(stream: int) -> Closed:
    return Closed(
        stream=columns.u64([stream]), attempt=columns.u16([1]), reason=columns.u8([1]),
        count=columns.u32([3]),
    )  # fmt: skip


def test_messages_arrive_once_and_in_order() -> None:
    a = Session()
    b = Session(a.number)
    frames = [a.stamp(Beat(steps=i)) for i in range(3)]
    assert [b.accept(decode(f)) for f in frames] == [True] * 3
    assert b.accept(decode(frames[1])) is False
    assert b.received == 3


def test_a_hole_ends_the_session_by_name() -> None:
    a = Session()
    b = Session(a.number)
    b.accept(decode(a.stamp(Beat())))
    a.stamp(Beat())  # lost
    with pytest.raises(SessionHole, match="message 2 is missing, 3 arrived"):
        b.accept(decode(a.stamp(Beat())))


def test_another_sessions_messages_are_dropped() -> None:
    a, b = Session(1), Session(2)
    assert b.accept(decode(a.stamp(Beat()))) is False
    assert b.received == 0


def test_kept_messages_stay_until_acknowledged() -> None:
    a = Session()
    b = Session(a.number)
    first = closed(1)
    report = Report(row=columns.u64([9]), kind=columns.u8([Kind.FINISHED]))
    b.accept(decode(a.stamp(first, keep=True)))
    b.accept(decode(a.stamp(Beat())))
    late = a.stamp(report, keep=True)
    assert a.carry_over() == [first, report]
    a.accept(decode(b.stamp(Beat())))  # acknowledges 1 and 2
    assert a.carry_over() == [report]
    b.accept(decode(late))
    a.accept(decode(b.stamp(Beat())))
    assert a.carry_over() == []


def test_a_backlog_waits_in_order_and_overflows_in_bytes() -> None:
    net = MemoryNetwork(capacity=2)
    server, client = net.bind("x"), net.connect("x")
    out = Outbox(client, limit=100)
    assert all(out.push(b"%d" % i) for i in range(6))
    assert out.statistics() == {"waiting_frames": 4, "waiting_bytes": 4}
    got: list[bytes] = []
    while len(got) < 6:
        got += [f for _, f in server.receive()]
        assert out.flush()
    assert got == [b"%d" % i for i in range(6)]
    assert out.push_all([b"x" * 60] * 2)
    assert out.push(b"x" * 60)
    assert not out.push(b"x" * 60)  # 120 bytes wait
    net.close()


def test_a_gone_peer_is_told_to_the_caller() -> None:
    net = MemoryNetwork()
    server = net.bind("x")
    assert Outbox(server, b"\0gone").push(b"f") is False
    net.close()
