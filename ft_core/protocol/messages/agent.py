"""Between the controller and an agent, either way, and from the process beside an agent."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, field

from ft_core.protocol.flight import NEWEST, FlightLog
from ft_core.protocol.groups import parse, roles_in
from ft_core.protocol.messages.plans import Counterparts, JobState
from ft_core.protocol.messages.roles import (
    Completed,
    Configure,
    Finished,
    FromRole,
    PausedAtStep,
    Reopened,
    Restored,
    Stepped,
    Suspect,
    ToRole,
    Trained,
    Unprotected,
)
from ft_core.protocol.messages.values import (
    Address,
    Addresses,
    CheckpointName,
    Counts,
    DeviceAction,
    Digest,
    Epoch,
    FailureRecord,
    Fault,
    Holders,
    Host,
    JobId,
    Layout,
    Message,
    NodeAddress,
    NodeCheck,
    NodeName,
    Number,
    PlanId,
    ProbeResult,
    ReplicaGroup,
    Role,
    RoleBeat,
    RoleHeld,
    SegmentId,
    Session,
    Setting,
    Size,
    Symptom,
    Term,
    Timing,
    Value,
    Version,
    check_texts,
)

# -- between the controller and an agent, either way ----------------------------------------------------


class Hosts(Message, frozen=True):
    """Some of a plan's nodes, and who plays what there: the one table that grows with the job. Sent where it
    is not known; otherwise what has changed is."""

    compressed: ClassVar[bool] = True

    id: PlanId
    hosts: list[Host]
    first: Size = 0
    """How many nodes were said before these: with none it is the table anew."""


# -- an agent to the controller ------------------------------------------------------------------------


class Holdings(Value, frozen=True):
    """What a node could contribute to a recovery. `reported`: the newest epoch before which no worker of
    its is inside a step any more. `parts`: of the script, as the plan that it has begun has them, and what it
    was told since."""

    epoch: Epoch
    begun: PlanId
    reported: Epoch
    parts: list[Version]
    roles: dict[Role, RoleHeld]
    replicas: dict[SegmentId, list[Version]]
    segments: dict[SegmentId, Holders]
    idle: Number
    store: Address
    master: Address
    configured: dict[str, Setting] | None

    def __post_init__(self) -> None:
        check_texts(roles_in, self.segments.values())


class HoldingsChanged(Message, frozen=True):
    """A node's `Holdings` by difference from what it said over this connection last: in its greeting, and in
    the `number` of these that came before. Where roles, or the segments of replicas, are as they were but for
    their versions, those alone are said: one list of all that have the same, or one of each, in the order in
    which they were said. `segments`: None where they are as they were. Settings are said as they come."""

    number: Number
    epoch: Epoch
    begun: PlanId
    reported: Epoch
    parts: list[Version]
    idle: Number
    roles: dict[Role, RoleHeld] | list[tuple[Version, ...]]
    replicas: dict[SegmentId, list[Version]] | list[tuple[Version, ...]]
    segments: dict[SegmentId, Holders] | None

    def __post_init__(self) -> None:
        if self.segments:
            check_texts(roles_in, self.segments.values())


class Heartbeat(Message, frozen=True):
    """A node lives, and its workers are so far."""

    epoch: Epoch
    begun: PlanId
    roles: dict[Role, RoleBeat]
    idle: Number
    replicas: dict[SegmentId, list[Version]]
    xids: dict[Number, Number] = {}
    """Errors of its GPUs since its agent began, by the driver's number."""
    answers: Number = 0
    """The number of the `SendHeartbeat` that it answers, if that has one."""
    guarding: list[Role] = []
    """Roles of other nodes of which it has the start-up done: see `node.workers.standbys`."""


class Idle(Message, frozen=True):
    """How many workers wait for a role."""

    idle: Number


class WorkerLost(Message, frozen=True):
    """A worker with a role has ended. `exit` in words; `code` as of `subprocess`. `device`: its index, -1 for
    none. `step`, `signature`: as of `FailureRecord`. `age`: seconds since, where it is said again. `epoch`:
    in which the role had this worker; None: it is not known, or it was to begin ahead of its epoch."""

    role: Role
    pid: Number
    exit: str
    code: Number
    fault: Fault
    step: Version = -1
    device: Number = -1
    signature: str = ""
    traceback: str = ""
    age: float = 0.0
    epoch: Epoch | None = None


