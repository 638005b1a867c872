"""The worker as a state machine: event in, effects out. No process, no socket, no clock, no torch."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
from core.plans import worker_plan
from msgspec.structs import replace

from ft_core.protocol import messages as m
from ft_core.worker import events as e
from ft_core.worker.machine import HOLD_LIMIT, NEVER, WorkerMachine
from ft_core.worker.states import (
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

REGISTERED = m.Registered(0, [0, 1], False, m.ReplicaGroup(0, 1, m.Redundancy.SHARDED), {})
COPY = m.CopyHere(0, 1, [7], [m.Layout("0", ())])


def plan(epoch: int, parts: Sequence[int] = (), version: int | None = None) -> m.WorkerPlan:
    return worker_plan(epoch, store=f"127.0.0.1:{epoch}", parts=list(parts), version=version)


def restore(epoch: int, version: int | None = None, parts: tuple[m.CopyHere, ...] = ()) -> m.Restore:
    return m.Restore(epoch, version, list(parts))


PID = 1000


class Worker:
    """The machine, and where it is after each thing that happens."""

    def __init__(self) -> None:
        self.machine = WorkerMachine(PID)
        self.now = 0.0

    @property
    def state(self) -> State:
        return self.machine.state

    def hear(self, message: e.Order) -> list[e.Effect]:
        return self.do(e.FromAgent(message))

    def do(self, event: e.Event, after: float = 0.0) -> list[e.Effect]:
        self.now += after
        return self.machine.handle(event, self.now)

    def start(self, epoch: int = 1, parts: Sequence[int] = ()) -> Worker:
        """In the script's start-up."""
        self.hear(m.Assign(0, {}, plan(epoch, parts)))
        return self

    def train(self, epoch: int = 1, parts: Sequence[int] = ()) -> Worker:
        """In its first step."""
        self.start(epoch, parts)
        self.do(e.Begins())
        self.do(e.Registers(REGISTERED))
        self.hear(restore(epoch))
        self.do(e.Loaded(0, loaded=False))
        assert self.state == Training()
        return self


# -- the way of a script ---------------------------------------------------------------------------


def test_it_imports_no_torch() -> None:
    code = "import sys, ft_core.worker.machine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_role_comes_with_the_first_epoch() -> None:
    worker = Worker()
    assert worker.state == NoRole()
    message = m.Assign(3, {}, replace(plan(2, parts=[7]), began_with=m.BeganWith(4, 1, 4)))
    assert worker.hear(message) == [e.TakeRole(message), e.UsePlan(message.plan)]
    machine = worker.machine
    assert (machine.role, machine.world_size, machine.epoch, machine.announced) == (3, 4, 2, 2)
    assert machine.parts == 1 and machine.plan is message.plan and worker.state == StartUp()


def test_from_the_first_line_to_the_end() -> None:
    worker = Worker().start()
    assert worker.do(e.Begins()) == [] and worker.state == Beginning()
    assert worker.do(e.Registers(REGISTERED)) == [e.Send(REGISTERED)]
    assert worker.state == Restoring()
    order = restore(1, 4, (COPY,))
    assert worker.hear(order) == [] and worker.state == Loading(order)
    assert worker.do(e.Loaded(4, loaded=True)) == [e.Send(m.Restored(1, 0, PID, 4, True))]
    assert worker.state == Training() and worker.machine.reports_step
    assert worker.do(e.StepDone(5)) == [e.Send(m.Stepped(1, 0, 5))]
    assert not worker.machine.reports_step and worker.do(e.StepDone(6)) == []
    assert worker.do(e.PartDone(1, 7, last=False)) == [e.Send(m.Completed(1, 0, 1, 7, False))]
    assert worker.state == AtEnd(1, False)
    assert worker.hear(m.Release([])) == [] and worker.state == AtEnd(1, False)
    assert worker.hear(m.Release([7])) == [] and worker.state == Training()
    worker.do(e.PartDone(2, 9, last=True))
    worker.hear(m.Release([7, 9]))
    assert worker.state == Trained()
    assert worker.do(e.ScriptDone()) == [e.Send(m.Finished(0))]
    assert worker.state == Finished()
    assert worker.hear(m.Exit()) == [] and worker.state == Over()


def test_the_state_may_be_there_before_training_begins() -> None:
    worker = Worker().start()
    order = restore(1, 3, (COPY,))
    worker.hear(order)
    assert worker.state == StartUp()
    worker.do(e.Begins())
    worker.do(e.Registers(REGISTERED))
    assert worker.state == Loading(order)


