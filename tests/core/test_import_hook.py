"""A patch comes with the import of its module: before, after, and not twice."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ft_core.import_hook import after_import


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with a module that takes a name of its neighbour's when it is imported."""
    package = tmp_path / "aframework"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parser.py").write_text("def flags():\n    return ['--own']\n")
    (package / "main.py").write_text("from aframework.parser import flags\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("aframework")]:
        del sys.modules[name]


def adding(flag: str) -> Callable[[ModuleType], None]:
    def patch(module: ModuleType) -> None:
        original = module.flags
        module.flags = lambda: [*original(), flag]  # type: ignore[attr-defined]

    return patch


def test_before_and_after_the_import(framework: None):
    early, late = adding("--early"), adding("--late")
    after_import("aframework.parser", early)
    after_import("aframework.parser", early)
    assert "aframework.parser" not in sys.modules
    main = importlib.import_module("aframework.main")
    assert main.flags() == ["--own", "--early"]
    after_import("aframework.parser", late)
    after_import("aframework.parser", late)
    assert sys.modules["aframework.parser"].flags() == ["--own", "--early", "--late"]


def test_the_module_is_otherwise_as_it_was(framework: None):
    after_import("aframework.parser", adding("--early"))
    parser = importlib.import_module("aframework.parser")
    assert parser.__spec__ is not None and parser.__file__ == parser.__spec__.origin
    assert "return ['--own']" in parser.__loader__.get_source("aframework.parser")


def test_what_is_not_there_is_still_not_there(framework: None):
    after_import("aframework.absent", adding("--early"))
    with pytest.raises(ModuleNotFoundError, match=r"aframework\.absent"):
        importlib.import_module("aframework.absent")


def test_a_module_that_is_loaded_once_more_is_patched_once_more(framework: None):
    after_import("aframework.parser", adding("--early"))
    parser = importlib.import_module("aframework.parser")
    before = parser.flags()
    assert "--early" in before and importlib.reload(parser).flags() == before
