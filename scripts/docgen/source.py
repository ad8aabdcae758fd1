"""What pages read of Python files: docstrings, and comments beside names."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

DRAWN = "<!-- Drawn from the code by scripts/docs; edit the code, not this page. -->"


def module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def dotted(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts)


def comments(path: Path) -> dict[int, str]:
    """Line → the comment on it, without its mark."""
    readline = io.StringIO(path.read_text(encoding="utf-8")).readline
    found = tokenize.generate_tokens(readline)
    return {t.start[0]: t.string.lstrip("#: ") for t in found if t.type == tokenize.COMMENT}


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (n for n in tree.body if isinstance(n, ast.ClassDef))


def first_sentence(text: str) -> str:
    """The first paragraph as one line, up to its first full stop."""
    line = " ".join(text.strip().split("\n\n")[0].split())
    head, dot, _ = line.partition(". ")
    return head + "." if dot else line


def field_docs(cls: ast.ClassDef) -> dict[str, str]:
    """Annotated fields in order → the string that follows each, as one line, or ''."""
    docs: dict[str, str] = {}
    last = ""
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
            docs[last] = ""
        elif (
            last
            and isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docs[last] = " ".join(node.value.value.split())
            last = ""
        else:
            last = ""
    return docs


def cell(text: str) -> str:
    """Safe inside a row of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)
