"""One table per lifecycle, `(state, event) -> state`; a missing pair is a bug with a story."""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from protocol.errors import IllegalTransition

STORY = 16  # changes of state kept per object

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Lifecycle(Generic[S, E]):
    """Where one object stands, and how it came there. `what` names it in errors."""

    __slots__ = ("_story", "_table", "_what", "state")

    def __init__(self, what: str, state: S, table: Mapping[tuple[S, E], S]) -> None:
        self._what, self._table = what, table
        self._story: deque[tuple[S, E, S, object]] = deque(maxlen=STORY)
        self.state = state

    def on(self, event: E, note: object = "") -> S:
        """Take one transition; raises `IllegalTransition` with the last changes where none exists.

        `note` is kept as it is and written out only when somebody asks for the story.
        """
        before = self.state
        after = self._table.get((before, event))
        if after is None:
            raise IllegalTransition(self._what, before.name, event.name, self.story())
        if after is not before:  # what just keeps stepping tells no story
            self._story.append((before, event, after, note))
            self.state = after
        return after

    def story(self) -> list[str]:
        """The last changes of state, oldest first."""
        return [
            f"{a.name} -{e.name}-> {b.name}{f' ({note})' if note != '' else ''}"
            for a, e, b, note in self._story
        ]
