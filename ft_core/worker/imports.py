"""What a fork server has imported for its workers, and whether a worker may have it as it is.

A module that reads the environment when it is imported is another one where that differs: in the worker,
which has a rank, or because the script has set something before its own import. So is one that the script
finds in another place, since it has changed `sys.path`. What was imported is out of sight when the script
begins. Its import of a package brings it back if nothing that was read reads otherwise now; else it is
imported anew, as it would be elsewhere. A package with native code cannot be imported twice, nor one that
fails the second time (`datasets` registers types with pyarrow, once): that is said. So it is with each module
of the engine's own adapters that a script has imported: what it has of a framework is that which was there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import resolve_name
from types import FrameType, ModuleType
from typing import Any

from ft_core import patched, plugins
from ft_core.import_hook import aside, in_sight

log = logging.getLogger(__name__)


def package_of(module: str) -> str:
    """The top-level package of a module."""
    return module.partition(".")[0]


def _unit(module: str) -> str:
    """What is imported anew as one: a package, or a module of the engine's that came with the script's."""
    package = package_of(module)
    return module if package in _own and module not in _there else package


@dataclass
class Package:
    """A package, or a module of the engine's, as it was imported in a fork server."""

    reads: dict[str, str | None] = field(default_factory=dict)
    """What it read of the environment."""
    needs: set[str] = field(default_factory=set)
    """Packages that it has imported."""
    modules: dict[str, ModuleType] = field(default_factory=dict)
    """By name, while they are out of sight."""
    handlers: list[tuple[logging.Logger, logging.Handler]] = field(default_factory=list)
    """What log messages go through, of those that it has installed as it was imported."""

    def differs(self) -> list[str]:
        """Names of what would read otherwise now, but for what packages themselves have made of it."""
        now = {name: os.environ.get(name) for name in self.reads}
        changed = (name for name, value in self.reads.items() if now[name] != value)
        return [name for name in changed if name not in _written or now[name] != _written[name]]


_NATIVE = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "KMP_AFFINITY")
"""What torch's libraries read as they are loaded."""
_packages: dict[str, Package] = {}
"""The packages of this process, or of that which it was forked from."""
_written: dict[str, str | None] = {}
"""What packages have set in the environment, or deleted (None), as they were imported: it is so in workers,
too."""
_before: frozenset[str] = frozenset()
"""Packages that the engine has imported for itself: they stay."""
_own: frozenset[str] = frozenset()
"""Those of them that are its own."""
_there: frozenset[str] = frozenset()
"""The modules of that time."""


# -- in the fork server ----------------------------------------------------------------------------


def set_for_script(name: str, value: str) -> None:
    """Set what the script sets itself, when it is about to import what comes next."""
    os.environ[name] = value
    _written.pop(name, None)


