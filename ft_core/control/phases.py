"""What the job is doing, seen from the controller: values, each with what only it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class Forming:
    """Nodes come; nothing was begun yet."""

    name: ClassVar[str] = "forming"
    joined_at: float = 0.0
    """When the last node came that had not been there."""


@dataclass
class Rebuilding:
    """A restarted controller learns from the agents what there is."""

    name: ClassVar[str] = "rebuilding"
    newest: int
    """The epoch of the newest plan that is known to be somewhere."""
    began: float
    heard_at: float
    """When somebody who knows the secret last came, or said who he is."""
    asked_at: float = float("-inf")
    asked: int = 0
    undone: list[tuple[str, list[int]]] = field(default_factory=list)
    """Failures, with their roles, that were heard of before it was known where all roles are."""


@dataclass
class Running:
    """An epoch is under way: neither ending nor yet to be decided."""

    name: ClassVar[str] = "running"


@dataclass
class Quiescing:
    """An epoch has ended: its workers leave what they are in, their nodes report what they hold."""

    name: ClassVar[str] = "quiescing"
    since: float


@dataclass
class Waiting:
    """All have reported; something is missing without which the job cannot go on."""

    name: ClassVar[str] = "waiting"
    since: float
    """When the epoch ended."""


@dataclass
class Done:
    """The job is over."""

    name: ClassVar[str] = "done"
    code: int


Phase = Forming | Rebuilding | Running | Quiescing | Waiting | Done