class Checksums(Message, frozen=True):
    """With `--ft-verify`: the checksums of what a role holds alike with others, in the versions that it has
    of the epoch. `pid`, `device`: its worker's. `alike`: the newest version that a controller has said all
    holders have alike, for a successor of it."""

    epoch: Epoch
    role: Role
    pid: Number
    device: Number
    versions: dict[Version, dict[SegmentId, Digest]]
    alike: Version = -1


class NoIdleWorker(Message, frozen=True):
    """A role of the plan has no worker on its node."""

    epoch: Epoch
    role: Role


class RestoreFailed(Message, frozen=True):
    """A role cannot have its state."""

    epoch: Epoch
    role: Role
    reason: str


class RoleLayout(Message, frozen=True):
    """What a role's state consists of, or the part that another has adopted: its agent has put it together,
    of what the worker has registered, and of the memory that it has asked for or loaded."""

    epoch: Epoch
    role: Role
    adopted: bool
    segments: dict[SegmentId, Holders]
    initial: Version | None
    resumes: bool
    group: ReplicaGroup | None

    def __post_init__(self) -> None:
        check_texts(roles_in, self.segments.values())


class Prepared(Message, frozen=True):
    """A role that comes back, or moves, waits for its state, as its agent knows: its worker has registered,
    and it has no part in the plan. `counts`: the start-up operations that it has on record."""

    role: Role
    counts: Counts


class Configured(Message, frozen=True):
    """An agent uses these."""

    configured: dict[str, Setting]


class NodesProbed(Message, frozen=True):
    """Which of these nodes this one reaches; answers `ProbeNodes`."""

    round: Number
    reach: dict[NodeName, ProbeResult]


class DurableNames(Message, frozen=True):
    """The durable checkpoints that a node can read; answers `ListDurable`."""

    id: Number
    names: list[CheckpointName]
    error: str = ""
    others: list[Number] = []
    """The numbers of roles of those that are of another number."""


class DurableWritten(Message, frozen=True):
    """A role's part of a durable checkpoint is written, which took so many seconds."""

    role: Role
    epoch: Epoch
    """The checkpoint's: parts of another do not complete it."""
    version: Version
    seconds: float


class DurableFailed(Message, frozen=True):
    """A role's part of a durable checkpoint is not written."""

    role: Role
    version: Version
    reason: str


class VersionSaved(Message, frozen=True):
    """A role's part of the job's last version is on storage, or why it is not; answers `SaveVersion`."""

    epoch: Epoch
    role: Role
    version: Version
    reason: str = ""


class RoleState(Message, frozen=True):
    """A role's state by tensor, for `ftctl plan`; answers `DescribeRole`."""

    role: Role
    segments: list[Layout]
    ring: list[Role]
    step_seconds: float
    bytes_per_second: float


class Flights(Message, frozen=True):
    """The flight records of a node's roles; answers `SendFlight`."""

    number: Number
    logs: tuple[FlightLog, ...]


class RoleFlight(Message, frozen=True):
    """A role's flight record, for `ftctl flight`; answers `DescribeFlight`. None: it has no worker there."""

    role: Role
    log: FlightLog | None


class Notice(Message, frozen=True):
    """Somebody announces that the node's machine is about to go, in so many seconds where that is known; or
    does not any more: no `reason`."""

    reason: str
    seconds: float | None


class DeviceFinding(Message, frozen=True):
    """A device of the node reports something. `number`: which, where the symptom has several; else 0.
    `device`: its index, -1 where that is not known; `bus`: where it is. `text`: in its driver's words. `age`:
    seconds since, where it is said again. `name`, `action`: of `Symptom.OTHER` alone."""

    symptom: Symptom
    number: Number
    device: Number
    bus: str
    text: str
    age: float = 0.0
    name: str = ""
    action: DeviceAction = DeviceAction.NOTHING

    @property
    def signature(self) -> str:
        """By which its `FailureRecord` is known again."""
        which = self.name or self.number
        return f"{self.symptom} {which}" if which else str(self.symptom)


