"""A child never outlives the process that started it (P8). Uses nothing heavy: it runs first.

Two ways, because each has a hole: the parent-death signal is tied to the thread that spawned us and
is set only after we began to run; the death pipe needs somebody who polls it.
"""

import ctypes
import os
import select
import signal

_PR_SET_PDEATHSIG = 1


class ParentGone(Exception):
    """The parent ended before we could tie ourselves to it."""


def tie_to_parent(death_fd: int | None) -> None:
    """Ask the kernel for SIGKILL when the parent ends. Raises `ParentGone` if it has already.

    `death_fd` is the read end of a pipe that only the parent can write to, or None.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent or (death_fd is not None and hung_up(death_fd)):
        raise ParentGone(f"process {parent} ended while this one started")


def hung_up(fd: int) -> bool:
    """The other side of the pipe is gone. Raises OSError where `fd` is no open descriptor."""
    os.fstat(fd)
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))


def at_end(fd: int) -> bool:
    """As `hung_up`, for a pipe that was reported readable; what is written to it is swallowed."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 4096) == b""
    except BlockingIOError:
        return False
