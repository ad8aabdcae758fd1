"""docs/benchmarks.md, from the records in docs/benchmarks/*.json."""

import json
from pathlib import Path
from typing import Any

from scripts.docgen import source

INTRO = """# Benchmarks

Each page of figures comes from one run of `python -m scripts.bench.NAME` (extra `bench`), which
writes its JSON and its plot to `docs/benchmarks/`. A ratio compares two things measured in that
same run, as CPU time where that is possible, because the cores were shared with other work; an
absolute figure holds on the machine that is named. What isn't met is said so.
"""


def render(root: Path) -> str:
    records = [_read(p) for p in sorted((root / "docs" / "benchmarks").glob("*.json"))]
    parts = [source.DRAWN + "\n" + INTRO]
    if records:
        parts.append(_overview(records))
    parts += [_section(r) for r in records]
    return "\n".join(parts)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _overview(records: list[dict[str, Any]]) -> str:
    rows = [
        [f"[{r['name']}](#{r['name'].replace(' ', '-')})", *_goal(g)]
        for r in records
        for g in r["summary"]
    ]
    return source.table(["benchmark", "measure", "found", "goal", ""], rows) + "\n"


def _goal(g: dict[str, Any]) -> list[str]:
    met = {True: "met", False: "**not met**", None: ""}[g["met"]]
    return [g["measure"], f"{_shown(g['value'])} {g['unit']}".strip(), g["goal"], met]


def _section(r: dict[str, Any]) -> str:
    m, v = r["machine"], r["versions"]
    where = (
        f"{r['when']}; {m['cpu']}, {m['cores']} cores, {m['system']}, load {m['load']} at the end; "
        + ", ".join(f"{name} {number}" for name, number in v.items())
    )
    config = ", ".join(f"{k} {_shown(x)}" for k, x in r["config"].items())
    seeds = f"; seeds {r['seeds']}" if r["seeds"] else ""
    parts = [
        f"## {r['name']}\n",
        f"{r['what']} Compared with: {r['against']}.\n",
        source.table(["measure", "found", "goal", ""], [_goal(g) for g in r["summary"]]) + "\n",
        f"![{r['plot']}](benchmarks/{r['name']}.png)\n",
    ]
    for t in r["tables"]:
        rows = [[_shown(x) for x in row] for row in t["rows"]]
        parts.append(f"{t['title']}\n\n{source.table(t['columns'], rows)}\n")
    parts += [f"- {note}" for note in r["notes"]]
    parts.append(f"\n{where}. {config}{seeds}.\n")
    return "\n".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
