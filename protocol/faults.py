"""Fault points: named places in every thread and link where a test makes this process misbehave.

Off, a point is one attribute that is None. `install`, once at a process's start, arms the points
that the configuration's `faults` name; what a fault does is one of `ACTIONS`. For tests only.

    _TURN = faults.point("worker.main")
    ...
    if _TURN.act is not None:
        _TURN.act()
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

POINTS = {
    "worker.main": "main thread, before each turn waits",
    "worker.control.receive": "main thread, before each frame of the conductor is read",
    "worker.control.send": "main thread, before each message to the conductor",
    "worker.gpu.prepare": "GPU thread, before a step is prepared",
    "worker.gpu.launch": "GPU thread, after the preparation, before the launch",
    "worker.gpu.commit": "GPU thread, after the commit, before the outputs are collected",
    "worker.postprocess.readback": "postprocess thread, before a step's tokens are read back",
    "worker.postprocess.frames": "postprocess thread, before a step's frames are made",
    "worker.postprocess.tell": "postprocess thread, frames are sent, main was not told yet",
    "worker.stream.send": "postprocess thread, before frames go to an owner's socket",
    "worker.stream.receive": "postprocess thread, before each frame of an owner is read",
    "gateway.request": "gateway, a request has come in",
    "gateway.event": "gateway, before each event of a streamed answer",
    "conductor.receive": "conductor, before each frame of a peer is read",
    "conductor.execute": "conductor, before each command of the core is done",
}
ACTIONS = {
    "raise": "raises PlantedFault",
    "memory": "raises MemoryError",
    "exit": "ends the process at once, status 70",
    "segv": "the process ends by SIGSEGV",
    "kill": "the process ends by SIGKILL, as the kernel's out-of-memory killer does it",
    "slow": "this thread sleeps for `ms`",
    "hang": "this thread sleeps for ever, without the GIL",
    "hang_gil": "this thread sleeps for ever and keeps the GIL",
}
CRASHES = ("exit", "segv", "kill")
HANGS = ("hang", "hang_gil")
EXIT_STATUS = 70


class PlantedFault(RuntimeError):
    pass


class Point:
    """`act` is None, or what happens whenever a thread comes past."""

    __slots__ = ("act", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.act: Callable[[], None] | None = None


class Spec(Protocol):
    """`protocol.config.FaultConfig`."""

    @property
    def point(self) -> str: ...
    @property
    def action(self) -> str: ...
    @property
    def where(self) -> str: ...
    @property
    def after(self) -> int: ...
    @property
    def every(self) -> int: ...
    @property
    def times(self) -> int: ...
    @property
    def ms(self) -> int: ...
    @property
    def once_file(self) -> str: ...
    @property
    def when_file(self) -> str: ...


_points = {name: Point(name) for name in POINTS}


def point(name: str) -> Point:
    """The one object of this name; `KeyError` if `POINTS` lacks it."""
    return _points[name]


def install(faults: Iterable[Spec], process: str) -> None:
    """Arm this process's points, and disarm all others. `process`: a worker's name, "gateway" or
    "conductor", which a fault's `where` is compared with."""
    armed: dict[str, list[_Armed]] = {}
    for f in faults:
        if f.where in ("", process):
            armed.setdefault(f.point, []).append(_Armed(f))
    for name, p in _points.items():
        p.act = _both(armed[name]) if name in armed else None


def perform(action: str, where: str, ms: int = 0) -> None:
    """Do it, here and now. Returns only from "slow"."""
    _say(f"planted fault: {action} in {where}")
    match action:
        case "slow":
            time.sleep(ms / 1000)
            return
        case "memory":
            raise MemoryError(f"planted in {where}")
        case "exit":
            os._exit(EXIT_STATUS)
        case "segv" | "kill":
            number = signal.SIGSEGV if action == "segv" else signal.SIGKILL
            signal.pthread_kill(threading.get_ident(), number)
            threading.Event().wait()
        case "hang":
            threading.Event().wait()
        case "hang_gil":
            sleep = ctypes.PyDLL(None).sleep  # a PyDLL's functions run with the GIL held
            while True:
                sleep(1 << 30)
        case _:
            raise PlantedFault(f"planted in {where}")


# ---- inside


class _Armed:
    """One fault and how often a thread has come past it."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._passed = 0
        self._fired = 0

    def __call__(self) -> None:
        f = self._spec
        self._passed += 1
        turn = self._passed - f.after
        if turn <= 0 or (turn - 1) % f.every or (f.times and self._fired >= f.times):
            return
        if f.when_file and not _removed(f.when_file):
            return
        if f.once_file and not _created(f.once_file):
            return
        self._fired += 1
        perform(f.action, f.point, f.ms)


def _both(armed: list[_Armed]) -> Callable[[], None]:
    if len(armed) == 1:
        return armed[0]

    def act() -> None:
        for each in armed:
            each()

    return act


def _removed(path: str) -> bool:
    try:
        Path(path).unlink()
    except FileNotFoundError:
        return False
    return True


def _created(path: str) -> bool:
    """Of all processes, one creates it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _say(text: str) -> None:
    """Past every buffer: the next moment may be the process's last."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        return  # nobody listens; the fault is what matters
