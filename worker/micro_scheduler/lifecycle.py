"""One object's place in its lifecycle table, and the story of how it came there."""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from protocol.errors import IllegalTransition

STORY = 12  # transitions kept per object

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Lifecycle(Generic[S, E]):
    """`table` maps (state, event) to the next state; a missing pair is a bug."""

    __slots__ = ("_story", "_table", "_what", "state")

    def __init__(self, what: str, state: S, table: Mapping[tuple[S, E], S]) -> None:
        self._what = what
        self._table = table
        self._story: deque[tuple[S, E, int]] = deque(maxlen=STORY)
        self.state = state

    def on(self, event: E, step: int = 0) -> S:
        """Take one transition. Raises `IllegalTransition` with the story where there is none."""
        after = self._table.get((self.state, event))
        if after is None:
            raise IllegalTransition(self._what, self.state.name, event.name, self.story())
        if after is not self.state:  # a row that just keeps stepping tells no story
            self._story.append((self.state, event, step))
            self.state = after
        return after

    def story(self) -> list[str]:
        """The last changes of state, oldest first."""
        told: list[str] = []
        for i, (before, event, step) in enumerate(self._story):
            after = self._story[i + 1][0] if i + 1 < len(self._story) else self.state
            told.append(f"{before.name} -{event.name}-> {after.name} (step {step})")
        return told
