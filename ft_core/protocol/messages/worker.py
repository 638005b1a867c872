"""Between a worker and its agent, either way."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ft_core.protocol.groups import Series, parse
from ft_core.protocol.messages.plans import WorkerPlan
from ft_core.protocol.messages.roles import FromRole, ToRole
from ft_core.protocol.messages.values import (
    Counts,
    Digest,
    Epoch,
    Fault,
    Layout,
    Message,
    Number,
    ReplicaGroup,
    Role,
    SegmentId,
    Size,
    Stage,
    StartupEntry,
    Value,
    Version,
    check_texts,
)

# -- a worker to its agent -----------------------------------------------------------------------------


class WorkerHello(Message, frozen=True):
    """A worker greets its agent."""

    worker: Number
    pid: Number


class Staged(Message, frozen=True):
    """A snapshot of a role, this worker's own or an adopted one, is whole. `sums`: with `--ft-verify`, those
    of its segments that others hold alike."""

    role: Role
    version: Version
    sums: dict[SegmentId, Digest] = {}


class Allocate(Message, frozen=True):
    """Memory for a slot of a role's snapshots."""

    id: Number
    role: Role
    slot: Annotated[int, Meta(ge=0, le=1)]
    segments: list[Layout]


class Registered(Message, frozen=True):
    """Training is protected from this version on. `counts`: start-up operations on record. The controller
    hears of it in parts, when it matters: `RoleLayout`, `Prepared`."""

    version: Version
    ring: list[Role]
    resumes: bool
    group: ReplicaGroup
    counts: Counts


class Quiesced(Message, frozen=True):
    """The worker has left its step for this epoch. Once all of its node have, that reports what it holds."""

    epoch: Epoch
    stage: Stage
    counts: Counts

    def __post_init__(self) -> None:
        check_texts(parse, self.counts)


class CorruptCopy(Message, frozen=True):
    """A copy in memory, of this worker's role or of an adopted one, does not match its checksums. Its agent
    strikes that off, and says `RestoreFailed` of the worker's role."""

    role: Role
    slot: Number
    reason: str


class AskStartupEntries(Message, frozen=True):
    """Records of start-up operations, of the worker that plays `holder`: both agents pass this on, and the
    answer. `id`: of whoever has sent it last."""

    id: Number
    holder: Role
    group: str
    start: Size

    def __post_init__(self) -> None:
        check_texts(Series.parse, [self.group])


class AskProgress(Message, frozen=True):
    """How far the worker that plays `holder` has come. It goes the way of `AskStartupEntries`. `tensor`: one
    of its newest snapshot that is wanted as well."""

    id: Number
    holder: Role
    tensor: str = ""


class StartupEntries(Message, frozen=True):
    """Answers `AskStartupEntries`: by text form of a group, its records from there on."""

    id: Number
    entries: dict[str, list[StartupEntry]]

    def __post_init__(self) -> None:
        check_texts(Series.parse, self.entries)


class Progress(Message, frozen=True):
    """Answers `AskProgress`. `envelope`: of the newest snapshot of that role (`state.envelope`), which its
    agent adds to what the worker says; and the bytes of the tensor, if it has it and that is small."""

    id: Number
    version: Version
    counts: Counts
    envelope: str = ""
    tensor: bytes = b""

    def __post_init__(self) -> None:
        check_texts(parse, self.counts)


class ScriptFailed(Message, frozen=True):
    """The script has raised, or ends itself: this worker ends; its agent says `WorkerLost` then. `what`: in
    a line. `signature`: by which the same error is known again."""

    fault: Fault
    what: str
    signature: str
    traceback: str


FromWorker = (
    WorkerHello | Staged | Allocate | Registered | Quiesced | FromRole | CorruptCopy | AskStartupEntries
    | AskProgress | StartupEntries | Progress | ScriptFailed
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


class FailureNoted(Message, frozen=True):
    """Answers `ScriptFailed`: the worker may end."""


class Exit(Message, frozen=True):
    """The job is over: a worker whose script is done may end."""


ToWorker = (
    Welcome | ToRole | PlanBegins | Assign | Restore | Allocated | Refused | AskStartupEntries | AskProgress
    | StartupEntries | Progress | FailureNoted | Exit
)  # fmt: skip
