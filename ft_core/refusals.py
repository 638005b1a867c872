"""What a user may ask a framework for that a recovery could not restore. Each adapter has a table of it.

It is asked as early as there is something to look at (`ftrun` and `ftctl doctor` see the arguments of a
script), and once more about what the framework has made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ft_core.errors import ConfigError


@dataclass(frozen=True)
class Refusal:
    """One thing that cannot go with fault tolerance."""

    asked: Callable[[Any], str]
    """Looks for it, and returns it in the user's words: a flag, or a key with its value. Empty: not there."""
    why: str
    """And what to do instead."""


def check(table: Iterable[Refusal], found: Any, protection: str, off: str) -> None:
    """Raise ConfigError if `found` has anything of the table: it names all, why, and what to do.

    `protection`: what asks for fault tolerance. `off`: how not to ask for it.
    """
    problems = [f"{what} cannot go with {protection}: {r.why}" for r in table if (what := r.asked(found))]
    if problems:
        raise ConfigError(f"{'; '.join(problems)}; or {off} to train without protection")
