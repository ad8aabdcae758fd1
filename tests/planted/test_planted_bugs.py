"""Bugs planted on purpose, each in a copy of the tree: a named test of the suite must fail.

This holds the suite itself to account. If a change moves the code that a bug edits, the edit no
longer applies and the test here says so: plant it anew.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("protocol", "conductor", "worker", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Bug:
    """`command`: what must fail, run with the interpreter in the copy; `says` in its output."""

    edits: tuple[Edit, ...]
    command: tuple[str, ...]
    says: str


PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
ENGINE = "worker/engine/engine.py"
SETS = "            batch.launch_started_event.set()\n"

BUGS: dict[str, Bug] = {
    "a page leak": Bug(
        (
            Edit(
                "worker/resources/kv/paged.py",
                "                self._give_all((request_id, label))\n"
                "                self._streams.release((request_id, label))\n",
                "                self._streams.release((request_id, label))\n",
            ),
        ),
        (*PYTEST, "tests/worker/resources/test_resource_contract.py"),
        "FAILED tests/worker/resources/test_resource_contract.py::test_contract[paged_kv",
    ),
    "a skipped commit_done": Bug(
        (
            Edit(
                ENGINE,
                SETS + "            batch.commit_done.set()\n",
                SETS,
            ),
        ),
        (*PYTEST, "tests/worker/engine/test_engine_step.py"),
        "FAILED tests/worker/engine/test_engine_step.py::test_exec_alone_sets_commit_done",
    ),
    "commit_done never set after a commit": Bug(
        (
            Edit(
                ENGINE,
                SETS + "            batch.commit_done.set()\n",
                SETS,
            ),
            Edit(
                ENGINE,
                "        batch.commit_done.set()\n        batch.outputs_ready.set()\n",
                "        batch.outputs_ready.set()\n",
            ),
            Edit("worker/engine/eager_step.py", "        batch.commit_done.set()\n", ""),
        ),
        (*PYTEST, "tests/worker/engine/test_engine_reference.py"),
        "assert batch.commit_done.is_set()",
    ),
    "a swallowed exception in forward": Bug(
        (
            Edit(
                "worker/engine/eager_step.py",
                '            self._fail(batch, rids[0], "forward", error)\n            return []\n',
                "            return []\n",
            ),
        ),
        (*PYTEST, "tests/worker/engine/test_engine_faults.py"),
        "FAILED tests/worker/engine/test_engine_faults.py::test_the_poisoned_request_fails_alone",
    ),
    "a missed rebase": Bug(
        (
            Edit(
                "conductor/core/loss.py",
                "    affected = list(worker.stakes.values())\n",
                "    affected = list(worker.stakes.values())[1:]\n",
            ),
        ),
        (*PYTEST, "tests/conductor/core/test_core_supervision.py"),
        "FAILED tests/conductor/core/test_core_supervision.py",
    ),
    "an import of torch in the conductor": Bug(
        (
            Edit(
                "conductor/core/machine.py",
                "from conductor.core",
                "import torch\nfrom conductor.core",
            ),
        ),
        ("-c", "from importlinter.cli import lint_imports_command as m; m()"),
        "conductor and worker never see each other; the conductor has no torch BROKEN",
    ),
    "an import of the worker in the conductor": Bug(
        (
            Edit(
                "conductor/core/walk.py",
                "from protocol.graph import",
                "import worker.api.model\nfrom protocol.graph import",
            ),
        ),
        ("-c", "from importlinter.cli import lint_imports_command as m; m()"),
        "conductor and worker never see each other; the conductor has no torch BROKEN",
    ),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "planted")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


def run(tree: Path, command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", BUGS)
def test_it_is_caught(tree: Path, name: str) -> None:
    bug = BUGS[name]
    before = {e.file: (tree / e.file).read_text(encoding="utf-8") for e in bug.edits}
    try:
        for e in bug.edits:
            text = (tree / e.file).read_text(encoding="utf-8")
            assert e.old in text, f"{e.file} has changed: plant this bug anew"
            (tree / e.file).write_text(text.replace(e.old, e.new, 1), encoding="utf-8")
        done = run(tree, bug.command)
    finally:
        for file, text in before.items():
            (tree / file).write_text(text, encoding="utf-8")
    told = done.stdout + done.stderr
    assert done.returncode == 1, f"{name} was not caught:\n{told}"
    assert bug.says in told, f"{name} was caught by something else:\n{told}"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", sorted({b.command for b in BUGS.values()}))
def test_the_same_command_passes_without_the_bug(tree: Path, command: tuple[str, ...]) -> None:
    done = run(tree, command)
    assert done.returncode == 0, done.stdout + done.stderr
