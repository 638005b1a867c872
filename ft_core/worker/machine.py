"""A worker's part in the job's epochs: what it does about whatever happens. No input, no output, no clock.

It hears the agent (abort, plan, restore, ...) and what the main thread has done, and says what the main
thread has to do next: that is its state (`worker.states`). It decides nothing about the job.

An epoch that ends is answered by `Quiesced` once nothing of this process is inside it any more: at once where
the main thread is in no protected step (start-up, the end of the script, quiet already), else when it has
unwound.
"""

from __future__ import annotations

import sys
from typing import assert_never

from msgspec.structs import replace

from ft_core.process.transitions import follow
from ft_core.protocol import messages as m
from ft_core.settings import AUTO
from ft_core.worker.events import (
    AbortBefore,
    AgentGone,
    Begins,
    Effect,
    EndProcess,
    Event,
    FoundCorrupt,
    FromAgent,
    Hung,
    KeepRecords,
    Loaded,
    Order,
    PartDone,
    Registers,
    Reopened,
    RunsUnprotected,
    SayCounts,
    SayEntries,
    SayIssued,
    SayProgress,
    SayQuiesced,
    ScriptDone,
    Send,
    SettingsBrought,
    StepDone,
    StepSafe,
    Suspects,
    TakeRole,
    Tick,
    Unwound,
    UsePlan,
)
from ft_core.worker.states import (
    TRANSITIONS,
    AtEnd,
    Beginning,
    Finished,
    Holding,
    Leaving,
    Loading,
    NoRole,
    Over,
    Quiet,
    Restoring,
    StartUp,
    State,
    Stuck,
    Trained,
    Training,
    Unprotected,
)

HOLD_LIMIT = 2.0
"""Seconds that a role waits at the end of a step for those who come back, should the controller be gone."""
NEVER = sys.maxsize
"""No version is that new."""
_NO_HOLD = m.PauseAfterStep(0, 0)
_IN_PLANS = ("policy", "lr_intervention", "snapshot", "every")
"""Settings that a plan tells its workers."""


