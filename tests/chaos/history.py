"""What clients saw, and the checker that says whether it may be (P1, P2). Pure.

Events of one request, in the order in which its client saw them:

    Tokens   what its reader got          End     the one terminal event, as the reader learnt it
    Frame    what a worker sent for it    Told    the end that its owner told the conductor

The oracle is the reference model's rule: the whole stream follows from the prompt.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from worker.models.reference_hash import EOS, reference_tokens

NATURAL = ("length", "stop")


@dataclass(frozen=True, slots=True)
class Expected:
    """One request. `legal`: reasons it may end with beside its natural one; `must`: those of which
    it has to end with one. `vanished`: its client was killed, so it may have no end."""

    key: str
    prompt: Sequence[int]
    max_tokens: int
    eos_every: int = 0
    legal: frozenset[str] = frozenset()
    must: frozenset[str] = frozenset()
    vanished: bool = False


class Tokens(NamedTuple):
    key: str
    tokens: list[int]


class End(NamedTuple):
    key: str
    reason: str
    text: str = ""


class Frame(NamedTuple):
    """A row of a worker's `Frames`, whether the owner took it or not. Rows without tokens too."""

    key: str
    worker: int
    attempt: int
    first: int
    tokens: list[int]


class Told(NamedTuple):
    """A row of the owner's `Closed`; said again in a new session."""

    key: str
    reason: str
    length: int


Event = Tokens | End | Frame | Told


class Violation(NamedTuple):
    key: str
    text: str


@dataclass(slots=True)
class _Story:
    expected: Expected
    oracle: list[int]
    got: list[int] = field(default_factory=list[int])
    ends: list[End] = field(default_factory=list[End])
    told: list[Told] = field(default_factory=list[Told])
    senders: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    broken: bool = False  # one contradiction is told; all that follows from it is not


def check(expected: Iterable[Expected], events: Iterable[Event]) -> list[Violation]:
    """Everything that contradicts the promises, in order."""
    stories = {
        e.key: _Story(e, reference_tokens(e.prompt, e.max_tokens, eos_every=e.eos_every))
        for e in expected
    }
    found: list[Violation] = []
    for event in events:
        story = stories.get(event.key)
        if story is None:
            found.append(Violation(event.key, f"a {type(event).__name__} for nobody's request"))
            continue
        match event:
            case Tokens():
                found += _tokens(story, event, stories)
            case End():
                found += _end(story, event)
            case Frame():
                found += _frame(story, event, stories)
            case Told():
                story.told.append(event)
    for story in stories.values():
        found += _whole(story)
    return found


def _tokens(story: _Story, event: Tokens, stories: Mapping[str, _Story]) -> list[Violation]:
    at = len(story.got)
    story.got += event.tokens
    if story.ends:
        return [Violation(event.key, f"{len(event.tokens)} tokens after the end")]
    if story.broken or event.tokens == story.oracle[at : len(story.got)]:
        return []
    story.broken = True
    what = _explain(story, at, event.tokens, stories)
    return [Violation(event.key, f"read {event.tokens[:8]} at position {at}: {what}")]


def _frame(story: _Story, event: Frame, stories: Mapping[str, _Story]) -> list[Violation]:
    """Late frames and those of the dead too: each is computed from exactly its prefix."""
    found: list[Violation] = []
    senders = story.senders.setdefault(event.attempt, set())
    senders.add(event.worker)
    if len(senders) == 2:
        found.append(Violation(event.key, f"two workers sent frames of attempt {event.attempt}"))
    last = event.first + len(event.tokens)
    if event.tokens != story.oracle[event.first : last]:
        what = _explain(story, event.first, event.tokens, stories)
        text = f"a frame of attempt {event.attempt} has {event.tokens[:8]} at {event.first}: {what}"
        found.append(Violation(event.key, text))
    return found


def _explain(story: _Story, at: int, tokens: list[int], stories: Mapping[str, _Story]) -> str:
    """How the wrong tokens came about, as far as they tell."""
    n = len(tokens)
    for other in stories.values():
        if other is not story and n > 1 and tokens == other.oracle[at : at + n]:
            return f"the tokens of {other.expected.key}"
    for back in range(1, at + 1):
        if tokens == story.oracle[at - back : at - back + n]:
            return f"a repetition of what stands at {at - back}"
    for ahead in range(1, len(story.oracle) - at):
        if tokens == story.oracle[at + ahead : at + ahead + n]:
            return f"a gap of {ahead} tokens"
    if at + n > len(story.oracle):
        return f"more than the {len(story.oracle)} tokens that there are"
    return f"the oracle has {story.oracle[at : at + n][:8]}"


def _end(story: _Story, event: End) -> list[Violation]:
    story.ends.append(event)
    if len(story.ends) > 1:
        ends = ", ".join(e.reason for e in story.ends)
        return [Violation(event.key, f"{len(story.ends)} terminal events: {ends}")]
    e = story.expected
    if event.reason in NATURAL:
        return _natural(story, event)
    if event.reason not in e.legal | e.must:
        allowed = ", ".join(sorted(e.legal | e.must)) or "none but the natural one"
        text = f"ended as {event.reason} ({event.text}); legal: {allowed}"
        return [Violation(event.key, text)]
    return []


def _natural(story: _Story, event: End) -> list[Violation]:
    oracle, e = story.oracle, story.expected
    natural = "stop" if oracle[-1] == EOS else "length"
    if event.reason != natural:
        return [Violation(event.key, f"ended as {event.reason}; its oracle ends as {natural}")]
    if not story.broken and len(story.got) != len(oracle):
        text = f"ended as {natural} after {len(story.got)} of {len(oracle)} tokens"
        return [Violation(event.key, text)]
    if e.must:
        return [Violation(event.key, f"ended as {natural}; it had to be {sorted(e.must)}")]
    return []


def _whole(story: _Story) -> list[Violation]:
    key, ends, told = story.expected.key, story.ends, story.told
    found: list[Violation] = []
    if not ends and not story.expected.vanished:
        found.append(Violation(key, f"no terminal event; {len(story.got)} tokens came"))
    if len({(t.reason, t.length) for t in told}) > 1:
        found.append(Violation(key, f"told the conductor different ends: {told}"))
    if ends and told and told[0].reason != ends[0].reason:
        text = f"ended as {ends[0].reason}, and told the conductor {told[0].reason}"
        found.append(Violation(key, text))
    if ends and told and told[0].length < len(story.got):
        text = f"told the conductor {told[0].length} tokens and delivered {len(story.got)}"
        found.append(Violation(key, text))
    return found