def test_the_state_of_another_epoch_is_not_loaded() -> None:
    worker = Worker().start(epoch=2)
    worker.hear(restore(1, 3, (COPY,)))
    worker.do(e.Begins())
    worker.do(e.Registers(REGISTERED))
    assert worker.state == Restoring()
    worker.hear(restore(3, 3, (COPY,)))
    assert worker.state == Restoring()


def test_an_exit_that_comes_before_the_script_is_done() -> None:
    worker = Worker().train()
    assert worker.hear(m.Exit()) == [] and worker.state == Training()
    worker.do(e.PartDone(1, 7, last=True))
    worker.hear(m.Release([7]))
    worker.do(e.ScriptDone())
    assert worker.state == Over()


def test_a_part_that_all_have_behind_them_is_left_in_silence() -> None:
    """A newcomer whose plan says so; whoever was released when a failure came."""
    worker = Worker().train(parts=[7, 9])
    assert worker.do(e.PartDone(2, 9, last=True)) == [] and worker.state == Trained()


def test_settings_that_the_script_brings_change_the_plan() -> None:
    worker = Worker().start()
    worker.do(e.SettingsBrought({"policy": "shrink", "lr_intervention": "sqrt", "replicas": 2}))
    assert (worker.machine.plan.policy, worker.machine.plan.lr_intervention) == ("shrink", "sqrt")


# -- an epoch is over ------------------------------------------------------------------------------


def test_a_recovery() -> None:
    worker = Worker().train()
    assert worker.hear(m.Abort(2)) == [e.AbortBefore(2)]
    assert worker.state == Leaving() and (worker.machine.epoch, worker.machine.announced) == (1, 2)
    assert worker.do(e.Unwound()) == [e.SayQuiesced(2, "training")] and worker.state == Quiet()
    found = plan(2, version=5)
    assert worker.hear(m.PlanBegins(found)) == [e.UsePlan(found)]
    assert worker.state == Restoring() and worker.machine.plan is found
    worker.hear(restore(2, 5, (COPY,)))
    assert worker.do(e.Loaded(5, loaded=True)) == [e.Send(m.Restored(2, 0, PID, 5, True))]
    assert worker.do(e.StepDone(6)) == [e.Send(m.Stepped(2, 0, 6))]


def test_what_is_on_record_is_told_after_the_abort() -> None:
    """Else an operation that completes in between would be on record here, and nobody would know."""
    worker = Worker().start()
    assert worker.hear(m.Abort(2)) == [e.AbortBefore(2), e.SayQuiesced(2, "startup")]


def test_an_abort_before_there_is_a_role() -> None:
    worker = Worker()
    assert worker.hear(m.Abort(1)) == [] and worker.state == NoRole() and worker.machine.announced == 0


def test_an_abort_during_start_up() -> None:
    """It is answered at once; training does not begin before the next epoch has."""
    worker = Worker().start()
    worker.hear(m.Abort(2))
    assert worker.state == StartUp()
    assert worker.do(e.Begins()) == [] and worker.state == StartUp(waits=True)
    assert worker.hear(m.Abort(3)) == [e.AbortBefore(3), e.SayQuiesced(3, "startup")]
    assert worker.hear(m.PlanBegins(plan(2))) == [] and worker.state == StartUp(waits=True)
    assert worker.hear(m.PlanBegins(found := plan(3))) == [e.UsePlan(found)]
    assert worker.state == Beginning()


def test_start_up_goes_on_in_the_next_epoch() -> None:
    worker = Worker().start()
    worker.hear(m.Abort(2))
    worker.hear(m.PlanBegins(plan(2)))
    assert worker.state == StartUp() and worker.machine.epoch == 2
    worker.do(e.Begins())
    assert worker.state == Beginning()


def test_an_abort_while_training_begins() -> None:
    worker = Worker().start()
    worker.do(e.Begins())
    assert worker.hear(m.Abort(2)) == [e.AbortBefore(2)] and worker.state == Leaving()
    assert worker.do(e.Registers(REGISTERED)) == [e.Send(REGISTERED)] and worker.state == Leaving()
    assert worker.do(e.Unwound()) == [e.SayQuiesced(2, "training")]


def test_an_abort_while_the_main_thread_unwinds() -> None:
    worker = Worker().train()
    worker.hear(m.Abort(2))
    assert worker.hear(m.Abort(3)) == [e.AbortBefore(3)] and worker.state == Leaving()
    assert worker.do(e.Unwound()) == [e.SayQuiesced(3, "training")]


