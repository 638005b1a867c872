"""What happens to a worker, and what is done about it: the machine's input and output.

`WorkerMachine.handle(event, now)` returns effects; the shell (`worker.shell`) turns the agent's messages, and
what the main thread does, into events and effects into the world. What of a message only the process groups
know (operations on record, operations begun) the shell adds when it comes to the effect: after what stands
before it, an abort for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ft_core.protocol import messages as m
from ft_core.protocol.messages import Setting, Stage, Version, WorkerPlan

Order = (
    m.Assign | m.Abort | m.PlanBegins | m.Restore | m.Release | m.PauseAfterStep | m.SendCounts | m.SendIssued
    | m.AskProgress | m.AskStartupEntries | m.Exit
)  # fmt: skip
"""A message of the agent that answers no question of this worker's."""

# -- events --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FromAgent:
    """A message of the agent. Replies go to who has asked."""

    message: Order


@dataclass(frozen=True)
class AgentGone:
    """The connection to the agent has ended, and with it this node."""


@dataclass(frozen=True)
class Begins:
    """The main thread has come to where training begins."""


@dataclass(frozen=True)
class Registers:
    """It has said what its training is."""

    message: m.Registered


@dataclass(frozen=True)
class Unwound:
    """It has left what it was in, and nothing of that is under way any more."""


@dataclass(frozen=True)
class Loaded:
    """It has the state of the epoch. `loaded`: from memory, not what the script has made."""

    version: Version
    loaded: bool


@dataclass(frozen=True)
class FoundCorrupt:
    """A copy that it was to load does not match its checksums."""

    role: int
    slot: int
    reason: str


@dataclass(frozen=True)
class StepDone:
    """It has finished a step; wanted where `WorkerMachine.reports_step`."""

    version: Version


@dataclass(frozen=True)
class StepSafe:
    """The outcome of the step is being copied; wanted from version `WorkerMachine.hold_at` on."""

    version: Version


@dataclass(frozen=True)
class PartDone:
    """It has come to the end of a part of its script. `last`: only local work follows."""

    part: int
    version: Version
    last: bool


@dataclass(frozen=True)
class ScriptDone:
    """Nothing of the script is left to be done."""


@dataclass(frozen=True)
class RunsUnprotected:
    """The script wants no fault tolerance, or cannot have it. `so_far`: it may yet ask for it."""

    reason: str
    so_far: bool = False


@dataclass(frozen=True)
class SettingsBrought:
    """The job uses settings that the script has brought."""

    settings: Mapping[str, Setting]


@dataclass(frozen=True)
class Suspects:
    """Connections of this epoch have broken; `by_link`: the link under them, as NCCL reports."""

    reason: str
    by_link: bool = False


@dataclass(frozen=True)
class Reopened:
    """The process groups of that epoch are connected again."""

    epoch: int


@dataclass(frozen=True)
class Hung:
    """An operation on the device has not ended in its time, and perhaps nobody can interrupt who waits."""


@dataclass(frozen=True)
class Tick:
    """`WorkerMachine.deadline` has passed."""


Event = (
    FromAgent | AgentGone | Begins | Registers | Unwound | Loaded | FoundCorrupt | StepDone | StepSafe
    | PartDone | ScriptDone | RunsUnprotected | SettingsBrought | Suspects | Reopened | Hung | Tick
)  # fmt: skip


# -- effects -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """To the agent."""

    message: m.FromWorker


@dataclass(frozen=True)
class TakeRole:
    """Make the process groups' registry for this role."""

    message: m.Assign


@dataclass(frozen=True)
class AbortBefore:
    """Operations of epochs older than this one end, and none of them is put on record any more."""

    epoch: int


@dataclass(frozen=True)
class UsePlan:
    """Communicators of this epoch may open."""

    plan: WorkerPlan


@dataclass(frozen=True)
class KeepRecords:
    """Whether records of start-up operations stay, though newcomers' scripts begin behind them."""

    wanted: bool


@dataclass(frozen=True)
class SayQuiesced:
    """`Quiesced`, with the operations on record."""

    epoch: int
    stage: Stage


@dataclass(frozen=True)
class SayCounts:
    """`OperationCounts`: the operations on record."""


@dataclass(frozen=True)
class SayIssued:
    """`Issued`: the operations begun."""

    round: int
    epoch: int
    at_end: bool


@dataclass(frozen=True)
class SayProgress:
    """`Progress`: the version, and the operations on record."""

    id: int


@dataclass(frozen=True)
class SayEntries:
    """`StartupEntries`: of a series, the records from there on."""

    id: int
    group: str
    start: int


@dataclass(frozen=True)
class EndProcess:
    """At once, with this exit code."""

    code: int


Effect = (
    Send | TakeRole | AbortBefore | UsePlan | KeepRecords | SayQuiesced | SayCounts | SayIssued | SayProgress
    | SayEntries | EndProcess
)  # fmt: skip
