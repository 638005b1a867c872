"""`python -m tests.names`: is each test there that was there?

A file that is overwritten takes its tests along, unseen. The names are in `names.txt`, so that a test goes,
or gets another name, only with a line of a commit. `--write` makes the list that of the tests there are.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent
LIST = ROOT / "names.txt"


def names(root: Path = ROOT) -> set[str]:
    """`FILE::TEST` of each test function below a folder."""
    return {
        f"{path.relative_to(root)}::{name}"
        for path in root.rglob("test_*.py")
        for name in _tests(ast.parse(path.read_text()))
    }


def _tests(node: ast.AST, inside: str = "") -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _tests(child, f"{inside}{child.name}::")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name.startswith("test_"):
            yield inside + child.name


def complaints(listed: set[str], found: set[str]) -> list[str]:
    """What is other than the list says, a line each."""
    gone = [f"{name} is gone" for name in sorted(listed - found)]
    return gone + [f"{name} is not in the list" for name in sorted(found - listed)]


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.names", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the list that of the tests there are")
    args = parser.parse_args()
    found = names()
    wrong = complaints(set(LIST.read_text().splitlines()) if LIST.exists() else set(), found)
    if args.write:
        LIST.write_text("".join(f"{name}\n" for name in sorted(found)))
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong and not args.write:
        print("If that is meant: python -m tests.names --write", file=sys.stderr)
    return 1 if wrong and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
