"""What a model keeps in attributes and in buffers that no `state_dict` has.

A count of calls, a running mean, the longest sequence so far, a temperature that the script sets.

A pass changes it, so a pass that is made again must find it as the first one did, and a newcomer, which makes
none, is given it where its peers are.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

_LARGEST = 1 << 20
"""Bytes of a tensor that is looked after. A larger one is a table: it is made, and not added to."""
_MANY = 64
"""Entries of a list or dictionary."""
_TORCH = ("torch.nn", "torch.ao", "deepspeed")
"""Modules of these are known to keep nothing of the kind."""
_OURS = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes that each module has for torch's own use."""
_OPTIMIZER = ("state", "param_groups", "defaults", "_")
"""How attributes of an optimizer begin that are torch's."""
_DEEPSPEED = ("ds_", "_ds", "_external_params", "applied_", "training")
"""How attributes begin that DeepSpeed gives modules, and what is a call's own anyway."""

_COUNT = "micro_offset"
"""A pipeline's passes, by which its layers are seeded (`PipelineModule(seed_layers=True)`)."""

_PACKAGES = ("site-packages", "dist-packages")
_FRAMEWORKS = frozenset(
    "torch transformers accelerate deepspeed datasets tokenizers peft trl numpy megatron apex".split()
)

_FIXED = frozenset({type(None), bool, int, float, str})
_MISSING = object()
Place = tuple[str, dict[str, Any], str]
"""Its name, and the dictionary and key that it is found by."""


class ModuleState:
    """The state of one model's attributes, and its optimizer's. Values that stay what they were when training
    began are not kept."""

    def __init__(self, module: torch.nn.Module, optimizer: Any = None) -> None:
        """`module`: as the script begins training with it. `optimizer`: the one that steps it."""
        self._modules = [
            (name, part)
            for name, part in module.named_modules()
            if not type(part).__module__.startswith(_TORCH) or [*_hidden(part)]
        ]
        self._late = {name: [*_hidden(part)] for name, part in self._modules}
        """Buffers that no `state_dict` has, or that were not there yet, by the module's name."""
        self._others = () if optimizer is None or _is_torchs(optimizer) else (vars(optimizer),)
        """Where an optimizer of the script's own has attributes; what torch knows of it is kept elsewhere."""
        self._places: list[Place] = []
        self._sizes: list[int] = []
        self._seen: list[Any] = []
        """What was found last at each place, and for what may change inside its mark; see `_mark`."""
        self._marks: list[Any] = []
        self._first: dict[str, Any] = {}
        self._changed: dict[str, Any] = {}
        self._look()
        self._first, self._changed = self._changed, {}

    def capture(self) -> dict[str, Any]:
        """What is other than it was in the beginning, by name."""
        self._look()
        return dict(self._changed)

    def restore(self, changed: dict[str, Any]) -> None:
        """Put back what `capture` returned, and the rest as it was in the beginning."""
        for name, space, key in self._places:
            value = changed.get(name, self._first.get(name, _MISSING))
            if value is _MISSING or _same(value, space.get(key, _MISSING)):
                continue
            here = space.get(key)
            if not isinstance(value, torch.Tensor):
                space[key] = _copied(value)
            elif isinstance(here, torch.Tensor) and here.shape == value.shape and here.dtype == value.dtype:
                with torch.no_grad():
                    here.copy_(value)
            else:
                device = here.device if isinstance(here, torch.Tensor) else value.device
                space[key] = value.to(device, copy=True)

    def _look(self) -> None:
        sizes = [*(len(vars(part)) for _, part in self._modules), *map(len, self._others)]
        if sizes != self._sizes:
            self._sizes = sizes
            self._places = [
                place for name, part in self._modules for place in _places(name, part, self._late[name])
            ]
            for space in self._others:
                self._places += [
                    (f"optimizer.{key}", space, key)
                    for key, value in space.items()
                    if not key.startswith(_OPTIMIZER) and (_is_plain(value) or _is_kept(value))
                ]
            self._seen = [_MISSING] * len(self._places)
            self._marks = [None] * len(self._places)
        seen, marks = self._seen, self._marks
        for at, (name, space, key) in enumerate(self._places):
            value = space.get(key, _MISSING)
            if value is seen[at] and type(value) in _FIXED:  # nearly all of them
                continue
            mark = _mark(value)
            if value is seen[at] and mark is not None and mark == marks[at]:
                continue
            seen[at], marks[at] = value, mark
            if not (_is_plain(value) or _is_kept(value)):
                self._changed.pop(name, None)
            elif not _same(self._first.get(name, _MISSING), value):
                self._changed[name] = _copied(value)
            else:
                self._changed.pop(name, None)


def _is_torchs(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith(("torch.", "deepspeed."))


def _mark(value: Any) -> Any:
    """Equal while nothing has changed in it; None: that is not known."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    return None


def _hidden(part: torch.nn.Module) -> Iterator[str]:
    yield from part._non_persistent_buffers_set
    for key, value in part._buffers.items():
        if value is None and key not in part._non_persistent_buffers_set:
            yield key
    if _COUNT in vars(part):
        yield _COUNT


def _places(name: str, part: torch.nn.Module, hidden: list[str]) -> Iterator[Place]:
    prefix = f"{name}." if name else ""
    if not type(part).__module__.startswith(_TORCH):
        space = vars(part)
        for key, value in space.items():
            if key not in _OURS and not key.startswith(_DEEPSPEED) and (_is_plain(value) or _is_kept(value)):
                yield f"{prefix}{key}", space, key
    for key in sorted({*part._non_persistent_buffers_set, *hidden}):
        if key == _COUNT and key in vars(part):
            yield f"{prefix}{key}", vars(part), key
        else:
            yield f"{prefix}{key}", part._buffers, key


def _is_kept(value: Any) -> bool:
    """A tensor that belongs to no pass."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, torch.nn.Parameter)
        and value.grad_fn is None
        and value.device.type != "meta"
        and value.nbytes <= _LARGEST
    )


def _is_plain(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, str, np.number)):
        return True
    if isinstance(value, dict):
        return len(value) <= _MANY and all(map(_is_plain, [*value, *value.values()]))
    return isinstance(value, (list, tuple)) and len(value) <= _MANY and all(map(_is_plain, value))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if type(value) is list:
        return [_copied(part) for part in value]
    return value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return False
        return (
            one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other.to(one.device))
        )
    return type(one) is type(other) and bool(one == other)


def _is_installed(name: str, file: str) -> bool:
    """Wherever that is: for the user, by PYTHONPATH, or from a checkout."""
    if file.startswith((sys.prefix, sys.base_prefix)) or name.startswith("ft_"):
        return True
    if name.partition(".")[0] in _FRAMEWORKS or any(f"/{place}/" in file for place in _PACKAGES):
        return True
    above = name.count(".") + (os.path.basename(file) == "__init__.py")
    return _holds_packages(str(Path(file).parents[above])) if above < len(Path(file).parents) else False


@functools.cache
def _holds_packages(directory: str) -> bool:
    """Whether pip has put packages there, as it does with `--target`."""
    try:
        with os.scandir(directory) as found:
            return any(entry.name.endswith(".dist-info") for entry in found)
    except OSError:
        return False


def scripts(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where generators of the script's own are looked for: its modules, and the model's attributes."""
    for name, found in list(sys.modules.items()):
        file = getattr(found, "__file__", None)
        if isinstance(file, str) and not _is_installed(name, file):
            yield name, vars(found)
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) is not None:
        yield "__main__", vars(main)
    for name, part in module.named_modules():
        yield f"model.{name}", vars(part)
