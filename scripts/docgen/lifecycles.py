"""docs/lifecycles.md: every transition table of the tree, as a table and as a state diagram."""

import ast
import importlib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from scripts.docgen import source

FILES = (
    "conductor/core/*_lifecycle.py",
    "worker/micro_scheduler/*_lifecycle.py",
    "worker/engine/*_lifecycle.py",
    "protocol/client/*_states.py",
    "protocol/*_lifecycle.py",
)
Table = Mapping[tuple[Enum, Enum], Enum]

INTRO = """# Lifecycles

Every object that lives through states has one table, `(state, event) → state`. A pair that is
missing (`·` below) is a bug: it raises `IllegalTransition`, which names the object, the state, the
event and the last changes that led there.
"""


def files(root: Path) -> list[Path]:
    return sorted(p for pattern in FILES for p in root.glob(pattern))


def render(root: Path) -> str:
    parts = [source.DRAWN + "\n" + INTRO, *(_section(root, p) for p in files(root))]
    return "\n".join(parts)


def transitions(path: Path, root: Path) -> Table:
    """The one table of a module; raises `ValueError` where there is none or a second."""
    found = {
        id(v): v
        for name, v in vars(importlib.import_module(source.dotted(root, path))).items()
        if not name.startswith("_") and _is_table(v)
    }
    if len(found) != 1:
        raise ValueError(f"{path}: one public transition table is expected, {len(found)} found")
    return next(iter(found.values()))


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(
            isinstance(k, tuple) and len(k) == 2 and all(isinstance(x, Enum) for x in (*k, v))
            for k, v in value.items()
        )
    )


def _section(root: Path, path: Path) -> str:
    table = transitions(path, root)
    tree = source.module(path)
    title, _, rest = (ast.get_docstring(tree) or path.stem).partition("\n\n")
    states, events = (list(type(x)) for x in next(iter(table)))
    notes = _notes(path, tree)
    name = path.relative_to(root).as_posix()
    heading = path.stem.removesuffix("_lifecycle").removesuffix("_states")
    side = name.split("/", maxsplit=1)[0]
    parts = [
        f"## {heading.capitalize()} ({'owner' if side == 'protocol' else side})\n",
        f"`{name}`. {' '.join(title.split())}\n",
        _prose(rest),
        source.table(
            ["event", *(s.name.lower() for s in states)],
            [
                [_name(e), *(_to(table.get((s, e)), s) for s in states)]
                for e in events
            ],
        ) + "\n",
        _diagram(table, states),
        _glossary("State", states, notes),
        _glossary("Event", events, notes),
    ]  # fmt: skip
    return "\n".join(p for p in parts if p)


def _prose(rest: str) -> str:
    """The docstring's paragraphs without its drawings."""
    kept = [p for p in rest.split("\n\n") if p.strip() and not p.startswith(" ")]
    return "\n\n".join(" ".join(p.split()) for p in kept) + "\n" if kept else ""


def _to(after: Enum | None, before: Enum) -> str:
    if after is None:
        return "·"
    return "stays" if after is before else after.name.lower()


def _name(event: Enum) -> str:
    return event.name.lower()


def initial(table: Table, states: list[Enum]) -> list[Enum]:
    """States that an object is made in: the first of each group that no other state leads into."""
    reach = {s: _reachable(table, s) for s in states}
    used = [s for s in states if any(s in (a, b) for (a, _), b in table.items())]
    groups: list[Enum] = []
    for s in used:
        into = {o for o in used if s in reach[o]}
        if into <= reach[s] | {s} and not any(s in reach[g] and g in reach[s] for g in groups):
            groups.append(s)
    return groups


def _reachable(table: Table, start: Enum) -> set[Enum]:
    seen: set[Enum] = set()
    todo = [start]
    while todo:
        here = todo.pop()
        for (a, _), b in table.items():
            if a is here and b not in seen:
                seen.add(b)
                todo.append(b)
    return seen


def _diagram(table: Table, states: list[Enum]) -> str:
    edges: dict[tuple[Enum, Enum], list[str]] = {}
    for (a, event), b in table.items():
        if a is not b:
            edges.setdefault((a, b), []).append(_name(event))
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"  [*] --> {s.name.lower()}" for s in initial(table, states)]
    order = {s: i for i, s in enumerate(states)}
    for (a, b), names in sorted(edges.items(), key=lambda e: (order[e[0][0]], order[e[0][1]])):
        lines.append(f"  {a.name.lower()} --> {b.name.lower()}: {', '.join(names)}")
    ends = [s for s in states if not any(a is s for a, _ in edges) and s in {b for _, b in edges}]
    lines += [f"  {s.name.lower()} --> [*]" for s in ends]
    return "\n".join([*lines, "```\n"])


def _notes(path: Path, tree: ast.Module) -> dict[str, str]:
    """Class.member → the comment beside it in the source."""
    comments = source.comments(path)
    return {
        f"{cls.name}.{target.id}": comments[node.lineno]
        for cls in source.classes(tree)
        for node in cls.body
        if isinstance(node, ast.Assign) and node.lineno in comments
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _glossary(what: str, members: list[Enum], notes: dict[str, str]) -> str:
    told = [(m, notes.get(str(m), "")) for m in members]
    rows = [[m.name.lower(), note] for m, note in told if note]
    return source.table([what.lower(), ""], rows) + "\n" if rows else ""
