"""docs/configuration.md: the schema of configs/*.yaml, from protocol/config.py."""

import ast
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol import config
from scripts.docgen import source

Keys = dict[type[config.Section], str]  # a section's class → where it stands in the file

INTRO = """# Configuration

One YAML file is one deployment. It is resolved once, at the start; unknown keys, values out of
range and impossible placements are refused with path, reason and nearest key, before a device is
touched (`podium check FILE`). `configs/` has examples.
"""


def render(root: Path) -> str:
    tree = source.module(root / "protocol" / "config.py")
    docs = {
        c.name: (ast.get_docstring(c) or "", source.field_docs(c)) for c in source.classes(tree)
    }
    parts = [source.DRAWN + "\n" + INTRO]
    keys = sections()
    for cls, key in keys.items():
        about, fields = docs[cls.__name__]
        schema = cls.model_json_schema()
        rows = [
            [f"`{name}`", _type(spec, keys), _default(name, cls, schema), fields.get(name, "")]
            for name, spec in schema["properties"].items()
        ]
        parts.append(f"## {key}\n\n{' '.join(about.split())}\n")
        parts.append(source.table(["field", "type", "default", "meaning"], rows) + "\n")
    return "\n".join(parts)


def sections() -> Keys:
    """Every section below the root, in the order of the schema."""
    found: Keys = {config.DaemonConfig: "(root)"}
    todo: list[tuple[str, type[config.Section]]] = [("", config.DaemonConfig)]
    while todo:
        prefix, cls = todo.pop(0)
        for name, field in cls.model_fields.items():
            for below, suffix in _sections_in(field.annotation, ""):
                if below not in found:
                    found[below] = f"{prefix}{name}{suffix}"
                    todo.append((f"{found[below]}.", below))
    return found


def _sections_in(annotation: Any, suffix: str) -> Iterator[tuple[type[config.Section], str]]:
    if isinstance(annotation, type) and issubclass(annotation, config.Section):
        yield annotation, suffix
        return
    below = {dict: ".NAME", tuple: "[]"}.get(typing.get_origin(annotation), "")
    for part in typing.get_args(annotation):
        yield from _sections_in(part, suffix + below)


def _type(spec: dict[str, Any], keys: Keys) -> str:
    """One field's type and bounds in words, from its JSON schema."""
    if "anyOf" in spec:
        return " or ".join(_type(s, keys) for s in spec["anyOf"])
    if "$ref" in spec:
        name = spec["$ref"].rpartition("/")[2]
        return next(f"[{k}](#{_anchor(k)})" for c, k in keys.items() if c.__name__ == name)
    if "enum" in spec or "const" in spec:
        return ", ".join(f"`{v}`" for v in spec.get("enum", [spec.get("const")]))
    kind = spec.get("type", "any")
    if kind == "array":
        return f"list of {_type(spec['items'], keys)}"
    if kind == "object":
        values = spec.get("additionalProperties")
        return f"map of {_type(values, keys)}" if isinstance(values, dict) else "map"
    low, high = spec.get("minimum"), spec.get("maximum")
    bounds = [f"≥ {low:,}" if low is not None else "", f"≤ {high:,}" if high is not None else ""]
    if "pattern" in spec:
        bounds.append(f"`{spec['pattern']}`")
    told = ", ".join(b for b in bounds if b)
    word = {"null": "`null`", "string": "text"}.get(kind, kind)
    return f"{word} {told}".strip()


def _anchor(heading: str) -> str:
    return "".join(c for c in heading.lower() if c.isalnum() or c in "-_")


def _default(name: str, cls: type[config.Section], schema: dict[str, Any]) -> str:
    if name in schema.get("required", ()):
        return "required"
    value = cls.model_fields[name].get_default(call_default_factory=True)
    if isinstance(value, config.Section):
        return "the section's own"
    return f"`{json.dumps(value, ensure_ascii=False)}`"
