"""Between a worker and the controller, either way: the agent passes it on as it is.

It sees to it that a worker speaks for nobody but the role that it plays (`node.machine`).
"""

from __future__ import annotations

from ft_core.protocol.groups import GroupId, Series, parse
from ft_core.protocol.messages.values import (
    Counts,
    Dealt,
    Epoch,
    Message,
    Number,
    Role,
    Setting,
    Version,
    check_texts,
)

# -- a worker to the controller ------------------------------------------------------------------------


class Restored(Message, frozen=True):
    """A role has its state. `loaded`: from a copy, not made by its script."""

    epoch: Epoch
    role: Role
    pid: Number
    version: Version
    loaded: bool


class Stepped(Message, frozen=True):
    """A role has finished the first step of its epoch."""

    epoch: Epoch
    role: Role
    version: Version


class Reopened(Message, frozen=True):
    """A role has its communicators."""

    epoch: Epoch
    role: Role


class Trained(Message, frozen=True):
    """The samples of a step, for the ledger. `since`: the version that its epoch began from, None of
    start-up."""

    epoch: Epoch
    since: Version | None
    step: Version
    role: Role
    dealt: Dealt


class OperationCounts(Message, frozen=True):
    """A role's start-up operations on record."""

    role: Role
    counts: Counts

    def __post_init__(self) -> None:
        check_texts(parse, self.counts)


class Issued(Message, frozen=True):
    """What a role has begun, by group, and the groups of which it waits for others to connect."""

    round: Number
    epoch: Epoch
    role: Role
    step: Version
    at_end: bool
    issued: Counts
    unopened: list[str]

    def __post_init__(self) -> None:
        check_texts(Series.parse, self.issued)
        check_texts(GroupId.parse, self.unopened)


class PausedAtStep(Message, frozen=True):
    """A role has stopped at the end of a step for those who come back. `version`: that it has done."""

    epoch: Epoch
    role: Role
    version: Version = 0


class Unprotected(Message, frozen=True):
    """A role's script runs without fault tolerance. `so_far`: it may yet ask for it. `epoch`: as of
    `WorkerLost`; its agent adds it."""

    role: Role
    reason: str
    so_far: bool
    epoch: Epoch | None = None


class Suspect(Message, frozen=True):
    """A role, or its agent, has seen connections break. `by_link`: NCCL reports that the link has failed."""

    epoch: Epoch
    role: Role
    reason: str
    by_link: bool = False


class Completed(Message, frozen=True):
    """A role has come to the end of a part of its script. `last`: only local work follows."""

    epoch: Epoch
    role: Role
    part: Number
    version: Version
    last: bool


class Finished(Message, frozen=True):
    """A role's script is done. `epoch`: as of `WorkerLost`; its agent adds it."""

    role: Role
    epoch: Epoch | None = None


class Configure(Message, frozen=True):
    """A script brings settings (names as in `Settings`), and waits. `worker`: its agent's number of it, since
    two may play a role, one of them ahead of need."""

    worker: Number
    id: Number
    settings: dict[str, Setting]


FromRole = (
    Restored | Stepped | Reopened | PausedAtStep | Unprotected | Suspect | Completed | Finished | Trained
    | OperationCounts | Issued | Configure
)  # fmt: skip

# -- the controller to a worker ------------------------------------------------------------------------


class Abort(Message, frozen=True):
    """The epoch before this one is over."""

    epoch: Epoch


class Release(Message, frozen=True):
    """All roles have come to the end of so many parts of their script: with which version."""

    parts: list[Version]


class SendCounts(Message, frozen=True):
    """Say how many start-up operations are on record."""


class SendIssued(Message, frozen=True):
    """Say which operations have begun."""

    round: Number


class PauseAfterStep(Message, frozen=True):
    """Stop at the end of this step, in this epoch; epoch 0: go on."""

    epoch: Epoch
    step: Version


class ConfigureAnswer(Message, frozen=True):
    """The answer to a worker's `Configure`; `error`: why its settings cannot be had."""

    worker: Number
    id: Number
    error: str = ""


ToRole = Abort | Release | SendCounts | SendIssued | PauseAfterStep | ConfigureAnswer
