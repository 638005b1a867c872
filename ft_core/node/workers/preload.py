"""In an agent's fork server: brings in what the user's script imports, in its order.

A worker forked from such a server has its imports done. That is most of what a restart costs
(process start and imports are 4 to 6 of the 7 to 10 seconds that `torchrun --max-restarts` takes).

The script's own helpers are left to it: they are to run in a process that has a rank, after the statements
that come before. What they import is brought in. So are packages that lie beside the script and belong to a
framework that is known here. Of what is imported it is noted what it reads of the environment
(`worker.imports`), and whatever leaves a thread behind, begins to draw random numbers or uses a GPU is found,
and left to the script as well: this process begins anew without it.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ft_core.errors import FtError
from ft_core.overlay import references
from ft_core.process import collector
from ft_core.worker import cuda_fork, import_output, imports

ENV = "FT_PRELOAD"
WITHOUT = "FT_PRELOAD_WITHOUT"
"""What is left to the script, and why, as JSON."""
_INSTALLED = {"site-packages", "dist-packages"}
_PYTHON = Path(os.__file__).resolve().parent
_TRIAL = 10
"""Seconds in which a child must be able to use all threads of the native pools."""


@dataclass(frozen=True)
class Import:
    """A module, and the names that are taken from it."""

    module: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """A variable of the environment; `default`: only if there is none."""

    name: str
    value: str
    default: bool = False


def source_of(target: str) -> Path | None:
    """The file behind a script path or a module name, or None when there is none to read."""
    if os.path.exists(target):
        return Path(target)
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    return None


class Script:
    """What a script does at its top level before it begins, and its own helpers, as they are imported."""

    def __init__(self, source: Path, root: Path, known: frozenset[str] = frozenset()) -> None:
        """`root`: the directory that it imports its own from. `known`: packages that are safe to import
        wherever they lie."""
        self._root, self._known = root, known
        self._read: set[Path] = set()
        self.steps = list(self._of(source.resolve()))
        """Imports of what is not the script's own, and settings of constants, in order."""

    def _of(self, path: Path) -> Iterator[Import | Setting]:
        if path in self._read or path.suffix != ".py" or not path.is_file():
            return
        self._read.add(path)
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        yield from self._import(alias.name, ())
                elif isinstance(node, ast.ImportFrom):
                    yield from self._from(node, path)
                else:
                    yield from _settings(node)

    def _from(self, node: ast.ImportFrom, path: Path) -> Iterator[Import | Setting]:
        names = tuple(alias.name for alias in node.names)
        if not node.level:
            yield from self._import(node.module or "", names)
            return
        base = path.parents[node.level - 1] if node.level <= len(path.parents) else path.parent
        yield from self._own(base.joinpath(*(node.module or "").split(".")), names)

    def _import(self, module: str, names: tuple[str, ...]) -> Iterator[Import | Setting]:
        package, *parts = module.split(".")
        if (at := self._place_of(package)) is None:
            yield Import(module, names)
            return
        yield from self._own(at, ())
        for part in parts:  # a package's own file runs before its modules'
            at /= part
            yield from self._own(at, ())
        yield from self._own(at, names)

    def _own(self, path: Path, names: tuple[str, ...]) -> Iterator[Import | Setting]:
        yield from self._of(path / "__init__.py")
        yield from self._of(path.with_suffix(".py"))
        for name in names:
            yield from self._of(path / f"{name}.py")
            yield from self._of(path / name / "__init__.py")

    def _place_of(self, package: str) -> Path | None:
        """Where that lies, less `.py`, if it is in the script's directory and not installed there."""
        if package in self._known or package in sys.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(package, [str(self._root), *sys.path])
        places = [spec.origin, *(spec.submodule_search_locations or ())] if spec is not None else []
        for place in filter(None, places):
            path = Path(place).resolve()
            if path.is_relative_to(_PYTHON):
                continue
            if path.is_relative_to(self._root) and _INSTALLED.isdisjoint(path.relative_to(self._root).parts):
                return path.parent if path.name == "__init__.py" else path.with_suffix("")
        return None


def _settings(node: ast.stmt) -> Iterator[Setting]:
    """`os.environ["NAME"] = "value"`, and `os.environ.setdefault("NAME", "value")`."""
    match node:
        case ast.Assign(
            targets=[ast.Subscript(value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str(name)))],
            value=ast.Constant(value=str(value)),
        ):
            yield Setting(name, value)
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="setdefault"),
                args=[ast.Constant(value=str(name)), ast.Constant(value=str(value))],
            )
        ):
            yield Setting(name, value, default=True)


