"""sd_notify: what is said, and silence where nobody listens."""

import socket
from pathlib import Path

import pytest

from conductor.shell.service_manager import ServiceManager


@pytest.mark.parametrize("abstract", [False, True])
def test_it_says_what_systemd_reads(tmp_path: Path, abstract: bool) -> None:
    name = f"@podium-test-{tmp_path.name}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name[1:] if abstract else name)
        listener.settimeout(5)
        service = ServiceManager(name, watchdog_s=2.0)
        service.loading(15)
        service.ready("ready: here")
        service.alive()
        service.stopping("SIGTERM")
        said = [listener.recv(256).decode() for _ in range(4)]
        service.close()
    assert said == [
        "EXTEND_TIMEOUT_USEC=15000000",
        "READY=1\nSTATUS=ready: here",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=SIGTERM",
    ]


def test_nobody_listens(tmp_path: Path) -> None:
    for service in (ServiceManager(), ServiceManager(str(tmp_path / "gone"), 1.0)):
        service.ready("x")
        service.alive()
        service.close()
        service.close()


def test_no_pings_without_a_watchdog(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "n"))
        listener.settimeout(5)
        service = ServiceManager(str(tmp_path / "n"))
        service.alive()
        service.status("only this")
        assert listener.recv(256) == b"STATUS=only this"
        service.close()
