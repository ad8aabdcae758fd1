"""Raw bytes at an owner's bound socket (P19): the stream ROUTER of a client and of the gateway.

Whatever arrives: the loop goes on, what makes no sense is counted, and a stream that is opened
afterwards gets its tokens.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import columns
from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.client import stream_port
from protocol.client.async_client import AsyncClient
from protocol.codec import decode, encode
from protocol.errors import WireError
from protocol.messages import Frames, Message, Window
from tests.support.budget import budget, hunt
from tests.support.fake_daemon import FakeDaemon
from tests.support.fuzz import RAW, Attacker, LoopThread, mutated, until
from tests.support.hostile_messages import MESSAGES

OWNER = 0x0C0FFEE
ANSWER = [7, 8, 9]


@st.composite
def frames(draw: st.DrawFn) -> Frames:
    """Frames of streams that were never opened (but 1: it is closed), of any shape."""
    n = draw(st.integers(0, 3))

    def many(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=n, max_size=n))

    counts = many(st.integers(0, 3))
    wide = st.integers(0, (1 << 32) - 1)
    return Frames(
        columns.u64(many(st.sampled_from([1, 1 << 40, (1 << 64) - 1]))),
        columns.u16(many(st.integers(0, 3))), columns.u8(many(st.integers(0, 2))),
        columns.u32(many(wide)), columns.u32(counts), columns.u8(many(st.integers(0, 255))),
        columns.u8(many(st.integers(0, 255))), columns.u32([5] * sum(counts)),
        draw(st.dictionaries(st.integers(0, 9), st.dictionaries(st.text(max_size=5), st.none()))),
    )  # fmt: skip


def said(messages: st.SearchStrategy[Message]) -> st.SearchStrategy[bytes]:
    """As a worker says it: mostly to this owner, its numbers in order or not."""
    life = st.sampled_from([OWNER, OWNER, OWNER, 5])
    return st.builds(encode, messages, st.integers(1, 3), life, st.integers(0, 4))


VALID = said(st.one_of(frames(), frames(), st.just(Window(1, 1)), MESSAGES))
ACTS = st.lists(
    st.one_of(
        VALID.map(lambda f: (f,)),
        mutated(VALID).map(lambda f: (f,)),
        st.binary(max_size=40).map(lambda f: (f,)),
        st.lists(st.binary(max_size=9), min_size=2, max_size=4).map(tuple),
    ),
    max_size=16,
)


class Service:
    """A client over real sockets, its daemon a fake one; both on a loop in a thread."""

    def __init__(self, role: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="podium-fuzz-"))
        self.endpoints = Endpoints(self.folder)
        self.thread = LoopThread()
        self.network = ZmqNetwork()
        self.thread.do(self._start(role))
        self.attacker = Attacker(self.endpoints.stream(OWNER))

    async def _start(self, role: str) -> None:
        self.daemon = FakeDaemon(self.network, self.endpoints).start()
        self.daemon.auto = lambda submit: ANSWER
        self.client = AsyncClient(self.endpoints, self.network, role=role, life=OWNER)
        await self.client.connect()

    def figures(self) -> dict[str, int]:
        self.thread.check()
        return self.thread.call(self.client.statistics)

    def attack(self, acts: list[tuple[bytes, ...]]) -> None:
        """Send these, and wait until what makes no sense is counted."""
        self.attacker.drain()
        before = self.figures()
        bad = foreign = 0
        for parts in acts:
            self.attacker.send(*parts)
            if len(parts) > 1:
                continue  # the channel counts them
            try:
                envelope = decode(parts[0])
            except WireError:
                bad += 1
            else:
                foreign += not isinstance(envelope.message, Frames) or envelope.b != OWNER

        def counted() -> tuple[int, int]:
            now = self.figures()
            return tuple(now[k] - before[k] for k in ("port_bad_frames", "port_not_ours"))  # type: ignore[return-value]

        until(lambda: counted() >= (bad, foreign), "all to be counted")
        assert counted() == (bad, foreign)

    def serves(self) -> None:
        async def ask() -> list[int]:
            stream = self.client.generate("m", [1, 2])
            return [t async for chunk in stream for t in chunk]

        assert self.thread.do(ask()) == ANSWER
        assert self.figures()["owner_open"] == 0

    async def _stop(self) -> None:
        self.client.close()
        self.daemon.close()

    def close(self) -> None:
        self.attacker.close()
        self.thread.do(self._stop())
        self.network.close()
        self.thread.close()
        shutil.rmtree(self.folder)


@pytest.fixture
def serving() -> Iterator[Any]:
    made: list[Service] = []

    def make(role: str) -> Service:
        made.append(Service(role))
        return made[-1]

    yield make
    for s in made:
        s.close()


def fuzz(service: Service, settings: Any) -> None:
    @settings
    @given(ACTS)
    def harmless(acts: list[tuple[bytes, ...]]) -> None:
        service.attack(acts)
        service.serves()

    harmless()


@pytest.mark.parametrize("role", ["client", "gateway"])
def test_any_bytes_at_an_owners_socket(serving: Any, role: str) -> None:
    service = serving(role)
    service.serves()
    fuzz(service, budget(50))
    for data in RAW:
        service.attacker.raw(data)
        service.serves()


def careless_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_carelessly(frame: bytes) -> Any:
        try:
            return decode(frame)
        except WireError as e:
            raise ValueError("careless") from e

    monkeypatch.setattr(stream_port, "decode", decode_carelessly)


def takes_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames for another owner are delivered here."""
    real = stream_port.decode
    monkeypatch.setattr(stream_port, "decode", lambda frame: real(frame)._replace(b=OWNER))


@pytest.mark.parametrize("plant", [careless_decode, takes_everybodys])
def test_it_finds_a_planted_bug(serving: Any, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service = serving("client")
    service.serves()
    monkeypatch.setattr("tests.support.fuzz.BOUND_S", 2.0)
    plant(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        fuzz(service, hunt(200))
    monkeypatch.undo()
