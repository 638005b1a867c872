"""What of all that is imported is the script's own."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("site-packages", "dist-packages")
_FRAMEWORKS = frozenset(
    "torch transformers accelerate deepspeed datasets tokenizers peft trl numpy megatron apex".split()
)
_BASES = frozenset({"abc", "typing"})
"""Modules whose classes give nothing of their own to an object."""


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
    for name, found in sys.modules.copy().items():  # other threads import, too
        file = getattr(found, "__file__", None)
        if isinstance(file, str) and not _is_installed(name, file):
            yield name, vars(found)
    main = sys.modules.get("__main__")
    if main is not None and getattr(main, "__file__", None) is not None:
        yield "__main__", vars(main)
    for name, part in module.named_modules():
        yield f"model.{name}", vars(part)


@functools.lru_cache(1000)
def is_own_class(kind: type) -> bool:
    """Whether an object of that class has nothing but its attributes, and only the script's own code."""
    bases = [base for base in kind.__mro__ if base is not object and base.__module__ not in _BASES]
    return bool(bases) and all(map(_is_own, bases))


def _is_own(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if not isinstance(file, str):
        return False
    return kind.__module__ == "__main__" or not _is_installed(kind.__module__, file)
