"""What happens to an agent, and what it has done about it: the machine's input and output.

`Agent.handle(event, now)` returns effects; the shell (`node.shell`) turns the world into events and effects
into the world, and does nothing else. A worker is named by its number, which the machine gives and never
gives again. What the node holds in memory is the shell's (`state.store`): the machine says when it is to be
reported, what of it is to be loaded, sent, written or dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft_core.protocol.messages import CopyHere, Message, NodePlan, Version

Number = int


# -- events --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """To the controller, after an attempt that took no longer than `Controller.attempt`."""


@dataclass(frozen=True)
class NotConnected:
    """An attempt has failed, or the connection has ended."""

    reason: str
    refused: bool = False
    """Whether whoever answers has another secret."""


@dataclass(frozen=True)
class FromController:
    """A message of the controller."""

    message: Message


@dataclass(frozen=True)
class Forked:
    """A worker that was to be started has a process."""

    worker: Number
    pid: int


@dataclass(frozen=True)
class WorkerReady:
    """It has connected: it can be given a role."""

    worker: Number


@dataclass(frozen=True)
class FromWorker:
    """A message of a worker."""

    worker: Number
    message: Message


@dataclass(frozen=True)
class WorkerEnded:
    """`code` as of `subprocess`."""

    worker: Number
    code: int


@dataclass(frozen=True)
class Replicated:
    """A role's snapshot is verified wherever it must be; `failed`: why it is not."""

    worker: Number
    role: int
    version: Version
    epoch: int
    failed: str = ""


@dataclass(frozen=True)
class Brought:
    """What a role goes on from is in memory here, as far as it is not made by its script; `failed`: why
    not."""

    worker: Number
    role: int
    epoch: int
    copies: tuple[CopyHere, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class DurableDone:
    """Written for these roles; `failed`: why not."""

    role: int
    version: Version
    roles: tuple[int, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class DurableListed:
    """The durable checkpoints that can be read here."""

    id: int
    names: tuple[str, ...]
    error: str = ""


@dataclass(frozen=True)
class Tick:
    """Some time has passed: every `heartbeat`, and at the times that were asked for."""


@dataclass(frozen=True)
class Terminate:
    """SIGTERM."""


@dataclass(frozen=True)
class LauncherGone:
    """`ftrun`, which has started this process, is no more."""


Event = (
    Connected | NotConnected | FromController | Forked | WorkerReady | FromWorker | WorkerEnded
    | Replicated | Brought | DurableDone | DurableListed | Tick | Terminate | LauncherGone
)  # fmt: skip


# -- effects -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToController:
    """Nothing happens if there is no connection."""

    message: Message


@dataclass(frozen=True)
class ToWorker:
    """Nothing happens if it is gone."""

    worker: Number
    message: Message


@dataclass(frozen=True)
class Start:
    """Fork a worker for this device (-1: a standby, for any)."""

    worker: Number
    device: int


@dataclass(frozen=True)
class Kill:
    """SIGKILL."""

    worker: Number


@dataclass(frozen=True)
class Commit:
    """Set the commit word of a worker: this version is safe wherever it must be. -1: none is."""

    worker: Number
    version: Version


@dataclass(frozen=True)
class BeginEpoch:
    """Copies and stores of older epochs are refused from now on; transfers under way end."""

    epoch: int


@dataclass(frozen=True)
class UsePlan:
    """Where everybody is from now on."""

    plan: NodePlan


@dataclass(frozen=True)
class DropAfter:
    """Strike off copies of versions newer than this, here."""

    version: Version


@dataclass(frozen=True)
class KeepOnly:
    """Give up the memory of all other roles, and of what was adopted of all others."""

    roles: frozenset[int]
    adopted: frozenset[int]


@dataclass(frozen=True)
class Strike:
    """A copy is corrupt."""

    role: int
    slot: int
    adopted: bool


@dataclass(frozen=True)
class Replicate:
    """Have a snapshot of a role that the worker plays, or has adopted, verified wherever it must be:
    `Replicated`."""

    worker: Number
    role: int
    version: Version
    epoch: int


@dataclass(frozen=True)
class Bring:
    """Have the plan's version of these roles (a worker's own first, then adopted ones) in memory here:
    `Brought`."""

    worker: Number
    roles: tuple[int, ...]
    plan: NodePlan


@dataclass(frozen=True)
class WriteDurable:
    """Write a snapshot to storage: `DurableDone`."""

    worker: Number
    role: int
    version: Version
    plan: NodePlan


@dataclass(frozen=True)
class LookForDurable:
    """`DurableListed`."""

    id: int


@dataclass(frozen=True)
class Wake:
    """A `Tick` no later than this."""

    at: float


@dataclass(frozen=True)
class BecomeSpare:
    """End all that this node has started, and begin anew under another name."""


@dataclass(frozen=True)
class End:
    """This node is done."""

    code: int


Effect = (
    ToController | ToWorker | Start | Kill | Commit | BeginEpoch | UsePlan | DropAfter | KeepOnly
    | Strike | Replicate | Bring | WriteDurable | LookForDurable | Wake | BecomeSpare | End
)  # fmt: skip
