"""What other packages add to the engine, found through entry points: the engine names none of them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

HOOKS = "ft_core.hooks"
"""Called without arguments in every worker before the user's script: installs a framework's hooks."""

PRELOAD = "ft_core.preload"
"""Called without arguments in a node's fork server: imports what a framework would import only when used."""

PLANNER = "ft_core.planner"
"""A `ft_core.cli.planner.shape.Framework`: what `ftctl plan` must know of it."""

DOCTOR = "ft_core.doctor"
"""A `ft_core.cli.doctor.case.Framework`: what `ftctl doctor` must know of it."""

HEALTH = "ft_core.health"
"""A `ft_core.node.devices.health.Health`: called by each agent, for what is wrong with its machine."""


@cache
def packages() -> tuple[str, ...]:
    """The engine's own package and those that add hooks to it."""
    return ("ft_core", *sorted({found.module.partition(".")[0] for found in entry_points(group=HOOKS)}))


@cache
def frameworks() -> frozenset[str]:
    """The packages that hooks are for, by which their entry points are called."""
    return frozenset(found.name for found in entry_points(group=HOOKS))


@cache
def load(group: str) -> tuple[Any, ...]:
    """The objects that entry points of `group` name. Looked up once per process and its forks."""
    return tuple(found.load() for found in sorted(entry_points(group=group), key=lambda e: e.name))
