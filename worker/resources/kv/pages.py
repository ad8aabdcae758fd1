"""PagePool: which pages are free. Host side only."""

import numpy as np
import numpy.typing as npt

from protocol.errors import InvariantViolation

Ints = npt.NDArray[np.int64]

SINK = 0
"""Page 0: padding reads and writes go there; it is never handed out."""


class PagePool:
    """Pages 1 … `usable`, last freed first. `total` counts the sink too."""

    def __init__(self, usable: int) -> None:
        if usable < 1:
            raise ValueError(f"a page pool needs at least 1 page, got {usable}")
        self.usable = usable
        self.total = usable + 1
        self._stack: Ints = np.arange(usable, 0, -1, dtype=np.int64)
        self.free = usable

    def take(self, n: int) -> Ints:
        """`n` pages in the order taken. ValueError where fewer are free: ask `free` first."""
        if n > self.free:
            raise ValueError(f"{n} pages asked, {self.free} free of {self.usable}")
        self.free -= n
        return self._stack[self.free : self.free + n][::-1].copy()

    def give(self, pages: Ints) -> None:
        """Take back pages, given in the order taken, so that undoing a `take` restores the pool."""
        n = len(pages)
        if self.free + n > self.usable:
            raise InvariantViolation(
                f"{n} pages given back with {self.free} free of {self.usable}", pages=pages.tolist()
            )
        self._stack[self.free : self.free + n] = pages[::-1]
        self.free += n

    def free_pages(self) -> Ints:
        """The free pages, next to be taken last."""
        return self._stack[: self.free].copy()

    def check(self, used: Ints) -> None:
        """Free and used pages together are each page but the sink, exactly once."""
        if self.free + len(used) != self.total - 1:
            raise InvariantViolation(
                f"pages: {self.free} free + {len(used)} used is not {self.total} total - 1 sink",
                free=self.free,
                used=len(used),
                total=self.total,
            )
        every = np.sort(np.concatenate([self.free_pages(), used]))
        if not np.array_equal(every, np.arange(1, self.total)):
            raise InvariantViolation("pages: one is both free and used, or held twice")
