"""The lifecycle of a stream at its owner, as one table (docs/wire.md, "States").

        END_COUNTED            every count reached, or any other end
    open ─────────▶ ending ─────────────────────────────────────▶ closed
     ▲ ╲               │                                            ▲
     │  ╲──────────────┼─────────────── TERMINAL ───────────────────╯
     ╰──── REBASE ─────╯

A closed stream takes late messages and stays closed; a second terminal event is the one thing
that can't happen to it, so that pair is missing.
"""

from enum import Enum

from protocol.errors import IllegalTransition


class State(Enum):
    OPEN = "open"
    ENDING = "ending"  # the conductor said how long the stream is; tokens are still on their way
    CLOSED = "closed"


class Change(Enum):
    END_COUNTED = "End with counts"
    REBASE = "Rebase"
    TERMINAL = "terminal event"


TRANSITIONS: dict[tuple[State, Change], State] = {
    (State.OPEN, Change.END_COUNTED): State.ENDING,
    (State.ENDING, Change.END_COUNTED): State.ENDING,  # repeated after a new session (rule 20)
    (State.OPEN, Change.REBASE): State.OPEN,
    (State.ENDING, Change.REBASE): State.OPEN,
    (State.OPEN, Change.TERMINAL): State.CLOSED,
    (State.ENDING, Change.TERMINAL): State.CLOSED,
    (State.CLOSED, Change.END_COUNTED): State.CLOSED,
    (State.CLOSED, Change.REBASE): State.CLOSED,
}


def after(state: State, change: Change, what: str, story: list[str]) -> State:
    """The next state; raises `IllegalTransition` with the stream's story."""
    try:
        return TRANSITIONS[state, change]
    except KeyError:
        raise IllegalTransition(what, state.value, change.value, story) from None
