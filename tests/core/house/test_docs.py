"""The pages of docs/ build strictly and without a network, and the API's have all that is public."""

from __future__ import annotations

import ast
import html
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from harness import ROOT
from simulation.invariants import Invariant

from ft_core import plugins
from ft_core.cli import ctl, flags
from ft_core.control import phases
from ft_core.node import phases as of_agent
from ft_core.worker import states
from ft_megatron import arguments

PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
OFFLINE = """
import socket, sys
def connect(*_): raise OSError("a page is built without a network")
socket.socket.connect = socket.create_connection = connect
from mkdocs.__main__ import cli
cli(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds; dead links, pages outside of the navigation and unknown names are errors."""
    built = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, "build", "--strict", "--quiet", "--site-dir", str(built)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def documented(page: Path) -> list[tuple[str, list[str]]]:
    """What a page asks to be described: (dotted name, the members that it chooses)."""
    found: list[tuple[str, list[str]]] = []
    for line in page.read_text().splitlines():
        if line.startswith("::: "):
            found.append((line.removeprefix("::: "), []))
        elif listed := re.fullmatch(r" +members: \[(.+)\]", line):
            found[-1][1].extend(listed[1].split(", "))
        elif listed := re.fullmatch(r" +- (\w+)", line):
            found[-1][1].append(listed[1])
    return found


def source(name: str) -> Path | None:
    base = ROOT / name.replace(".", "/")
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


def public(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    """(dotted name, docstring) of each class, function and annotated attribute."""
    for at, node in enumerate(body):
        name = getattr(node, "name", "")
        if isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, (ast.Name, ast.Attribute))
            name = node.target.id if isinstance(node.target, ast.Name) else ""
        if not name or name.startswith("_"):
            continue
        if isinstance(node, ast.AnnAssign):
            after = body[at + 1] if at + 1 < len(body) else None
            text = after.value if isinstance(after, ast.Expr) else None
            said = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
            yield f"{prefix}.{name}", said
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield f"{prefix}.{name}", ast.get_docstring(node) or ""
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{prefix}.{name}")


def fields(module: ModuleType, anchors: set[str]) -> Iterator[str]:
    """Of the classes that a page describes, those that the module has from elsewhere too."""
    for name, found in vars(module).items():
        if isinstance(found, type) and f"{module.__name__}.{name}" in anchors:
            own = [field for field in vars(found).get("__annotations__", ()) if not field.startswith("_")]
            yield from (f"{module.__name__}.{name}.{field}" for field in own)


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """A page that is read where there is no network looks the same: no fonts, scripts or images of others."""
    pages = list(site.rglob("*.html"))
    assert {path.name for path in pages} >= {"index.html", "tutorial.html", "design.html", "adapter.html"}
    for page in pages:
        remote = re.findall(
            r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//[^>]*>", page.read_text()
        )
        assert not remote, f"{page.relative_to(site)}: {remote}"


def test_the_machines_tables_are_shown(site: Path) -> None:
    """The picture of each machine's phases is made from its table."""
    page = html.unescape((site / "design.html").read_text())
    assert "<!-- reference" not in page
    for table in (phases.TRANSITIONS, of_agent.TRANSITIONS, states.TRANSITIONS):
        for rows in table.values():
            for after, reason in rows.items():
                assert re.search(rf"-> {after.__name__} +{re.escape(reason)}", page), reason


def test_the_invariants_are_shown(site: Path) -> None:
    page = (site / "design.html").read_text()
    for each in Invariant:
        assert all(f"<td>{text}</td>" in page for text in (each.number, each.label, each.sentence)), each


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_api_has_all_that_it_names(site: Path, page: Path) -> None:
    text = (site / "api" / f"{page.stem}.html").read_text()
    anchors = set(re.findall(r' id="([\w.]+)"', text))
    for name, members in documented(page):
        for member in members:
            assert f"{name}.{member}" in anchors, f"{page.name}: {name} has no {member}"
        path = source(name)
        if path is None or members:
            continue
        for found, _ in public(ast.parse(path.read_text()).body, name):
            assert found in anchors, f"{page.name}: nothing about {found}"
        if any(re.fullmatch(rf"{re.escape(name)}\.[A-Z]\w*", anchor) for anchor in anchors):
            for found in fields(importlib.import_module(name), anchors):
                assert found in anchors, f"{page.name}: nothing about {found}"