class NodeChecked(Message, frozen=True):
    """What the node's own check has found; answers `CheckNode`. What is wrong with it was said before, as
    `DeviceFinding`. `times`: what was measured, by its name. `hardware`: nodes that say the same are alike.
    `age`: seconds since, where it is said again."""

    checks: list[NodeCheck]
    times: dict[str, Timing]
    hardware: str
    age: float = 0.0


class Leaving(Message, frozen=True):
    """SIGTERM has come to a node."""


class Left(Message, frozen=True):
    """All workers of a node have ended of SIGTERM."""


class KeptState(Message, frozen=True):
    """The newest `JobState` that an agent knows of; answers `SendState`. Before it come its `Hosts`, as
    `NodesChanged` has changed them since."""

    state: JobState
    strikes: list[FailureRecord] = field(default_factory=list)


class AgentHello(Message, frozen=True):
    """An agent greets. Its greeting is a report too. `term`: the newest that it knows of. `said`: what must
    be known of its roles, said again. `draining`: it is to be taken out. `job`: that it has a part in; empty
    if it was never let in. `digest`: of what must be the same on all nodes (`Settings.digest`)."""

    node: NodeName
    term: Term
    pid: Number
    node_rank: Number
    domain: str
    data: Addresses
    holdings: Holdings
    said: list[SaidAgain]
    draining: bool
    job: JobId
    digest: str


OfRole = (
    WorkerLost | Checksums | NoIdleWorker | RestoreFailed | RoleLayout | Prepared
    | Restored | Stepped | Reopened | PausedAtStep | Unprotected | Suspect | Completed | Finished
)  # fmt: skip
"""What must be known of a role, whichever controller leads."""
SaidAgain = OfRole | Configure | Trained

FromAgent = (
    AgentHello | HoldingsChanged | Heartbeat | Idle | OfRole | FromRole
    | Configured | Hosts | NodesProbed | DurableNames | DurableWritten | DurableFailed | VersionSaved
    | RoleState | Flights | RoleFlight | Notice | DeviceFinding | NodeChecked | Leaving | Left | KeptState
)  # fmt: skip


# -- the process beside an agent to the controller ------------------------------------------------------


class Pulse(Message, frozen=True):
    """The node lives. A datagram: see `protocol.pulses`."""

    session: Session
    """The session of the controller that its agent has met."""
    node: NodeName
    number: Size
    """Higher than that of all that the node has sent before."""
    stalled: Annotated[float, Meta(ge=0)]
    """Seconds since the event loop of its agent went round."""


# -- the controller to an agent ------------------------------------------------------------------------


class LeaderHello(Message, frozen=True):
    """The first word to an agent: in which term this controller leads, and which job."""

    term: Term
    session: Session
    job: JobId


class OtherJob(Message, frozen=True):
    """The first and last word to an agent of another job: this is one that has its address and its secret."""

    job: JobId


class OtherCommand(Message, frozen=True):
    """The first and last word to an agent that was started with another command line than this job. `alike`:
    what must be the same on all nodes (`Settings.alike`), as JSON."""

    alike: str


class OwnPlan(Message, frozen=True):
    """What one node must know of the next epoch beyond `SharedPlan`, which comes after it: fields as of
    `NodePlan`, `completed` as of `WorkerPlan`. Many have nothing of it to know."""

    id: PlanId
    sources: dict[Role, dict[SegmentId, list[NodeName]]]
    away: dict[Role, list[SegmentId]]
    completed: dict[str, tuple[Number, Role]]

    def __post_init__(self) -> None:
        check_texts(parse, self.completed)


class SharedPlan(Message, frozen=True):
    """The next epoch, alike for all nodes. `base`: the plan that this one differs from by `gone` and
    `changed`, nodes that it has no more and those that are new or play other roles; its own id where all
    nodes were said before (`Hosts`)."""

    base: PlanId
    gone: list[NodeName]
    changed: list[Host]
    state: JobState


