"""Raw bytes at the conductor's bound sockets (P19): control ROUTER and stats socket, over ZeroMQ.

The links, the codec and the whole core are real. Whatever is said: no exception, no broken
invariant, every frame delivered or counted, and a decent peer is served afterwards.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.core import requests
from conductor.core.commands import Forget, Send
from conductor.core.events import Event, Received, Tick
from conductor.core.machine import Machine
from conductor.observe.stats_socket import StatsSocket
from conductor.shell import links as links_module
from conductor.shell.links import Links
from protocol import codec, stats
from protocol.channel.zeromq import ZmqNetwork
from protocol.codec import decode
from protocol.errors import BadMessage
from protocol.graph import spec_to_wire
from protocol.messages import Hello, Message, Submit, Welcome
from protocol.session import Session
from tests.support.budget import budget, hunt
from tests.support.conductor_driver import config, spec, tokens
from tests.support.fuzz import RAW, Attacker, frames_of, mutated, until
from tests.support.hostile_messages import MESSAGES
from tests.support.snapshots import snapshot

FRAMES = frames_of(MESSAGES)
HELLOS = st.sampled_from(
    [
        Hello("gateway", "gw", 0x101, [1], "ipc://gw"),
        Hello("client", "c", 0x102, [1], "ipc://c"),
        Hello("worker", "w0", 0x103, [1], specs=[spec_to_wire(spec(pages=6))]),
    ]
)
WHO = st.integers(0, 2)
ACTS = st.lists(
    st.one_of(
        st.tuples(WHO, st.just("frame"), st.binary(max_size=40) | mutated(FRAMES)),
        st.tuples(WHO, st.just("parts"), st.lists(st.binary(max_size=9), min_size=2, max_size=4)),
        st.tuples(WHO, st.just("say"), MESSAGES),
        st.tuples(WHO, st.just("say"), MESSAGES),
        st.tuples(WHO, st.just("say"), HELLOS),
    ),
    max_size=20,
)


class Conductor:
    """Links and core on a real socket, turned by the test; `attackers` are connected."""

    def __init__(self, folder: Path) -> None:
        self.network = ZmqNetwork()
        address = f"ipc://{folder}/control"
        self.channel = self.network.bind(address)
        self.attackers = [Attacker(address) for _ in range(3)]
        self.citizen = Attacker(address)
        self.tokens = 0
        self.now = 100.0

    def fresh(self) -> None:
        """A new core, and links that know nobody."""
        self.received_before = self.received
        self.machine = Machine(config(prefill_tokens=16, max_rows=3), 0xC0DD, 7)
        self.links = Links(self.channel, self.deliver)
        self.events = 0

    def deliver(self, event: Event) -> None:
        self.now += 0.01
        self.events += isinstance(event, Received)
        for command in self.machine.handle(event, self.now):
            if isinstance(command, Send):
                self.links.send(command.life, command.message)
            elif isinstance(command, Forget):
                self.links.forget(command.life)
        self.machine.check()

    @property
    def received(self) -> int:
        counts = self.channel.statistics()
        return counts["received"] + counts["malformed"]

    def take(self, n: int) -> None:
        """Until `n` more frames have arrived."""
        want = self.received_before + n

        def arrived() -> bool:
            self.links.receive()
            return self.received >= want

        until(arrived, f"{n} frames")

    def attack(self, hellos: list[Hello], acts: list[tuple[int, str, Any]]) -> int:
        """Frames sent. Attackers begin with these Hellos; the last of them is a stranger."""
        sessions = [Session(100 + i) for i in range(len(self.attackers))]
        for i, hello in enumerate(hellos):
            self.attackers[i].send(sessions[i].stamp(hello))
        for i, how, what in acts:
            attacker = self.attackers[i]
            attacker.drain()
            if how == "frame":
                attacker.send(what)
            elif how == "parts":
                attacker.send(*what)
            else:
                if isinstance(what, Hello):
                    sessions[i] = Session(sessions[i].number + 10)
                attacker.send(sessions[i].stamp(what))
        return len(hellos) + len(acts)

    def serves(self, frames: int) -> None:
        """A decent owner says Hello, submits, and is told what it must know."""
        peer, session = self.citizen, Session()
        peer.drain()
        life = 0xDECE7
        peer.send(session.stamp(Hello("gateway", "decent", life, [1], "ipc://decent")))
        peer.send(session.stamp(Submit(1, 1, "no such model", {"tokens": tokens([1])}, {})))
        self.take(frames + 2)
        self.deliver(Tick())
        self.links.receive()
        heard: list[Message] = []

        def told() -> bool:
            while peer.socket.poll(0):
                envelope = decode(peer.socket.recv())
                if session.accept(envelope):  # else it was for the one before
                    heard.append(envelope.message)
            return any(type(m).__name__ == "End" for m in heard)

        until(told, "the answer to a decent peer")
        assert isinstance(heard[0], Welcome)

    def close(self) -> None:
        for a in (*self.attackers, self.citizen):
            a.close()
        self.network.close()


@pytest.fixture(scope="module")
def conductor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conductor]:
    c = Conductor(tmp_path_factory.mktemp("c"))
    yield c
    c.close()


def fuzz_control(conductor: Conductor, settings: Any) -> None:
    @settings
    @given(st.lists(HELLOS, max_size=2), ACTS)
    def harmless(hellos: list[Hello], acts: list[tuple[int, str, Any]]) -> None:
        conductor.fresh()
        malformed = conductor.channel.statistics()["malformed"]
        sent = conductor.attack(hellos, acts)
        conductor.take(sent)
        dropped = conductor.links.statistics()["dropped"]
        counted = sum(dropped.values()) - dropped.get("refusal", 0) - malformed
        assert conductor.events + counted == sent, "a frame is neither delivered nor counted"
        conductor.serves(sent)

    harmless()


def test_any_bytes_at_the_control_socket(conductor: Conductor) -> None:
    fuzz_control(conductor, budget(150))


@pytest.mark.parametrize("data", RAW)
def test_bytes_below_zeromq_reach_nobody(conductor: Conductor, data: bytes) -> None:
    conductor.fresh()
    for _ in range(3):
        conductor.attackers[0].raw(data)
    conductor.serves(0)


def careless_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is malformed raises what the unpacking raises."""

    def decode(frame: bytes) -> Any:
        try:
            return codec.decode(frame)
        except BadMessage as e:
            raise ValueError("careless") from e

    monkeypatch.setattr(links_module, "decode", decode)


