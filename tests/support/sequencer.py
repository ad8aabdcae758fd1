"""Sequencer: a test holds and lets go of named points that threads pass, and so forces their order.

A thread calls `gate(name)` at a point; the cpu-async device does so for everything on its streams.
The test holds patterns ("compute:*", as of fnmatch), lets points pass one by one or all, waits
until a point was reached, and reads the trace of what passed in what order. Every wait is bounded;
one that never ends raises `SequenceBroken` with what is held, who waits, and the last of the trace.
"""

import fnmatch
import threading
from collections.abc import Callable

BOUND_S = 20.0


class SequenceBroken(AssertionError):
    pass


class Sequencer:
    """`bound_s`: how long any one wait may last."""

    def __init__(self, bound_s: float = BOUND_S) -> None:
        self._bound_s = bound_s
        self._cv = threading.Condition()
        self._held: dict[str, int] = {}  # pattern → points that may still pass it
        self._rules: list[tuple[str, Callable[[str], bool]]] = []
        self._waiting: list[str] = []
        self._reached: list[str] = []
        self._passed: list[str] = []
        self._open = False

    # ---- threads under test

    def gate(self, name: str) -> None:
        """Pass, or wait until the test lets this point go."""
        with self._cv:
            self._reached.append(name)
            self._waiting.append(name)
            self._cv.notify_all()
            try:
                self._await(lambda: self._may_pass(name), f"{name!r} to be let go")
            finally:
                self._waiting.remove(name)
            self._take(name)
            self._passed.append(name)
            self._cv.notify_all()

    # ---- the test

    def hold(self, *patterns: str) -> None:
        """Whoever comes to such a point waits there from now on."""
        with self._cv:
            for p in patterns:
                self._held[p] = 0

    def release(self, *patterns: str) -> None:
        """Undo a `hold` of the same pattern."""
        with self._cv:
            for p in patterns:
                del self._held[p]
            self._cv.notify_all()

    def let(self, pattern: str, points: int = 1) -> None:
        """Let this many points pass a held pattern."""
        with self._cv:
            self._held[pattern] += points
            self._cv.notify_all()

    def rule(self, pattern: str, may_pass: Callable[[str], bool]) -> None:
        """Such points wait until `may_pass(name)`; what else changes its answer calls `changed`."""
        with self._cv:
            self._rules.append((pattern, may_pass))

    def changed(self) -> None:
        with self._cv:
            self._cv.notify_all()

    def open(self) -> None:
        """Nothing is held any more, for good: the end of a test."""
        with self._cv:
            self._open = True
            self._cv.notify_all()

    def until_reached(self, pattern: str, times: int = 1) -> None:
        """Until threads have come to such points `times` times in all, held there or not."""
        with self._cv:
            self._await(lambda: _count(self._reached, pattern) >= times, f"{pattern!r} × {times}")

    def until_passed(self, pattern: str, times: int = 1) -> None:
        with self._cv:
            self._await(
                lambda: _count(self._passed, pattern) >= times, f"{pattern!r} × {times} to pass"
            )

    def until(self, reached: Callable[[], bool], what: str) -> None:
        """`reached` is asked whenever a point is reached or passed, and after `changed()`."""
        with self._cv:
            self._await(reached, what)

    @property
    def trace(self) -> list[str]:
        """The points that were passed, in order."""
        with self._cv:
            return list(self._passed)

    def passed(self, pattern: str) -> int:
        with self._cv:
            return _count(self._passed, pattern)

    def reached(self, pattern: str) -> int:
        with self._cv:
            return _count(self._reached, pattern)

    def waiting(self, pattern: str) -> bool:
        """Whether a thread is held at such a point now."""
        with self._cv:
            return _count(self._waiting, pattern) > 0

    # ---- inside

    def _may_pass(self, name: str) -> bool:
        if self._open:
            return True
        held = [n for p, n in self._held.items() if fnmatch.fnmatchcase(name, p)]
        ruled = (ask(name) for p, ask in self._rules if fnmatch.fnmatchcase(name, p))
        return all(n > 0 for n in held) and all(ruled)

    def _take(self, name: str) -> None:
        for p, n in self._held.items():
            if n and fnmatch.fnmatchcase(name, p):
                self._held[p] = n - 1

    def _await(self, reached: Callable[[], bool], what: str) -> None:
        if not self._cv.wait_for(lambda: self._open or reached(), self._bound_s):
            raise SequenceBroken(
                f"waited {self._bound_s:g} s for {what}\n"
                f"  held: {self._held}; rules: {[p for p, _ in self._rules]}\n"
                f"  threads wait at: {self._waiting}\n"
                f"  passed last: {self._passed[-12:]}"
            )


def _count(names: list[str], pattern: str) -> int:
    return sum(fnmatch.fnmatchcase(n, pattern) for n in names)
