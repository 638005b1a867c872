"""What the job is doing, seen from the controller: values, each with what only it needs, and a table of what
leads from one to another."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

from ft_core.control.decide.ladder import Failure
from ft_core.control.decide.last_version import LastVersion
from ft_core.control.events import Peer
from ft_core.process.transitions import Transitions
from ft_core.protocol.messages import NodeName


@dataclass
class Forming:
    """Nodes come; nothing was begun yet."""

    name: ClassVar[str] = "forming"
    joined_at: float = 0.0
    """When the last node came that had not been there."""


@dataclass(frozen=True)
class Missing:
    """Nodes of the plan that have not come."""

    names: Collection[str]
    covered: bool
    """Whether others have all that they had."""


@dataclass(frozen=True)
class Ending:
    """How the job is to end: its exit code, why, and what the console says of that, if not the reason."""

    code: int
    reason: str
    shown: str


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
    failures: list[Failure] = field(default_factory=list)
    """What was heard of before it was known where all roles are."""
    missing: Missing | None = None
    """The nodes that had not come when it was looked last, if some had not."""
    ending: Ending | None = None
    """How the job is to end once it is known what there is to save."""


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
class Saving:
    """The job ends; before that its nodes write the newest version that they hold to storage."""

    name: ClassVar[str] = "saving"
    code: int
    reason: str
    since: float
    until: float
    """When it ends, whatever is written by then."""
    last: LastVersion | None = None
    """What is written, once it is known."""
    left: set[int] = field(default_factory=set)
    """Roles whose parts of it are not written yet."""
    told: dict[NodeName, Peer] = field(default_factory=dict)
    """The nodes that were told to write them, each with the connection that this went over."""
    hurried: bool = False
    """Whether workers were ended that did not leave their step."""
    unread: str = ""
    """Why it is not known what is on storage, if somebody could not look when asked last."""


@dataclass
class Done:
    """The job is over."""

    name: ClassVar[str] = "done"
    code: int


Phase = Forming | Rebuilding | Running | Quiescing | Waiting | Saving | Done

TRANSITIONS: Transitions[Phase] = {
    Forming: {
        Running: "there are workers for all roles",
        Rebuilding: "a node has begun a plan: this is no new job",
        Done: "it cannot begin, or is told to end",
    },
    Rebuilding: {
        Running: "the plan is known, and who of its nodes is there",
        Forming: "those who knew of a plan are gone again",
        Done: "it cannot go on, or is told to end",
    },
    Running: {
        Quiescing: "a failure; or roles move, leave, return, begin anew, or have other settings",
        Rebuilding: "a node has begun a newer plan, which is another controller's",
        Done: "all roles have finished, no restart could help, or it is told to end",
    },
    Quiescing: {
        Running: "all have reported, and it is decided how to go on",
        Waiting: "all have reported, and something is missing",
        Saving: "the job ends, and what is in memory is written first",
        Quiescing: "before it is decided, the next epoch ends too",
        Rebuilding: "a node has begun a newer plan, which is another controller's",
        Done: "nothing is left to go on from, no restart could help, or it is told to end",
    },
    Waiting: {
        Running: "what was missing is there",
        Saving: "the job ends, and what is in memory is written first",
        Quiescing: "the next epoch ends, too: roles begin anew",
        Rebuilding: "a node has begun a newer plan, which is another controller's",
        Done: "nothing is left to go on from, no restart could help, or it is told to end",
    },
    Saving: {Done: "it is written, cannot be, or its time is over"},
    Done: {},
}
