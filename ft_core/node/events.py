"""What happens to an agent, and what it has done about it: the machine's input and output.

`Agent.handle(event, now)` returns effects; the shell (`node.shell`) turns the world into events and effects
into the world, and does nothing else. A worker is named by its number, which the machine gives, and gives
once. What the node holds in memory is the shell's (`state.store`), and the machine reads of it what it
reports (`node.memory.view`). It says what is to be loaded, sent, written or dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ft_core.protocol import messages as m
from ft_core.protocol.messages import CopyHere, NodePlan, Version
from ft_core.settings import Settings

Number = int


# -- events --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """The first of all: the node is there."""


@dataclass(frozen=True)
class Connected:
    """There is a connection to the controller. `term`: the newest in which one is known to have led. `job`:
    the id of the job that this node has a part in; empty before a controller has said so."""

    term: int = 1
    job: str = ""


@dataclass(frozen=True)
class NotConnected:
    """An attempt to reach the controller has failed, or the connection has ended."""

    reason: str
    stranger: bool = False
    """Whether somebody answers who is not this job's controller."""
    refused: bool = False
    """Whether that is since the two have different secrets."""
    other_job: bool = False
    """Whether that is the controller of another job, which knows the secret."""


@dataclass(frozen=True)
class FromController:
    """A message of the controller."""

    message: m.ToAgent


@dataclass(frozen=True)
class Forked:
    """A worker that was to be started has a process."""

    worker: Number
    pid: int


@dataclass(frozen=True)
class WorkerReady:
    """A worker has connected: it can be given a role."""

    worker: Number


@dataclass(frozen=True)
class FromWorker:
    """A message of a worker."""

    worker: Number
    message: m.FromWorker


@dataclass(frozen=True)
class WorkerEnded:
    """A worker does nothing any more; `WorkerGone` follows. `code` as of `subprocess`; `version` as of its
    control words. `out_of_memory`: whether the kernel has ended it for want of memory."""

    worker: Number
    code: int
    version: Version = -1
    out_of_memory: bool = False


@dataclass(frozen=True)
class WorkerGone:
    """The process of a worker that has ended is no more: the kernel has taken back its memory, devices and
    ports."""

    worker: Number


@dataclass(frozen=True)
class Signalled:
    """A worker has been sent SIGTERM, as `Signal` wanted it."""

    worker: Number


@dataclass(frozen=True)
class Noticed:
    """Somebody announces that this machine is about to go, in so many seconds where that is known; or does
    not any more: no `reason`."""

    reason: str
    seconds: float | None


@dataclass(frozen=True)
class DeviceFound:
    """A device of this node reports something."""

    finding: m.DeviceFinding


@dataclass(frozen=True)
class NodeExamined:
    """What a check of this node has found, as `ExamineNode` wanted it; `findings`: what devices report."""

    checks: tuple[m.NodeCheck, ...]
    times: dict[str, m.Timing]
    hardware: str
    findings: tuple[m.DeviceFinding, ...]


@dataclass(frozen=True)
class Replicated:
    """A role's snapshot is verified wherever it must be, as was wanted; `failed`: why it is not."""

    order: Replicate
    failed: str = ""


