"""Bugs planted on purpose, each in a copy of the tree: a named test of the suite must fail.

This holds the suite itself to account. If a change moves the code that a bug edits, the edit no
longer applies and the test here says so: plant it anew.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted.bugs import BUGS, IMPORTS

ROOT = Path(__file__).parents[2]
COPIED = ("protocol", "conductor", "worker", "tests", "pyproject.toml")


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


def test_the_copy_is_whole(tree: Path) -> None:
    """Without a bug all that the bugs' commands run passes: what fails there fails for its bug."""
    files = sorted({f for b in BUGS.values() for f in b.command if f.endswith(".py")})
    done = run(tree, ("-m", "pytest", "-q", "-p", "no:cacheprovider", *files))
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(tree, IMPORTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_enough() -> None:
    assert len(BUGS) >= 25
