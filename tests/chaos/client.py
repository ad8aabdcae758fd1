"""A client of chaos: asks, reads, cancels, and tells everything that it saw.

In the driver's process `Client` is used as it is; `python -m tests.chaos.client RUNTIME_DIR NAME`
is the same as a process that can be stopped and killed: asks as JSON on stdin, events as JSON lines
on stdout, the first line being `["ready"]`.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.client.async_client import AsyncClient
from protocol.errors import PodiumError
from protocol.messages import Closed, Frames, Message, Reason
from tests.chaos.history import End, Event, Frame, Tokens, Told
from tests.chaos.recording import RecordingNetwork
from tests.chaos.scenario import Ask

Emit = Callable[[Event], None]
_KINDS: dict[str, Any] = {k.__name__: k for k in (Tokens, End, Frame, Told)}


class Client:
    """One owner. `emit` takes its events as they happen."""

    def __init__(self, endpoints: Endpoints, name: str, emit: Emit) -> None:
        self._network = ZmqNetwork()
        self._client = AsyncClient(
            endpoints, RecordingNetwork(self._network, self._note), name=f"chaos-{name}"
        )
        self._emit = emit
        self._keys: dict[int, str] = {}
        self._left = False

    async def connect(self) -> None:
        await self._client.connect(timeout=30)

    async def run(self, asks: Iterable[Ask]) -> None:
        """Until every stream has ended."""
        await asyncio.gather(*(self._one(a) for a in asks))

    def close(self) -> None:
        self._client.close()
        self._network.close()

    def close_early(self) -> None:
        """End every stream from this side; `close` is still to be called."""
        self._left = True
        self._client.close()

    async def _one(self, ask: Ask) -> None:
        await asyncio.sleep(ask.wait_ms / 1000)
        try:
            stream = self._client.generate(
                ask.model, ask.prompt, max_tokens=ask.max_tokens, deadline_ms=ask.deadline_ms,
                priority=ask.priority, replay=ask.replay,
            )  # fmt: skip
        except PodiumError as e:  # this client was closed, or taken for dead
            self._emit(End(ask.key, "cancelled" if self._left else e.code, str(e)))
            return
        self._keys[stream.id] = ask.key
        text, left = "", ask.cancel_at
        if left == 0:
            stream.cancel()
        try:
            async for chunk in stream:
                self._emit(Tokens(ask.key, chunk))
                if left is not None and stream.count >= left:
                    stream.cancel()
                await asyncio.sleep(ask.slow_ms / 1000)
        except PodiumError as e:
            text = f"{e.code}: {e.message}"
        self._emit(End(ask.key, stream.reason.name.lower(), text))

    def _note(self, sent: bool, first: int, message: Message) -> None:
        if isinstance(message, Frames) and not sent:
            at = 0
            columns = (message.stream, message.attempt, message.first, message.count)
            for stream, attempt, position, count in zip(*columns, strict=True):
                tokens = message.tokens[at : at + count].tolist()
                at += count
                self._emit(Frame(self._key(stream), first, attempt, position, tokens))
        elif isinstance(message, Closed) and sent:
            columns = (message.stream, message.reason, message.count)
            for stream, reason, count in zip(*columns, strict=True):
                self._emit(Told(self._key(stream), Reason(reason).name.lower(), count))

    def _key(self, stream: int) -> str:
        return self._keys.get(stream, f"unknown stream {stream}")


def to_line(event: Event) -> str:
    return json.dumps([type(event).__name__, *event])


def from_line(line: str) -> Event:
    kind, *values = json.loads(line)
    return _KINDS[kind](*values)


def asks_to_json(asks: Iterable[Ask]) -> str:
    return json.dumps([asdict(a) for a in asks])


async def _main(root: str, name: str) -> None:
    asks = [Ask(**{**a, "prompt": tuple(a["prompt"])}) for a in json.loads(sys.stdin.readline())]
    client = Client(Endpoints(Path(root)), name, lambda e: print(to_line(e), flush=True))
    await client.connect()
    print('["ready"]', flush=True)
    try:
        await client.run(asks)
    finally:
        client.close()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
