"""The conductor and the owner for timer_worker.py, as one process; the end of stdin ends it."""

import json
import sys
import time
from typing import Any

import zmq

from protocol import PROTOCOL_VERSION, columns
from protocol.channel.zeromq import ZmqNetwork
from protocol.codec import decode
from protocol.messages import Beat, Hello, Kind, Message, Open, Owners, Report, Row, Run, Welcome
from protocol.session import Session
from protocol.stream_link import StreamReceiver

LIFE, OWNER = 0xAA, 0xBB  # the worker's and our own
BATCH_TOKENS = 1 << 14  # of one prefill batch
DECODE = 1 << 20
BEAT_S, TICK_S = 0.2, 0.1


class Peer:
    def __init__(self, folder: str, rows: int, prompt: int, max_steps: int) -> None:
        self.network = ZmqNetwork()
        self.control = self.network.bind(f"ipc://{folder}/control.sock")
        self.endpoint = f"ipc://{folder}/owner.sock"
        self.stream = self.network.bind(self.endpoint)
        self._rows, self._prompt, self._max_steps = rows, prompt, max_steps
        self._session: Session | None = None
        self._peer = b""
        self._receiver = StreamReceiver(LIFE, OWNER)
        self._waiting: list[Run] = []

    def serve(self) -> None:
        poller = zmq.Poller()
        for source in (self.control.pollable, self.stream.pollable, sys.stdin.fileno()):
            poller.register(source, zmq.POLLIN)
        beat_at = 0.0
        stdin = sys.stdin.fileno()
        while all(source != stdin for source, _ in poller.poll(int(TICK_S * 1000))):
            self._hear_worker()
            self._hear_frames()
            now = time.monotonic()
            if self._session is not None and now >= beat_at:
                beat_at = now + BEAT_S
                self._say(Beat())

    def _say(self, message: Message) -> None:
        assert self._session is not None
        self.control.send(self._session.stamp(message), self._peer)

    def _hear_worker(self) -> None:
        for peer, frame in self.control.receive():
            envelope = decode(frame)
            if isinstance(envelope.message, Hello):
                self._peer, self._session = peer, Session(envelope.a)
            if self._session is None or not self._session.accept(envelope):
                continue
            if isinstance(envelope.message, Hello):
                self._welcome()
            elif isinstance(envelope.message, Report):
                self._report(envelope.message)

    def _welcome(self) -> None:
        self._say(Welcome(0xC0, PROTOCOL_VERSION, int(BEAT_S * 1000)))
        self._say(Owners(OWNER, self.endpoint, True))
        self._say(Open(DECODE, "m/decoder", "decode", 0, 1 << 16))
        prompt = columns.to_bytes(columns.u32([1]) * self._prompt)
        at_once = max(1, BATCH_TOKENS // self._prompt)
        numbers = range(1, self._rows + 1)
        for batch, i in enumerate(range(0, self._rows, at_once), start=1):
            rows: list[Row | int] = [
                Row(
                    row=n, owner=OWNER, stream=n, attempt=1, ordinal=0,
                    path=[[batch, self._prompt], [DECODE, 0]], base=[0], handed=[],
                    inputs={"tokens": prompt}, params={}, max_steps=self._max_steps,
                )
                for n in numbers[i : i + at_once]
            ]  # fmt: skip
            self._waiting.append(Run(batch, "m/decoder", "prefill", 0, rows))
        self._next()

    def _report(self, report: Report) -> None:
        if Kind.MOVED in report.kind:
            self._next()

    def _next(self) -> None:
        if self._waiting:
            self._say(self._waiting.pop(0))

    def _hear_frames(self) -> None:
        now = time.monotonic()
        answers: list[bytes] = []
        peer = b""
        for peer, frame in self.stream.receive():  # noqa: B007
            answers += self._receiver.accept(decode(frame).c, len(frame), now)[1]
        for answer in answers:
            self.stream.send(answer, peer)


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    peer = Peer(**options)
    try:
        peer.serve()
    finally:
        peer.network.close()


if __name__ == "__main__":
    main()
