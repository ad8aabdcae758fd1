"""The private directory of one daemon: made 0700, held by a lock, cleaned up at exit.

Everything inside is removed only by whoever holds the lock: a second bind on a socket's path would
take its traffic over in silence.
"""

import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from protocol.channel.endpoints import Endpoints
from protocol.errors import ConfigError, PodiumError

_PID_WAIT_S = 0.5


class AlreadyRunning(PodiumError):
    code, fault = "already_running", "operator"


class RuntimeDir:
    """Held from `acquire` until `release` or the end of the process (the kernel drops the lock)."""

    def __init__(self, endpoints: Endpoints, fd: int, made: bool) -> None:
        self.endpoints = endpoints
        self._fd = fd
        self._made = made

    @classmethod
    def acquire(cls, path: Path) -> "RuntimeDir":
        """Raises `AlreadyRunning` naming the owner's pid, or `ConfigError` if the directory cannot
        be used safely."""
        endpoints = Endpoints(path)
        endpoints.stream((1 << 64) - 1)  # the longest address: refuse a long path before making it
        made = _make_private(path)
        directory = cls(endpoints, _lock(endpoints.lock, path), made)
        directory._remove_stale()
        return directory

    def release(self) -> None:
        """Remove what this daemon left, then the lock. Idempotent."""
        if self._fd < 0:
            return
        self._remove_stale()
        self.endpoints.lock.unlink(missing_ok=True)
        if self._made:
            with suppress(OSError):  # somebody put a file there: it is theirs to remove
                self.endpoints.root.rmdir()
        os.close(self._fd)
        self._fd = -1

    def _remove_stale(self) -> None:
        for entry in self.endpoints.root.glob("*.sock"):
            entry.unlink(missing_ok=True)
        self.endpoints.config.unlink(missing_ok=True)
        self.endpoints.gateway.unlink(missing_ok=True)


def _make_private(path: Path) -> bool:
    """True if the directory was made here."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.parent.stat().st_uid
        if owner not in (0, os.getuid()):
            raise ConfigError(
                f"runtime_dir: {path.parent} belongs to user {owner}, who could replace "
                f"{path.name!r} in it: choose another runtime_dir"
            )
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            _check_private(path)
            return False
    except OSError as e:
        raise ConfigError(f"runtime_dir: cannot make {path}: {e.strerror}") from None
    return True


def _check_private(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"runtime_dir: {path} is not a directory")
    if found.st_uid != os.getuid():
        raise ConfigError(f"runtime_dir: {path} belongs to user {found.st_uid}, not to us")
    if stat.S_IMODE(found.st_mode) & 0o077:
        others = [p.name for p in path.iterdir() if p.name != "lock"]
        if others and not (path / "lock").exists():
            raise ConfigError(
                f"runtime_dir: {path} is open to other users and holds other files "
                f"({sorted(others)[0]!r}): choose an empty or a new directory"
            )
        path.chmod(0o700)


def _lock(lock: Path, root: Path) -> int:
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _owner(fd)
            os.close(fd)
            raise AlreadyRunning(
                f"{root} is in use by another podium daemon, pid {pid}: stop it, or give this one "
                "its own name or runtime_dir",
                pid=pid,
            ) from None
        # An owner that just left may have unlinked the file between our open and our lock.
        try:
            same = os.stat(lock).st_ino == os.fstat(fd).st_ino
        except FileNotFoundError:
            same = False
        if same:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd
        os.close(fd)


def _owner(fd: int) -> str:
    """The pid in a lock that somebody else holds; they write it right after locking."""
    until = time.monotonic() + _PID_WAIT_S
    while True:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        if text or time.monotonic() > until:
            return text or "unknown"
        time.sleep(0.01)
