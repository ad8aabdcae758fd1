"""Bytes of a pipe -> lines of text, bounded however long a line is."""

_MAX_LINE = 8192  # bytes


class LineSplitter:
    """A line ends at a newline or a carriage return, or where it reaches the bound."""

    def __init__(self, limit: int = _MAX_LINE) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Whole lines, without their ends; empty ones are left out."""
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        while len(self._rest) > self._limit:
            lines.append(self._rest[: self._limit])
            self._rest = self._rest[self._limit :]
        return [_text(part) for line in lines for part in self._cut(line) if part.strip()]

    def finish(self) -> list[str]:
        """The last line, if it has no end."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest.strip() else []

    def _cut(self, line: bytes) -> list[bytes]:
        return [line[i : i + self._limit] for i in range(0, len(line), self._limit)]


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()
