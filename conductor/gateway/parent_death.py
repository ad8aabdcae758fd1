"""A gateway never outlives its conductor (P8): a signal from the kernel, and a pipe that closes."""

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """SIGKILL when the thread that spawned this process ends. Call it first thing.

    Best effort: where it can't be had, the pipe still tells.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def watch_death_pipe(fd: int, parent_died: Callable[[], None]) -> None:
    """`fd`: the read end of a pipe whose write end only the parent holds."""
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)

    def readable() -> None:
        try:
            data = os.read(fd, 64)
        except BlockingIOError:
            return
        if not data:
            loop.remove_reader(fd)
            parent_died()

    loop.add_reader(fd, readable)