@contextmanager
def noted() -> Iterator[None]:
    """Note what modules that are imported meanwhile read of the environment, and import."""
    global _before, _own, _there
    _there = frozenset(sys.modules)
    _before = frozenset(map(package_of, _there))
    _own = _before & frozenset(plugins.packages())
    _packages.setdefault("torch", Package()).reads.update({name: os.environ.get(name) for name in _NATIVE})
    read, write = patched.READ_VARIABLE.original(), patched.WRITE_VARIABLE.original()
    each, delete = patched.EACH_VARIABLE.original(), patched.DELETE_VARIABLE.original()
    add_handler = patched.ADD_HANDLER.original()
    load, load_by_name = patched.IMPORT.original(), patched.IMPORT_BY_NAME.original()
    looked_through = deque[str]()

    def reads(environment: Any, name: str) -> str:
        as_all = bool(looked_through) and name == looked_through[0] and looked_through.popleft()
        package = _of(sys._getframe(1), unless=name if as_all else "")
        try:
            value: str = read(environment, name)
        except KeyError:
            package.reads.setdefault(name, None)
            raise
        package.reads.setdefault(name, value)
        return value

    def looks_through(environment: Any) -> Iterator[str]:
        looked_through.clear()
        for name in each(environment):  # `dict` has all names first, `items` reads each as it comes
            looked_through.append(name)
            yield name

    def writes(environment: Any, name: str, value: str) -> None:
        write(environment, name, value)
        _written[name] = value

    def deletes(environment: Any, name: str) -> None:
        delete(environment, name)
        _written[name] = None

    def adds_handler(logger: logging.Logger, handler: logging.Handler) -> None:
        add_handler(logger, handler)
        _of(sys._getframe(1)).handlers.append((logger, handler))

    def loads(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        if not level:
            names = {name, *(f"{name}.{each}" for each in fromlist or ())}
            _of(sys._getframe(1)).needs.update(map(_unit, names))
        found: ModuleType = load(name, globals, locals, fromlist, level)
        return found

    def loads_by_name(name: str, package: Any = None, level: int = 0) -> ModuleType:
        whole = resolve_name("." * level + name, package)
        _of(sys._getframe(1)).needs.add(_unit(whole))
        found: ModuleType = load_by_name(name, package, level)
        return found

    with (
        patched.READ_VARIABLE.replaced(reads),
        patched.EACH_VARIABLE.replaced(looks_through),
        patched.WRITE_VARIABLE.replaced(writes),
        patched.DELETE_VARIABLE.replaced(deletes),
        patched.ADD_HANDLER.replaced(adds_handler),
        patched.IMPORT.replaced(loads),
        patched.IMPORT_BY_NAME.replaced(loads_by_name),
    ):
        yield


def _of(frame: FrameType | None, unless: str = "") -> Package:
    """The package that something is done for, perhaps through the standard library. `unless`: a variable that
    is read as all are, which is for nobody whose name is not in it."""
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if (package := package_of(module)) not in sys.stdlib_module_names:
            if unless and package.lower() not in unless.lower():
                return Package()
            return _packages.setdefault(_unit(module), Package())
        frame = frame.f_back
    return Package()


def check() -> None:
    """In a worker, once its script has imported what it does: say what of the environment came too late."""
    for name in _before & _packages.keys():
        _say(name, _packages[name].differs())


# -- in a worker -----------------------------------------------------------------------------------


def hide() -> None:
    """Put out of sight what was imported for the script."""
    if not _there:
        return
    hidden = set[str]()
    for each, module in list(sys.modules.items()):  # other threads import, too
        name = _unit(each)
        if each not in _there and name not in _before and package_of(name) not in sys.stdlib_module_names:
            hidden.add(name)
            _packages.setdefault(name, Package()).modules[each] = aside[each] = module
            del sys.modules[each]
            _parent(each).pop(each.rpartition(".")[2], None)
    sys.meta_path.insert(0, _Finder(hidden))


def _parent(module: str) -> dict[str, Any]:
    """The variables of the package that a module of the engine's lies in; else what nobody looks at."""
    parent = module.rpartition(".")[0]
    return vars(sys.modules[parent]) if _unit(module) == module and parent in sys.modules else {}


def _and_who_needs(names: set[str], among: Collection[str]) -> set[str]:
    """With the packages that need one of them, directly or not."""
    while more := {n for n in among if not names.isdisjoint(_packages[n].needs)} - names:
        names = names | more
    return names


class _Finder(MetaPathFinder):
    """Finds packages that were imported before; to load one is what decides of it."""

    def __init__(self, hidden: set[str]) -> None:
        self._hidden = hidden
        self._anew: dict[str, dict[str, dict[str, ModuleType]]] = {}
        """For packages that are to be imported anew: the modules of all those that are so together."""
        self._renewed: list[dict[str, dict[str, ModuleType]]] = []
        """The same of those that are anew. Whoever has been imported with the former ones has to be, too."""
        self._asks = threading.local()
        self._came: list[str] = []
        """Modules that are back, and have yet to be told of to who waits for them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (_unit(name) not in self._hidden and name not in self._anew) or name in vars(self._asks):
            return None
        vars(self._asks)[name] = True  # other finders ask all
        try:
            others = (finder for finder in list(sys.meta_path) if finder is not self)
            found = (spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None)
            spec = next(found, None)
        finally:
            del vars(self._asks)[name]
        if spec is None:
            if name not in aside:
                return None
            spec = ModuleSpec(name, None)  # it was made, and is in no file
        spec.loader = _Brings(self, spec, spec.loader)
        return spec

    def back(self, name: str, spec: ModuleSpec) -> ModuleType | None:
        """The module, if it need not be imported anew. `spec`: as it would be found now."""
        if (unit := _unit(name)) in self._hidden:
            self._decide(unit, _is_elsewhere(name, _packages[unit].modules, spec))
            return sys.modules.pop(name, None)  # who finds it there loads it once more
        return None

    def tell(self) -> None:
        """What came back with a module can be imported by now, that one too."""
        came, self._came = self._came, []
        in_sight(came)

    def execute(self, loader: Loader, module: ModuleType) -> None:
        """Run a module that is not back."""
        if (former := self._anew.pop(module.__name__, None)) is None:
            loader.exec_module(module)
        else:
            _execute_anew(loader, module, former)

    def _decide(self, wanted: str, elsewhere: bool) -> None:
        """Bring that package back, with those that it needs, or have it imported anew.

        `elsewhere`: the script finds it in another place, as it has changed `sys.path`.
        """
        needed = self._needed(wanted)
        renewed = {name for former in self._renewed for name in former}
        differ = {n for n in needed if _packages[n].differs() or not renewed.isdisjoint(_packages[n].needs)}
        differ |= {wanted} if elsewhere else set()
        anew = {name for name in _and_who_needs(differ, needed) if not _is_native(_packages[name])}
        former = {name: _packages[name].modules for name in anew}
        self._renewed.append(former)
        for name in needed:
            package = _packages[name]
            self._hidden.discard(name)
            if name in anew:
                self._anew[name] = former
                for logger, handler in package.handlers:
                    logger.removeHandler(handler)
                continue
            _say(name, package.differs())
            _bring_back(package.modules)
            self._came += package.modules
        for name in needed:
            for each in _packages[name].modules:
                aside.pop(each, None)
            _packages[name].modules = {}

    def _needed(self, wanted: str) -> set[str]:
        found, ahead = {wanted}, [wanted]
        while ahead:
            more = (_packages[ahead.pop()].needs & self._hidden) - found
            found |= more
            ahead += more
        return found


def _execute_anew(loader: Loader, module: ModuleType, former: dict[str, dict[str, ModuleType]]) -> None:
    """Run a module once more; where that fails, it is as before, with those that came with it.

    `former`: the modules of all packages that are anew together; empty once another of them has failed, and
    has brought all back.
    """
    name = module.__name__
    own = dict(former.get(name, {}))
    try:
        loader.exec_module(module)
    except Exception as error:
        if name not in own:
            raise
        log.warning("%s cannot be imported again: %s: %s", name, type(error).__name__, error)
        for each in [each for each in sys.modules if _unit(each) in former]:
            del sys.modules[each]
        for package, modules in former.items():
            _say(package, _packages[package].differs())
            _bring_back(modules)
            for logger, handler in _packages[package].handlers:
                if not logger.handlers:
                    logger.addHandler(handler)
        in_sight(each for modules in former.values() for each in modules)
        former.clear()
        sys.modules.update(own)
        vars(module).update(vars(own[name]))  # for whoever has it already


class _Brings(Loader):
    """Loads a module that was imported before: as it was, or anew."""

    def __init__(self, finder: _Finder, spec: ModuleSpec, loader: Loader | None) -> None:
        """`loader`: what would load it elsewhere; None of what is in no file, or in many places."""
        self._finder, self._name, self._loader = finder, spec.name, loader
        self._back: tuple[ModuleType, Any] | None = None
        """The module, and its own spec."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if (module := self._finder.back(self._name, spec)) is not None:
            self._back = module, getattr(module, "__spec__", None)
            return module
        return self._loader.create_module(spec) if self._loader is not None else None

    def exec_module(self, module: ModuleType) -> None:
        if self._back is not None:
            with contextlib.suppress(AttributeError):  # it may be any object
                module.__spec__ = self._back[1]
        self._finder.tell()
        if self._back is None and self._loader is not None:
            self._finder.execute(self._loader, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # get_source, is_package and what else tools ask a loader


def _is_elsewhere(name: str, modules: Mapping[str, ModuleType], spec: ModuleSpec) -> bool:
    """Whether one of these modules would be another file now. Of a package that is in many places those in it
    are looked at."""
    if spec.origin is not None:
        return _file(modules.get(name)) not in (None, spec.origin)
    places = list(spec.submodule_search_locations or ())
    inner = ((each, _file(module)) for each, module in modules.items() if each.rpartition(".")[0] == name)
    return any(file is not None and _found(each, places) not in (None, file) for each, file in inner)


def _found(name: str, places: Sequence[str]) -> str | None:
    """Where a module's file is, looked for there in turn."""
    each = [os.path.join(place, name.rpartition(".")[2]) for place in places]
    files = (file for at in each for file in (os.path.join(at, "__init__.py"), f"{at}.py"))
    return next(filter(os.path.exists, files), None)


def _file(module: ModuleType | None) -> str | None:
    return getattr(getattr(module, "__spec__", None), "origin", None)


def _bring_back(modules: Mapping[str, ModuleType]) -> None:
    sys.modules.update(modules)
    for name, module in modules.items():
        _parent(name)[name.rpartition(".")[2]] = module


def _is_native(package: Package) -> bool:
    files = (getattr(module, "__file__", None) or "" for module in package.modules.values())
    return any(file.endswith(tuple(EXTENSION_SUFFIXES)) for file in files)


def _say(package: str, names: list[str]) -> None:
    if not names:
        return
    log.warning(
        "%s was imported before the script had set %s, and cannot be imported again: set it for ftrun",
        package,
        ", ".join(sorted(names)),
    )