def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Links.statistics

    def statistics(self: Links) -> Any:
        told = real(self)
        return {**told, "dropped": {k: v for k, v in told["dropped"].items() if k != "hole"}}

    monkeypatch.setattr(Links, "statistics", statistics)


def trusting_history(monkeypatch: pytest.MonkeyPatch) -> None:
    real = requests.history

    def history(s: Any, owner: Any, message: Any) -> None:
        assert message.attempt == owner.streams[message.stream].attempt
        real(s, owner, message)

    monkeypatch.setattr(requests, "history", history)


@pytest.mark.parametrize("plant", [careless_decode, uncounted, trusting_history])
def test_it_finds_a_planted_bug(
    conductor: Conductor, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        fuzz_control(conductor, hunt(300))


# ---- the stats socket


class Stats:
    def __init__(self, folder: Path, make: type[StatsSocket] = StatsSocket) -> None:
        self.network = ZmqNetwork()
        address = f"ipc://{folder}/stats"
        self.channel = self.network.bind(address)
        self.socket = make(self.channel, snapshot)
        self.attacker, self.citizen = Attacker(address), Attacker(address)
        self.asked = 0

    def counted(self) -> int:
        self.socket.receive()
        counts = self.socket.served + self.socket.ignored
        return counts + self.channel.statistics()["malformed"]

    def serves(self) -> None:
        self.citizen.send(stats.SNAPSHOT)
        self.asked += 1
        all_sent = self.attacker.sent + self.asked
        until(lambda: self.counted() >= all_sent, "all that was sent to be counted")
        assert self.counted() == all_sent
        until(lambda: self.citizen.socket.poll(0), "a snapshot")
        assert stats.decode(self.citizen.socket.recv()) == snapshot()

    def close(self) -> None:
        for a in (self.attacker, self.citizen):
            a.close()
        self.network.close()


STATS_FRAMES = st.lists(
    st.one_of(
        st.lists(st.binary(max_size=20), min_size=1, max_size=3),
        st.lists(mutated(st.just(stats.SNAPSHOT)), min_size=1, max_size=1),
    ),
    max_size=12,
)


def fuzz_stats(served: Stats, settings: Any) -> None:
    @settings
    @given(STATS_FRAMES)
    def harmless(frames: list[list[bytes]]) -> None:
        for parts in frames:
            served.attacker.drain()
            served.attacker.send(*parts)
        served.serves()

    harmless()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def test_any_bytes_at_the_stats_socket(folder: Path) -> None:
    served = Stats(folder)
    try:
        fuzz_stats(served, budget(80))
        for data in RAW:
            served.attacker.raw(data)
        served.serves()
    finally:
        served.close()


class ReadsText(StatsSocket):
    """Takes whatever it is asked for text."""

    def receive(self) -> bool:
        frames = self._channel.receive()
        for peer, frame in frames:
            asked = frame.decode()
            self.served += asked == "snapshot"
            self.ignored += asked != "snapshot"
            if asked == "snapshot":
                self._channel.send(stats.encode(self._take()), peer)
        return bool(frames)


def test_the_stats_fuzz_finds_a_planted_bug(folder: Path) -> None:
    served = Stats(folder, ReadsText)
    try:
        with pytest.raises(UnicodeDecodeError):
            fuzz_stats(served, hunt(300))
    finally:
        served.close()