def test_files_that_a_page_names_are_there() -> None:
    """By their path from the root, or by their name alone."""
    tops = ("ft_core", "ft_megatron", "ft_deepspeed", "patches", "recipes", "tests", "benchmarks")
    names = {path.name for top in tops for path in (ROOT / top).rglob("*.py")}
    gone = []
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = page.read_text()
        named = re.findall(rf"\b(?:{'|'.join(tops)})/[\w/.-]*\.(?:py|md|json)\b", text)
        alone = set(re.findall(r"`(\w+\.py)`", text)) - set(re.findall(r'title="(.+?)"', text))
        gone += [f"{page.name}: {path}" for path in named if not (ROOT / path).exists()]
        gone += [f"{page.name}: {name}" for name in alone if name not in names]
    assert not gone, "\n".join(gone)


def test_the_pages_are_short() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "api"]
    assert len(pages) > 20
    words = {page.name: len(re.findall(r"\S*\w\S*", page.read_text())) for page in pages}
    assert sum(words.values()) <= 25_000, f"say it once, or link: {words}"


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "recipes" / "megatron" / "README.md"):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            if link.startswith("https://"):
                continue
            assert (page.parent / path).exists(), f"{page.name}: {link}"
            titles = re.findall(r"^#+ (.+)$", (page.parent / path).read_text(), re.M) if anchor else []
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not anchor or anchor in slugs, f"{page.name}: {link}"


def commands(program: str) -> Iterator[tuple[str, str]]:
    """(page, arguments) of each call of it in a block, or whole in `...`; without what the shell takes."""
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *ROOT.glob("recipes/*/README.md")]:
        text = page.read_text().replace("\\\n", " ")
        for call in re.findall(
            rf"(?:^    |^|`(?=\w+ --job-dir DIR \w)){program} +([^`#&|;>\n]*)", text, re.M
        ):
            yield page.name, call


def test_ftctl_takes_the_commands_of_the_pages() -> None:
    parser = ctl.parser(plugins.load(plugins.PLANNER))
    found = [(page, call) for page, call in commands("ftctl") if not re.search(r"\.\.\.|ftrun|<|\[", call)]
    assert len(found) > 40
    wrong = []
    for page, call in found:
        try:
            parser.parse_args(re.sub(r" N\b", " 1", call).split())
        except SystemExit:
            wrong.append(f"{page}: ftctl {call}")
    assert not wrong, "\n".join(wrong)


def test_ftrun_takes_the_commands_of_the_pages() -> None:
    found = [(page, call) for page, call in commands("ftrun") if re.search(r"\.py\b|--join [A-Z]", call)]
    assert len(found) > 10
    wrong = []
    for page, call in found:
        words = re.sub(r"\.\.\. ?|<[^>]*>", "", re.sub(r"\$RANK\b| N\b", " 1", call)).split()
        known, rest = flags.parser().parse_known_args(words)
        if rest or not (known.command or known.join):
            wrong.append(f"{page}: ftrun {call}")
    assert not wrong, "\n".join(wrong)


def test_all_that_megatron_is_refused_is_named() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    section = page.partition("## Refused with Megatron\n")[2].partition("\n### ")[0]
    named = set(re.findall(r"`(--[\w-]+)", section))
    calls = [
        node
        for node in ast.walk(ast.parse(Path(arguments.__file__).read_text()))
        if isinstance(node, ast.Call)
    ]
    refused = [call.args[0] for call in calls if getattr(call.func, "id", "") == "_refused"]
    flags = {first.value for first in refused if isinstance(first, ast.Constant)} | set(arguments._SWITCHES)
    assert len(flags) > 20 and flags <= named


def test_every_module_is_listed(site: Path) -> None:
    """With the first line of its docstring, which says what it is for."""
    text = (site / "api" / "modules.html").read_text()
    listed = set(re.findall(r'\b(?:title|id)="\s*([\w.]+)"', text))
    for package in ("ft_core", "ft_megatron", "ft_deepspeed"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            assert name in listed or parts[-1] == "__main__", f"docs/api/modules.md lacks {name}"


def test_docstrings_of_the_api_are_sentences() -> None:
    """A word or two says nothing that the name does not."""
    short = []
    for page in PAGES:
        for name, members in documented(page):
            path = source(name) or source(name.rpartition(".")[0])
            assert path is not None, f"{page.name}: {name} is not there"
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for found, said in public(ast.parse(path.read_text()).body, module):
                chosen = found.startswith(name) and (
                    not members or found.removeprefix(f"{name}.").split(".")[0] in members
                )
                if chosen and len(said.split()) < 4:
                    short.append(f"{found}: {said!r}")
    assert not short, "\n".join(short)
