"""What a child said before it ended, for whoever must find out why."""

from collections import deque

LINES = 30
_CRASH = "Fatal Python error"  # how faulthandler begins: the cause, then every thread's stack


class LastWords:
    """The last 30 lines; of a crash report its first ones, because the cause stands on top."""

    def __init__(self) -> None:
        self._tail: deque[str] = deque(maxlen=LINES)
        self._crash: list[str] = []

    def add(self, line: str) -> None:
        if line.startswith(_CRASH) or self._crash:
            if len(self._crash) < LINES:
                self._crash.append(line)
        else:
            self._tail.append(line)

    def lines(self) -> list[str]:
        room = LINES - len(self._crash)
        return [*list(self._tail)[len(self._tail) - min(room, len(self._tail)) :], *self._crash]
