"""What messages consist of: kinds of numbers and names, and parts that several messages have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct, field

from ft_core.errors import ProtocolError
from ft_core.protocol.groups import RUNS, parse, roles_in

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
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""A checksum of what several roles hold alike."""
NodeName = str
"""The name of an agent, which no other has had; `protocol.domains.place` is the machine that it runs on."""
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
Addresses = Annotated[str, Meta(pattern=rf"^{_HOST}:{_PORT}(,{_HOST}:{_PORT}){{0,15}}\Z")]
"""The addresses of one process, by each of its interfaces."""
CheckpointName = Annotated[
    str, Meta(pattern=r"^step-[0-9]{1,18}-[0-9]{1,19}-[0-9A-Za-z_]{1,64}-[0-9]{1,10}\Z")
]
"""The name of a durable checkpoint, see `protocol.checkpoint_names`."""
Stage = Literal["startup", "training"]
"""Whether a worker has reached its first train step in this job."""
Origin = Literal["memory", "initial", "durable"]
"""Where the state of an epoch comes from, see `control.decide.version_choice.Choice`."""
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

    data: Addresses
    domain: str


class Host(Value, frozen=True, array_like=True):
    """A node of a plan, and the roles that it plays; empty for none."""

    name: NodeName
    data: Addresses
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
    LINK = "link"
    """What joins the device to its peers, by NCCL's own report, though no peer was lost."""
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
    CORRUPTION = "corruption"
    """Its state is not what others hold alike, and what it was made from is. No worker ends of it."""
    TERMINATED = "terminated"
    """It was told to end: by SIGTERM, SIGINT or SIGHUP, or by this job's controller."""
    NODE = "node"
    """The whole node was lost."""
    DEVICE_WARNING = "device_warning"
    """Nothing has failed: a device has reported something that counts (`DeviceFinding`)."""
    DEVICE_FAULTY = "device_faulty"
    """The same, after which others are preferred to it."""
    DEVICE_CONDEMNED = "device_condemned"
    """The same, and it is not to be used again before it is repaired."""
    SLOW = "slow"
    """Nothing has failed: a role there took longer for each step than its like, and was moved."""


DEVICE_FAULTS = frozenset({Fault.DEVICE, Fault.DEVICE_FAULTY, Fault.DEVICE_CONDEMNED})
"""After these a device is given to no role while there is another."""


class DeviceAction(StrEnum):
    """What is done about what a device reports, the mildest first."""

    NOTHING = "nothing"
    """It stands in `ft_xid_total`."""
    COUNT = "count"
    """A strike against its node: as often as `--ft-strikes` says, and the node is avoided."""
    ELSEWHERE = "elsewhere"
    """The device is given to no role while there is another: once its worker ends, the role moves."""
    DRAIN = "drain"
    """The same; and its node is drained, so that roles leave before they fail."""
    CONDEMN = "condemn"
    """The same; and its node is avoided at once, as after too many strikes."""


class Symptom(StrEnum):
    """What a device reports. `control.liveness.device_health` says what each leads to."""

    XID = "xid"
    """An error, by the driver's number."""
    ADVICE = "driver advice"
    """What the driver says is to be done, by its number."""
    UNCORRECTED = "uncorrected memory errors"
    """There are more of them than before."""
    REMAPPING = "remapping pending"
    """A memory row is to be remapped, since this job looks."""
    REMAP_FAILED = "remapping failed"
    """A memory row could not be remapped, whenever that was."""
    RETIRING = "page retirement pending"
    """A memory page is to be retired, since this job looks."""
    LOST = "lost"
    """The driver does not reach it any more."""
    OTHER = "health"
    """A plugin's, by the name that it has given, with what it wants to be done."""


class Soundness(StrEnum):
    """What a check of a node comes to."""

    OK = "ok"
    SICK = "sick"
    UNKNOWN = "unknown"
    """It could not be made, or did not end: that keeps nobody out."""


class NodeCheck(Value, frozen=True):
    """One check of a node. `found`: a figure, or what it was made on. `why`: of one that is not `ok`, a
    sentence for people. `device`: the index of the GPU that it is about, -1 for none."""

    name: str
    soundness: Soundness
    found: str
    why: str = ""
    device: Number = -1


class Timing(Value, frozen=True):
    """How many seconds the same has taken, several times."""

    best: float
    worst: float


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
    """A text by which an exception is known again."""
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
    """Seconds of a step that it computes, and neither is in operations of process groups nor waits for data
    or copies; 0: not known. See `node.workers.own_time`."""
    loss: float | None = None
    """The loss that the script has told last."""
    ready: Number = 0
    """The pid of a standby that has started the role ahead of need; 0: there is none."""
    copy_s: float = 0.0
    """Seconds that it took to have its newest version safe, from when it was whole on its own node."""
    passed: Number = 0
    """How much a newcomer's script has passed over that was done before it; see `state.memory.Word`."""
    data_s: float = 0.0
    """Seconds of a step that it waits for its data."""
