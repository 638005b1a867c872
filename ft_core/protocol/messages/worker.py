"""Between a worker and its agent, either way."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ft_core.protocol.groups import GroupId, Series, parse
from ft_core.protocol.messages.agent import Abort, PauseAfterStep, Release, SendCounts, SendIssued
from ft_core.protocol.messages.plans import WorkerPlan
from ft_core.protocol.messages.values import (
    Counts,
    Dealt,
    Epoch,
    Fault,
    Layout,
    Message,
    Number,
    ReplicaGroup,
    Role,
    Setting,
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
