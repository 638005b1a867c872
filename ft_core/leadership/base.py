"""`Leadership`: how a job agrees on who its controller is. Where that is kept is in the modules beside this.

Every call may block, for `http.TRY` seconds a server at most. An object is for one thread.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from ft_core.errors import FtError
from ft_core.leadership import lease
from ft_core.protocol.goodput import Spent


class LeadershipError(FtError):
    """Nobody can be asked who leads, or what was answered is none. What was asked for may have happened."""


class Notes(Struct, frozen=True):
    """What a leader leaves for its successors, of what no agent may be left to tell."""

    recorded: dict[str, int] = {}
    """Event -> the newest epoch that has it."""
    failed: int = 0
    """Leaders in a row, up to the last, that have failed of an error of their own."""
    spent: Spent | None = None
    """What the job's time went to."""
    at: float = 0.0
    """Until this time, in seconds since 1970."""


@dataclass(frozen=True)
class Leader:
    """Who leads, as far as can be seen."""

    term: int = 0
    """The newest that there is; 0: nobody has led yet."""
    address: str = ""
    """Empty where nobody leads at present."""
    over: int | None = None
    """The job's exit code, once it is over."""
    job: str = field(default="", compare=False)
    """The id of the job that this is about; empty where there is none."""


@dataclass
class Grant:
    """A leadership."""

    job: str
    """The id of the job."""
    term: int
    seconds: float
    """That it lasts from one renewal to the next."""
    notes: Notes
    """The notes of predecessors."""
    key: Any = field(repr=False)
    """By which the lease is known where it is kept."""


class Leadership(Protocol):
    """Who is the job's controller."""

    place: str
    """For people, and for the command line."""
    near: str
    """HOST:PORT: this machine's address on the way there is one that others reach it by."""
    every: float
    """Seconds between two looks of a process."""

    def look(self) -> Leader:
        """Raises LeadershipError."""

    def acquire(self, address: str, floor: int, job: str = "") -> Grant | None:
        """Lead, if nobody does, in a term above `floor`. `job`: its id, if that is known; else it is found
        there, or a new job begins. None: somebody else does. Raises LeadershipError."""

    def renew(self, grant: Grant) -> bool:
        """False: the lease is lost. Raises LeadershipError."""

    def note(self, grant: Grant, notes: Notes) -> bool:
        """False: the lease is lost. Raises LeadershipError."""

    def resign(self, grant: Grant, over: int | None = None) -> bool:
        """Let another lead; `over`: with this code the job is over, for all. False: the lease was lost
        before. Raises LeadershipError."""


def new_id() -> str:
    """The id of a job: no other has it."""
    return secrets.token_hex(8)


def no_other_of_this_name(place: str, address: str) -> LeadershipError:
    """Where somebody leads who does not know this job's secret."""
    return LeadershipError(
        f"{place}: {address!r} leads there, of a job with another secret, unless somebody else can write "
        "there and has: give each job a name of its own there, and all of its nodes the same secret"
    )


@dataclass
class Fixed:
    """The controller is on one machine, at an address that all nodes were told."""

    place: str
    every: float = lease.LOOK

    def __post_init__(self) -> None:
        self.near = self.place

    def look(self) -> Leader:
        """There is but one, whom its own machine restarts."""
        return Leader(1, self.place)

    def acquire(self, address: str, floor: int, job: str = "") -> Grant | None:
        """Nobody else ever leads."""
        return None

    def renew(self, grant: Grant) -> bool:
        raise NotImplementedError(self.acquire.__doc__)

    def note(self, grant: Grant, notes: Notes) -> bool:
        raise NotImplementedError(self.acquire.__doc__)

    def resign(self, grant: Grant, over: int | None = None) -> bool:
        raise NotImplementedError(self.acquire.__doc__)
