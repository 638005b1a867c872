"""The one way in which attributes of frameworks are replaced at run time; no file of theirs is changed.

Each package declares what it patches, and why, in its module `patched`, so that it can be read in one place;
`ftctl doctor --patches` lists it. Where a declared patch is applied, it is to the class or module that its
target names, or to one object (`of`), whose other instances stay as they are.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

from ft_core.errors import ConfigError

_MISSING = object()
_MARK = "_ft_patch"


@dataclass(frozen=True)
class Patch:
    """An attribute of a framework that is replaced."""

    target: str
    """`module:qualified name`."""
    reason: str
    optional: bool = False
    """Not every version has it: where it is missing nothing is done."""
    made_later: bool = False
    """The class does not have it: the framework sets it on objects."""

    @property
    def name(self) -> str:
        """The name of the attribute, without what holds it."""
        return self.target.rpartition(":")[2].rpartition(".")[2]

    def exists(self) -> bool:
        """Whether it is there. Raises ConfigError if it is not, and is not optional."""
        if self.optional:
            return hasattr(self._owner(), self.name)
        self.original()
        return True

    def original(self, of: Any = None) -> Any:
        """What is there now. `of`: the object that has it; by default what the target names.

        Raises ConfigError if there is no such attribute: the framework's version is another one.
        """
        found = getattr(self._owner() if of is None else of, self.name, _MISSING)
        if found is _MISSING:
            raise self._missing()
        return found

    def wrap(
        self,
        wrapper: Callable[[Callable[..., Any]], Callable[..., Any]],
        of: Any = None,
        *,
        once: bool = False,
        bound: bool = False,
    ) -> None:
        """Put what `wrapper` makes of the function in its place. For `of` and errors see `original`.

        `once`: nothing is done where that was done before. `bound`: `of` gets a method, as some who look at
        it insist, and not a function.
        """
        owner = self._owner() if of is None else of
        if self.optional and not hasattr(owner, self.name):
            return
        original = self.original(owner)
        if once and getattr(original, _MARK, None) is self:
            return
        if (made := wrapper(original)) is original:
            return
        wrapped: Callable[..., Any] = functools.wraps(original)(_without_self(made) if bound else made)
        setattr(wrapped, _MARK, self)
        setattr(owner, self.name, MethodType(wrapped, owner) if bound else wrapped)

    def replace(self, value: Any, of: Any = None) -> None:
        """Put `value` in its place. For `of` and errors see `original`."""
        owner = self._owner() if of is None else of
        self.original(owner)
        setattr(owner, self.name, value)

    @contextmanager
    def replaced(self, value: Any, of: Any = None) -> Iterator[None]:
        """`replace` for a while."""
        owner = self._owner() if of is None else of
        self.original(owner)
        with replaced(owner, {self.name: value}):
            yield

    def _owner(self) -> Any:
        module, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module)
        for part in path.split(".")[:-1]:
            if (owner := getattr(owner, part, _MISSING)) is _MISSING:
                raise self._missing()
        return owner

    def _missing(self) -> ConfigError:
        module, _, path = self.target.partition(":")
        return ConfigError(
            f"{framework(self)} has no {path} in {module}, which is to be patched ({self.reason}): use a "
            "version that docs/compatibility.md lists, or train without fault tolerance"
        )


_declared: dict[Patch, None] = {}


def declare(target: str, reason: str, *, optional: bool = False, made_later: bool = False) -> Patch:
    """A patch, for `ftctl doctor --patches` to list; see `Patch`."""
    patch = Patch(target, reason, optional, made_later)
    _declared[patch] = None
    return patch


def declare_each(
    owner: str, names: str, reason: str, *, optional: bool = False, made_later: bool = False
) -> tuple[Patch, ...]:
    """Declare several attributes of one class or module, which are replaced for the same reason."""
    prefix = owner if owner.endswith(":") else f"{owner}."
    options = {"optional": optional, "made_later": made_later}
    return tuple(declare(prefix + name, reason, **options) for name in names.split())


def declared(packages: Iterable[str]) -> list[Patch]:
    """All that these packages patch, by framework, as their modules `patched` have it."""
    for package in packages:
        name = f"{package}.patched"
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # a package that patches nothing has none
                raise
    return sorted(_declared, key=framework)


def framework(patch: Patch) -> str:
    """The distribution that the patch's target belongs to, with its version."""
    return _distribution(patch.target.partition(":")[0].partition(".")[0])


@functools.cache
def _distribution(top: str) -> str:
    for name in importlib.metadata.packages_distributions().get(top, ()):
        return f"{name} {importlib.metadata.version(name)}"
    return "Python" if top in sys.stdlib_module_names else f"{top} (not installed)"


@contextmanager
def replaced(owner: Any, values: dict[str, Any]) -> Iterator[None]:
    """`owner` with other attributes for a while. What they have become by its end is kept in `values`."""
    before: Mapping[str, Any] = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            values[name] = getattr(owner, name)
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def _without_self(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: function(*args, **kwargs)
