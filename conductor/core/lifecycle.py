"""One table per lifecycle, `(state, event) -> state`. A missing pair is a bug, with its story."""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from protocol.errors import IllegalTransition

STORY = 16  # transitions kept per object

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Lifecycle(Generic[S, E]):
    """Where one object stands, and how it came there."""

    __slots__ = ("_story", "_table", "_what", "state")

    def __init__(self, what: str, state: S, table: Mapping[tuple[S, E], S]) -> None:
        self._what, self._table = what, table
        self._story: list[tuple[S, E, S, object]] = []
        self.state = state

    def on(self, event: E, note: object = "") -> S:
        """Take one transition; raises `IllegalTransition` with the last ones where none exists."""
        after = self._table.get((self.state, event))
        if after is None:
            raise IllegalTransition(self._what, self.state.name, event.name, self.story())
        if len(self._story) == STORY:
            del self._story[0]
        self._story.append((self.state, event, after, note))
        self.state = after
        return after

    def story(self) -> list[str]:
        """The last transitions, oldest first. Written out only when somebody asks."""
        return [
            f"{a.name} -{e.name}-> {b.name}{f' ({note})' if note != '' else ''}"
            for a, e, b, note in self._story
        ]