def test_a_second_abort_before_the_plan_of_the_first() -> None:
    """Nothing is under way here: it is answered at once, and the first plan is not obeyed."""
    worker = Worker().train()
    worker.hear(m.Abort(2))
    worker.do(e.Unwound())
    assert worker.hear(m.Abort(3)) == [e.AbortBefore(3), e.SayQuiesced(3, "training")]
    assert worker.hear(m.PlanBegins(plan(2))) == [] and worker.state == Quiet()
    worker.hear(restore(2))
    assert worker.state == Quiet()
    worker.hear(m.PlanBegins(plan(3)))
    assert worker.state == Restoring() and worker.machine.epoch == 3


def test_a_plan_for_an_epoch_that_was_not_announced() -> None:
    for before in (Worker().start(), Worker().train()):
        state, known = before.state, before.machine.plan
        for epoch in (1, 2):
            assert before.hear(m.PlanBegins(plan(epoch))) == []
        assert before.state == state and before.machine.plan is known and before.machine.epoch == 1


def test_an_abort_of_an_epoch_that_is_under_way() -> None:
    worker = Worker().train(epoch=3)
    for epoch in (2, 3):
        assert worker.hear(m.Abort(epoch)) == []
    assert worker.state == Training()


def test_a_plan_that_comes_before_the_step_is_left() -> None:
    worker = Worker().train()
    worker.hear(m.Abort(2))
    found, order = plan(2), restore(2, 0, (COPY,))
    assert worker.hear(m.PlanBegins(found)) == [] and worker.state == Leaving()
    worker.hear(order)
    assert worker.machine.epoch == 1
    assert worker.do(e.Unwound()) == [e.SayQuiesced(2, "training"), e.UsePlan(found)]
    assert worker.state == Loading(order) and worker.machine.epoch == 2


def test_a_plan_that_comes_too_early_is_not_used_in_a_later_epoch() -> None:
    worker = Worker().train()
    worker.hear(m.Abort(2))
    worker.hear(m.PlanBegins(plan(2)))
    worker.hear(restore(2, 0, (COPY,)))
    worker.hear(m.Abort(3))
    assert worker.do(e.Unwound()) == [e.SayQuiesced(3, "training")] and worker.state == Quiet()
    worker.hear(m.PlanBegins(plan(3)))
    assert worker.state == Restoring()


@pytest.mark.parametrize("order", [None, restore(1, 2, (COPY,))], ids=["waits", "loads"])
def test_an_abort_while_the_state_is_loaded(order: m.Restore | None) -> None:
    worker = Worker().start()
    worker.do(e.Begins())
    worker.do(e.Registers(REGISTERED))
    if order is not None:
        worker.hear(order)
    assert worker.hear(m.Abort(2)) == [e.AbortBefore(2)] and worker.state == Leaving()
    assert worker.do(e.Loaded(2, loaded=True)) == [], "of an epoch that is over nothing is said"
    assert worker.state == Leaving() and not worker.machine.reports_step
    assert worker.do(e.Unwound()) == [e.SayQuiesced(2, "training")]


def test_a_corrupt_copy_is_told_of_and_waits_for_another_epoch() -> None:
    worker = Worker().start()
    worker.do(e.Begins())
    worker.do(e.Registers(REGISTERED))
    worker.hear(restore(1, 2, (COPY,)))
    said = [e.Send(m.CorruptCopy(0, 1, "chunk 3"))]
    assert worker.do(e.FoundCorrupt(0, 1, "chunk 3")) == said and worker.state == Stuck()
    assert worker.hear(m.Abort(2)) == [e.AbortBefore(2)] and worker.state == Leaving()
    assert worker.do(e.FoundCorrupt(0, 1, "chunk 3")) == said, "also of an epoch that is over"
    assert worker.state == Leaving()


def test_an_abort_at_the_end_of_a_part() -> None:
    worker = Worker().train()
    worker.do(e.PartDone(1, 7, last=True))
    assert worker.hear(m.Abort(2)) == [e.AbortBefore(2)] and worker.state == Leaving()
    worker.hear(m.Release([7]))
    assert worker.state == Leaving(), "its agent waits for its word that it has left"
    assert worker.do(e.Unwound()) == [e.SayQuiesced(2, "training")]
    worker.hear(m.PlanBegins(plan(2, parts=[7])))
    worker.hear(restore(2))
    worker.do(e.Loaded(0, loaded=False))
    assert worker.do(e.PartDone(1, 7, last=True)) == [] and worker.state == Trained()


