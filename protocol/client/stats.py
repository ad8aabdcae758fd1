"""The conductor's snapshot over asyncio: one question, one answer."""

import asyncio

from protocol import stats
from protocol.channel.base import Channel, Network
from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.errors import Unavailable


class StatsReader:
    """Asks again and again over one socket; one question at a time."""

    def __init__(self, endpoints: Endpoints, network: Network) -> None:
        self._address = endpoints.stats
        self._network = network
        self._channel: Channel | None = None

    async def snapshot(self, timeout: float) -> stats.Snapshot:  # noqa: ASYNC109
        """Raises `Unavailable` if no answer came in `timeout` seconds, `BadMessage` if it is no
        snapshot. Of several answers (a late one to an earlier question) the newest counts."""
        if self._channel is None:
            self._channel = self._network.connect(self._address)
        channel = self._channel
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()

        def read() -> None:
            if not answer.done() and (got := channel.receive()):
                answer.set_result(got[-1][1])

        fd = channel.fileno()
        loop.add_reader(fd, read)
        try:
            channel.send(stats.SNAPSHOT)
            loop.call_soon(read)  # the send may have taken the descriptor's edge
            async with asyncio.timeout(timeout):
                frame = await answer
        except BaseException as e:
            loop.remove_reader(fd)
            self.close()  # and its unanswered question with it
            if isinstance(e, TimeoutError):
                text = f"no snapshot from {self._address} within {timeout:g} s"
                raise Unavailable(text) from None
            raise
        loop.remove_reader(fd)
        return stats.decode(frame)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None


async def fetch_stats(
    endpoints: Endpoints,
    timeout: float,  # noqa: ASYNC109 (seconds, as everywhere in this API)
    network: Network | None = None,
) -> stats.Snapshot:
    """One snapshot of a running daemon. Raises `Unavailable`, `BadMessage`."""
    net: Network = network or ZmqNetwork()
    reader = StatsReader(endpoints, net)
    try:
        return await reader.snapshot(timeout)
    finally:
        reader.close()
        if network is None:
            net.close()
