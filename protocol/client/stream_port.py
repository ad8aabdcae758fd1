"""An owner's end of all stream links: frames from every worker life, acknowledgements back."""

from collections import OrderedDict

from protocol.channel.base import Channel
from protocol.codec import decode
from protocol.errors import WireError
from protocol.messages import Frames
from protocol.session import Outbox
from protocol.stream_link import StreamReceiver

MAX_WORKERS = 1024  # worker lives remembered; the one that was silent longest is forgotten


class _Link:
    def __init__(self, receiver: StreamReceiver, outbox: Outbox) -> None:
        self.receiver = receiver
        self.outbox = outbox


class StreamPort:
    """Pure but for the bound channel it reads and answers."""

    def __init__(self, channel: Channel, life: int) -> None:
        self.channel = channel
        self._life = life
        self._links: OrderedDict[int, _Link] = OrderedDict()
        self._counts = {"bad_frames": 0, "not_ours": 0, "repeated_or_early": 0}

    def read(self, now: float) -> tuple[bool, list[Frames]]:
        """(whether anything arrived, the messages to deliver in order) of one batch."""
        batch = self.channel.receive()
        out: list[Frames] = []
        for peer, data in batch:
            try:
                envelope = decode(data)
            except WireError:
                self._counts["bad_frames"] += 1
                continue
            message = envelope.message
            if not isinstance(message, Frames) or envelope.b != self._life:
                self._counts["not_ours"] += 1
                continue
            link = self._link(envelope.a, peer)
            deliver, answers = link.receiver.accept(envelope.c, len(data), now)
            link.outbox.push_all(answers)
            if deliver:
                out.append(message)
            else:
                self._counts["repeated_or_early"] += 1
        return bool(batch), out

    def tick(self, now: float) -> None:
        """Acknowledge quiet links, and try what their peers had no room for."""
        for link in self._links.values():
            link.outbox.push_all(link.receiver.tick(now))
            link.outbox.flush()

    def statistics(self) -> dict[str, int]:
        return {**self._counts, "workers": len(self._links)}

    def _link(self, worker: int, peer: bytes) -> _Link:
        link = self._links.get(worker)
        if link is None:
            link = self._links[worker] = _Link(
                StreamReceiver(worker, self._life), Outbox(self.channel, peer)
            )
            if len(self._links) > MAX_WORKERS:
                self._links.popitem(last=False)
        else:
            self._links.move_to_end(worker)
        if link.outbox.peer != peer:  # the worker connected again
            link.outbox = Outbox(self.channel, peer)
        return link