class WorkerMachine:
    """The machine of one process. What is public is read by the main thread at any time, and changed here
    alone."""

    plan: m.WorkerPlan
    """The plan of `epoch`; from when there is a role."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._state: State = NoRole()
        self.role = -1
        self.world_size = 0
        self.epoch = 0
        """The assignment of roles to workers that this worker is in."""
        self.announced = 0
        """The newest epoch that it has heard of. While that is newer, `epoch` is over."""
        self.parts = 0
        """How many parts of the script all roles have behind them."""
        self.reports_step = False
        """Whether the agent waits for the next step: it is the first after a recovery."""
        self.hold_at = NEVER
        """The version at whose end this role is to stop, for those who come back."""
        self._hold = _NO_HOLD
        self._next: m.WorkerPlan | None = None
        """The plan of the epoch that was announced, while the main thread has yet to leave the one before."""
        self._restore: m.Restore | None = None
        """What is to be restored in the newest epoch."""
        self._exits = False
        self._now = 0.0
        self._effects: list[Effect] = []

    @property
    def state(self) -> State:
        """What the main thread is at, or has to do next."""
        return self._state

    def _go(self, to: State) -> None:
        self._state = follow(TRANSITIONS, self._state, to)

    @property
    def deadline(self) -> float | None:
        """When a `Tick` is due, if ever."""
        return self.state.until if isinstance(self.state, Holding) else None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What is to be done about `event`, in this order. `now`: in seconds."""
        self._now, self._effects = now, []
        self._handle(event)
        return self._effects

    def _do(self, *effects: Effect) -> None:
        self._effects += effects

    def _say(self, message: m.FromWorker) -> None:
        self._effects.append(Send(message))

    def _handle(self, event: Event) -> None:
        match event:
            case FromAgent(message):
                self._hear(message)
            case AgentGone():
                self._do(EndProcess(1))
            case Begins():
                self._go(StartUp(waits=True) if self.announced > self.epoch else Beginning())
            case Registers(message):
                self._say(message)
                if isinstance(self.state, Beginning):
                    self._await_state()
            case Unwound():
                self._unwound()
            case Loaded(version, loaded):
                if isinstance(self.state, Loading):
                    self._go(Training())
                    self.reports_step = True
                    self._say(m.Restored(self.epoch, self.role, self._pid, version, loaded))
            case FoundCorrupt(role, slot, reason):
                # Also where the epoch is over: who decides about the next must know.
                self._say(m.CorruptCopy(role, slot, reason))
                if isinstance(self.state, Loading):
                    self._go(Stuck())
            case StepDone(version):
                if self.reports_step and isinstance(self.state, Training):
                    self.reports_step = False
                    self._say(m.Stepped(self.epoch, self.role, version))
            case StepSafe(version):
                if version >= self.hold_at and isinstance(self.state, Training):
                    self._go(Holding(self._now + HOLD_LIMIT))
                    self._say(m.PausedAtStep(self.epoch, self.role, version))
            case PartDone(part, version, last):
                if isinstance(self.state, Training):
                    self._go(AtEnd(part, last))
                    if part > self.parts:
                        self._say(m.Completed(self.epoch, self.role, part, version, last))
                    self._leave_part()
            case ScriptDone():
                self._go(Finished())
                self._say(m.Finished(self.role))
                if self._exits:
                    self._go(Over())
            case RunsUnprotected(reason, so_far):
                if not so_far:
                    self._go(Unprotected())
                self._say(m.Unprotected(self.role, reason, so_far))
            case SettingsBrought(settings):
                values = {name: settings[name] for name in _IN_PLANS if settings.get(name, AUTO) != AUTO}
                self.plan = replace(self.plan, **values)
            case Suspects(reason, by_link):
                self._say(m.Suspect(self.epoch, self.role, reason, by_link))
            case Reopened(epoch):
                self._say(m.Reopened(epoch, self.role))
            case Hung():
                self._do(EndProcess(1))
            case Tick():
                if isinstance(self.state, Holding) and self._now >= self.state.until:
                    self._stop_holding()
            case _:
                assert_never(event)

    def _hear(self, message: Order) -> None:
        match message:
            case m.Assign(role, _, plan):
                self.role, self.world_size = role, plan.began_with.roles
                self.announced = plan.epoch
                self._go(StartUp())
                self._do(TakeRole(message))
                self._begin(plan)
            case m.Abort(epoch):
                if epoch > self.announced and not isinstance(self.state, NoRole):
                    self._abort(epoch)
            case m.PlanBegins(plan):
                if plan.epoch == self.announced > self.epoch:
                    self._planned(plan)
            case m.Restore():
                if message.epoch == self.announced:
                    self._restore = message
                    if isinstance(self.state, Restoring):
                        self._go(Loading(message))
            case m.Release(parts):
                self.parts = len(parts)
                self._leave_part()
            case m.PauseAfterStep(epoch):
                if not epoch:  # they do not come after all
                    self._do(KeepRecords(False))
                self._hold = message
                self._set_hold()
                if isinstance(self.state, Holding) and epoch != self.epoch:
                    self._stop_holding()
            case m.SendCounts():
                self._do(KeepRecords(True), SayCounts())  # a replica group is about to come back
            case m.SendIssued(number):
                at_end = isinstance(self.state, AtEnd | Finished | Over)
                self._do(SayIssued(number, self.epoch, at_end))
            case m.AskProgress(number):
                self._do(SayProgress(number))
            case m.AskStartupEntries(number, _, group, start):
                self._do(SayEntries(number, group, start))
            case m.Exit():
                self._exits = True
                if isinstance(self.state, Finished):
                    self._go(Over())
            case _:
                assert_never(message)

    # -- epochs --------------------------------------------------------------------------------

    def _abort(self, epoch: int) -> None:
        # The main thread sees that first, and then what an aborted operation has left.
        self.announced = epoch
        self._next = self._restore = None
        self._do(AbortBefore(epoch))
        match self.state:
            case StartUp() | Quiet() | Trained() | Finished() | Over():
                self._do(SayQuiesced(epoch, self._stage))
            case Unprotected() | Leaving():
                pass  # what is aborted ends the script, or is being left already
            case _:
                self._go(Leaving())

    def _planned(self, plan: m.WorkerPlan) -> None:
        match self.state:
            case Leaving():
                self._next = plan
            case Unprotected():
                pass
            case _:
                self._begin(plan)

    def _unwound(self) -> None:
        self._go(Quiet())
        self._do(SayQuiesced(self.announced, self._stage))
        if self._next is not None:
            self._begin(self._next)

    def _begin(self, plan: m.WorkerPlan) -> None:
        """The epoch of `plan`, which was announced."""
        self.plan, self.epoch, self._next = plan, plan.epoch, None
        self.parts = len(plan.parts)
        self._set_hold()
        self._do(UsePlan(plan))
        match self.state:
            case StartUp(waits=True):
                self._go(Beginning())
            case Quiet():
                self._await_state()

    def _await_state(self) -> None:
        self._go(Restoring() if self._restore is None else Loading(self._restore))

    @property
    def _stage(self) -> m.Stage:
        return "startup" if isinstance(self.state, NoRole | StartUp) else "training"

    # -- waiting for others ------------------------------------------------------------------------

    def _leave_part(self) -> None:
        if isinstance(self.state, AtEnd) and self.parts >= self.state.part:
            self._go(Trained() if self.state.last else Training())

    def _set_hold(self) -> None:
        self.hold_at = self._hold.step if self._hold.epoch == self.epoch else NEVER

    def _stop_holding(self) -> None:
        self._go(Training())
        self._hold, self.hold_at = _NO_HOLD, NEVER
