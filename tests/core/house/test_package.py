"""What a user installs: the engine and its adapters, and nothing else of this tree."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from harness import ROOT, environment

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


def test_the_page_is_there_with_its_licences(installed: Path) -> None:
    web = Path("ft_core", "control", "observe", "web")
    files = {path.relative_to(ROOT) for path in (ROOT / web).rglob("*") if path.is_file()}
    assert web / "index.html" in files and web / "uplot" / "LICENSE" in files
    assert {path.relative_to(installed) for path in (installed / web).rglob("*") if path.is_file()} == files
    (metadata,) = installed.glob("*.dist-info")
    licences = metadata / "licenses"
    assert {path.name for path in licences.iterdir()} >= {"LICENSE", "NOTICE"}
    assert "uPlot" in (licences / "NOTICE").read_text()


PLAN = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257"


def ftctl(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process to which the distribution is what `place` holds."""
    code = (
        "import sys, ft_core; from ft_core.cli import ctl; status = ctl.main(sys.argv[1:]); "
        "print('adapters', sorted(name for name in sys.modules if name in ('ft_megatron', 'ft_deepspeed'))); "
        f"assert ft_core.__file__.startswith({str(place)!r}); sys.exit(status)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=place,
        env={**environment(), "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_adapters_are_found(installed: Path, tmp_path: Path) -> None:
    sizes = ("--world-size=8", "--nproc-per-node=1", "--zero-stage=1")
    planned = ftctl(installed, "plan", *PLAN.split(), *sizes)
    assert (planned.returncode, "word embeddings" in planned.stdout) == (0, True), planned.stderr
    assert planned.stdout.endswith("adapters ['ft_deepspeed', 'ft_megatron']\n")
    config = tmp_path / "ds.json"
    config.write_text('{"fault_tolerance": {}}')
    examined = ftctl(installed, "doctor", "deepspeed", "train.py", f"--deepspeed_config={config}")
    assert "begins with deepspeed" in examined.stdout and "ok    protection" in examined.stdout


def test_the_engine_without_adapters(installed: Path, tmp_path: Path) -> None:
    """Their entry points are hidden."""
    shutil.copytree(installed / "ft_core", tmp_path / "ft_core")
    (metadata,) = installed.glob("*.dist-info")
    (tmp_path / metadata.name).mkdir()
    shutil.copy(metadata / "METADATA", tmp_path / metadata.name)
    planned = ftctl(tmp_path, "plan", "--parameters=1000000", "--world-size=8", "--nproc-per-node=1")
    assert "any 7 lost nodes at once" in planned.stdout, planned.stderr
    assert planned.stdout.endswith("adapters []\n") and planned.returncode == 0
    refused = ftctl(tmp_path, "plan", *PLAN.split(), "--world-size=8")
    assert refused.returncode == 2 and "unrecognized arguments: --num-layers" in refused.stderr
    examined = ftctl(tmp_path, "doctor", "ftrun", "--standalone", "train.py", "--ft")
    assert "ok    version of torch" in examined.stdout and "ok    launcher: ftrun" in examined.stdout
    assert "protection" not in examined.stdout and "megatron" not in examined.stdout
    assert examined.stdout.endswith("adapters []\n"), examined.stderr


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