def _preload(without: dict[str, str]) -> dict[str, str]:
    """Returns what is to be left to the script beside that, and was not, and why."""
    import ft_core.node.workers.entry
    from ft_core import plugins

    try:
        import ft_core.worker.entry  # noqa: F401 - what every worker needs
    except ImportError as error:  # such an error the fork server would pass over, and each worker come to
        raise FtError(f"no worker can be started here: {error}") from error

    with contextlib.suppress(Exception):
        plugins.load(plugins.HOOKS)
    cuda_fork.look("the hooks of installed packages")
    target = os.environ.get(ENV, "")
    source = source_of(target) if target else None
    if source is None or source.suffix != ".py":
        return {}
    source = source.resolve()
    root = source.parent if os.path.exists(target) else source.parents[target.count(".")]
    sys.path.insert(0, str(root))
    with contextlib.suppress(
        ImportError
    ):  # numpy brings it in when somebody asks for it, and that draws nothing
        importlib.import_module("numpy.random")
    unsafe, before = dict[str, str](), dict[str, str | None]()
    try:
        with imports.noted():
            for step in Script(source, root, plugins.frameworks()).steps:
                if isinstance(step, Setting):
                    before.setdefault(step.name, os.environ.get(step.name))
                    if not step.default or step.name not in os.environ:
                        imports.set_for_script(step.name, step.value)
                elif not _is_left(step.module, without):
                    traces = _Traces()
                    _import(step)
                    if why := traces.left_by(step.module):
                        unsafe[step.module] = why
            for preload in plugins.load(plugins.PRELOAD):
                name = preload.__module__
                if not _is_left(name, without):
                    with contextlib.suppress(Exception):
                        preload()
                    if cuda_fork.look(f"what {name} preloads"):
                        unsafe[name] = "what it imports initializes CUDA, and no worker could use a GPU"
    finally:
        sys.path.pop(0)
        for name, value in before.items():  # each worker's script sets it anew
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    return unsafe


def _is_left(module: str, without: Iterable[str]) -> bool:
    """Whether it, or what it is a part of, is left to the script."""
    return any(f"{module}.".startswith(f"{name}.") for name in without)


def _import(step: Import) -> None:
    # Whatever is wrong with an import is for the script itself to report, in its own process.
    with contextlib.suppress(Exception):
        module = importlib.import_module(step.module)
        for name in step.names:  # a module may import only now what is asked of it
            getattr(module, name, None)


class _Traces:
    """What an import must leave as it is."""

    def __init__(self) -> None:
        self._python, self._native, self._drawn = threading.active_count(), _tasks(), _drawn()

    def left_by(self, name: str) -> str:
        """Why a fork of this process is not what the script would have; empty: it is."""
        if threading.active_count() > self._python:
            return "it starts a thread, which no worker would have"
        if _drawn() != self._drawn:
            return "it seeds random numbers, or draws some"
        if _tasks() > self._native and not _pools_survive():
            return "it uses native threads, for which its workers would wait"
        if cuda_fork.look(name):
            return "it initializes CUDA, and no worker could use a GPU"
        return ""


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def _drawn() -> tuple[int, bytes, bytes]:
    """Where the generators are."""
    import torch

    numpy = sys.modules.get("numpy.random")
    own = repr(numpy.get_state()).encode() if numpy is not None else b""
    return hash(random.getstate()), own, torch.get_rng_state().numpy().tobytes()


def _pools_survive() -> bool:
    """Whether a child can compute on all threads: a pool that has run before the fork waits for ever."""
    import torch

    if (child := os.fork()) == 0:
        signal.alarm(_TRIAL)
        torch.arange(1 << 20).float().sin()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def main() -> None:
    """Import all that there is, and begin anew without what must not be."""
    without = json.loads(os.environ.pop(WITHOUT, "{}"))
    gc.disable()  # nothing is garbage yet
    try:
        with import_output.kept():
            for name, why in without.items():
                print(
                    f"ftrun: workers import {name} themselves, and start later for it: {why}", file=sys.stderr
                )
            unsafe = _preload(without)
        if not unsafe:
            references.look_through()
        collector.exempt()
    finally:
        gc.enable()
    if unsafe:
        # The second time all of the package is left: not one module after the other, a start for each.
        whole = {imports.package_of(name): why for name, why in unsafe.items()} if without else {}
        os.environ[WITHOUT] = json.dumps(without | unsafe | whole)
        os.execv(sys.executable, sys.orig_argv)
