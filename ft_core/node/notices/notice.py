"""What a source of notices is, and what it says."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple, Protocol

EVERY = 5.0
"""Seconds between two looks at what answers on this machine."""
PER_SECOND = 50.0
"""Looks of a whole job at what all its nodes share, such as Slurm's controller."""
LIMIT = 2.0
"""Seconds that an answer may take."""
_LONGEST = 200
"""Characters of a reason."""


class Notice(NamedTuple):
    """This machine is about to go."""

    reason: str
    """Who says so, and what."""
    at: float | None = None
    """When, in seconds of the epoch; None where nobody says."""


class Source(Protocol):
    """Somebody who may announce that."""

    every: float
    """Seconds between two looks."""

    async def look(self) -> list[Notice]:
        """All that is announced now. Raises OSError where nobody answers, and ValueError for an answer that
        is none."""

    async def agree(self) -> None:
        """The machine does nothing for the job any more: it may go at once. Raises as `look`."""


def shared(nodes: int) -> float:
    """Seconds between two looks at something that all nodes of the job ask."""
    return max(EVERY, nodes / PER_SECOND)


def moment(text: str) -> float:
    """A time as clouds write it, ISO 8601 or that of mail, in seconds of the epoch. Raises ValueError."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            found = parsedate_to_datetime(text)
        except OverflowError:
            raise ValueError(f"{plain(text)!r} is no time") from None
    seconds = (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is no time")
    return seconds


def plain(text: str) -> str:
    """A text in one line, fit for a console."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:_LONGEST]
