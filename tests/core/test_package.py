"""What a user installs: the engine and its adapters, and nothing else of this tree."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from harness import ROOT

PACKAGES = {"ft_core", "ft_megatron", "ft_deepspeed"}
NOT_SOURCE = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of this tree, unpacked as in a site-packages. Nothing is downloaded."""
    source = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    place = tmp_path_factory.mktemp("installed")
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(place)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    wheel.unlink()
    shutil.rmtree(source)
    return place


def test_top_level_names(installed: Path) -> None:
    """Names such as `patches` and `recipes` would hide a user's own."""
    (metadata,) = installed.glob("*.dist-info")
    assert {path.name for path in installed.iterdir()} == {*PACKAGES, metadata.name}
    for package in PACKAGES:
        found = {str(path.relative_to(installed)) for path in (installed / package).rglob("*.py")}
        assert found == {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}


def test_nothing_else_of_this_tree_is_imported() -> None:
    """What is installed does not need what is not."""
    beside = {path.stem for path in ROOT.iterdir()} - PACKAGES
    assert {"patches", "recipes", "tests", "benchmarks"} <= beside
    found = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for statement in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in statement.names] if isinstance(statement, ast.Import) else []
            if isinstance(statement, ast.ImportFrom):
                names = [statement.module or ""]
            found += [f"{path}: {n}" for n in names if n.partition(".")[0] in beside]
    assert not found
