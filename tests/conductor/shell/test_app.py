"""The daemon with fake children: phases, signals, supervision, exit statuses. Real processes."""

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.channel.zeromq import ZmqNetwork
from protocol.messages import Hello
from protocol.session import Session
from protocol.stats import Snapshot
from tests.support.processes import ROOT, Daemon

pytestmark = pytest.mark.processes

DEPLOYMENT = (sys.executable, str(Path(ROOT, "tests/support/fake_deployment.py")))
CONFIG: dict[str, Any] = {
    "name": "fake",
    "models": {"reference": {"kind": "reference"}},
    "workers": [{"name": "w0"}, {"name": "w1"}],
    "supervision": {"backoff_ms": 5, "backoff_max_ms": 20, "max_restarts": 3, "drain_s": 5},
}
Start = Callable[..., Daemon]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    daemons: list[Daemon] = []

    def start(*modes: str, **more: Any) -> Daemon:
        folder = tmp_path / str(len(daemons))
        folder.mkdir()
        process = {k: more.pop(k) for k in ("command", "environment", "stdin") if k in more}
        process.setdefault("command", DEPLOYMENT)
        daemons.append(Daemon({**CONFIG, **more}, folder, arguments=modes or ("good",), **process))
        return daemons[-1]

    yield start
    for d in daemons:
        d.close()


def test_it_gets_ready_says_where_and_stops_on_sigterm(start: Start) -> None:
    d = start().wait_ready()
    s = d.snapshot()
    assert [(c["name"], c["state"], c["restarts"]) for c in s["children"]] == [
        ("w0", "ready", 0), ("w1", "ready", 0), ("gateway", "ready", 0),
    ]  # fmt: skip
    assert s["conductor"]["pid"] == d.process.pid
    assert s["gateway_url"] == "http://127.0.0.1:1"
    assert sorted(w["name"] for w in s["machine"]["workers"]) == ["w0", "w1"]
    assert s["bugs"] == 0
    assert "ready: http://127.0.0.1:1 models=reference" in d.log
    assert d.stop() == 0
    d.wait_gone(1.0)
    assert not d.root.exists(), "the runtime directory was left behind"
    assert "ended" not in d.log, d.log


def test_a_signal_to_the_whole_group_equals_one(start: Start) -> None:
    d = start(log={"level": "debug"}).wait_ready()
    d.descendants()
    os.killpg(d.process.pid, signal.SIGINT)
    assert d.wait() == 0, d.story("a group's SIGINT is one SIGINT")
    ends = [line for line in d.log.splitlines() if " ended why=" in line]
    assert len(ends) == 3
    assert all("why='exit status 0'" in line for line in ends), d.log
    d.wait_gone(1.0)


def test_ctrl_c_at_a_terminal_is_one_signal(start: Start) -> None:
    """The launcher makes the terminal its own, as a shell's foreground job has it."""
    ours, theirs = pty.openpty()
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    launcher = (
        sys.executable,
        "-c",
        f"{take}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
    )
    d = start(command=(*launcher, DEPLOYMENT[1]), stdin=theirs).wait_ready()
    d.descendants()
    os.write(ours, b"\x03")
    assert d.wait() == 0, d.story("Ctrl-C is one SIGINT")
    assert "SIGINT: draining" in d.log
    d.wait_gone(1.0)
    for fd in (ours, theirs):
        os.close(fd)


def test_a_second_signal_stops_at_once(start: Start) -> None:
    d = start("stubborn").wait_ready()
    d.signal(signal.SIGTERM)
    d.until(lambda: "SIGTERM: draining" in d.log, "the drain to begin", 10)
    before = time.monotonic()
    d.signal(signal.SIGINT)
    assert d.wait(5) == 128 + signal.SIGINT
    assert time.monotonic() - before < 5  # children that ignore everything get no say
    d.wait_gone(1.0)


def test_children_that_ignore_exit_are_killed_after_their_grace(start: Start) -> None:
    d = start("stubborn").wait_ready()
    assert d.stop() == 0
    d.wait_gone(1.0)


def test_a_killed_conductor_leaves_nobody(start: Start) -> None:
    d = start("stubborn", "stubborn").wait_ready()
    assert len(d.descendants()) == 3
    d.signal(signal.SIGKILL)
    d.wait()
    d.wait_gone(2.0)
    again = start(runtime_dir=str(d.root)).wait_ready()  # stale lock and sockets are no obstacle
    assert again.stop() == 0


def test_a_second_daemon_names_the_first(start: Start) -> None:
    d = start().wait_ready()
    second = start(runtime_dir=str(d.root))
    assert second.wait() == 75
    assert f"in use by another podium daemon, pid {d.process.pid}" in second.log
    assert d.snapshot()["conductor"]["pid"] == d.process.pid
    assert d.stop() == 0


