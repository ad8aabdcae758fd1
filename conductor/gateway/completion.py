"""One answer as text: tokens from the stream, detokenized, cut at stop strings."""

from collections.abc import AsyncIterator

from conductor.gateway.detokenizer import Detokenizer
from conductor.gateway.stop_strings import StopStrings
from protocol.client.async_stream import AsyncStream
from protocol.errors import PodiumError
from protocol.messages import Reason


class Completion:
    """Iterate it once for pieces of text, none of them empty.

    A stop string closes the stream from here, with reason `stop`. If the stream fails, what text
    there is comes first, then the error.
    """

    def __init__(self, stream: AsyncStream, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self.stream = stream
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def reason(self) -> Reason:
        return self.stream.reason

    async def __aiter__(self) -> AsyncIterator[str]:
        failure: PodiumError | None = None
        try:
            async for tokens in self.stream:
                text = self._stops.push(self._detokenizer.push(tokens))
                if self._stops.stopped:
                    # before the text goes out: its reader may be slow, or gone
                    self.stream.cancel(Reason.STOP)
                if text:
                    yield text
                if self._stops.stopped:
                    return
        except PodiumError as e:
            failure = e
        text = self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        if text:
            yield text
        if failure is not None:
            raise failure