@dataclass(frozen=True)
class StateFetched:
    """What was wanted is in memory here; `failed`: why it is not."""

    order: FetchState
    copies: tuple[CopyHere, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class DurableDone:
    """Written for these roles; `failed`: why not."""

    role: int
    epoch: int
    version: Version
    roles: tuple[int, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class VersionWritten:
    """What `WriteVersion` wanted is on storage; `failed`: why not."""

    order: WriteVersion
    failed: str = ""


@dataclass(frozen=True)
class DurableListed:
    """The durable checkpoints that can be read here."""

    id: int
    names: tuple[str, ...]
    error: str = ""
    others: tuple[int, ...] = ()
    """The numbers of roles of those that are of another number."""


@dataclass(frozen=True)
class FlightRead:
    """What `ReadFlight` wanted."""

    answer: m.Flights | m.RoleFlight


@dataclass(frozen=True)
class Probed:
    """Which nodes this one reaches, as `Probe` wanted it."""

    round: int
    reach: dict[str, m.ProbeResult]


@dataclass(frozen=True)
class Examined:
    """What `WriteStacks` wanted is written, as far as it could be; `end`: as there."""

    worker: Number
    end: bool


@dataclass(frozen=True)
class PeerAsks:
    """Another agent asks the worker that plays the question's `holder` here; its `id` is in `AnswerPeer`."""

    question: m.AskStartupEntries | m.AskProgress


@dataclass(frozen=True)
class Tick:
    """Time has passed: each `heartbeat` seconds."""


@dataclass(frozen=True)
class Terminate:
    """SIGTERM has come."""


@dataclass(frozen=True)
class LauncherGone:
    """`ftrun`, which has started this process, is no more."""


@dataclass(frozen=True)
class RecordsFound:
    """Answers `AskRecords`; `failed`: why not."""

    role: int
    epoch: int
    counts: m.Counts
    failed: str = ""


Event = (
    Begin | Connected | NotConnected | FromController | Forked | WorkerReady | FromWorker | WorkerEnded
    | WorkerGone | Signalled | Replicated | StateFetched | DurableDone | VersionWritten | DurableListed
    | FlightRead | Probed | Examined | PeerAsks | RecordsFound | Noticed | DeviceFound | NodeExamined | Tick
    | Terminate | LauncherGone
)  # fmt: skip


# -- effects -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToController:
    """Nothing happens if there is no connection."""

    message: m.FromAgent


@dataclass(frozen=True)
class Report:
    """Send the controller `EpochExecutor.report()`, once what stands before this is done. From `BeginEpoch`
    on no copy comes in that would push out another; what is reported stays."""


@dataclass(frozen=True)
class ToWorker:
    """Send a message to a worker; nothing happens if it is gone."""

    worker: Number
    message: m.ToWorker


@dataclass(frozen=True)
class Start:
    """Fork a worker for this device (-1: a standby, for any): `Forked`."""

    worker: Number
    device: int


@dataclass(frozen=True)
class Kill:
    """Send SIGKILL to a worker."""

    worker: Number


@dataclass(frozen=True)
class Signal:
    """SIGTERM, but only if the worker handles it, or else, if `even_so`, does not ignore it: `Signalled`."""

    worker: Number
    even_so: bool


@dataclass(frozen=True)
class ShowRest:
    """What former workers of a role have printed last is shown before what its next one prints."""

    role: int


@dataclass(frozen=True)
class SetApart:
    """A worker starts up a role that another plays: its flight record is nobody's. Or (not `apart`) it is
    that role's from now on."""

    worker: Number
    apart: bool


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
    """Where everybody is from now on; transfers to who is no longer anywhere end."""

    plan: NodePlan


@dataclass(frozen=True)
class UseSettings:
    """Let these settings hold from now on."""

    settings: Settings


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
class Reserve:
    """Memory for a snapshot; the worker is told where (`Allocated`)."""

    worker: Number
    request: m.Allocate
    adopted: bool
    again: bool
    """Whether what the slot has may be overwritten: no process that could write there is ending."""


@dataclass(frozen=True)
class InvalidateCopy:
    """Never use a copy again: it is corrupt."""

    role: int
    slot: int
    adopted: bool


@dataclass(frozen=True)
class Replicate:
    """Have a snapshot of a role that the worker plays, or has adopted, verified wherever it must be:
    `Replicated`. `ring`: the worker's, see `state.placement`."""

    worker: Number
    role: int
    version: Version
    epoch: int
    ring: tuple[int, ...]


@dataclass(frozen=True)
class FetchState:
    """Have the plan's version of the roles `held`, the worker's own and those that it has adopted, in
    memory here: `StateFetched`."""

    worker: Number
    role: int
    held: tuple[int, ...]
    plan: NodePlan


@dataclass(frozen=True)
class WriteDurable:
    """Write a snapshot to storage: `DurableDone`. `replicated`: every replica group has all the state."""

    role: int
    version: Version
    plan: NodePlan
    replicated: bool


@dataclass(frozen=True)
class WriteVersion:
    """The job ends: have the version of `plan` of these roles in memory, the first and what that adopts, and
    write it: `VersionWritten`. `replicated`: as of `WriteDurable`."""

    held: tuple[int, ...]
    version: Version
    plan: NodePlan
    replicated: bool


@dataclass(frozen=True)
class LookForDurable:
    """Ask storage which durable checkpoints can be read; `DurableListed` answers."""

    id: int


@dataclass(frozen=True)
class ReadFlight:
    """Read flight records of the workers here, without their help: `FlightRead`. Roles `at_end` wait for
    others at the end of their scripts, or of a part. `playing`: the roles of workers, by their numbers.
    `epoch`: that which they should be in; -1: it has yet to begin."""

    question: m.SendFlight | m.DescribeFlight
    at_end: frozenset[int]
    playing: Mapping[int, int]
    epoch: int


@dataclass(frozen=True)
class Probe:
    """Find out which of these nodes, by name the address of their agents, can be reached: `Probed`."""

    round: int
    nodes: dict[str, str]


@dataclass(frozen=True)
class WriteStacks:
    """Where a worker is, into the job directory: `Examined`. `end`: it is to be ended after that."""

    worker: Number
    role: int
    end: bool


@dataclass(frozen=True)
class AskPeer:
    """Ask the agent at this address for the worker, which is told the answer."""

    worker: Number
    question: m.AskStartupEntries | m.AskProgress
    address: str


@dataclass(frozen=True)
class AnswerPeer:
    """An answer to `PeerAsks`, or why there is none."""

    id: int
    answer: m.StartupEntries | m.Progress | str


@dataclass(frozen=True)
class AskRecords:
    """Ask the agent at this address what the worker of a role there has on record: `RecordsFound`."""

    role: int
    epoch: int
    address: str


@dataclass(frozen=True)
class ExamineNode:
    """Check this node, beside all else: `NodeExamined`."""


@dataclass(frozen=True)
class KillNode:
    """SIGKILL to all that this node has started, and to itself."""


@dataclass(frozen=True)
class BecomeSpare:
    """End all that this node has started, and begin anew under another name."""


@dataclass(frozen=True)
class Say:
    """Print a line for the person at this node's console, unless the controller says it there."""

    text: str


@dataclass(frozen=True)
class End:
    """End this process with this code, and what is left of the node before."""

    code: int


Effect = (
    ToController | Report | ToWorker | Start | Kill | Signal | ShowRest | SetApart | Commit | BeginEpoch
    | UsePlan | UseSettings | DropAfter | KeepOnly | Reserve | InvalidateCopy | Replicate | FetchState
    | WriteDurable | WriteVersion | LookForDurable | ReadFlight | WriteStacks | Probe | AskPeer | AnswerPeer
    | AskRecords | ExamineNode | KillNode | BecomeSpare | Say | End
)  # fmt: skip