def test_a_killed_worker_is_replaced_and_the_gateway_too(start: Start) -> None:
    d = start().wait_ready()
    for name in ("w0", "gateway"):
        pid = d.child(name)["pid"]
        os.kill(pid, signal.SIGKILL)
        back = d.wait_child(name, pid, 20)
        assert (back["restarts"], back["last_exit"]) == (1, "ended by SIGKILL")

    def settled() -> Snapshot | None:
        s = d.snapshot()
        m = s["machine"]
        there = (len(m["workers"]), len(m["owners"])) == (2, 1)
        return s if there and s["gateway_url"] else None

    s = d.until(settled, "both to be known to the core", 10)
    assert s["conductor"]["phase"] == "ready"
    assert s["machine"]["counters"]["workers_lost"] == 1
    assert "its process ended: ended by SIGKILL" in d.log, d.story("learnt by silence only")
    assert d.stop() == 0


@pytest.mark.parametrize("mode", ["fail", "crash"])
def test_a_crash_loop_is_bounded_and_named(start: Start, mode: str) -> None:
    d = start(mode)
    assert d.wait(30) == 1
    words = {"fail": "cannot start: mode fail", "crash": "about to crash"}[mode]
    assert "giving up: worker w" in d.log
    assert "exit status 3; it ended again after 3 restarts within 300 s; its last words:" in d.log
    assert words in d.log.split("its last words:")[1]
    d.wait_gone(1.0)


def test_a_childs_configuration_error_ends_the_daemon_with_78(start: Start) -> None:
    d = start("config")
    assert d.wait(30) == 78
    assert "its configuration cannot be used" in d.log
    assert "restart=" not in d.log
    d.wait_gone(1.0)


def test_a_start_that_takes_too_long_is_one_more_failure(start: Start) -> None:
    d = start("slow", supervision={"start_timeout_s": 1, "max_restarts": 0, "drain_s": 1})
    assert d.wait(30) == 1
    assert "killed: not ready 1 s after its start" in d.log


def test_stopping_while_starting(start: Start) -> None:
    d = start("slow")
    d.until(lambda: "gateway starts" in d.log, "the children to start", 20)
    assert d.stop() == 0
    d.wait_gone(1.0)


def test_systemd_hears_of_every_phase(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(20)
        d = start(environment={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        said: list[str] = []

        def hear(what: str) -> None:
            while what not in said:
                said.append(listener.recv(256).decode().partition("\n")[0])

        hear("READY=1")
        assert "EXTEND_TIMEOUT_USEC=15000000" in said
        assert d.snapshot()["conductor"]["phase"] == "ready"
        hear("WATCHDOG=1")
        d.signal(signal.SIGTERM)
        hear("STOPPING=1")
        assert d.wait() == 0


def test_any_bytes_at_the_sockets_are_counted(start: Start) -> None:
    d = start().wait_ready()
    network = ZmqNetwork()
    for address in (d.endpoints.control, d.endpoints.stats):
        channel = network.connect(address)
        for frame in (b"", b"\xc1", b"snapsho", b"\x95\x01\x02\x03\x04\x05", bytes(range(256))):
            channel.send(frame)
    d.until(
        lambda: sum(d.snapshot()["links"]["dropped"].values()) == 5, "5 frames to be counted", 10
    )
    assert d.snapshot()["bugs"] == 0
    network.close()
    assert d.stop() == 0


def test_the_socket_of_an_owner_that_vanished_is_removed(start: Start) -> None:
    d = start().wait_ready()
    network = ZmqNetwork()
    stream = network.bind(d.endpoints.stream(5))
    path = d.endpoints.stream_path(5)
    assert path.exists()
    control = network.connect(d.endpoints.control)
    control.send(Session().stamp(Hello("client", "c", 5, [1], d.endpoints.stream(5))))
    d.until(lambda: len(d.snapshot()["machine"]["owners"]) == 2, "the client to be known", 10)
    d.until(lambda: len(d.snapshot()["machine"]["owners"]) == 1, "its silence to be noticed", 20)
    d.until(lambda: not path.exists(), "its socket to be removed", 5)
    stream.close()
    network.close()
    assert d.stop() == 0


def test_the_command_shows_it(start: Start) -> None:
    d = start().wait_ready()
    shown = subprocess.run(
        [sys.executable, "-m", "conductor", "stats", "--runtime-dir", str(d.root)],
        capture_output=True, text=True, timeout=60, check=True, cwd=ROOT,
    )  # fmt: skip
    assert f"fake  ready  pid {d.process.pid}" in shown.stdout
    assert d.stop() == 0
