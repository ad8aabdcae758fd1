"""Mailbox: how a thread that polls descriptors is told something by other threads.

Any thread puts; one thread takes. Items come out in the order they were put in, and what one thread
put before it handed work to a second is seen before what the second puts. `put` never waits. After
`close`, what is put is dropped.
"""

import os
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[T] = deque()
        self._open = True
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Readable while there may be items."""
        return self._fd

    def put(self, item: T) -> None:
        with self._lock:
            if not self._open:
                return
            self._items.append(item)
            if len(self._items) == 1:
                os.eventfd_write(self._fd, 1)

    def wake(self) -> None:
        """Make the descriptor readable without an item; safe in a signal handler."""
        if self._open:
            os.eventfd_write(self._fd, 1)

    def take(self) -> list[T]:
        """Everything there is, without waiting."""
        with self._lock:
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                return []
            got = list(self._items)
            self._items.clear()
            return got

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                self._items.clear()
                os.close(self._fd)

    def statistics(self) -> dict[str, int]:
        return {"waiting": len(self._items)}