@pytest.mark.parametrize("done", [(), (e.ScriptDone(),)], ids=["trained", "finished"])
def test_an_abort_after_the_end(done: tuple[e.Event, ...]) -> None:
    """Nobody unwinds there: it is answered at once."""
    worker = Worker().train()
    worker.do(e.PartDone(1, 7, last=True))
    worker.hear(m.Release([7]))
    for event in done:
        worker.do(event)
    state = worker.state
    assert worker.hear(m.Abort(2)) == [e.AbortBefore(2), e.SayQuiesced(2, "training")]
    assert worker.hear(m.PlanBegins(found := plan(2, parts=[7]))) == [e.UsePlan(found)]
    assert worker.state == state and worker.machine.epoch == 2


def test_who_is_not_protected_takes_part_in_no_recovery() -> None:
    worker = Worker().start()
    so_far = e.RunsUnprotected("it trains", so_far=True)
    assert worker.do(so_far) == [e.Send(m.Unprotected(0, "it trains", so_far=True))]
    assert worker.state == StartUp(), "it may yet ask for it"
    said = m.Unprotected(0, "it wants none", so_far=False)
    assert worker.do(e.RunsUnprotected("it wants none")) == [e.Send(said)]
    assert worker.hear(m.Abort(2)) == [e.AbortBefore(2)]
    assert worker.hear(m.PlanBegins(plan(2))) == [] and worker.machine.epoch == 1
    assert worker.state == Unprotected()
    worker.do(e.ScriptDone())
    assert worker.hear(m.Abort(3)) == [e.AbortBefore(3), e.SayQuiesced(3, "training")]


def test_unwinding_from_an_epoch_that_goes_on_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Worker().train().do(e.Unwound())


# -- a replica group comes back --------------------------------------------------------------------


def test_records_are_kept_from_when_a_group_is_announced() -> None:
    """Before they are counted: what is told must still be there when it is asked for."""
    worker = Worker().train()
    assert worker.hear(m.SendCounts()) == [e.KeepRecords(True), e.SayCounts()]


def test_records_are_dropped_again_when_the_group_does_not_come() -> None:
    worker = Worker().train()
    worker.hear(m.PauseAfterStep(1, 5))
    assert worker.machine.hold_at == 5
    assert worker.hear(m.PauseAfterStep(0, 0)) == [e.KeepRecords(False)] and worker.machine.hold_at == NEVER
    assert worker.hear(m.PauseAfterStep(1, 7)) == [], "the records of a group that comes stay"


def hold(worker: Worker) -> None:
    worker.hear(m.PauseAfterStep(1, 5))
    assert worker.do(e.StepSafe(4)) == [] and worker.state == Training()
    assert worker.do(e.StepSafe(5)) == [e.Send(m.PausedAtStep(1, 0, 5))]
    assert worker.state == Holding(worker.now + HOLD_LIMIT) and worker.machine.deadline is not None


def test_a_hold_ends_with_the_epoch() -> None:
    worker = Worker().train()
    hold(worker)
    assert worker.hear(m.Abort(2)) == [e.AbortBefore(2)] and worker.state == Leaving()
    worker.do(e.Unwound())
    worker.hear(m.PlanBegins(plan(2)))
    assert worker.machine.hold_at == NEVER, "it was of another epoch"


def test_a_hold_ends_when_the_group_does_not_come() -> None:
    worker = Worker().train()
    hold(worker)
    worker.hear(m.PauseAfterStep(1, 5))
    assert isinstance(worker.state, Holding), "it is said again"
    assert worker.hear(m.PauseAfterStep(0, 0)) == [e.KeepRecords(False)] and worker.state == Training()


def test_a_hold_ends_after_its_time() -> None:
    worker = Worker().train()
    hold(worker)
    worker.do(e.Tick(), after=HOLD_LIMIT / 2)
    assert isinstance(worker.state, Holding)
    worker.do(e.Tick(), after=HOLD_LIMIT)
    assert worker.state == Training() and worker.machine.hold_at == NEVER
    assert worker.machine.deadline is None


def test_a_hold_of_another_epoch_holds_nobody() -> None:
    worker = Worker().train(epoch=2)
    worker.hear(m.PauseAfterStep(1, 0))
    assert worker.machine.hold_at == NEVER


# -- questions, and what is told -------------------------------------------------------------------


