"""`python -m scripts.docgen [--check]`: write the drawn pages, or say which are out of date."""

import argparse
import sys
from pathlib import Path

from scripts.docgen.pages import PAGES, ROOT, stale


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a page is old")
    check = parser.parse_args(arguments).check
    old = stale(root)
    for name in old:
        if not check:
            (root / name).write_text(PAGES[name](root), encoding="utf-8")
        print(f"{name}: {'out of date: run scripts/docs' if check else 'written'}")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
