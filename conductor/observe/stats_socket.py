"""The stats socket: whoever sends `snapshot` gets one. Anything else is counted and ignored."""

from collections.abc import Callable

from protocol import stats
from protocol.channel.base import Channel, Network
from protocol.channel.endpoints import Endpoints
from protocol.errors import Unavailable

_BATCHES = 4


class StatsSocket:
    """Serves `take()`; several requests that wait together share one snapshot.

    A reader that does not read loses answers: they are never queued here.
    """

    def __init__(self, channel: Channel, take: Callable[[], stats.Snapshot]) -> None:
        self._channel = channel
        self._take = take
        self.served = 0
        self.ignored = 0

    def receive(self) -> bool:
        """Answer what waits. True: there may be more, call again soon (the descriptor is
        edge-triggered)."""
        for _ in range(_BATCHES):
            frames = self._channel.receive()
            if not frames:
                return False
            asking = [peer for peer, frame in frames if frame == stats.SNAPSHOT]
            self.ignored += len(frames) - len(asking)
            if asking:
                answer = stats.encode(self._take())
                for peer in asking:
                    self._channel.send(answer, peer)
                self.served += len(asking)
        return True


def read_snapshot(network: Network, endpoints: Endpoints, timeout_s: float) -> stats.Snapshot:
    """Ask a daemon. Raises `Unavailable` where none answers in time."""
    import zmq

    channel = network.connect(endpoints.stats)
    try:
        channel.send(stats.SNAPSHOT)
        poller = zmq.Poller()
        poller.register(channel.pollable, zmq.POLLIN)
        if not poller.poll(int(timeout_s * 1000)):
            raise Unavailable(f"no daemon answers in {endpoints.root} within {timeout_s:g} s")
        return stats.decode(channel.receive(1)[0][1])
    finally:
        channel.close()
