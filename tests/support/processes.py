"""Real daemons for tests: started, watched through their stats, and never left behind.

Every wait is bounded and, when it fails, says what was awaited and how the daemon's log ends.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from conductor.observe.stats_socket import read_snapshot
from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.errors import PodiumError
from protocol.stats import ChildStats, Snapshot

T = TypeVar("T")
ROOT = Path(__file__).parents[2]
SERVE = (sys.executable, "-m", "conductor", "serve")
START_S = 120.0
STOP_S = 45.0
POLL_S = 0.05
TAIL = 60  # lines


class Daemon:
    """One daemon process with its own runtime directory. `log` is all that it wrote."""

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path,
        *,
        command: Sequence[str] = SERVE,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        """`folder` takes the configuration and the log. `config` gets a runtime directory of its
        own if it names none: below the system's, whose path is short enough for sockets."""
        self._made: Path | None = None
        if "runtime_dir" not in config:
            self._made = Path(tempfile.mkdtemp(prefix="podium-test-"))
            config = {**config, "runtime_dir": str(self._made / "run")}
        self.endpoints = Endpoints(Path(config["runtime_dir"]))
        self.config = folder / "podium.yaml"
        self.config.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        self._log = folder / "daemon.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self.config), *arguments],
                stdin=stdin,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": _python_path(), **(environment or {})},
                start_new_session=True,  # a group of its own, for tests that signal groups
            )
        self._descendants: list[psutil.Process] = []
        self._network = ZmqNetwork()

    # ---- what it says

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def log_size(self) -> int:
        """Bytes, for `log_lines`."""
        return self._log.stat().st_size

    def log_lines(self, start: int) -> list[dict[str, Any]]:
        """What was logged from that byte on, by a daemon whose `log.format` is json."""
        with self._log.open("rb") as f:
            f.seek(start)
            lines = f.read().decode(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    @property
    def root(self) -> Path:
        return self.endpoints.root

    @property
    def url(self) -> str:
        """The gateway's base URL."""
        return self.endpoints.gateway.read_text(encoding="utf-8").strip()

    def snapshot(self, timeout_s: float = 5.0) -> Snapshot:
        try:
            return read_snapshot(self._network, self.endpoints, timeout_s)
        except PodiumError as e:
            raise AssertionError(self.story(str(e))) from None

    def child(self, name: str) -> ChildStats:
        return next(c for c in self.snapshot()["children"] if c["name"] == name)

    def pages(self) -> dict[str, tuple[int, int]]:
        """Worker → (pages that requests hold or were promised, pages there are)."""
        return {
            w["name"]: (max(w["committed_pages"], w["pages"] - w["load"]["pages_free"]), w["pages"])
            for w in self.snapshot()["machine"]["workers"]
        }

    def story(self, what: str) -> str:
        tail = "\n".join(self.log.splitlines()[-TAIL:])
        status = self.process.poll()
        state = "runs" if status is None else f"ended with {status}"
        return f"{what}\nthe daemon {state}; its log ends:\n{tail}"

    # ---- waiting

    def until(self, get: Callable[[], T | None], what: str, timeout_s: float) -> T:
        """The first true result of `get`; fails at once if the daemon ends."""
        end = time.monotonic() + timeout_s
        while True:
            alive = self.process.poll() is None
            if alive:
                got = get()
                if got:
                    return got
            assert alive, self.story(f"while waiting for {what}, the daemon ended")
            assert time.monotonic() < end, self.story(f"not within {timeout_s:g} s: {what}")
            time.sleep(POLL_S)

    def wait_ready(self, timeout_s: float = START_S) -> "Daemon":
        """Until every child is ready. Remembers the descendants for `wait_gone`."""
        self.until(lambda: self._try_snapshot("ready"), "the daemon to be ready", timeout_s)
        self.descendants()
        return self

    def wait_child(self, name: str, not_pid: int, timeout_s: float = START_S) -> ChildStats:
        """Until this child is ready again in another process than `not_pid`."""

        def again() -> ChildStats | None:
            c = self.child(name)
            return c if c["state"] == "ready" and c["pid"] != not_pid else None

        return self.until(again, f"{name} to be back (was pid {not_pid})", timeout_s)

    async def wait_pages_free(self, timeout_s: float = 30.0) -> None:
        """Until nothing is open and no worker holds a page for a request."""

        def at_rest() -> bool:
            held = [h for h, _ in self.pages().values()]
            return self.snapshot()["machine"]["requests"]["open"] == 0 and not any(held)

        def wait() -> None:
            try:
                self.until(at_rest, "all pages to be free", timeout_s)
            except AssertionError as e:
                machine = self.snapshot()["machine"]
                raise AssertionError(f"{e}\n{json.dumps(machine, indent=1)}") from None

        await asyncio.to_thread(wait)

    def _try_snapshot(self, phase: str) -> Snapshot | None:
        with suppress(PodiumError):
            snapshot = read_snapshot(self._network, self.endpoints, 0.5)
            if snapshot["conductor"]["phase"] == phase:
                return snapshot
        return None

    # ---- ending

    def descendants(self) -> list[psutil.Process]:
        """Those alive now; also remembered."""
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children(recursive=True)
            self._descendants += [p for p in found if p not in self._descendants]
        return [p for p in self._descendants if _alive(p)]

    def wait_gone(self, timeout_s: float) -> None:
        """Until no descendant that was ever seen is left."""
        end = time.monotonic() + timeout_s
        while left := [p for p in self._descendants if _alive(p)]:
            told = [f"{p.pid} {' '.join(_command(p))}" for p in left]
            assert time.monotonic() < end, self.story(f"left after {timeout_s:g} s: {told}")
            time.sleep(POLL_S)

    def signal(self, number: signal.Signals) -> None:
        self.descendants()
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """The exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story(f"no exit within {timeout_s:g} s")) from None

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        """Whatever happened, nothing is left."""
        self.descendants()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for p in self._descendants:
            with suppress(psutil.NoSuchProcess):
                p.kill()
        self._network.close()
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


@contextmanager
def running_daemon(config: Mapping[str, Any], folder: Path) -> Iterator[Daemon]:
    """`podium serve` with this configuration, ready; stopped and cleaned up at the end."""
    daemon = Daemon(config, folder)
    try:
        yield daemon.wait_ready()
        assert daemon.stop() == 0, daemon.story("it did not end well")
        daemon.wait_gone(2.0)
    finally:
        daemon.close()


def _python_path() -> str:
    """This tree first; whatever else this process was given stays."""
    given = os.environ.get("PYTHONPATH")
    return f"{ROOT}{os.pathsep}{given}" if given else str(ROOT)


def _alive(p: psutil.Process) -> bool:
    try:
        return p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(p: psutil.Process) -> list[str]:
    try:
        return p.cmdline()
    except psutil.Error:
        return ["?"]
