"""Every message between the processes of a job, by who sends it to whom.

Who looks for the producer or the consumer of a message finds it by its class's name. Frozen; decoded
strictly: an unknown kind, an unknown field or a wrong type is an error of the sender's version, never a
default. Times are in seconds, sizes in bytes. Roles are integers. A segment is named by its id
(`state.manifest`), a process group and a place in it by its text form (`protocol.groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct, field

from ft_core.errors import ProtocolError
from ft_core.protocol.codec import Decoder
from ft_core.protocol.flight import NEWEST, FlightLog
from ft_core.protocol.groups import RUNS, GroupId, Series, parse, roles_in

_WORD = (1 << 62) - 1
"""What fits into a word of shared memory."""

Role = Annotated[int, Meta(ge=0, lt=1 << 31)]
Epoch = Annotated[int, Meta(ge=0, le=_WORD)]
Term = Annotated[int, Meta(ge=1, lt=1 << 40)]
"""The term of a leadership: the number of a controller among all that the job has had
(`leadership.lease`)."""
Version = Annotated[int, Meta(ge=-1, le=_WORD)]
"""Steps that a state has seen; -1 where none."""
Roles = Annotated[str, Meta(pattern=rf"^{RUNS}\Z")]
"""Roles as text: see `protocol.groups`."""
Holders = Roles
"""The roles that have the same segment."""
Number = Annotated[int, Meta(ge=-_WORD, le=_WORD)]
Size = Annotated[int, Meta(ge=0, le=_WORD)]
SegmentId = str
NodeName = str
Session = Annotated[str, Meta(pattern=r"^[0-9a-z]{1,64}\Z")]
"""The name of one controller's process, which no other has: pulses for another do not count."""
JobId = Annotated[str, Meta(pattern=r"^[0-9A-Za-z._-]{0,64}\Z")]
"""What tells a job from others that have its address and its secret; empty where it is not known."""
PlanId = Annotated[str, Meta(pattern=r"^([0-9]{1,18}-[0-9a-z]{1,64})?\Z")]
"""Epoch and name of a plan, of which two controllers may make one each; empty where there is none."""
_HOST = (
    r"(?:\[[0-9A-Fa-f:.]{2,45}(?:%[0-9A-Za-z_.-]{1,15})?\]|[0-9A-Za-z_-]{1,63}(?:\.[0-9A-Za-z_-]{1,63}){0,9})"
)
_PORT = r"(?:[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
Address = Annotated[str, Meta(pattern=rf"^{_HOST}:{_PORT}\Z")]
"""HOST:PORT of a process, such as can be connected to: nobody who is told it stumbles over it."""
CheckpointName = Annotated[
    str, Meta(pattern=r"^step-[0-9]{1,18}-[0-9]{1,19}-[0-9A-Za-z_]{1,64}-[0-9]{1,10}\Z")
]
"""The name of a durable checkpoint, see `state.durable`."""
Stage = Literal["startup", "training"]
"""Whether a worker has reached its first train step in this job."""
Origin = Literal["memory", "initial", "durable"]
"""Where the state of an epoch comes from, see `control.decide.decision.Choice`."""
ProbeResult = Literal["reached", "refused", "silent"]
"""How a node is seen from another: its agent answers; nobody listens at its port any more, so its process has
ended; or nothing comes."""
Setting = str | int | float | bool
"""A value of `ft_core.settings.Settings` that a script may bring."""
Counts = dict[str, Number]
"""Start-up operations by group: how many are on record."""


class Message(Struct, frozen=True, forbid_unknown_fields=True, gc=False, tag_field="type"):
    """The base of all messages. The tag on the wire is the class's name."""

    compressed: ClassVar[bool] = False
    """Whether it is large, and as repetitive as to be worth it."""


