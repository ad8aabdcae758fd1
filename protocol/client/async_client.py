"""The asyncio client: requests over the control link, tokens straight from the workers.

    async with AsyncClient(Endpoints(runtime_dir)) as client:
        async for chunk in client.generate("smollm2", tokens=[1, 2, 3], max_tokens=16):
            print(chunk)

One event loop owns it. Nothing polls: sockets wake the loop, and a timer fires each 100 ms while
connected, or when a deadline is due.
"""

import asyncio
from collections.abc import Iterable, Sequence
from types import TracebackType

from protocol import PROTOCOL_VERSION, columns
from protocol.channel.base import Network
from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.client.async_stream import AsyncStream
from protocol.client.control_link import ControlLink, Phase
from protocol.client.owner import Event, Grew, Owner, Send
from protocol.client.stream_port import StreamPort
from protocol.clock import Clock, SystemClock
from protocol.errors import Bug, ConductorLost, InvalidRequest, PodiumError, Unavailable
from protocol.ids import new_life
from protocol.messages import End, Hello, Reason, Rebase, Welcome
from protocol.session import Outbox

TICK_S = 0.1
BURST = 16  # batches of frames handled before other tasks of the loop get their turn
MAX_PROMPT = 8 << 20  # tokens: half of the largest frame


class AsyncClient:
    """An owner of streams. `name` is for people; `life` is minted unless a supervisor gave one.

    Without `network` it makes ZeroMQ sockets of its own and closes them with itself.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        network: Network | None = None,
        *,
        role: str = "client",
        name: str = "",
        clock: Clock | None = None,
        life: int | None = None,
    ) -> None:
        self.life = life or new_life()
        self._endpoints = endpoints
        self._own_network = network is None
        self._network: Network = network or ZmqNetwork()
        self._role, self._name = role, name or f"{role}-{self.life:016x}"
        self._clock: Clock = clock or SystemClock()
        self._owner = Owner()
        self._handles: dict[int, AsyncStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._pump_is_due = False
        self._changed: list[asyncio.Future[None]] = []
        self._closed = False

    # ---- the caller's side

    async def connect(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109
        """Wait until the conductor welcomes this client.

        Raises `Unavailable` after `timeout` seconds, or what the conductor refused it for
        (`VersionMismatch`, `ConductorLost`). After a failure the client is closed.
        """
        try:
            self._open()
            async with asyncio.timeout(timeout):
                while not self._link.up:
                    if self._link.error is not None:
                        raise self._link.error
                    await self._change()
        except TimeoutError:
            self.close()
            raise Unavailable(
                f"no conductor answered at {self._endpoints.control} within {timeout:g} s"
            ) from None
        except BaseException:
            self.close()
            raise

    @property
    def connected(self) -> bool:
        return self._loop is not None and self._link.up

    @property
    def error(self) -> PodiumError | None:
        """Why this client can't be used any more; None while it can."""
        return self._link.error if self._loop is not None else None

    async def until_failed(self) -> PodiumError:
        """Wait until this client can't be used any more, and say why: it was fenced, or closed."""
        while self._link.error is None:
            await self._change()
        return self._link.error

    def generate(
        self,
        model: str,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop_token_ids: Iterable[int] | None = None,
        ignore_eos: bool | None = None,
        deadline_ms: int = 0,
        priority: int = 0,
        tenant: str = "",
        replay: str = "history",
    ) -> AsyncStream:
        """Ask for tokens that follow `tokens`. Returns at once; errors come from the stream.

        `deadline_ms` counts from now, 0 is none. What is None is left to the daemon. Raises
        `InvalidRequest` for values that can't travel, `ConductorLost` if there is no conductor.
        """
        if self._loop is None or self._closed:
            raise ConductorLost("this client is not connected: await connect() first")
        now = self._clock.monotonic()
        if self._link.error is not None:
            raise ConductorLost(self._link.error.message)
        if self._link.lost(now):
            raise ConductorLost("no conductor answers")
        params = {
            "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
            "seed": seed, "ignore_eos": ignore_eos,
            "stop_token_ids": None if stop_token_ids is None else list(stop_token_ids),
        }  # fmt: skip
        if deadline_ms < 0 or priority < 0:
            raise InvalidRequest("deadline_ms and priority may not be negative")
        if replay not in ("history", "restart", "never"):
            raise InvalidRequest(f"replay: history, restart or never, not {replay!r}")
        stream = self._owner.open(
            model,
            {"tokens": _prompt(tokens)},
            {k: v for k, v in params.items() if v is not None},
            now,
            deadline_ms=deadline_ms,
            priority=priority,
            tenant=tenant,
            replay=replay,
        )
        handle = self._handles[stream.id] = AsyncStream(stream, self._cancel)
        if self._link.up:
            self._perform([self._owner.submission(stream, now)])
        self._arm()
        return handle

    def close(self) -> None:
        """End every open stream as cancelled, say goodbye, close the sockets. Idempotent.

        May take up to 0.2 s to hand the last frames over if the client made its own network.
        """
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            loop = self._loop
            self._perform(self._owner.close_all(Reason.CANCELLED))
            self._link.bye("closed", self._clock.monotonic())
            self._link.flush()
            for channel in (self._control, self._port.channel):
                loop.remove_reader(channel.fileno())
                channel.close()
            if self._timer is not None:
                self._timer.cancel()
            self._notify()
        if self._own_network:
            self._network.close()

    def statistics(self) -> dict[str, int]:
        parts: dict[str, dict[str, int]] = {"owner": self._owner.statistics()}
        if self._loop is not None:
            parts |= {"link": self._link.statistics(), "port": self._port.statistics()}
        return {f"{part}_{k}": v for part, values in parts.items() for k, v in values.items()}

    async def __aenter__(self) -> "AsyncClient":
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- the loop's side

    def _open(self) -> None:
        if self._loop is not None or self._closed:
            raise ConductorLost("a client connects once: make a new one")
        # bound before the Hello that tells workers where to connect
        endpoint = self._endpoints.stream(self.life)
        self._port = StreamPort(self._network.bind(endpoint), self.life)
        self._control = self._network.connect(self._endpoints.control)

        def hello() -> Hello:
            return Hello(
                self._role, self._name, self.life, [PROTOCOL_VERSION], endpoint,
                inventory=self._owner.inventory(),
            )  # fmt: skip

        self._link = ControlLink(Outbox(self._control), hello, self._clock.monotonic())
        self._loop = asyncio.get_running_loop()
        for channel in (self._control, self._port.channel):
            self._loop.add_reader(channel.fileno(), self._pump)
        self._pump_soon()
        self._arm()

    def _pump_soon(self) -> None:
        """Read once more after sending: a ZeroMQ descriptor fires on edges, and a send may have
        taken the edge of a frame that arrived meanwhile."""
        if not self._pump_is_due and self._loop is not None:
            self._pump_is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        if self._closed:
            return
        try:
            self._link.flush()
            for _ in range(BURST):
                now = self._clock.monotonic()
                batch = self._control.receive()
                for _, frame in batch:
                    self._on_control(frame, now)
                arrived, messages = self._port.read(now)
                for m in messages:
                    self._perform(self._owner.frames(m))
                if not batch and not arrived:
                    return
            self._pump_soon()
        except Exception as e:
            self._broken(e)

    def _on_control(self, frame: bytes, now: float) -> None:
        phase = self._link.phase
        for message in self._link.receive(frame, now):
            if isinstance(message, Welcome):
                self._perform(list(self._owner.submissions(now)))
            elif isinstance(message, End):
                self._perform(self._owner.end(message))
            elif isinstance(message, Rebase):
                self._perform(self._owner.rebase(message))
        if self._link.phase is not phase:
            if self._link.phase is Phase.FAILED:
                self._perform(self._owner.close_all(Reason.OWNER_LOST, self._link.error))
            self._notify()

    def _tick(self) -> None:
        self._timer = None
        try:
            now = self._clock.monotonic()
            self._perform(self._owner.tick(now))
            self._link.tick(now)
            self._port.tick(now)
            if self._link.lost(now):
                self._perform(self._owner.close_all(Reason.CONDUCTOR_LOST))
        except Exception as e:
            self._broken(e)
        self._pump_soon()
        self._arm()

    def _arm(self) -> None:
        """One timer: the next tick, or a deadline that is nearer."""
        if self._closed or self._loop is None:
            return
        due = self._owner.due()
        delay = TICK_S if due is None else min(TICK_S, max(0.0, due - self._clock.monotonic()))
        at = self._loop.time() + delay
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._tick)

    def _cancel(self, stream: int, reason: Reason) -> None:
        self._perform(self._owner.cancel(stream, reason))

    def _perform(self, events: Sequence[Event]) -> None:
        for e in events:
            if isinstance(e, Send):
                self._link.send(e.message, self._clock.monotonic(), e.keep)
                self._pump_soon()
            elif isinstance(e, Grew):
                for stream in e.streams:
                    handle = self._handles.get(stream)
                    if handle is not None:
                        handle.wake()
            else:
                handle = self._handles.pop(e.stream, None)
                if handle is not None:
                    handle.wake()

    async def _change(self) -> None:
        """Wait for the link's next change of phase."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._changed:
                self._changed.remove(waiter)

    def _notify(self) -> None:
        waiters, self._changed = self._changed, []
        for w in waiters:
            if not w.done():
                w.set_result(None)

    def _broken(self, e: Exception) -> None:
        """A bug here must not leave a reader waiting for ever."""
        error = e if isinstance(e, PodiumError) else Bug(f"{type(e).__name__}: {e}")
        self._perform(self._owner.close_all(Reason.FAILED, error))
        raise e


def _prompt(tokens: Sequence[int]) -> bytes:
    if len(tokens) > MAX_PROMPT:
        raise InvalidRequest(f"a prompt has at most {MAX_PROMPT} tokens, got {len(tokens)}")
    try:
        return columns.to_bytes(columns.u32(tokens))
    except (OverflowError, TypeError) as e:
        raise InvalidRequest(f"tokens: unsigned 32-bit integers are expected: {e}") from None
