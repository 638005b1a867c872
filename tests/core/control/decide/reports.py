"""What agents say of roles, for tests of the decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RoleReport:
    """A role's `ft_core.control.decide.holdings.RoleHoldings`, and where that is."""

    role: int
    node: str
    alive: bool
    stage: Literal["startup", "training"]
    versions: tuple[int, ...]
    segments: tuple[str, ...]
