"""Which pages are drawn, and from what."""

from collections.abc import Callable
from pathlib import Path

from scripts.bench import report
from scripts.docgen import configuration, lifecycles, threads

ROOT = Path(__file__).resolve().parents[2]
PAGES: dict[str, Callable[[Path], str]] = {
    "docs/lifecycles.md": lifecycles.render,
    "docs/threads.md": threads.render,
    "docs/configuration.md": configuration.render,
    "docs/benchmarks.md": report.render,
}


def stale(root: Path = ROOT) -> list[str]:
    """Pages whose text is not what the code says now."""
    return [name for name, render in PAGES.items() if _text(root / name) != render(root)]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
