"""Who gets in: the bounded queue, and the checks that refuse a request with reason and numbers."""

import math
from collections.abc import Container
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from conductor.core.lazy_heap import LazyHeap
from conductor.core.records import Request
from protocol import columns
from protocol.config import LimitsConfig
from protocol.errors import (
    BadMessage,
    CannotFit,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    UnknownModel,
)
from protocol.graph import ModelSpec
from protocol.messages import Submit

REPLAYS = ("history", "restart", "never")
RATE_WINDOW = 10.0  # seconds over which the rate of placements is averaged
RETRY_MIN, RETRY_MAX = 1, 60  # seconds


class Queue:
    """Requests that wait for a place: per model, higher priority first, then order of arrival.

    A replayed request keeps its order of arrival, so it goes ahead of all that came after it.
    """

    def __init__(self) -> None:
        self._models: dict[str, LazyHeap[Request]] = {}
        self.tokens = 0
        self.length = 0
        self._rate = 0.0  # decayed count of placements
        self._rated_at = 0.0

    def __contains__(self, request: Request) -> bool:
        heap = self._models.get(request.model)
        return heap is not None and request in heap

    def items(self) -> list[Request]:
        return [r for heap in self._models.values() for r in heap.items()]

    def push(self, request: Request) -> None:
        heap = self._models.setdefault(request.model, LazyHeap())
        heap.push((-request.priority, request.sequence), request)
        self.length += 1
        self.tokens += request.prompt_tokens

    def discard(self, request: Request) -> bool:
        heap = self._models.get(request.model)
        if heap is None or not heap.discard(request):
            return False
        self.length -= 1
        self.tokens -= request.prompt_tokens
        return True

    def first(self, blocked: Container[str]) -> Request | None:
        """The one to place next among models that aren't blocked. It stays in."""
        best: tuple[Any, Request] | None = None
        for model, heap in self._models.items():
            if model in blocked:
                continue
            head = heap.first()
            if head is not None and (best is None or head[0] < best[0]):
                best = head
        return None if best is None else best[1]

    def placed(self, now: float) -> None:
        self._decay(now)
        self._rate += 1.0

    def retry_after(self, now: float) -> int:
        """Seconds in which the queue, at its present rate, would be worked off."""
        self._decay(now)
        rate = self._rate / RATE_WINDOW
        wait = self.length / rate if rate > 0.01 else RETRY_MAX
        return max(RETRY_MIN, min(RETRY_MAX, math.ceil(wait)))

    def _decay(self, now: float) -> None:
        self._rate *= math.exp((self._rated_at - now) / RATE_WINDOW)
        self._rated_at = now

    def refuse_if_full(self, tokens: int, limits: LimitsConfig, now: float) -> None:
        """Raises `Overloaded` where one more request of that many tokens passes a bound."""
        if self.length >= limits.max_queued:
            what, queued, limit = "requests", self.length, limits.max_queued
        elif self.length and self.tokens + tokens > limits.max_queued_tokens:
            what, queued, limit = "prompt tokens", self.tokens, limits.max_queued_tokens
        else:
            return
        after = self.retry_after(now)
        raise Overloaded(
            f"{queued} {what} are queued, the limit is {limit}; retry after {after} s",
            retry_after=after,
            queued=queued,
            limit=limit,
        )


@dataclass(frozen=True, slots=True)
class Admitted:
    """What the checks worked out: `prompt` as u32 bytes, `params` with `max_tokens` and `seed`."""

    prompt: bytes
    max_tokens: int
    params: dict[str, Any]


def check(
    submit: Submit, spec: ModelSpec, pool: tuple[int, int], limits: LimitsConfig, drawn_seed: int
) -> Admitted:
    """Raises `InvalidRequest`, `PromptTooLong` or `CannotFit`. `pool` is (pages, tokens a page) of
    the largest KV pool, (0, 0) for none."""
    prompt, n = _prompt(submit, spec)
    if submit.replay not in REPLAYS:
        raise InvalidRequest(f"replay {submit.replay!r} is not one of {', '.join(REPLAYS)}")
    if n >= spec.context:
        raise PromptTooLong(
            f"the prompt has {n} tokens; model {spec.model!r} takes {spec.context} tokens of prompt"
            " and output together",
            prompt_tokens=n,
            context=spec.context,
        )
    pages, page_tokens = pool
    room = pages * page_tokens - n if pages else spec.context
    wanted = _integer(submit.params, "max_tokens")
    if wanted is None:
        max_tokens = min(spec.context - n, limits.max_tokens, max(1, room))
    elif wanted < 1:
        raise InvalidRequest(f"max_tokens is {wanted}; at least 1 is needed", max_tokens=wanted)
    else:
        max_tokens = min(wanted, spec.context - n, limits.max_tokens)
    if max_tokens > room:
        raise CannotFit(
            f"{n} prompt tokens and {max_tokens} output tokens never fit: the largest KV pool of"
            f" model {spec.model!r} holds {pages * page_tokens} tokens",
            prompt_tokens=n,
            max_tokens=max_tokens,
            pool_tokens=pages * page_tokens,
        )
    seed = _integer(submit.params, "seed")
    if seed is None:
        seed = drawn_seed
    params = {**submit.params, "max_tokens": max_tokens, "seed": seed & (1 << 63) - 1}
    return Admitted(prompt, max_tokens, params)


def _prompt(submit: Submit, spec: ModelSpec) -> tuple[bytes, int]:
    data = submit.inputs.get("tokens")
    try:
        tokens = columns.from_bytes("I", data, "inputs.tokens")
    except BadMessage as e:
        raise InvalidRequest(e.message) from None
    if not tokens:
        raise InvalidRequest("the prompt is empty; at least one token is needed")
    if (top := max(tokens)) >= spec.vocab:
        raise InvalidRequest(
            f"token {top} is outside the vocabulary of {spec.vocab}", token=top, vocab=spec.vocab
        )
    return columns.to_bytes(tokens), len(tokens)


def _integer(params: dict[str, Any], name: str) -> int | None:
    value = params.get(name)
    if value is not None and type(value) is not int:
        raise InvalidRequest(f"{name} must be an integer, got {type(value).__name__}")
    return value


def unknown_model(model: str, known: list[str]) -> UnknownModel:
    return UnknownModel(f"no model {model!r}; served here: {', '.join(sorted(known))}", model=model)


def draw_seed(key: int, owner: int, stream: int) -> int:
    """A seed for a request that names none: the same for all its attempts, 63 bits."""
    words = (key, owner, stream)
    data = b"".join((w & (1 << 64) - 1).to_bytes(8, "little") for w in words)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1
