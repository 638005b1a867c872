"""What a worker's main thread is at, or has to do next, as its machine knows it: values.

The main thread waits for the machine to leave a state (`worker.shell`), and does what the next one says.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """It has, and waits for the next epoch."""


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
