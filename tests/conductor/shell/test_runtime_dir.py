"""One owner at a time, by name; private; nothing left behind."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from conductor.shell.runtime_dir import AlreadyRunning, RuntimeDir
from protocol.errors import ConfigError


def test_it_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    held = RuntimeDir.acquire(root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert held.endpoints.lock.read_text() == f"{os.getpid()}\n"
    (root / "control.sock").touch()
    held.endpoints.config.touch()
    held.release()
    held.release()
    assert not root.exists()


def test_stale_sockets_go_but_other_files_stay(tmp_path: Path) -> None:
    root = tmp_path / "r"
    root.mkdir(mode=0o700)
    (root / "s01.sock").touch()
    (root / "notes").touch()
    held = RuntimeDir.acquire(root)
    assert not (root / "s01.sock").exists()
    held.release()
    assert [p.name for p in root.iterdir()] == ["notes"]


def test_a_second_owner_is_refused_and_told_the_first_ones_pid(tmp_path: Path) -> None:
    root = tmp_path / "r"
    held = RuntimeDir.acquire(root)
    (root / "control.sock").touch()
    code = (
        "import sys; from pathlib import Path\n"
        "from conductor.shell.runtime_dir import RuntimeDir\n"
        "RuntimeDir.acquire(Path(sys.argv[1]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert other.returncode == 1
    assert f"in use by another podium daemon, pid {os.getpid()}:" in other.stderr
    assert (root / "control.sock").exists(), "the refused one removed the owner's socket"
    held.release()


def test_a_dead_owners_lock_is_taken_over(tmp_path: Path) -> None:
    root = tmp_path / "r"
    code = (
        "import os, sys; from pathlib import Path\n"
        "from conductor.shell.runtime_dir import RuntimeDir\n"
        "held = RuntimeDir.acquire(Path(sys.argv[1])); os._exit(9)"
    )
    dead = subprocess.run([sys.executable, "-c", code, str(root)], timeout=60, check=False)
    assert dead.returncode == 9
    assert (root / "lock").exists()
    RuntimeDir.acquire(root).release()
    assert not (root / "lock").exists()


def test_two_tries_in_one_process_are_two_owners(tmp_path: Path) -> None:
    held = RuntimeDir.acquire(tmp_path / "r")
    with pytest.raises(AlreadyRunning):
        RuntimeDir.acquire(tmp_path / "r")
    held.release()


def test_an_open_directory_with_other_files_is_not_taken(tmp_path: Path) -> None:
    root = tmp_path / "home"
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    (root / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"holds other files \('thesis.tex'\)"):
        RuntimeDir.acquire(root)
    (root / "thesis.tex").unlink()
    held = RuntimeDir.acquire(root)  # empty: as a service manager makes it
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    held.release()
    assert root.exists()


def test_what_cannot_be_a_runtime_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        RuntimeDir.acquire(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        RuntimeDir.acquire(tmp_path / "link")
    with pytest.raises(ConfigError, match="choose a shorter runtime_dir"):
        RuntimeDir.acquire(tmp_path / ("x" * 120))
    assert not (tmp_path / ("x" * 120)).exists()
