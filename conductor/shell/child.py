"""One incarnation of one child process: spawned, heard, ended, reaped.

Spawned by the main thread only: a parent-death signal that the child asks for is tied to the thread
that spawned it. Each child leads its own session, so that a terminal's Ctrl-C and a signal to the
daemon's process group reach the daemon alone, which then decides; and whatever a child started can
be ended with it. Should the daemon vanish, the read end of the death pipe in every child reports
end of file: the daemon holds the only write end.
"""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from conductor.shell.last_words import LastWords
from conductor.shell.line_splitter import LineSplitter

_READ = 1 << 16
_LAST_WORDS = 1 << 20  # bytes still read from a pipe once its process has ended


class DeathPipe:
    """Closes when this process ends, however it ends. `fd` is what children inherit."""

    def __init__(self) -> None:
        self.fd, self._kept = os.pipe()  # both close on exec; `pass_fds` lets `fd` through

    def close(self) -> None:
        for fd in (self.fd, self._kept):
            os.close(fd)


class Child:
    """`on_line(child, text)` for each line of its output, `on_exit(child, returncode)` once, last.

    `on_line` says whether the line counts among its `last_words`. `killed_for`: why `kill` was
    called, or ''.
    """

    def __init__(
        self,
        name: str,
        life: int,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        inherited_fd: int,
        on_line: Callable[["Child", str], bool],
        on_exit: Callable[["Child", int], None],
    ) -> None:
        """Raises `OSError` if it cannot be started."""
        assert threading.current_thread() is threading.main_thread(), "spawn from the main thread"
        self.name = name
        self.life = life
        self.last_words = LastWords()
        self.killed_for = ""
        self._on_line = on_line
        self._on_exit = on_exit
        self._lines = LineSplitter()
        self._loop = asyncio.get_running_loop()
        self._process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=(inherited_fd,),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._pipe: int | None = self._process.stdout.fileno()
        os.set_blocking(self._pipe, False)
        self._loop.add_reader(self._pipe, self._hear)
        self._pidfd = os.pidfd_open(
            self._process.pid
        )  # not reaped yet, so the pid is still its own
        self._loop.add_reader(self._pidfd, self._ended)
        self.running = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self, why: str) -> None:
        """SIGKILL, at once; `why` is what its death will be put down to."""
        self.killed_for = self.killed_for or why
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        if self.running:
            with suppress(ProcessLookupError):  # ended, and about to be reaped
                signal.pidfd_send_signal(self._pidfd, number)

    def _hear(self) -> None:
        if self._pipe is None:
            return
        try:
            data = os.read(self._pipe, _READ)
        except BlockingIOError:
            return
        if not data:
            self._stop_hearing()
        self._tell(self._lines.feed(data))

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            if self._on_line(self, line):
                self.last_words.add(line)

    def _stop_hearing(self) -> None:
        if self._pipe is not None:
            self._loop.remove_reader(self._pipe)
            self._pipe = None
            assert self._process.stdout is not None
            self._process.stdout.close()

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Still a zombie, so its group's number cannot have been given away.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        returncode = self._process.wait()
        self.running = False
        os.close(self._pidfd)
        left = _LAST_WORDS
        while self._pipe is not None and left > 0:
            try:
                data = os.read(self._pipe, _READ)
            except BlockingIOError:
                break
            if not data:
                break
            left -= len(data)
            self._tell(self._lines.feed(data))
        self._tell(self._lines.finish())
        self._stop_hearing()
        self._on_exit(self, returncode)