class Value(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What messages consist of. Like them it never refers to what refers to it: the collector, which would
    stop a controller of many roles for a second, leaves it alone."""


def check_texts(parsed: Callable[[str], object], texts: Iterable[str]) -> None:
    """Check names of groups and series, see `protocol.groups`. Raises ValueError, as a message's checks
    do."""
    for text in texts:
        try:
            parsed(text)
        except ProtocolError as error:
            raise ValueError(str(error)) from None


# -- parts ---------------------------------------------------------------------------------------------


class NodeAddress(Value, frozen=True):
    """Where a node's memory is asked for, and what it may be lost with."""

    data: Address
    domain: str


class Host(Value, frozen=True, array_like=True):
    """A node of a plan, and the roles that it plays; empty for none."""

    name: NodeName
    data: Address
    domain: str
    """Empty where it is the node's name."""
    roles: Annotated[str, Meta(pattern=rf"^({RUNS})?\Z")]

    def __post_init__(self) -> None:
        if self.roles:
            check_texts(roles_in, [self.roles])


class Item(Value, frozen=True, array_like=True):
    """A tensor in a segment: `dtype` without the `torch.` prefix, `offset` and `nbytes` in the segment's
    bytes."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    offset: Size
    nbytes: Size


class Layout(Value, frozen=True):
    """A segment's holders and its tensors, as `state.manifest.Segment` has them."""

    holders: Holders
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        check_texts(roles_in, [self.holders])


class MembershipChanges(Value, frozen=True):
    """What `elastic.rules.Membership` has, with groups as roles are said. The change that a job begins with
    is of a version before all others."""

    groups: Number
    changes: tuple[tuple[Number, Roles], ...] = ()

    def __post_init__(self) -> None:
        check_texts(roles_in, (groups for _, groups in self.changes))


class Family(Value, frozen=True, array_like=True):
    """Many sets of roles that are the same but for their first role: `pattern`, counted from that, and the
    first ones."""

    pattern: Roles
    firsts: Roles

    def __post_init__(self) -> None:
        check_texts(roles_in, [self.pattern, self.firsts])


class Catalogue(Value, frozen=True):
    """The segments of all roles, as they have told. `families`: of holders, all of which have said so, and of
    segments that are named after them. `others`: by segment, its holders, and those of which it was told."""

    families: list[Family]
    others: dict[SegmentId, tuple[Holders, Roles]]

    def __post_init__(self) -> None:
        check_texts(roles_in, (text for pair in self.others.values() for text in pair))


class GroupFamily(Value, frozen=True, array_like=True):
    """Replica groups of one shape, by the same order: their roles, and their indices."""

    roles: Family
    indices: Roles

    def __post_init__(self) -> None:
        check_texts(roles_in, [self.indices])


class ReplicaGroups(Value, frozen=True):
    """What is known of the job's replica groups, see `control.decide.groups`."""

    of: list[GroupFamily]
    redundancy: Redundancy
    membership: MembershipChanges


class Redundancy(StrEnum):
    """What of a replica group's state there is in the other groups."""

    REPLICATED = "replicated"
    """All of it. What comes back later takes over the whole state of its counterpart in another group, random
    states included."""
    ADOPTABLE = "adoptable"
    """Each role has something alone, which its counterpart in another group can adopt: hold, step and
    snapshot beside its own (`ft_core.adapter.Adapter.adopt`)."""
    SHARDED = "sharded"
    """Each role has something alone that nobody can adopt: no group can go on without another."""


class Fault(StrEnum):
    """What a worker, or a node, has failed of. `control.liveness.strikes` says what each leads to."""

    EXCEPTION = "exception"
    """The script's own, as far as can be seen."""
    EXITED = "exited"
    """The script has ended itself, with an exit code that is not 0."""
    LEFT = "left"
    """The same, with 0."""
    INTERRUPTED = "interrupted"
    """KeyboardInterrupt."""
    REFUSED = "refused"
    """A configuration that nothing but another one mends."""
    DIVERGED = "diverged"
    """The script, started again, does not do what it, or its peers, had done before."""
    ENGINE = "engine"
    """An error of this engine's, before the script's first line or outside of it."""
    MEMORY = "memory"
    """The host's memory is used up, and the process was told so."""
    DEVICE_MEMORY = "device_memory"
    """The device's memory is used up."""
    DEVICE = "device"
    """The device has failed, or what ran on it."""
    TRANSPORT = "transport"
    """A communicator, though no peer was lost."""
    STORAGE = "storage"
    """Files cannot be read or written: no space, an error of the device, a handle that went stale."""
    LOADER = "loader"
    """A process that loads data for the worker has died."""
    KILLED = "killed"
    """SIGKILL, nobody knows of whom."""
    OUT_OF_MEMORY = "out_of_memory"
    """SIGKILL of the kernel, since the host's memory, or the cgroup's, is used up."""
    CRASHED = "crashed"
    """Another signal, by which a process ends that goes wrong (SIGSEGV, SIGBUS, SIGABRT)."""
    TERMINATED = "terminated"
    """It was told to end: by SIGTERM, SIGINT or SIGHUP, or by this job's controller."""
    NODE = "node"
    """The whole node was lost."""


class FailureRecord(Value, frozen=True):
    """A failure, as it is kept of the node where it was. `place`: the node, whichever process is its agent.
    `age`: seconds."""

    place: str
    device: Number
    """-1: none of them alone."""
    role: Annotated[int, Meta(ge=-1, lt=1 << 31)]
    """-1: of a whole node."""
    pid: Number
    step: Version
    """The version that the role had; -1 in start-up."""
    fault: Fault
    signature: str
    """By which an exception is known again."""
    age: float


class ReplicaGroup(Value, frozen=True):
    """The replica group that a role belongs to."""

    index: Number
    """Which one, counted from 0."""
    groups: Number
    """How many there are when all are there."""
    redundancy: Redundancy
    """What the others have of its state."""

    @property
    def may_leave(self) -> bool:
        """Whether the other groups can go on without this one."""
        return self.redundancy is not Redundancy.SHARDED


class BeganWith(Value, frozen=True):
    """The roles that the job began with, as `elastic.rules.Start` has them."""

    roles: Number
    stages: Number
    there: Number


class Dealt(Value, frozen=True):
    """The samples of a step, as `elastic.rules.Deal` has them after it. Ranges are a first position, and one
    past the last. `samples`: by replica group. `waiting`: to be dealt again, not before the step that is
    named first."""

    samples: dict[Number, list[tuple[Number, Number]]]
    waiting: list[tuple[Number, Number, Number]]
    next: Number


class StartupEntry(Value, frozen=True):
    """A completed operation of the start-up phase. There may be one for each training step.

    `tensors`: the bytes of each result, or None where they are not kept.
    """

    kind: str
    signature: str
    tensors: tuple[bytes, ...] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the results that are kept."""
        return sum(map(len, self.tensors or ()))


class RoleHeld(Value, frozen=True):
    """What a node could give to a recovery of a role that is played there."""

    alive: bool
    stage: Stage
    versions: list[Version]
    segments: list[SegmentId]
    counts: Counts = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_texts(parse, self.counts)


class RoleBeat(Value, frozen=True):
    """How far a role's worker has come."""

    pid: Number
    step: Version
    tag: Number
    held: list[Version]
    committed: Version
    step_s: float
    waited_s: float
    h2h_bytes: Number
    h2h_snapshots: Number
    own_s: float = 0.0
    """Seconds of a step that are not spent in operations of process groups; 0: not known. See
    `node.workers.own_time`."""
    loss: float | None = None
    """That the script has told last."""
    ready: Number = 0
    """The pid of a standby that has started the role ahead of need; 0: there is none."""
    passed: Number = 0
    """How much a newcomer's script has passed over that was done before it; see `state.memory.Word`."""


# -- plans ---------------------------------------------------------------------------------------------


class Counterparts(Value, frozen=True, array_like=True):
    """Roles that others stand for, see `control.decide.compact.counterparts`: by how much the numbers of
    those are greater, and of which roles."""

    shifts: tuple[tuple[Number, Roles], ...] = ()

    def __post_init__(self) -> None:
        check_texts(roles_in, (roles for _, roles in self.shifts))

    def expanded(self) -> Mapping[Role, Role]:
        """Role -> who stands for it, by role."""
        return _expanded(self.shifts)


@lru_cache(maxsize=8)
def _expanded(shifts: tuple[tuple[int, str], ...]) -> Mapping[int, int]:
    pairs = ((role, role + by) for by, text in shifts for run in roles_in(text) for role in run)
    return MappingProxyType(dict(sorted(pairs)))


class WorkerPlan(Value, frozen=True):
    """What one role must know of the epoch it takes part in."""

    epoch: Epoch
    store: str
    version: Version | None
    origin: Origin
    completed: dict[str, tuple[Number, Role]]
    """By group, how many start-up operations somebody who takes part has on record, and who."""
    parts: list[Version]
    """The parts of the script that all roles have come to the end of: with which version."""
    started_over: Epoch
    counterparts: Counterparts
    """Who stands for the roles that are away."""
    adopting: bool
    """Whether these hold what those had alone."""
    newcomers: list[Role]
    membership: MembershipChanges
    policy: str
    lr_intervention: str
    snapshot: str
    began_with: BeganWith
    entered: Version
    """The newest step that the ledger has."""
    standing_in: Counterparts = Counterparts()
    """For roles that start while others train: those that come back, and those that move, which train
    themselves, elsewhere."""

    def __post_init__(self) -> None:
        check_texts(parse, self.completed)

    @property
    def absent(self) -> Mapping[Role, Role]:
        """Roles that are away, with their counterparts."""
        return self.counterparts.expanded()

    @property
    def adopted(self) -> Mapping[Role, Role]:
        """Those of the absent whose counterparts hold what they had alone."""
        return self.absent if self.adopting else {}

    @property
    def ahead(self) -> Mapping[Role, Role]:
        """Roles that start while others train, with those who stand for them."""
        return self.standing_in.expanded()

    @property
    def apart(self) -> bool:
        """Whether this is for a standby, which starts a role ahead of need that another worker of its node
        plays: it takes no part in the epoch, so it has no store, and meets nobody."""
        return not self.store


class JobState(Value, frozen=True):
    """What a successor of the controller needs to go on, but for who is where: agents keep it, and do not
    read it. That of what roles are to do, it does not have: where some have not begun the epoch, there is
    another."""

    id: PlanId
    epoch: Epoch
    job: str
    store: str
    master: str
    version: Version | None
    origin: Origin
    durable: str
    parts: list[Version]
    resumes: bool
    started_over: Epoch
    counterparts: Counterparts
    adopting: bool
    newcomers: list[Role]
    groups: ReplicaGroups
    catalogue: Catalogue
    initial: Version | None
    reached: Version
    futile: Number
    goal: Version
    height: Number
    furthest: Version
    entered: Version
    """The newest step that the ledger has."""
    start: tuple[Version | None, Origin]
    """Version and origin that the job began with."""


class Plan(JobState, frozen=True):
    """The control plane's truth: an epoch."""

    roles: dict[Role, NodeName]
    nodes: dict[NodeName, NodeAddress]
    sources: dict[Role, dict[SegmentId, list[NodeName]]]
    """Who holds what roles go on from that do not have all of it on their own node."""
    completed: dict[str, tuple[Number, Role]]

    @property
    def absent(self) -> Mapping[Role, Role]:
        """The same as `WorkerPlan.absent`."""
        return self.counterparts.expanded()

    @property
    def adopted(self) -> Mapping[Role, Role]:
        """The same as `WorkerPlan.adopted`."""
        return self.absent if self.adopting else {}


class NodePlan(Value, frozen=True):
    """What one agent knows of an epoch: `SharedPlan` and `OwnPlan` put together."""

    id: PlanId
    epoch: Epoch
    job: str
    roles: dict[Role, NodeName]
    nodes: dict[NodeName, NodeAddress]
    master: str
    durable: str
    """Name of the durable checkpoint to read, if any."""
    sources: dict[Role, dict[SegmentId, list[NodeName]]]
    """Who holds what the roles played and adopted on this node alone go on from. Not for those whose
    snapshot is here."""
    away: dict[Role, list[SegmentId]]
    """For the roles in `worker.absent` whose counterparts are on this node: all of their segments, by the
    catalogue. A durable checkpoint has their parts too."""
    worker: WorkerPlan
    state: JobState
    """Kept for a successor of the controller."""


# -- between the controller and an agent, either way ----------------------------------------------------


class Hosts(Message, frozen=True):
    """Some of a plan's nodes, and who plays what there: the one table that grows with the job. Sent where it
    is not known; otherwise what has changed is."""

    compressed: ClassVar[bool] = True

    id: PlanId
    hosts: list[Host]


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
    """That a node lives, and where its workers are."""

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
    none. `step`, `signature`: as of `FailureRecord`. `age`: seconds since, where it is said again."""

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


class NoIdleWorker(Message, frozen=True):
    """A role of the plan has no worker on its node."""

    epoch: Epoch
    role: Role


class RestoreFailed(Message, frozen=True):
    """A role cannot have its state."""

    epoch: Epoch
    role: Role
    reason: str


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


class RoleLayout(Message, frozen=True):
    """What a role's state consists of, or the part that another has adopted."""

    epoch: Epoch
    role: Role
    adopted: bool
    segments: dict[SegmentId, Holders]
    initial: Version | None
    resumes: bool
    group: ReplicaGroup | None

    def __post_init__(self) -> None:
        check_texts(roles_in, self.segments.values())


class Trained(Message, frozen=True):
    """For the ledger: a step's samples. `since`: the version that its epoch began from, None of start-up."""

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


class Prepared(Message, frozen=True):
    """A role that comes back, or moves, waits for its state. `counts`: the start-up operations that it has on
    record."""

    role: Role
    counts: Counts


class PausedAtStep(Message, frozen=True):
    """A role has stopped at the end of a step for those who come back."""

    epoch: Epoch
    role: Role


class Unprotected(Message, frozen=True):
    """A role's script runs without fault tolerance. `so_far`: it may yet ask for it."""

    role: Role
    reason: str
    so_far: bool


class Suspect(Message, frozen=True):
    """A role, or its agent, has seen connections break."""

    epoch: Epoch
    role: Role
    reason: str


class Completed(Message, frozen=True):
    """A role has come to the end of a part of its script. `last`: only local work follows."""

    epoch: Epoch
    role: Role
    part: Number
    version: Version
    last: bool


class Finished(Message, frozen=True):
    """A role's script is done."""

    role: Role


class Configure(Message, frozen=True):
    """A worker brings settings (names as in `Settings`), and waits."""

    worker: Number
    id: Number
    settings: dict[str, Setting]


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


class DurableWritten(Message, frozen=True):
    """A role's part of a durable checkpoint is written, which took so many seconds."""

    role: Role
    version: Version
    seconds: float


class DurableFailed(Message, frozen=True):
    """A role's part of a durable checkpoint is not written."""

    role: Role
    version: Version
    reason: str


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
    if it was never let in."""

    node: NodeName
    term: Term
    pid: Number
    node_rank: Number
    domain: str
    data: Address
    holdings: Holdings
    said: list[FromRoles]
    draining: bool
    job: JobId


FromRoles = (
    WorkerLost | NoIdleWorker | RestoreFailed | Restored | Stepped | Reopened | RoleLayout | Prepared
    | PausedAtStep | Unprotected | Suspect | Completed | Finished | Configure | Trained
)  # fmt: skip
"""What an agent says of its roles, and says again with each greeting."""

FromAgent = (
    AgentHello | HoldingsChanged | Heartbeat | Idle | FromRoles | OperationCounts | Issued
    | Configured | Hosts | NodesProbed | DurableNames | DurableWritten | DurableFailed | RoleState | Flights
    | RoleFlight | Leaving | Left | KeptState
)  # fmt: skip


# -- on the way between an agent and the controller -----------------------------------------------------


class RouteRequest(Message, frozen=True):
    """An agent's first word to the controller: may it stay, or is another to speak for it? `relay`: where it
    would take those for which it is to speak. `direct`: it may not be sent away, since it has others already,
    or could not use who was to speak for it."""

    relay: Address
    direct: bool


class UseRelay(Message, frozen=True):
    """The answer. `relay`: where it finds who speaks for it; empty: it is to greet here."""

    relay: str


class RelayLives(Message, frozen=True):
    """To an agent, from who speaks for it: the controller has just said something."""


class LeavingRelay(Message, frozen=True):
    """From an agent, over the connection with who speaks for it: that ends, and the agent lives."""


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


class Abort(Message, frozen=True):
    """The epoch before this one is over."""

    epoch: Epoch


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
    worker: WorkerPlan
    """But for what each node has completed."""
    state: JobState


class NodesChanged(Message, frozen=True):
    """Nodes without a role have come, or gone (None), in the epoch of that plan. `all`: these are all without
    a role."""

    id: PlanId
    nodes: dict[NodeName, NodeAddress | None]
    all: bool = False


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
    nodes: dict[NodeName, Address]


class SendHeartbeat(Message, frozen=True):
    """Now, not at the next beat."""

    number: Number = 0


class Drain(Message, frozen=True):
    """This node is to be taken out, or not any more. It keeps that for a successor of the controller."""

    wanted: bool


class SendState(Message, frozen=True):
    """To a controller that has just started."""


class Release(Message, frozen=True):
    """All roles have come to the end of so many parts of their script: with which version."""

    parts: list[Version]


class SendCounts(Message, frozen=True):
    """Say the counts of the start-up operations of all roles here."""


class SendIssued(Message, frozen=True):
    """What the roles here have begun."""

    round: Number


class SendFlight(Message, frozen=True):
    """The flight records of all roles here: what is under way, and the newest that have ended, so many of
    each group. `closely`: of these also what they do."""

    number: Number
    newest: Size = NEWEST
    closely: tuple[Role, ...] = ()


class DescribeFlight(Message, frozen=True):
    """A role's flight record, all of it."""

    role: Role


class PauseAfterStep(Message, frozen=True):
    """Stop at the end of this step, in this epoch; epoch 0: go on."""

    epoch: Epoch
    step: Version


class Prepare(Message, frozen=True):
    """Start workers for roles that come back, or move, ahead of the epoch in which they take part. `worker`:
    what they begin with, in place of the plan's."""

    epoch: Epoch
    roles: list[Role]
    worker: WorkerPlan


class Withdraw(Message, frozen=True):
    """End the workers of these roles: their replica group takes no part."""

    roles: list[Role]


class GivenUp(Message, frozen=True):
    """A plan was made without this node: it joins again as a spare."""


class UseSettings(Message, frozen=True):
    """Settings that the script has brought."""

    settings: dict[str, Setting]


class ConfigureAnswer(Message, frozen=True):
    """To a worker's `Configure`; `error`: why its settings cannot be had."""

    worker: Number
    id: Number
    error: str = ""


class KeepStrikes(Message, frozen=True):
    """All failures that count, for a successor of the controller."""

    strikes: list[FailureRecord]


class Shutdown(Message, frozen=True):
    """The job is over, with this exit code."""

    code: Number


ToAgent = (
    LeaderHello | OtherJob | Hosts | OwnPlan | SharedPlan | Abort | NodesChanged | KillWorker | Examine
    | DescribeRole | ListDurable | ProbeNodes | SendHeartbeat | SendState | Release | SendCounts | SendIssued
    | SendFlight | DescribeFlight | PauseAfterStep | Prepare | Withdraw | GivenUp | UseSettings
    | ConfigureAnswer | KeepStrikes | Drain | Shutdown
)  # fmt: skip


# -- `ftctl` to the controller, and its answers --------------------------------------------------------


class CtlHello(Message, frozen=True):
    """`ftctl` greets; its questions follow. `DescribeRole` and `DescribeFlight` are among them. `job`: of
    which it asks; empty: of any."""

    job: JobId


class AskStatus(Message, frozen=True):
    """What the job is doing, in a few words however large it is."""


class AskRows(Message, frozen=True):
    """A list of one row for each role, spare, or node; of nodes also those alone against which something
    counts. It comes in pieces, each asked for by itself: `AskMore` for those after the first."""

    what: Literal["roles", "spares", "nodes", "struck"]


class AskMore(Message, frozen=True):
    """The next piece."""


class Inject(Message, frozen=True):
    """SIGKILL to the worker of a role, or to a whole node."""

    role: Role | None = None
    node: NodeName | None = None


class AskHosts(Message, frozen=True):
    """Where all roles are. Answered by `HostsFollow`, and then by so many `Hosts`."""


class Forgive(Message, frozen=True):
    """Forget what was counted against a node."""

    node: NodeName


class DrainNode(Message, frozen=True):
    """Take a node out: its roles move, and then it ends."""

    node: NodeName


class RoleStatus(Value, frozen=True):
    """The status of a role: None where nothing is known of its worker."""

    role: Role
    node: NodeName
    worker_pid: Number | None
    agent_pid: Number | None
    step: Version | None
    tag: Number | None
    held: list[Version]
    replicas: dict[SegmentId, dict[NodeName, list[Version]]]
    committed: Version | None
    waited_s: float | None
    h2h_bytes: Number | None
    h2h_snapshots: Number | None
    ready: Number | None = None
    """The same as `RoleBeat.ready`."""


class SpareStatus(Value, frozen=True):
    """The status of a node without a role."""

    node: NodeName
    agent_pid: Number
    idle: Number
    guarding: list[Role] = []


class RoleNamed(Value, frozen=True):
    """A role that is named in a summary. `step`: that it has done, and `step_s`: how long the last one took;
    None where nothing is known of its worker."""

    role: Role
    node: NodeName
    step: Version | None
    step_s: float | None


class DomainSpares(Value, frozen=True):
    """A failure domain with spares."""

    domain: str
    spares: Number


class Struck(Value, frozen=True):
    """A node against which something counts: how many strikes, and whether it is avoided."""

    node: NodeName
    strikes: Number
    avoided: bool


class JobStatus(Message, frozen=True):
    """Answers `AskStatus`. Lists have the first `NAMED` of what they are about."""

    epoch: Epoch
    phase: str
    controller_pid: Number
    finished: Annotated[str, Meta(pattern=rf"^({RUNS})?\Z")]
    """Roles whose script has come to its end."""
    roles: Number
    """Those of the plan; others, of the `world_size`, are away."""
    world_size: Number
    missing: Number
    """Roles of the plan without a worker that is heard of."""
    missing_roles: list[RoleNamed]
    oldest: Version | None
    newest: Version | None
    """The steps that roles have done, at least and at most."""
    slowest: list[RoleNamed]
    """Those that have done the fewest steps; of those that have done as many, those with the longest."""
    nodes: Number
    """With roles, and there."""
    nodes_expected: Number
    spares: Number
    spares_ready: Number
    """Those with as many idle workers as a node has roles."""
    spare_domains: Number
    most_spares: list[DomainSpares]
    strikes: Number
    """That count, against all nodes."""
    limit: Number
    struck: Number
    """Nodes against which any count."""
    most_struck: list[Struck]
    draining: list[NodeName]
    """Nodes that are being taken out, in that order."""
    seconds: dict[str, float] = {}
    """What the job's time went to, by `Cause`."""
    complaint: str = ""
    """Why the job does not get on, if so."""
    unprotected: str = ""
    """Why it is not protected, if so."""


class RolesStatus(Message, frozen=True):
    """Answers `AskRows`. `more`: there are more."""

    roles: list[RoleStatus]
    more: bool


class SparesStatus(Message, frozen=True):
    """A piece of the list of spares, as `RolesStatus` is of that of roles."""

    spares: list[SpareStatus]
    more: bool


class NodeStatus(Value, frozen=True):
    """The status of a node that is there, or that is not and has a record. `strikes`: what counts against it;
    `avoided`: that is as many as the limit, so it is not used while there is another."""

    node: NodeName
    domain: str
    alive: bool
    roles: list[Role]
    idle: Number
    strikes: list[FailureRecord]
    avoided: bool
    draining: bool = False
    """It is being taken out."""


class NodesStatus(Message, frozen=True):
    """A piece of the list of nodes, as `RolesStatus` is of that of roles. `limit`: strikes within
    `seconds`."""

    limit: Number
    seconds: float
    nodes: list[NodeStatus]
    more: bool


class Forgiven(Message, frozen=True):
    """Answers `Forgive`: how many strikes are forgotten."""

    node: NodeName
    strikes: Number


class Drains(Message, frozen=True):
    """Answers `DrainNode`: so many roles of that node are to move, after those of the nodes `before` it."""

    node: NodeName
    roles: Number
    before: list[NodeName]


class Injected(Message, frozen=True):
    """Answers `Inject`: the role or node that is told to die."""

    killed: Role | NodeName


class RoleDescribed(Message, frozen=True):
    """Answers `DescribeRole`: what its agent says. `replicas`: how many copies of what is unique are kept."""

    state: RoleState
    replicas: Number


class HostsFollow(Message, frozen=True):
    """Answers `AskHosts`."""

    pieces: Number


class Denied(Message, frozen=True):
    """A question that cannot be answered, and why."""

    error: str


NAMED = 16
"""How many are named of what there is too much of to be listed."""

FromCtl = (
    CtlHello | AskStatus | AskRows | AskMore | AskHosts | Inject | DescribeRole | DescribeFlight | Forgive
    | DrainNode
)  # fmt: skip
ToCtl = (
    JobStatus | RolesStatus | SparesStatus | NodesStatus | HostsFollow | Hosts | Injected | RoleDescribed
    | RoleFlight | Forgiven | Drains | Denied
)  # fmt: skip


# -- a worker to its agent -----------------------------------------------------------------------------


class WorkerHello(Message, frozen=True):
    """A worker greets its agent."""

    worker: Number
    pid: Number


class Staged(Message, frozen=True):
    """A snapshot of a role, this worker's own or an adopted one, is whole."""

    role: Role
    version: Version


class Allocate(Message, frozen=True):
    """Memory for a slot of a role's snapshots."""

    id: Number
    role: Role
    slot: Annotated[int, Meta(ge=0, le=1)]
    segments: list[Layout]


class Registered(Message, frozen=True):
    """Training is protected from this version on. `counts`: start-up operations on record."""

    version: Version
    ring: list[Role]
    resumes: bool
    group: ReplicaGroup
    counts: Counts


class Quiesced(Message, frozen=True):
    """The worker has left its step for this epoch."""

    epoch: Epoch
    stage: Stage
    counts: Counts

    def __post_init__(self) -> None:
        check_texts(parse, self.counts)


class WorkerRestored(Message, frozen=True):
    """The worker has its state."""

    epoch: Epoch
    version: Version
    loaded: bool


class WorkerStepped(Message, frozen=True):
    """The worker has finished the first step of its epoch."""

    epoch: Epoch
    version: Version


class WorkerReopened(Message, frozen=True):
    """The worker has its communicators."""

    epoch: Epoch


class WorkerHeld(Message, frozen=True):
    """The worker has stopped at the end of a step."""

    epoch: Epoch


class WorkerUnprotected(Message, frozen=True):
    """The script runs without fault tolerance. `so_far`: it may yet ask for it."""

    reason: str
    so_far: bool


class WorkerSuspects(Message, frozen=True):
    """The worker has seen connections break."""

    epoch: Epoch
    reason: str


class WorkerCompleted(Message, frozen=True):
    """The worker has come to the end of a part of its script, as of `version`."""

    epoch: Epoch
    part: Number
    version: Version
    last: bool


class WorkerTrained(Message, frozen=True):
    """For the ledger, the samples of a step. `since`: as of `Trained`."""

    epoch: Epoch
    since: Version | None
    step: Version
    dealt: Dealt


class WorkerCounts(Message, frozen=True):
    """Start-up operations on record."""

    counts: Counts

    def __post_init__(self) -> None:
        check_texts(parse, self.counts)


class WorkerIssued(Message, frozen=True):
    """What the worker has begun, by group, and the groups of which it waits for others to connect."""

    round: Number
    epoch: Epoch
    step: Version
    at_end: bool
    issued: Counts
    unopened: list[str]

    def __post_init__(self) -> None:
        check_texts(Series.parse, self.issued)
        check_texts(GroupId.parse, self.unopened)


class CorruptCopy(Message, frozen=True):
    """A copy in memory does not match its checksums."""

    role: Role
    slot: Number
    reason: str


class AskStartupEntries(Message, frozen=True):
    """Records of start-up operations, of the worker that plays `holder`."""

    id: Number
    holder: Role
    group: str
    start: Number

    def __post_init__(self) -> None:
        check_texts(Series.parse, [self.group])


class AskProgress(Message, frozen=True):
    """How far the worker that plays `holder` has come."""

    id: Number
    holder: Role


class BringSettings(Message, frozen=True):
    """The script brings settings."""

    id: Number
    settings: dict[str, Setting]


class StartupEntries(Message, frozen=True):
    """Answers `SendStartupEntries`: by text form of a group, its records from there on."""

    id: Number
    entries: dict[str, list[StartupEntry]]

    def __post_init__(self) -> None:
        check_texts(Series.parse, self.entries)


class Progress(Message, frozen=True):
    """Answers `SendProgress`."""

    id: Number
    version: Version
    counts: Counts

    def __post_init__(self) -> None:
        check_texts(parse, self.counts)


class ScriptFailed(Message, frozen=True):
    """The script has raised, or ends itself: this worker ends. `what`: in a line. `signature`: by which the
    same error is known again."""

    fault: Fault
    what: str
    signature: str
    traceback: str


class WorkerFinished(Message, frozen=True):
    """Nothing of the script is left to be done."""


FromWorker = (
    WorkerHello | Staged | Allocate | Registered | Quiesced | WorkerRestored | WorkerStepped
    | WorkerReopened | WorkerHeld | WorkerUnprotected | WorkerSuspects | WorkerCompleted | WorkerTrained
    | WorkerCounts | WorkerIssued | CorruptCopy | AskStartupEntries | AskProgress | BringSettings
    | StartupEntries | Progress | ScriptFailed | WorkerFinished
)  # fmt: skip


# -- an agent to a worker ------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Where the control words are: a memory file's descriptor and owner (`state.memory`)."""

    control: list[Number]


class PlanBegins(Message, frozen=True):
    """The next epoch, for a worker that has a role."""

    plan: WorkerPlan


class Assign(Message, frozen=True):
    """A role for an idle worker. `ending`: pids of former workers of the node whose memory, devices and ports
    the kernel is still taking back."""

    role: Role
    world_size: Number
    env: dict[str, str]
    plan: WorkerPlan
    ending: tuple[Number, ...] = ()


class CopyHere(Value, frozen=True):
    """A snapshot in this node's memory."""

    role: Role
    slot: Number
    address: list[Number]
    segments: list[Layout]
    fetch_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds that it took to bring it here; 0: it was here."""


class Restore(Message, frozen=True):
    """The state to go on from; without `parts`, what the script has made."""

    epoch: Epoch
    version: Version | None
    parts: list[CopyHere]


class Allocated(Message, frozen=True):
    """Answers `Allocate`: where the memory is."""

    id: Number
    address: list[Number]


class Refused(Message, frozen=True):
    """A request could not be served."""

    id: Number
    error: str


class SettingsTaken(Message, frozen=True):
    """Answers `BringSettings`."""

    id: Number


class EntriesBrought(Message, frozen=True):
    """Answers `AskStartupEntries`."""

    id: Number
    entries: dict[str, list[StartupEntry]]

    def __post_init__(self) -> None:
        check_texts(Series.parse, self.entries)


class ProgressBrought(Message, frozen=True):
    """Answers `AskProgress`."""

    id: Number
    version: Version
    counts: Counts
    envelope: str

    def __post_init__(self) -> None:
        check_texts(parse, self.counts)


class SendStartupEntries(Message, frozen=True):
    """Another role's worker asks for records."""

    id: Number
    group: str
    start: Number

    def __post_init__(self) -> None:
        check_texts(Series.parse, [self.group])


class SendProgress(Message, frozen=True):
    """Another role's worker asks how far this one is."""

    id: Number


class FailureNoted(Message, frozen=True):
    """Answers `ScriptFailed`: the worker may end."""


class Exit(Message, frozen=True):
    """The job is over: a worker whose script is done may end."""


ToWorker = (
    Welcome | Abort | PlanBegins | Assign | Restore | Release | SendCounts | SendIssued | PauseAfterStep
    | Allocated | Refused | SettingsTaken | EntriesBrought | ProgressBrought | SendStartupEntries
    | SendProgress | FailureNoted | Exit
)  # fmt: skip


# -- what each end of a connection decodes -------------------------------------------------------------

FROM_CONTROLLER = Decoder[ToAgent](ToAgent)
FROM_CLIENT = Decoder[FromAgent | FromCtl | RouteRequest | LeavingRelay](
    FromAgent | FromCtl | RouteRequest | LeavingRelay
)
"""Who is a peer of the controller: an agent, or `ftctl`."""
TO_AGENT = Decoder[ToAgent | UseRelay | RelayLives](ToAgent | UseRelay | RelayLives)
"""From the controller, or from who passes on what that says."""
FROM_PULSE = Decoder[Pulse](Pulse)
TO_CTL = Decoder[ToCtl](ToCtl)
FROM_WORKER = Decoder[FromWorker](FromWorker)
TO_WORKER = Decoder[ToWorker](ToWorker)
