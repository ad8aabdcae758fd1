"""A stream as a program reads it: chunks of tokens, then one end."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from protocol.client.owned_stream import OwnedStream
from protocol.errors import PodiumError
from protocol.messages import Reason


class AsyncStream:
    """Iterate it for lists of token ids, as they come; one reader at a time.

    A slow reader costs nothing but the history, which is kept anyway: what came meanwhile is one
    chunk. When the stream failed, iteration delivers what arrived and then raises the error
    (`protocol.errors`); `tokens` keeps it all. A cancelled stream just stops, `reason` says so.
    """

    def __init__(self, stream: OwnedStream, cancel: Callable[[int, Reason], None]) -> None:
        self._stream = stream
        self._cancel = cancel
        self._cursor = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def id(self) -> int:
        return self._stream.id

    @property
    def tokens(self) -> list[int]:
        """A copy of all that arrived so far."""
        return self._stream.tokens.tolist()

    @property
    def count(self) -> int:
        """How many tokens arrived so far."""
        return len(self._stream.tokens)

    @property
    def reason(self) -> Reason:
        """`Reason.NONE` while the stream is open."""
        return self._stream.reason

    @property
    def error(self) -> PodiumError | None:
        return self._stream.error

    @property
    def attempt(self) -> int:
        """1, and one more for each time the request was placed anew."""
        return self._stream.attempt

    def cancel(self, reason: Reason = Reason.CANCELLED) -> None:
        """End the stream now, from this side. Idempotent; a closed stream keeps its reason."""
        self._cancel(self._stream.id, reason)

    async def collect(self) -> list[int]:
        """Wait for the end and return all tokens; raises the stream's error.

        If the waiting task is cancelled, so is the stream.
        """
        try:
            async for _ in self:
                pass
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.tokens

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> list[int]:
        s = self._stream
        while True:
            if self._cursor < len(s.tokens):
                chunk = s.tokens[self._cursor :].tolist()
                self._cursor = len(s.tokens)
                return chunk
            if s.error is not None:
                raise s.error
            if s.reason is not Reason.NONE:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError("a stream has one reader at a time")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def wake(self) -> None:
        """For the client: something new is in the stream."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
