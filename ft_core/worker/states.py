"""What a worker's main thread is at, or has to do next, as its machine knows it: values, and a table of what
leads from one to another.

The main thread waits for the machine to leave a state (`worker.shell`), and does what the next one says.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_core.process.transitions import Transitions
from ft_core.protocol.messages import Restore


@dataclass(frozen=True)
class NoRole:
    """It waits for a role."""


@dataclass(frozen=True)
class StartUp:
    """The script's start-up: it does not unwind; what an epoch's end interrupts is issued again."""

    waits: bool = False
    """Whether it has come to its end while the epoch is over: training begins with the next."""


@dataclass(frozen=True)
class Beginning:
    """Training begins: it says what that is."""


@dataclass(frozen=True)
class Restoring:
    """An epoch has begun: it waits for what to go on from."""


@dataclass(frozen=True)
class Loading:
    """It loads this, and what it has to do before the next step."""

    restore: Restore


@dataclass(frozen=True)
class Stuck:
    """A copy was corrupt: it waits for another epoch."""


@dataclass(frozen=True)
class Training:
    """It does steps."""


@dataclass(frozen=True)
class Holding:
    """It waits at the end of a step for a replica group that comes back, until then at most."""

    until: float


@dataclass(frozen=True)
class AtEnd:
    """It waits for all roles to come to the end of a part of the script."""

    part: int
    last: bool


@dataclass(frozen=True)
class Leaving:
    """The epoch is over: it has to unwind from whatever it is in."""


@dataclass(frozen=True)
class Quiet:
    """It has unwound, and waits for the next epoch."""


@dataclass(frozen=True)
class Unprotected:
    """It does as under torchrun: a failure ends the job."""


@dataclass(frozen=True)
class Trained:
    """Training is behind all roles: only local work is left."""


@dataclass(frozen=True)
class Finished:
    """The script is done: it waits for the end of the job."""


@dataclass(frozen=True)
class Over:
    """The job is over: it ends."""


State = (
    NoRole | StartUp | Beginning | Restoring | Loading | Stuck | Training | Holding | AtEnd | Leaving | Quiet
    | Unprotected | Trained | Finished | Over
)  # fmt: skip

_OVER = "the epoch is over"
_UNPROTECTED = "its script wants no fault tolerance, or cannot have it"

TRANSITIONS: Transitions[State] = {
    NoRole: {StartUp: "it is given a role"},
    StartUp: {
        Beginning: "its script comes to its training",
        StartUp: "its script does, and the epoch is over: the next one is waited for",
        Unprotected: _UNPROTECTED,
        Finished: "its script is done, and has not trained",
    },
    Beginning: {
        Restoring: "it has said what it begins with",
        Loading: "it has said that, and what it goes on from is here already",
        Leaving: _OVER,
        Unprotected: "its training was refused, and its script does without fault tolerance",
        Finished: "its training was refused, and its script is done",
    },
    Restoring: {Loading: "what it goes on from is here", Leaving: _OVER},
    Loading: {Training: "it has loaded that", Stuck: "a copy is corrupt", Leaving: _OVER},
    Stuck: {Leaving: _OVER},
    Training: {
        Holding: "it has done the step after which others come back",
        AtEnd: "it has come to the end of a part of its script",
        Leaving: _OVER,
        Unprotected: "its script goes on with something that is not protected",
    },
    Holding: {Training: "they do not come, or not in time", Leaving: _OVER},
    AtEnd: {
        Training: "all roles have come to the end of that part",
        Trained: "all roles have come to the end of the last part",
        Leaving: _OVER,
    },
    Leaving: {
        Quiet: "it has unwound",
        Unprotected: "its script goes on with something that is not protected, and has not heard of the end",
    },
    Quiet: {
        Restoring: "the next epoch begins",
        Loading: "the next epoch begins, and what it goes on from is here already",
    },
    Unprotected: {Finished: "its script is done"},
    Trained: {
        Unprotected: "its script goes on with something that is not protected",
        Finished: "its script is done",
    },
    Finished: {Over: "the job is over"},
    Over: {},
}
