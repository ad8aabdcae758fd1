"""docs/threads.md: who runs what, and what threads tell each other.

Read from the code: modules whose docstring has the lines Owns, Waits on, Signals and Never; the
queues of worker/engine/orders.py; the events of `ExecutingBatch`, where they are set and awaited.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from scripts.docgen import source

FACTS = ("Owns", "Waits on", "Signals", "Never")
PACKAGES = ("protocol", "conductor", "worker")
ORDERS = Path("worker/engine/orders.py")
BATCH = Path("worker/engine/executing_batch.py")
STEP_THREADS = Path("worker")

INTRO = """# Threads

The conductor and the gateway are one event loop each: nothing of theirs is shared, so nothing is
locked (their logs have a thread that only writes). A worker has the threads below. One thread is
one file, whose docstring says this and whose code asserts that it runs on its own thread.
"""


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread as its module's docstring tells it; `facts` by the names in `FACTS`."""

    file: Path
    name: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Queue:
    """A union of orders: `name: senders → receiver`, and what its members say of themselves."""

    name: str
    senders: list[str]
    receiver: str
    members: dict[str, str]


def render(root: Path) -> str:
    found, told = threads(root), queues(root)
    parts = [source.DRAWN + "\n" + INTRO, _table(root, found), _diagram(told)]
    parts += ["## Queues\n", *(_queue(q) for q in told)]
    parts += ["## Events of a step\n", _events(root)]
    return "\n".join(parts)


# ---- threads


def parse(path: Path) -> Thread | None:
    """None: the module's docstring claims no thread. Raises `ValueError` if it does by halves."""
    text = ast.get_docstring(source.module(path)) or ""
    facts = {name: _fact(text, name) for name in FACTS}
    lacking = [name for name, fact in facts.items() if not fact]
    named = re.match(r"The (\w+) thread[.:]", text)
    if named is None and lacking:
        return None
    if named is None or lacking:
        what = lacking or "a first line 'The NAME thread'"
        raise ValueError(f"{path}: the docstring of a thread's module lacks {what}")
    return Thread(path, named[1].lower(), facts)


def _fact(text: str, name: str) -> str:
    """The line that begins with `name:` and the indented lines after it."""
    found = re.search(rf"^{name}: (.+(?:\n[ ]+.+)*)", text, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def threads(root: Path) -> list[Thread]:
    """In the order of the tree, the worker's step threads first."""
    found = [t for p in modules(root) if (t := parse(p)) is not None]
    order = {q: i for i, q in enumerate(_names(queues(root)))}
    return sorted(found, key=lambda t: (order.get(t.name, len(order)), t.file.as_posix()))


def modules(root: Path) -> list[Path]:
    return sorted(p for name in PACKAGES for p in (root / name).rglob("*.py"))


def _names(told: list[Queue]) -> list[str]:
    names = [n for q in told for n in (*q.senders, q.receiver)]
    return list(dict.fromkeys(names))


def _table(root: Path, found: list[Thread]) -> str:
    rows = []
    for t in found:
        name = t.file.relative_to(root).as_posix()
        where = f"{t.name}, of the {name.split('/', maxsplit=1)[0]} (`{name}`)"
        rows.append([where, *(t.facts[f] for f in FACTS)])
    return source.table(["thread", "owns", "waits on", "signals", "never"], rows) + "\n"


# ---- queues


def queues(root: Path) -> list[Queue]:
    """The unions that the docstring of worker/engine/orders.py names."""
    tree = source.module(root / ORDERS)
    about = {c.name: ast.get_docstring(c) or "" for c in source.classes(tree)}
    unions = {
        n.targets[0].id: [m.strip() for m in ast.unparse(n.value).split("|")]
        for n in tree.body
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    }
    lines = re.findall(r"^(\w+): ([\w, ]+) → (\w+)$", ast.get_docstring(tree) or "", re.MULTILINE)
    missing = set(unions) - {name for name, _, _ in lines}
    if missing:
        raise ValueError(f"{ORDERS}: the docstring does not say who sends {sorted(missing)}")
    about |= _abouts(root) | {"ExecutingBatch": "A step, as soon as it was launched."}
    return [
        Queue(
            name,
            [s.strip() for s in senders.split(",")],
            receiver,
            {m: source.first_sentence(about.get(m, "")) for m in unions[name]},
        )
        for name, senders, receiver in lines
    ]


def _abouts(root: Path) -> dict[str, str]:
    """Docstrings of what the orders take from other modules."""
    paths = [root / BATCH, root / "worker/micro_scheduler/events.py"]
    return {
        c.name: ast.get_docstring(c) or "" for p in paths for c in source.classes(source.module(p))
    }


def _queue(q: Queue) -> str:
    head = f"**`{q.name}`**, {' and '.join(q.senders)} → {q.receiver}\n"
    rows = [[f"`{m}`", about] for m, about in q.members.items()]
    return head + "\n" + source.table(["order", ""], rows) + "\n"


def _diagram(told: list[Queue]) -> str:
    lines = ["```mermaid", "flowchart LR"]
    lines += [f"  {q}([{q}])" for q in _names(told)]
    for q in told:
        lines += [f"  {s} -- {q.name} --> {q.receiver}" for s in q.senders]
    return "\n".join([*lines, "```\n"])


# ---- events


@dataclass(slots=True)
class _Sites:
    sets: list[str]
    waits: list[str]


def events(root: Path) -> dict[str, _Sites]:
    """Events that travel with a step: where they are set or recorded, and where awaited."""
    batch = next(
        c for c in source.classes(source.module(root / BATCH)) if c.name == "ExecutingBatch"
    )
    names = [
        n.target.id
        for n in batch.body
        if isinstance(n, ast.AnnAssign)
        and isinstance(n.target, ast.Name)
        and (n.target.id.endswith("_event") or "Event" in ast.unparse(n.annotation))
    ]
    found = {n: _Sites([], []) for n in names}
    for path in sorted((root / STEP_THREADS).rglob("*.py")):
        _Scan(path.relative_to(root).as_posix(), found).visit(source.module(path))
    return found


class _Scan(ast.NodeVisitor):
    """Collects the uses of the events in one module, by qualified name of the function."""

    def __init__(self, name: str, found: dict[str, _Sites]) -> None:
        self._name, self._found = name, found
        self._stack: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._within(node)

    def _within(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self._stack.append(node.name)
        self.generic_visit(node)
        self._stack.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._note(target, "sets")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        f = node.func
        if isinstance(f, ast.Attribute) and f.attr in ("set", "record"):
            self._note(f.value, "sets")
        elif isinstance(f, ast.Attribute) and f.attr in ("wait", "synchronize"):
            self._note(f.value, "waits")
        else:
            for argument in node.args:
                self._note(argument, "waits")  # handed to what waits for it
        self.generic_visit(node)

    def _note(self, node: ast.expr, how: str) -> None:
        if isinstance(node, ast.Attribute) and node.attr in self._found:
            sites: list[str] = getattr(self._found[node.attr], how)
            place = f"`{self._name}` {'.'.join(self._stack)}"
            if place not in sites:
                sites.append(place)


def _events(root: Path) -> str:
    rows = [
        [f"`{name}`", "<br>".join(s.sets), "<br>".join(s.waits)] for name, s in events(root).items()
    ]
    return source.table(["event", "set in", "awaited in"], rows) + "\n"