def test_questions_are_answered_in_every_state() -> None:
    worker = Worker().train()
    assert worker.hear(m.SendIssued(4)) == [e.SayIssued(4, 1, at_end=False)]
    assert worker.hear(m.AskProgress(5, 0)) == [e.SayProgress(5)]
    assert worker.hear(m.AskStartupEntries(6, 0, "0-1:1#0", 2)) == [e.SayEntries(6, "0-1:1#0", 2)]
    worker.do(e.PartDone(1, 7, last=True))
    assert worker.hear(m.SendIssued(5)) == [e.SayIssued(5, 1, at_end=True)]
    worker.hear(m.Release([7]))
    assert worker.hear(m.SendIssued(6)) == [e.SayIssued(6, 1, at_end=False)], "local work"
    worker.do(e.ScriptDone())
    assert worker.hear(m.SendIssued(7)) == [e.SayIssued(7, 1, at_end=True)]


def test_what_the_process_groups_notice_is_told() -> None:
    worker = Worker().train(epoch=2)
    assert worker.do(e.Suspects("reset")) == [e.Send(m.Suspect(2, 0, "reset"))]
    assert worker.do(e.Reopened(2)) == [e.Send(m.Reopened(2, 0))]


def test_the_process_ends() -> None:
    assert Worker().do(e.AgentGone()) == [e.EndProcess(1)]
    assert Worker().train().do(e.Hung()) == [e.EndProcess(1)]


# -- whatever happens ------------------------------------------------------------------------------


def of_the_main_thread(worker: Worker, dice: random.Random) -> e.Event | None:
    """What it may do where it is."""
    match worker.state:
        case StartUp(waits=False):
            return e.Begins()
        case Beginning():
            return e.Registers(REGISTERED)
        case Loading():
            return dice.choice(
                [e.Loaded(3, loaded=True), e.Loaded(0, loaded=False), e.FoundCorrupt(0, 1, "x")]
            )
        case Training():
            part = worker.machine.parts + 1
            return dice.choice([e.StepDone(4), e.StepSafe(4), e.StepSafe(9), e.PartDone(part, 4, part > 2)])
        case Holding():
            return e.Tick()
        case Leaving():
            # It may not have noticed yet.
            return dice.choice(
                [e.Unwound(), e.Loaded(3, loaded=True), e.StepDone(4), e.PartDone(1, 4, False)]
            )
        case Trained():
            return e.ScriptDone()
    return None


def of_the_agent(worker: Worker, dice: random.Random) -> e.Order:
    """Whatever, in whatever order."""
    epoch = worker.machine.announced + dice.choice([-1, 0, 0, 0, 1])
    return dice.choice(
        [
            m.Abort(epoch),
            m.PlanBegins(plan(epoch, [4] * worker.machine.parts)),
            restore(epoch, 3, (COPY,)),
            m.Release([4] * (worker.machine.parts + dice.choice([0, 1]))),
            m.PauseAfterStep(dice.choice([0, epoch]), 5),
            m.SendIssued(1),
            m.SendCounts(),
            m.Exit(),
        ]
    )


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_epoch_is_answered_once(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(20):
        worker = Worker().start()
        machine, quiesced, begun = worker.machine, [1], [1]
        for _ in range(200):
            before, was = machine.announced, worker.state
            event = of_the_main_thread(worker, dice) if dice.random() < 0.5 else None
            done = worker.do(event or e.FromAgent(of_the_agent(worker, dice)), after=dice.random())
            assert machine.announced >= max(before, machine.epoch)
            for effect in done:
                match effect:
                    case e.AbortBefore(epoch):
                        assert epoch == machine.announced > before
                    case e.SayQuiesced(epoch):
                        assert epoch == machine.announced > quiesced[-1] and epoch > begun[-1]
                        outside = isinstance(was, StartUp | Quiet | Trained | Finished | Over)
                        assert outside or event == e.Unwound(), was
                        quiesced.append(epoch)
                    case e.UsePlan(begins):
                        assert begins.epoch == machine.announced == quiesced[-1] > begun[-1]
                        begun.append(begins.epoch)
                    case e.Send(
                        m.Restored(epoch) | m.Stepped(epoch) | m.PausedAtStep(epoch) | m.Completed(epoch)
                    ):
                        assert epoch == machine.epoch == machine.announced
            assert machine.epoch == begun[-1]
        if worker.state == Leaving():
            worker.do(e.Unwound())
            quiesced.append(machine.announced)
        assert quiesced[-1] == machine.announced, "somebody waits for that"
