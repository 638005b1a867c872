"""Imported by an agent's fork server: brings in what the user's script imports, in its order.

A worker forked from such a server has its imports done. That is most of what a restart costs
(process start and imports are 4 to 6 of the 7 to 10 seconds that `torchrun --max-restarts` takes).
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import os
import sys
from pathlib import Path

from ft_core.process import collector
from ft_core.worker import cuda_fork, import_output

ENV = "FT_PRELOAD"


def source_of(target: str) -> Path | None:
    """The file behind a script path or a module name, or None when there is none to read."""
    if os.path.exists(target):
        return Path(target)
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    return None


def imports_of(source: str) -> list[tuple[str, list[str]]]:
    """What a script's top level imports, in order: modules, and the names that it takes from them.

    Nothing for a script that does not parse.
    """
    found: list[tuple[str, list[str]]] = []
    with contextlib.suppress(SyntaxError):
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import):
                found += [(alias.name, []) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.append((node.module, [alias.name for alias in node.names]))
    return found


def _preload() -> None:
    import ft_core.worker.entry  # noqa: F401 - what every worker needs
    from ft_core import plugins

    with contextlib.suppress(Exception):
        plugins.load(plugins.HOOKS)
    cuda_fork.look("the hooks of installed packages")
    target = os.environ.get(ENV, "")
    source = source_of(target) if target else None
    if source is None or source.suffix != ".py":
        return
    sys.path.insert(0, str(source.parent.resolve()))
    for name, parts in imports_of(source.read_text()):
        # Whatever is wrong with an import is for the script itself to report, in its own process.
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            for part in parts:  # a module may import only now what is asked of it
                getattr(module, part, None)
        cuda_fork.look(name)
    for preload in plugins.load(plugins.PRELOAD):
        with contextlib.suppress(Exception):
            preload()
        cuda_fork.look(f"what {preload.__module__} preloads")
    sys.path.pop(0)


gc.disable()  # nothing is garbage yet
try:
    with import_output.kept():
        _preload()
    collector.exempt()
finally:
    gc.enable()
