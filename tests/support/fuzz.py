"""What fuzz tests of sockets share: mutations of valid frames, attackers, a loop in a thread."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import zmq
from hypothesis import strategies as st

from protocol.codec import encode
from protocol.messages import Message

T = TypeVar("T")
BOUND_S = 20.0  # only a broken service reaches it


@st.composite
def mutated(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Valid bytes with up to four edits: some changed, cut out, put in, doubled; or cut short."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 4)):
            case 0:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del data[at : at + draw(st.integers(1, 9))]
            case 2:
                data[at:at] = draw(st.binary(max_size=9))
            case 3:
                data[at:at] = data[at : at + draw(st.integers(1, 20))]
            case _:
                del data[at:]
    return bytes(data)


def frames_of(messages: st.SearchStrategy[Message]) -> st.SearchStrategy[bytes]:
    """Encoded, with small or absurd header numbers."""
    number = st.one_of(st.integers(0, 4), st.just((1 << 64) - 1))
    return st.builds(encode, messages, number, number, number)


class Attacker:
    """A peer that says what it likes: frames, messages of many parts, or bytes below ZeroMQ."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, int(BOUND_S * 1000))
        self.socket.connect(address)
        self.sent = 0

    def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts)
        self.sent += 1

    def drain(self) -> None:
        """Read what came back, so that answers have room."""
        while self.socket.poll(0):
            self.socket.recv_multipart()

    def raw(self, data: bytes) -> None:
        """These bytes on a connection of their own, where a ZeroMQ greeting is expected."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.connect(self.address.removeprefix("ipc://"))
            s.settimeout(BOUND_S)
            with suppress(BrokenPipeError, ConnectionResetError):  # it is entitled to hang up
                s.sendall(data)

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
RAW: tuple[bytes, ...] = (
    GREETING[:20],
    GREETING.replace(b"NULL", b"CURV"),
    GREETING + READY + b"\x02" + (1 << 40).to_bytes(8, "big") + b"x" * 100,  # a frame of 1 TiB
    GREETING + READY + b"\x02" + b"\xff" * 8,
    GREETING + READY + b"\x01\x00" * 2000 + b"\x00\x01x",  # very many parts
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
)
"""Below ZeroMQ: half a greeting, a wrong one, frames that claim more than there is, HTTP."""


def until(reached: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + BOUND_S
    while not reached():
        assert time.monotonic() < limit, f"it never comes to that: {what}"
        time.sleep(0.001)


class LoopThread:
    """An event loop in a thread. `errors`: what its callbacks raised and nobody caught."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, c: self.errors.append(str(c)))
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(BOUND_S)

    def call(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return self.do(run())

    def check(self) -> None:
        assert not self.errors, self.errors

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(BOUND_S)
        self.loop.close()
