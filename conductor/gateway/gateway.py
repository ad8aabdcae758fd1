"""The gateway's state: its models, its client, who is being answered, what was counted."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import structlog

from conductor.gateway.openai_schema import ChatRequest
from conductor.gateway.tokenizer import Tokenizer, load_tokenizer
from protocol.client.async_client import AsyncClient
from protocol.client.async_stream import AsyncStream
from protocol.clock import Clock, SystemClock
from protocol.config import DaemonConfig, GatewayConfig
from protocol.errors import Overloaded, Unavailable, UnknownModel
from protocol.messages import Reason

INLINE = 4096  # characters; a longer prompt is tokenized on the pool (about 1 ms per 3,000)
THREADS = 2
SPARE = 1024  # requests open here beyond those the conductor may queue
MAX_NAMES = 256  # of ignored fields told apart


class Gateway:
    """`client` is set once the conductor has welcomed it. Belongs to the event loop's thread."""

    def __init__(
        self,
        config: DaemonConfig,
        log: structlog.typing.FilteringBoundLogger,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.log = log
        self.clock: Clock = clock or SystemClock()
        self.created = int(self.clock.wall())
        self.client: AsyncClient | None = None
        self.draining = False
        self.counts: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()
        self._tokenizers: dict[str, Tokenizer] = {}
        self._streams: set[AsyncStream] = set()
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")

    @property
    def max_body(self) -> int:
        return (self.config.gateway or GatewayConfig()).max_body_bytes

    # ---- life

    async def load(self) -> None:
        """The tokenizers of all models; raises `ConfigError`."""
        loop = asyncio.get_running_loop()
        for name, model in self.config.models.items():
            self._tokenizers[name] = await loop.run_in_executor(self._pool, load_tokenizer, model)
            self.log.info("tokenizer loaded", model=name)

    async def drain(self, seconds: float) -> bool:
        """Refuse what is new, wait for what is open. False: some of it was aborted."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self.abort()
            return False
        return True

    def abort(self) -> None:
        """End every open stream; their clients are told."""
        self.draining = True
        for stream in list(self._streams):
            stream.cancel(Reason.ABORTED)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- one request

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Around one request. Raises `Unavailable` while starting or draining, `Overloaded`."""
        if self.draining:
            raise Unavailable("the gateway is draining: it takes no new requests")
        if self.client is None:
            raise Unavailable("the gateway is starting")
        limit = self.config.limits.max_queued + SPARE
        if self._open >= limit:
            raise Overloaded(f"{self._open} requests are open, the limit is {limit}", retry_after=1)
        self._open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()

    def tokenizer(self, model: str) -> Tokenizer:
        if model not in self.config.models:
            known = ", ".join(sorted(self.config.models))
            raise UnknownModel(f"no model {model!r}; this daemon serves {known}")
        return self._tokenizers[model]

    async def prompt(self, tokenizer: Tokenizer, request: ChatRequest) -> list[int]:
        """The request's messages as tokens; long ones off the loop, so that other streams go on."""
        messages = [m.for_template() for m in request.messages]

        def work() -> list[int]:
            return tokenizer.encode(tokenizer.render(messages))

        if sum(len(m["content"]) for m in messages) <= INLINE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @contextmanager
    def stream(self, request: ChatRequest, tokens: list[int]) -> Iterator[AsyncStream]:
        """The request's stream, cancelled at the end if it is still open then."""
        assert self.client is not None  # `admitted` saw to it
        stream = self.client.generate(
            request.model,
            tokens,
            max_tokens=request.output_limit,
            # OpenAI's defaults, said here: the daemon's own default is greedy
            temperature=1.0 if request.temperature is None else float(request.temperature),
            top_p=1.0 if request.top_p is None else float(request.top_p),
            top_k=None if request.top_k is None else max(0, request.top_k),
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            deadline_ms=self.config.limits.default_deadline_ms,
        )
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)
            stream.cancel()

    def ignore(self, names: list[str]) -> None:
        """Count fields that mean nothing here; each is logged the first time."""
        for name in names:
            known = name[:64]
            if known not in self.ignored:
                if len(self.ignored) >= MAX_NAMES:
                    known = "(others)"
                else:
                    self.log.warning("field ignored", field=known)
            self.ignored[known] += 1

    def statistics(self) -> Mapping[str, int]:
        ignored = {f"ignored_{k}": v for k, v in self.ignored.items()}
        return {**self.counts, **ignored, "open": self._open}
