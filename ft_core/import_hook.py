"""Patches a framework's module as soon as somebody imports it; who never does never waits for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Patch = Callable[[ModuleType], None]


def after_import(name: str, patch: Patch) -> None:
    """Call `patch` with the module `name`: now if it is imported already, otherwise once it has run, or is in
    sight again.

    Asked for again, the same `patch` is called no second time.
    """
    asked = _patches.setdefault(name, [])
    if patch in asked:
        return
    asked.append(patch)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    if (module := sys.modules.get(name)) is not None:
        _use(patch, module)


def _use(patch: Patch, module: ModuleType) -> None:
    _patched[id(module), patch] = module
    patch(module)


def in_sight(names: Iterable[str]) -> None:
    """These modules are there again that were out of sight."""
    for name in names:
        for patch in list(_patches.get(name, ())):
            if (module := sys.modules.get(name)) is not None and (id(module), patch) not in _patched:
                _use(patch, module)


_patches: dict[str, list[Patch]] = {}
_patched: dict[tuple[int, Patch], ModuleType] = {}
"""By its identity, which no other has as long as it is in here: the modules that were patched."""
aside: dict[str, ModuleType] = {}
"""Modules that are imported, and are out of sight until somebody asks for them."""


class _AfterImport(MetaPathFinder):
    """Finds a module as the others would, and has it patched once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _patches:
            return None
        for finder in sys.meta_path:  # it may be asked for without being imported, so this finder stays
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader)
                return spec
        return None


_FINDER = _AfterImport()


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for patch in list(_patches[module.__name__]):
            _use(patch, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source, is_package and what else tools ask a loader
