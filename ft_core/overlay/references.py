"""Who has taken a function that reaches files by its name, as `from os import replace` does.

A fork server looks through what it has imported once, before a failure; a newcomer only through what has been
imported since.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

from ft_core.import_hook import aside
from ft_core.overlay import libraries

Reference = tuple[ModuleType, str, Any]
"""Module, name, and what it stands for there."""
_SOURCES = (os, io, tempfile, subprocess, shutil)
_NOT = frozenset({"posix", "_io", "os", "io", "builtins", "nt"})
"""Modules that are turned themselves."""
_looked_through: dict[int, ModuleType] = {}
"""By identity."""
_found: list[Reference] = []


def look_through() -> None:
    """Find, in what is imported by now, whoever has taken one."""
    functions = [f for source in _SOURCES for f in vars(source).values() if callable(f)]
    known = {id(function) for function in (*functions, *libraries.functions(), builtins.open, time.sleep)}
    modules = _modules()
    _found.extend(_references(modules, known))
    _looked_through.update((id(module), module) for module in modules)


def to(functions: Collection[int]) -> Iterator[Reference]:
    """Whoever has taken one of these functions, given by identity; they are alive."""
    for module, name, value in _found:
        if id(value) in functions and vars(module).get(name) is value:
            yield module, name, value
    yield from _references([m for m in _modules() if id(m) not in _looked_through], functions)


def _modules() -> list[ModuleType]:
    ours = __package__ or ""
    found = [*list(sys.modules.values()), *list(aside.values())]  # other threads import, too
    return [m for m in found if isinstance(m, ModuleType) and not _name(m).startswith(ours)]


def _name(module: ModuleType) -> str:
    name = vars(module).get("__name__")
    return name if isinstance(name, str) else ""


def _references(modules: list[ModuleType], functions: Collection[int]) -> Iterator[Reference]:
    for module in modules:
        if _name(module) in _NOT:
            continue
        for name, value in list(vars(module).items()):
            if id(value) in functions:
                yield module, name, value