class NodesChanged(Message, frozen=True):
    """Nodes without a role have come, or gone (None), in the epoch of that plan. `all`: these are all without
    a role."""

    id: PlanId
    nodes: dict[NodeName, NodeAddress | None]
    all: bool = False


class Verified(Message, frozen=True):
    """With `--ft-verify`: in this version of the epoch, and all before it, holders have the same."""

    epoch: Epoch
    version: Version


class KillWorker(Message, frozen=True):
    """End the worker of a role; of None, the whole node."""

    role: Role | None = None


class Examine(Message, frozen=True):
    """Write down where the worker of a role is, if it is still this process; then, if `end`, end it."""

    role: Role
    pid: Number
    end: bool


class DescribeRole(Message, frozen=True):
    """What a role's state consists of, by tensor."""

    role: Role


class ListDurable(Message, frozen=True):
    """Which durable checkpoints can be read."""

    id: Number


class ProbeNodes(Message, frozen=True):
    """Which of these nodes, at these addresses, do you reach?"""

    round: Number
    nodes: dict[NodeName, Addresses]


class SendHeartbeat(Message, frozen=True):
    """Now, not at the next beat."""

    number: Number = 0


class Drain(Message, frozen=True):
    """A node is to be taken out, or not any more. It keeps that for a successor of the controller. After
    `Leaving` it is the answer: whether the roles move, or the workers are to get the signal."""

    wanted: bool


class SendState(Message, frozen=True):
    """An agent is to say the state that it keeps, to a controller that has just started."""


class SendFlight(Message, frozen=True):
    """The flight records of all roles here: what is under way, and the newest that have ended, so many of
    each group. `closely`: of these also what they do."""

    number: Number
    newest: Size = NEWEST
    closely: tuple[Role, ...] = ()


class DescribeFlight(Message, frozen=True):
    """A role's flight record, all of it."""

    role: Role


class Prepare(Message, frozen=True):
    """Start workers for roles that come back, or move, ahead of the epoch in which they take part. What comes
    last is what they begin with, in place of the plan's."""

    epoch: Epoch
    roles: list[Role]
    counterparts: Counterparts
    surrogates: Counterparts
    completed: dict[str, tuple[Number, Role]]

    def __post_init__(self) -> None:
        check_texts(parse, self.completed)


class Withdraw(Message, frozen=True):
    """End the workers of these roles: their replica group takes no part."""

    roles: list[Role]


class GivenUp(Message, frozen=True):
    """A plan was made without this node: it joins again as a spare."""


class UseSettings(Message, frozen=True):
    """Settings that the script has brought."""

    settings: dict[str, Setting]


class KeepStrikes(Message, frozen=True):
    """All failures that count, for a successor of the controller."""

    strikes: list[FailureRecord]


class CheckNode(Message, frozen=True):
    """Is this node well? `again`: as of now; else as of when that was looked at last, if it was."""

    again: bool = False


class SaveVersion(Message, frozen=True):
    """The job ends: write these roles' parts of `version`, which is complete in memory, to storage. `plan`:
    the newest; `epoch`: that which ends. `sources`, `away`: as of `NodePlan`. `replicated`: every replica
    group has all the state."""

    plan: PlanId
    epoch: Epoch
    version: Version
    roles: list[Role]
    sources: dict[Role, dict[SegmentId, list[NodeName]]]
    away: dict[Role, list[SegmentId]]
    replicated: bool


class Shutdown(Message, frozen=True):
    """The job is over, with this exit code; or, of a node that is `drained`, it is over for that."""

    code: Number
    drained: bool = False


ToAgent = (
    LeaderHello | OtherJob | OtherCommand | Hosts | OwnPlan | SharedPlan | NodesChanged | ToRole
    | KillWorker | Examine | DescribeRole | ListDurable | ProbeNodes | SendHeartbeat | SendState
    | SendFlight | DescribeFlight | Prepare | Withdraw | Verified | GivenUp | UseSettings | KeepStrikes
    | Drain | CheckNode | SaveVersion | Shutdown
)  # fmt: skip
