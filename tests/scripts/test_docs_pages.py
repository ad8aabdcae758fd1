"""The drawn pages: current, complete, and old as soon as the code says something else."""

import ast
import shutil
from enum import Enum
from pathlib import Path

import pytest

from scripts.docgen import configuration, lifecycles, pages, source, threads
from scripts.docgen.__main__ import main

ROOT = pages.ROOT


def test_every_drawn_page_is_current() -> None:
    assert pages.stale() == [], "run scripts/docs"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the pages are drawn from."""
    for name in ("protocol", "conductor", "worker", "docs"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "models")
        )
    return tmp_path


def test_a_change_in_the_code_makes_its_page_old(tree: Path) -> None:
    def replace(name: str, old: str, new: str) -> None:
        path = tree / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    assert pages.stale(tree) == []
    replace("worker/engine/gpu_thread.py", "Never: reads", "Never: ever reads")
    assert pages.stale(tree) == ["docs/threads.md"]
    replace("protocol/config.py", "0 picks a free port", "0 takes any port")
    assert pages.stale(tree) == ["docs/threads.md", "docs/configuration.md"]
    replace("conductor/core/request_lifecycle.py", "has a row on a worker", "runs")
    assert "docs/lifecycles.md" in pages.stale(tree)


def test_check_fails_and_changes_nothing_where_a_page_is_old(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check"], tree) == 0
    page = tree / "docs" / "threads.md"
    page.write_text("old\n", encoding="utf-8")
    assert main(["--check"], tree) == 1
    assert "docs/threads.md: out of date" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == "old\n"


# ---- lifecycles


def test_every_transition_table_of_the_tree_has_its_section() -> None:
    """Found by the type that tables are annotated with, wherever they stand."""
    with_tables = {
        path
        for path in threads.modules(ROOT)
        for node in ast.walk(source.module(path))
        if isinstance(node, ast.AnnAssign)
        and ast.unparse(node.annotation).startswith("dict[tuple[")
        and ast.unparse(node.annotation).count("State") >= 2
    }
    assert set(lifecycles.files(ROOT)) == with_tables
    assert len(with_tables) >= 5


def test_a_diagram_has_every_transition_that_changes_the_state() -> None:
    page = lifecycles.render(ROOT)
    for path in lifecycles.files(ROOT):
        for (before, _), after in lifecycles.transitions(path, ROOT).items():
            if before is not after:
                assert f"  {before.name.lower()} --> {after.name.lower()}: " in page


class S(Enum):
    A, B, C, D = range(4)


class E(Enum):
    X, Y = range(2)


def test_initial_states_are_those_that_nothing_else_leads_into() -> None:
    table = {(S.A, E.X): S.B, (S.B, E.X): S.A, (S.B, E.Y): S.D, (S.C, E.X): S.D}
    assert lifecycles.initial(table, list(S)) == [S.A, S.C]


# ---- threads


def test_every_thread_of_a_module_that_makes_one_is_described() -> None:
    described = {t.file for t in threads.threads(ROOT)}
    for path in threads.modules(ROOT):
        text = path.read_text(encoding="utf-8")
        if "threading.Thread(" in text and "worker/device/" not in path.as_posix():
            assert path in described, f"{path}: its docstring lacks Owns, Waits on, Signals, Never"


def test_orders_are_made_only_by_the_threads_that_the_page_names() -> None:
    files = {t.name: t.file for t in threads.threads(ROOT) if "worker" in t.file.as_posix()} | {
        "main": ROOT / "worker" / "process" / "loop.py"
    }
    queues = threads.queues(ROOT)
    assert {q.name for q in queues} == {"GpuOrder", "PostOrder", "Post"}
    for queue in queues:
        for order in set(queue.members) - {"ExecutingBatch", "Call", "Stop", "Halt"}:
            makers = {name for name, file in files.items() if _makes(file, order)}
            assert makers, f"nobody makes a {order}"
            assert makers <= set(queue.senders), f"{order} is made by {makers}"


def _makes(path: Path, name: str) -> bool:
    calls = (n.func for n in ast.walk(source.module(path)) if isinstance(n, ast.Call))
    names = (ast.unparse(f).removeprefix("orders.") for f in calls)
    return name in names


def test_every_order_says_what_it_is_for() -> None:
    silent = [m for q in threads.queues(ROOT) for m, about in q.members.items() if not about]
    assert silent == []


def test_a_thread_that_is_described_by_halves_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text('"""The odd thread.\n\nOwns: nothing.\nNever: ends.\n"""\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"Waits on.*Signals"):
        threads.parse(path)


def test_a_steps_events_are_set_and_awaited_where_the_page_says() -> None:
    found = threads.events(ROOT)
    assert set(found) >= {
        "launch_started_event", "commit_done", "outputs_ready", "completion_event",
    }  # fmt: skip
    assert all(sites.sets for sites in found.values())
    waits = " ".join(found["outputs_ready"].waits)
    assert "PostprocessThread" in waits


# ---- configuration


def test_every_field_of_the_configuration_says_what_it_means() -> None:
    tree = source.module(ROOT / "protocol" / "config.py")
    names = {cls.__name__ for cls in configuration.sections()}
    silent = [
        f"{c.name}.{field}"
        for c in source.classes(tree)
        if c.name in names
        for field, meaning in source.field_docs(c).items()
        if not meaning
    ]
    assert silent == []


def test_configuration_shows_types_bounds_and_defaults() -> None:
    page = configuration.render(ROOT)
    assert "| `port` | integer ≥ 0, ≤ 65,535 | `8000` |" in page
    assert '| `source` | text | `""` |' in page
    assert "## supervision" in page
    assert "| `gateway` | [gateway](#gateway) or `null` |" in page
