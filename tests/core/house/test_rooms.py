"""The rooms of `ft_core`: imports go down only, so what a process does can be read without those above it.

`tests/core` has the same rooms.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import ft_core

ORDER = (
    *("errors", "refusals", "plugins", "import_hook", "patching", "patched"),
    *(
        "process",
        "protocol",
        "history",
        "leadership",
        "elastic",
        "adapter",
        "comm",
        "state",
        "net",
        "overlay",
    ),
    *("settings", "kept", "conformance"),
    *("worker", "control", "node", "cli"),
)
"""What `ft_core` consists of, lowest first: each may import itself and what stands before it."""
APART = (("control", "worker"), ("control", "node"), ("control", "net"), ("control", "comm"))
"""The controller knows nothing of how its orders are carried out."""

PACKAGE = Path(ft_core.__file__).parent
TESTS = Path(__file__).parents[1]
HOUSE = Path(__file__).parent
"""For tests of the tree itself; all others are where that is which they test."""
FRAMEWORKS = ("megatron", "deepspeed", "ft_megatron", "ft_deepspeed", "patches", "recipes")


def imports(path: Path, source: str) -> Iterator[tuple[int, str, str]]:
    """(line, importer's part, what of `ft_core` it imports, or which framework)."""
    inside = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for statement in ast.walk(ast.parse(source)):
        names = []
        if isinstance(statement, ast.ImportFrom) and statement.module == "ft_core":
            names = [f"ft_core.{name.name}" for name in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names = [statement.module or "." * statement.level]
        elif isinstance(statement, ast.Import):
            names = [name.name for name in statement.names]
        for name in names:
            yield statement.lineno, inside, name


def wrong(path: Path, source: str) -> list[str]:
    """The offending lines."""
    found = []
    for line, importer, name in imports(path, source):
        top, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        if top in FRAMEWORKS:
            why = "the engine knows no framework"
        elif name.startswith("."):
            why = "relative"
        elif top != "ft_core" or not part:
            continue
        elif ORDER.index(part) > ORDER.index(importer):
            why = f"{importer} stands below {part}"
        elif (importer, part) in APART:
            why = f"{importer} has nothing to do with {part}"
        else:
            continue
        text = source.splitlines()[line - 1].strip()
        found.append(f"{path.relative_to(PACKAGE.parent)}:{line}: {text}  ({why})")
    return found


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def test_imports_go_down_only() -> None:
    offending = [line for path in modules() for line in wrong(path, path.read_text())]
    assert not offending, "\n".join(["imports that go up:", *offending])


def test_no_two_modules_import_each_other() -> None:
    """Also within a room, also for types alone."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in modules()}
    edges: dict[str, dict[str, int]] = {name: {} for name in names}
    for name, path in names.items():
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.ImportFrom) and statement.module:
                asked = [statement.module, *(f"{statement.module}.{each.name}" for each in statement.names)]
                edges[name] |= {found: statement.lineno for found in asked if found in names}
    cycles = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            cycle = (*path[path.index(name) :], name)
            lines = [f"{names[a]}:{edges[a][b]}" for a, b in itertools.pairwise(cycle)]
            cycles.append(" -> ".join(cycle) + "\n  " + "\n  ".join(lines))
            return
        if name in done:
            return
        for other in edges[name]:
            visit(other, (*path, name))
        done.add(name)

    done: set[str] = set()
    for name in names:
        visit(name, ())
    assert not cycles, "\n".join(cycles)


def test_an_arrow_up_is_found_with_its_line() -> None:
    path = PACKAGE / "protocol" / "codec.py"
    lines = ["import os", "def f():", "    from ft_core.control.machine import Controller"]
    assert wrong(path, "\n".join(lines)) == [
        f"ft_core/protocol/codec.py:3: {lines[2].strip()}  (protocol stands below control)"
    ]
    assert "knows no framework" in wrong(path, "import megatron.core")[0]
    assert "nothing to do with" in wrong(PACKAGE / "control" / "x.py", "from ft_core.net import transport")[0]


def homeless(tests: Path, package: Path, house: Path) -> list[str]:
    """Modules in rooms that the package has not; tests, beside the rooms, of no module beside its rooms."""
    found = []
    for path in sorted(tests.rglob("*.py")):
        room = package / path.parent.relative_to(tests)
        is_test, tested = path.name.startswith("test_"), room / path.name.removeprefix("test_")
        if path.parent == tests:
            right = not is_test or tested.exists()  # helpers there serve several rooms
        else:
            right = path.is_relative_to(house) or (room / "__init__.py").exists()
        if not right:
            found.append(str(path.relative_to(tests)))
    return found


def test_tests_are_in_the_room_of_what_they_test() -> None:
    """`tests/core/control/decide` has those of `ft_core/control/decide`."""
    found = homeless(TESTS, PACKAGE, HOUSE)
    assert not found, "\n".join(["no such room, or module, in ft_core:", *found])


def test_a_test_without_a_room_is_found(tmp_path: Path) -> None:
    tests, package = tmp_path / "tests", tmp_path / "package"
    for name in (
        "house/test_words",
        "test_errors",
        "test_lost",
        "plans",
        "net/test_gate",
        "web/page",
        "net/in/x",
    ):
        (tests / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tests / f"{name}.py").touch()
    for name in ("errors", "net/__init__", "web/page"):
        (package / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").touch()
    assert homeless(tests, package, tests / "house") == ["net/in/x.py", "test_lost.py", "web/page.py"]
