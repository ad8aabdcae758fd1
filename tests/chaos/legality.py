"""Which ends are legal, given what was done to the processes. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.chaos.history import Expected
from tests.chaos.scenario import POISON_AT, RAISE, RAISE_PREPARE, RAISE_STOP, SEGV, Ask
from worker.models.reference_hash import reference_tokens

MAX_REPLAYS = 4
FAILS = (RAISE, RAISE_PREPARE, RAISE_STOP)


@dataclass(slots=True)
class Facts:
    """What happened while a seed ran.

    `losses`: of workers, charged or not. `crashes`: faults that fired and charge whoever was in a
    step. `left`: workers that were told to leave. `failed_steps`: exceptions planted in steps.
    """

    losses: list[bool] = field(default_factory=list[bool])
    crashes: int = 0
    left: int = 0
    failed_steps: int = 0
    gateway_ended: bool = False
    gateway_raised: bool = False
    vanished: set[str] = field(default_factory=set[str])  # clients that were killed
    stalled: set[str] = field(default_factory=set[str])  # and stopped beyond the silence
    closed: set[str] = field(default_factory=set[str])  # and closed in mid-stream


def expectations(asks: Iterable[Ask], facts: Facts) -> list[Expected]:
    return [_expected(a, facts) for a in asks]


def _expected(ask: Ask, facts: Facts) -> Expected:
    return Expected(
        key=ask.key,
        prompt=ask.prompt,
        max_tokens=ask.max_tokens,
        eos_every=ask.eos_every,
        legal=frozenset(_legal(ask, facts)),
        must=frozenset(_must(ask)),
        vanished=ask.client in facts.vanished,
    )


def _must(ask: Ask) -> set[str]:
    """What poison has to come to, if the stream lasts until it acts."""
    tokens = reference_tokens(ask.prompt, ask.max_tokens, eos_every=ask.eos_every)
    if len(tokens) <= POISON_AT + 1:
        return set()
    if ask.poison == SEGV:
        return {"quarantined"}
    return {"failed"} if ask.poison in FAILS else set()


def _legal(ask: Ask, facts: Facts) -> set[str]:
    legal: set[str] = set()
    if ask.cancel_at is not None or ask.client in facts.closed:
        legal.add("cancelled")
    if ask.deadline_ms:
        legal.add("deadline")
    if ask.client in facts.stalled:
        legal |= {"owner_lost", "conductor_lost"}
    if ask.client == "h":
        legal |= {"broken", "unavailable", "conductor_lost"} if facts.gateway_ended else set()
        legal |= {"broken", "bug"} if facts.gateway_raised else set()
    if facts.losses or facts.left:
        legal |= {"worker_lost"} if ask.replay == "never" else set()
    if len(facts.losses) > MAX_REPLAYS:
        legal.add("worker_lost")
    if facts.failed_steps or ask.poison in FAILS:
        legal.add("failed")
    if ask.poison == SEGV:
        legal.add("quarantined")
    # A crash that no request caused may hit a suspect while it is on trial alone.
    if facts.crashes and sum(facts.losses) >= 2:
        legal.add("quarantined")
    return legal
