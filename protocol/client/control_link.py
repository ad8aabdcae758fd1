"""An owner's control link: `Hello` until welcomed, beats, and `Hello` again when it is silent.

Pure but for the outbox it pushes frames into: frames and time in, delivered messages out.

    greeting ──Welcome──▶ up ──silence, hole, Refuse(resync), overflow, Bye──▶ greeting
        ╰────────────── Refuse(version, fenced, name_taken) ──────────────▶ failed
"""

from collections.abc import Callable
from enum import Enum

from protocol import PROTOCOL_VERSION
from protocol.codec import decode
from protocol.errors import BadMessage, ConductorLost, PodiumError, Unavailable, VersionMismatch
from protocol.messages import Beat, Bye, Hello, Message, Refuse, Welcome
from protocol.session import Outbox, Session, SessionHole

GREET_AGAIN_S = 1.0  # without a Welcome
GREET_SOONEST_S = 0.1  # a conductor that answers every session with a hole is not flooded
SILENCE_S = 2.0  # or five beats, if those are longer
LOST_S = 10.0  # rule 21: an owner without a conductor goes on this long


class Phase(Enum):
    GREETING = "greeting"
    UP = "up"
    FAILED = "failed"


class ControlLink:
    """`hello` makes the `Hello` of a new session, with the inventory of that moment.

    After `receive` returned a `Welcome`, the caller submits its open streams again; what earlier
    sessions were told to keep and the conductor has not acknowledged is sent again here.
    """

    def __init__(self, outbox: Outbox, hello: Callable[[], Hello], now: float) -> None:
        self.phase = Phase.GREETING
        self.error: PodiumError | None = None  # why the link failed for good
        self.limits: dict[str, object] = {}
        self._outbox = outbox
        self._hello = hello
        self._session = Session()
        self._carried: list[Message] = []
        self._beat_s = 0.2
        self._heard_at = now
        self._sent_at = now
        self._greeted_at = float("-inf")
        self._must_greet = True
        self._counts = {"sessions": 0, "bad_frames": 0, "dropped": 0}
        self._greet(now)

    @property
    def up(self) -> bool:
        return self.phase is Phase.UP

    def lost(self, now: float) -> bool:
        """No conductor for so long that open streams must end."""
        return self.phase is not Phase.UP and now - self._heard_at >= LOST_S

    def send(self, message: Message, now: float, keep: bool = False) -> bool:
        """Send in the running session. Without one, what is to be kept waits for the next, and
        the rest is dropped: a new session says it anew (rule 20)."""
        if not self.up:
            if keep:
                self._carried.append(message)
            return False
        self._sent_at = now
        if not self._outbox.push(self._session.stamp(message, keep)):
            self._again(now)
            return False
        return True

    def receive(self, frame: bytes, now: float) -> list[Message]:
        """The message of this frame, or nothing if it is malformed, repeated or not of this
        session."""
        if self.phase is Phase.FAILED:
            return []
        try:
            envelope = decode(frame)
        except VersionMismatch as e:
            if self.phase is Phase.GREETING:
                self._fail(e)
            return []
        except BadMessage:
            self._counts["bad_frames"] += 1
            return []
        message = envelope.message
        if isinstance(message, Refuse):
            # outside the sequence: a conductor that doesn't know the session refuses it
            if envelope.a == self._session.number:
                self._refused(message, now)
            return []
        try:
            if not self._session.accept(envelope):
                self._counts["dropped"] += 1
                return []
        except SessionHole:
            self._again(now)
            return []
        self._heard_at = now
        if isinstance(message, Welcome):
            return [message] if self._welcomed(message, now) else []
        if not self.up:
            self._counts["dropped"] += 1
            return []
        if isinstance(message, Bye):
            self._again(now)
            return []
        return [message]

    def tick(self, now: float) -> None:
        """Every 100 ms or so: what waits, beats, silence."""
        if self.phase is Phase.FAILED:
            return
        self._outbox.flush()
        if self.up:
            if now - self._heard_at >= max(SILENCE_S, 5 * self._beat_s):
                self._again(now)
            elif now - self._sent_at >= self._beat_s:
                self.send(Beat(), now)
        elif self._must_greet or now - self._greeted_at >= GREET_AGAIN_S:
            self._greet(now)

    def flush(self) -> None:
        self._outbox.flush()

    def bye(self, reason: str, now: float) -> None:
        """The last message of this link."""
        self.send(Bye(reason), now)
        self.phase = Phase.FAILED
        self.error = ConductorLost("this client is closed")

    def statistics(self) -> dict[str, int]:
        kept = len(self._carried) + len(self._session.carry_over())
        return {**self._counts, "kept": kept, **self._outbox.statistics()}

    def _again(self, now: float) -> None:
        """This session is over."""
        self.phase = Phase.GREETING
        if now - self._greeted_at >= GREET_SOONEST_S:
            self._greet(now)
        else:
            self._must_greet = True

    def _greet(self, now: float) -> None:
        self._carried.extend(self._session.carry_over())
        self._session = Session()
        self._counts["sessions"] += 1
        self._must_greet = False
        self._greeted_at = self._sent_at = now
        self._outbox.push(self._session.stamp(self._hello()))

    def _welcomed(self, message: Welcome, now: float) -> bool:
        if message.version != PROTOCOL_VERSION:
            self._fail(VersionMismatch(f"the conductor chose version {message.version}"))
            return False
        self._beat_s = max(0.02, message.beat_ms / 1000)
        self.limits = dict(message.limits)
        self.phase = Phase.UP
        carried, self._carried = self._carried, []
        for m in carried:
            self.send(m, now, keep=True)
        return self.up

    def _refused(self, message: Refuse, now: float) -> None:
        text = f"the conductor refused this client: {message.code}: {message.text}"
        if message.code == "resync":
            self._again(now)
        elif message.code == "version":
            self._fail(VersionMismatch(text))
        elif message.code == "name_taken":
            self._fail(Unavailable(text))
        else:  # fenced: this life was taken for dead and is never taken back
            self._fail(ConductorLost(text))

    def _fail(self, error: PodiumError) -> None:
        self.phase = Phase.FAILED
        self.error = error
