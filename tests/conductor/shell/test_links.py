"""The control ROUTER over the in-memory network: sessions, refusals, what is dropped."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core.events import Event, LinkDown, Received
from conductor.shell.links import Links
from protocol.channel.memory import MemoryNetwork
from protocol.codec import decode, encode
from protocol.messages import Beat, Bye, Hello, Message, Refuse, Welcome
from protocol.session import Session

HELLO = Hello("worker", "w0", 7, [1])


class Peer:
    def __init__(self, network: MemoryNetwork) -> None:
        self.channel = network.connect("control")
        self.session = Session()

    def say(self, message: Message) -> None:
        self.channel.send(self.session.stamp(message))

    def hear(self) -> list[Message]:
        """What arrived and is in order for the session."""
        envelopes = [decode(frame) for _, frame in self.channel.receive()]
        return [e.message for e in envelopes if self.session.accept(e)]


class Hub:
    def __init__(self, capacity: int = 4096) -> None:
        self.network = MemoryNetwork(capacity)
        self.events: list[Event] = []
        self.links = Links(self.network.bind("control"), self.events.append)

    def peer(self, hello: Hello | None = HELLO) -> Peer:
        peer = Peer(self.network)
        if hello is not None:
            peer.say(hello)
            self.links.receive()
            self.events.clear()
        return peer

    def take(self) -> list[Event]:
        self.links.receive()
        events = list(self.events)
        self.events.clear()
        return events

    @property
    def dropped(self) -> dict[str, int]:
        return self.links.statistics()["dropped"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.network.close()


def test_messages_come_in_order_and_answers_go_back(hub: Hub) -> None:
    peer = Peer(hub.network)
    for message in (HELLO, Beat(steps=1), Bye("done")):
        peer.say(message)
    assert hub.take() == [Received(7, HELLO), Received(7, Beat(steps=1)), Received(7, Bye("done"))]
    assert hub.links.send(7, Welcome(1, 1, 200))
    assert peer.hear() == [Welcome(1, 1, 200)]
    assert hub.links.send(8, Beat()) is False


def test_an_unknown_peer_is_asked_for_a_hello_in_its_own_session(hub: Hub) -> None:
    peer = Peer(hub.network)
    peer.session.stamp(HELLO)  # lost with an earlier conductor
    peer.say(Beat())
    assert hub.take() == []
    heard = peer.hear()
    assert [m.code for m in heard if isinstance(m, Refuse)] == ["resync"]
    assert hub.dropped == {"unknown_peer": 1}


def test_a_hole_ends_the_session_and_a_hello_begins_another(hub: Hub) -> None:
    peer = hub.peer()
    peer.session.stamp(Beat(steps=1))  # lost
    peer.say(Beat(steps=2))
    (down,) = hub.take()
    assert isinstance(down, LinkDown)
    assert (down.life, "message 2 is missing, 3 arrived" in down.why) == (7, True)
    assert [m.code for m in peer.hear() if isinstance(m, Refuse)] == ["resync"]
    peer.say(Beat(steps=3))
    assert hub.take() == []
    peer.session = Session()
    peer.say(HELLO)
    peer.say(Beat(steps=4))
    assert hub.take() == [Received(7, HELLO), Received(7, Beat(steps=4))]


def test_repeats_and_other_sessions_are_dropped(hub: Hub) -> None:
    peer = hub.peer()
    frame = peer.session.stamp(Beat(steps=1))
    peer.channel.send(frame)
    peer.channel.send(frame)
    peer.channel.send(Session(12345).stamp(Beat(steps=9)))
    assert hub.take() == [Received(7, Beat(steps=1))]
    assert hub.dropped == {"stale": 2}


def test_a_hello_on_a_known_life_replaces_its_session(hub: Hub) -> None:
    old = hub.peer()
    new = Peer(hub.network)
    new.say(HELLO)
    old.say(Beat(steps=1))  # from the connection that is replaced
    assert hub.take() == [Received(7, HELLO)]
    hub.links.send(7, Beat())
    assert new.hear() == [Beat()]
    assert [m.code for m in old.hear() if isinstance(m, Refuse)] == ["resync"]
    assert hub.links.statistics()["peers"] == 1


def test_another_life_on_the_same_connection_ends_the_first(hub: Hub) -> None:
    peer = hub.peer()
    peer.session = Session()
    peer.say(replace(HELLO, life=8))
    first, second = hub.take()
    assert isinstance(first, LinkDown)
    assert first.life == 7
    assert second == Received(8, replace(HELLO, life=8))
    assert not hub.links.known(7)


def test_a_session_begins_with_hello(hub: Hub) -> None:
    peer = Peer(hub.network)
    peer.session.stamp(Beat())
    peer.say(HELLO)
    assert hub.take() == []
    assert [m.code for m in peer.hear() if isinstance(m, Refuse)] == ["resync"]


def test_another_version_is_refused_in_its_own_words(hub: Hub) -> None:
    peer = Peer(hub.network)
    peer.channel.send(encode(HELLO, 5, 1, 0, version=9))
    assert hub.take() == []
    ((_, frame),) = peer.channel.receive()
    refusal = encode(decode_as(frame, 9), 5, 1, 1, version=9)
    assert refusal == frame, "a peer of version 9 must find its version, session and numbers"
    told = decode_as(frame, 9)
    assert isinstance(told, Refuse)
    assert told.code == "version"
    assert "version 1, the peer [9]" in told.text


def decode_as(frame: bytes, version: int) -> Message:
    """As a peer of that version reads the header, which never changes."""
    import msgpack

    parts = msgpack.unpackb(frame)
    assert parts[0] == version
    ours = msgpack.packb([1, *parts[1:]])
    assert ours is not None
    return decode(ours).message


def test_a_hello_that_does_not_offer_our_version_is_refused(hub: Hub) -> None:
    peer = Peer(hub.network)
    peer.say(replace(HELLO, versions=[2, 3]))
    assert hub.take() == []
    assert [m.code for m in peer.hear() if isinstance(m, Refuse)] == ["version"]


def test_a_backlog_that_overflows_ends_the_link(hub: Hub) -> None:
    small = Hub(capacity=1)
    small.peer()
    big = Refuse("resync", "x" * (1 << 20))
    for _ in range(80):
        small.links.send(7, big)
    (down,) = small.events
    assert isinstance(down, LinkDown)
    assert "backlog" in down.why
    assert small.links.statistics()["peers"] == 0
    small.network.close()


def test_what_waited_is_sent_on_once_the_peer_reads() -> None:
    small = Hub(capacity=2)
    peer = small.peer()
    for i in range(6):
        small.links.send(7, Beat(steps=i))
    assert small.links.statistics()["waiting_bytes"] > 0
    heard: list[Message] = []
    for _ in range(4):
        heard += peer.hear()
        small.links.receive()
    assert heard == [Beat(steps=i) for i in range(6)]
    assert small.links.statistics()["waiting_bytes"] == 0
    small.network.close()


def test_a_gone_peer_ends_the_link(hub: Hub) -> None:
    hub.peer().channel.close()
    hub.links.send(7, Beat())
    assert [type(e) for e in hub.events] == [LinkDown]


def test_reset_asks_for_a_new_hello(hub: Hub) -> None:
    peer = hub.peer()
    hub.links.reset(7)
    assert [m.code for m in peer.hear() if isinstance(m, Refuse)] == ["resync"]
    assert hub.events == [LinkDown(7, "reset by the conductor")]
    hub.links.reset(7)


def test_forgotten_peers_are_unknown(hub: Hub) -> None:
    peer = hub.peer()
    hub.links.forget(7)
    hub.links.forget(7)
    peer.say(Beat())
    assert hub.take() == []
    assert hub.dropped == {"unknown_peer": 1}


def test_one_call_takes_a_bounded_number_of_frames(hub: Hub) -> None:
    peer = hub.peer()
    big = Hub(capacity=100_000)
    peer = big.peer()
    for i in range(5000):
        peer.say(Beat(steps=i))
    assert big.links.receive() is True
    assert len(big.events) == 4096
    assert big.links.receive() is False
    assert len(big.events) == 5000
    big.network.close()


@given(st.lists(st.binary(max_size=64), max_size=8))
def test_any_bytes_are_counted_and_harm_nobody(frames: list[bytes]) -> None:
    hub = Hub()
    peer = hub.peer()
    stranger = Peer(hub.network)
    for f in frames:
        peer.channel.send(f)
        stranger.channel.send(f)
    peer.say(Beat(steps=1))
    events = hub.take()
    assert events == [Received(7, Beat(steps=1))]
    assert sum(hub.dropped.values()) == 2 * len(frames)
    hub.network.close()
