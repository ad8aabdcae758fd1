"""Stop strings over text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string, whatever pieces it comes in.

    The stop that is complete first counts (of several that end together, the longest), so the
    result does not depend on how the text was cut. Text that may still become a stop is held back:
    at most the longest stop, less one character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What may be shown of it; after a stop, nothing."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        keep = max(self._overlap(text, s) for s in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and became no stop."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The longest end of `text` that a stop begins with."""
        for n in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:n]):
                return n
        return 0
