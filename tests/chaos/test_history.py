"""The history checker finds every violation that is planted, and nothing in a clean history."""

import pytest

from tests.chaos.history import End, Event, Expected, Frame, Tokens, Told, check
from worker.models.reference_hash import reference_tokens

PROMPT, OTHER = [40, 41, 42], [90, 91]
N = 10
ORACLE, FOREIGN = reference_tokens(PROMPT, N), reference_tokens(OTHER, N)
A = Expected("a", PROMPT, N)
B = Expected("b", OTHER, N)
DONE = End("a", "length")


def found(*events: Event, a: Expected = A) -> list[str]:
    quiet = [Tokens("b", FOREIGN), End("b", "length")]
    return [f"{key}: {text}" for key, text in check([a, B], [*events, *quiet])]


def chunks(*sizes: int) -> list[Event]:
    events: list[Event] = []
    at = 0
    for n in sizes:
        events.append(Tokens("a", ORACLE[at : at + n]))
        at += n
    return events


def test_a_clean_history() -> None:
    frames = [Frame("a", 7, 1, i, ORACLE[i : i + 1]) for i in range(4)]
    again = [Frame("a", 8, 2, i, ORACLE[i : i + 2]) for i in (2, 4, 6, 8)]  # a late one, a repeat
    told = [Told("a", "length", N)] * 2
    assert found(*frames, *again, *chunks(1, 3, 6), DONE, *told) == []


def test_ends_that_are_legal() -> None:
    cancelled = Expected("a", PROMPT, N, legal=frozenset({"cancelled"}))
    assert found(*chunks(4), End("a", "cancelled"), a=cancelled) == []
    assert found(*chunks(N), DONE, a=cancelled) == []
    poison = Expected("a", PROMPT, N, must=frozenset({"quarantined"}))
    assert found(*chunks(3), End("a", "quarantined"), a=poison) == []
    assert found(*chunks(3), a=Expected("a", PROMPT, N, vanished=True)) == []


def test_a_stop_at_eos() -> None:
    eos = Expected("a", PROMPT, 200, eos_every=20)
    tokens = reference_tokens(PROMPT, 200, eos_every=20)
    assert len(tokens) < 200
    assert found(Tokens("a", tokens), End("a", "stop"), a=eos) == []
    assert "its oracle ends as stop" in found(Tokens("a", tokens), DONE, a=eos)[0]


VIOLATIONS: dict[str, tuple[list[Event], str]] = {
    "no end": (chunks(4), "a: no terminal event; 4 tokens came"),
    "two ends": ([*chunks(N), DONE, DONE], "a: 2 terminal events: length, length"),
    "tokens after the end": ([*chunks(N), DONE, Tokens("a", [1])], "a: 1 tokens after the end"),
    "a gap": ([*chunks(4), Tokens("a", ORACLE[5:])], "a gap of 1 tokens"),
    "a repetition": ([*chunks(4), Tokens("a", ORACLE[3:5])], "a repetition of what stands at 3"),
    "another's tokens": ([*chunks(4), Tokens("a", FOREIGN[4:7])], "the tokens of b"),
    "a wrong token": ([*chunks(4), Tokens("a", [ORACLE[4] ^ 1])], "at position 4: the oracle has"),
    "too many tokens": ([Tokens("a", [*ORACLE, 33])], "more than the 10 tokens that there are"),
    "an early end": ([*chunks(6), DONE], "a: ended as length after 6 of 10 tokens"),
    "another's end": ([*chunks(N), End("a", "stop")], "its oracle ends as length"),
    "an end nobody asked for": (
        [*chunks(4), End("a", "cancelled", "why")],
        "a: ended as cancelled (why); legal: none but the natural one",
    ),
    "a failure": ([End("a", "worker_lost")], "a: ended as worker_lost"),
    "a stranger": ([*chunks(N), DONE, Tokens("c", [1])], "c: a Tokens for nobody's request"),
    "a frame of wrong tokens": ([Frame("a", 7, 1, 3, [1])], "a frame of attempt 1 has [1] at 3"),
    "a frame of another's": ([Frame("a", 7, 1, 3, FOREIGN[3:5])], "the tokens of b"),
    "two senders": (
        [Frame("a", 7, 1, 0, ORACLE[:1]), Frame("a", 8, 1, 1, ORACLE[1:2])],
        "a: two workers sent frames of attempt 1",
    ),
    "two accounts of an end": (
        [*chunks(N), DONE, Told("a", "length", N), Told("a", "cancelled", N)],
        "a: told the conductor different ends",
    ),
    "another account": (
        [*chunks(N), DONE, Told("a", "done", N)],
        "a: ended as length, and told the conductor done",
    ),
    "an account of less": (
        [*chunks(N), DONE, Told("a", "length", 4)],
        "a: told the conductor 4 tokens and delivered 10",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_planted_violation_is_found(name: str) -> None:
    events, text = VIOLATIONS[name]
    told = found(*events)
    assert any(text in line for line in told), told


def test_what_had_to_fail_and_did_not() -> None:
    poison = Expected("a", PROMPT, N, must=frozenset({"failed"}))
    assert "it had to be ['failed']" in found(*chunks(N), DONE, a=poison)[0]


def test_one_contradiction_is_told_once() -> None:
    told = found(*chunks(4), Tokens("a", ORACLE[5:6]), Tokens("a", ORACLE[6:]), DONE)
    assert len(told) == 1
