"""ConductorLink on a clock that only tests move."""

import pytest

from protocol import PROTOCOL_VERSION
from protocol.channel.memory import MemoryNetwork
from protocol.codec import decode, encode
from protocol.messages import Beat, Hello, Kind, Refuse, Report, Welcome
from protocol.session import Session
from worker.micro_scheduler.decisions import Say
from worker.process.link import ConductorLink, ConductorSilent, Refused, unacknowledged, versions


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 0.0


class Bench:
    def __init__(self) -> None:
        self.clock = Clock()
        self.network = MemoryNetwork()
        self.conductor = self.network.bind("memory://c")
        self.link = ConductorLink(
            self.network.connect("memory://c"),
            self.clock,
            lambda inventory: Hello("worker", "w0", 7, versions(), inventory=inventory),
            lambda: {"rows": [[1, 0, 0]], "batches": [3]},
        )
        self.link.open()
        self.session = Session()
        self.peer = b""

    def read(self) -> list:
        got = []
        for peer, frame in self.conductor.receive():
            e = decode(frame)
            self.peer = peer
            if isinstance(e.message, Hello):
                self.session = Session(e.a)
            if self.session.accept(e):
                got.append(e.message)
        return got

    def say(self, message) -> None:
        self.conductor.send(self.session.stamp(message), self.peer)


@pytest.fixture
def bench() -> Bench:
    b = Bench()
    (hello,) = b.read()
    assert hello.inventory == {"ends": [], "rows": [[1, 0, 0]], "batches": [3]}
    b.say(Welcome(1, PROTOCOL_VERSION, 50))
    assert b.link.receive() == [Welcome(1, PROTOCOL_VERSION, 50)]
    return b


def ends(*rows: int) -> list[Say]:
    return [Say(r, Kind.FINISHED, 5, {"reason": 1}) for r in rows]


def test_beats_come_as_often_as_welcome_says(bench: Bench) -> None:
    for _ in range(10):
        bench.link.beat(Beat)
        bench.clock.now += 0.025
    assert bench.read() == [Beat()] * 5
    assert bench.link.until_beat() == pytest.approx(0.0)


def test_lines_of_one_moment_are_one_report(bench: Bench) -> None:
    bench.link.report([Say(1, Kind.STARTED, 0), Say(1, Kind.MOVED, 1), *ends(2)])
    bench.link.report([])
    (report,) = bench.read()
    assert isinstance(report, Report)
    assert list(report.row) == [1, 1, 2]
    assert list(report.kind) == [Kind.STARTED, Kind.MOVED, Kind.FINISHED]
    assert report.extras == {2: {"reason": 1}}


def test_ends_stay_until_acknowledged_through_any_number_of_sessions(bench: Bench) -> None:
    bench.link.report(ends(2))
    bench.read()
    bench.say(Beat())  # acknowledges 2
    bench.link.receive()
    bench.link.report([Say(4, Kind.STARTED, 0), *ends(3)])
    for _ in range(3):  # sessions that break before anything is acknowledged
        peer, number = bench.peer, bench.session.number
        bench.conductor.send(encode(Refuse("resync", ""), number, 9, 0), peer)
        bench.link.receive()
        *_, hello = bench.read()
        assert hello.inventory["ends"] == [[3, Kind.FINISHED, 5, {"reason": 1}]]
    bench.say(Welcome(1, PROTOCOL_VERSION, 50))
    bench.link.receive()
    bench.say(Refuse("resync", ""))
    bench.link.receive()
    *_, hello = bench.read()
    assert hello.inventory["ends"] == []


def test_a_hole_opens_a_new_session_and_what_follows_it_is_dropped(bench: Bench) -> None:
    bench.session.stamp(Beat())  # lost
    bench.say(Beat(steps=1))
    bench.say(Beat(steps=2))
    assert bench.link.receive() == []
    assert isinstance(bench.read()[0], Hello)
    bench.say(Welcome(1, PROTOCOL_VERSION, 50))
    bench.say(Beat(steps=3))
    assert Beat(steps=3) in bench.link.receive()


@pytest.mark.parametrize("code", ["fenced", "name_taken", "version"])
def test_other_refusals_end_the_worker(bench: Bench, code: str) -> None:
    bench.say(Refuse(code, "no"))
    with pytest.raises(Refused, match=code):
        bench.link.receive()


def test_a_refusal_of_another_session_means_nothing(bench: Bench) -> None:
    bench.conductor.send(encode(Refuse("fenced", "old"), 12345, 1, 0), bench.peer)
    assert bench.link.receive() == []


def test_silence_of_ten_seconds_is_the_end(bench: Bench) -> None:
    bench.clock.now += 9.9
    bench.link.check_silence()
    bench.say(Beat())
    bench.link.receive()
    bench.clock.now += 9.9
    bench.link.check_silence()
    bench.clock.now += 0.2
    with pytest.raises(ConductorSilent, match=r"10\.1 s"):
        bench.link.check_silence()


def test_noise_is_counted_and_changes_nothing(bench: Bench) -> None:
    bench.conductor.send(b"\xc1garbage", bench.peer)
    bench.conductor.send(encode(Beat(), 12345, 1, 0), bench.peer)
    assert bench.link.receive() == []
    assert bench.link.statistics()["malformed"] >= 1
    assert bench.link.statistics()["strays"] == 1


def test_each_end_is_told_once_in_an_inventory() -> None:
    hello = Hello("worker", "w", 1, [1], inventory={"ends": [[2, 16, 5, {}]]})
    assert unacknowledged([hello, Beat()]) == [[2, 16, 5, {}]]
