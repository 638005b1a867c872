"""Rules that are broken on purpose: the test of the simulator is that it finds each of them.

A mutation changes classes of the process that it is called in, which is of no other use afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ft_core.control.cluster.node import Node
from ft_core.control.cluster.setbacks import Setbacks
from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide import ladder, outcomes, plans, version_choice
from ft_core.control.decide.durable_names import Checkpoints
from ft_core.control.decide.last_version import LastVersion
from ft_core.control.decisions import Decisions
from ft_core.control.device_findings import DeviceFindings
from ft_core.control.events import Record
from ft_core.control.final_save import FinalSave
from ft_core.control.liveness.failure_detector import FailureDetector
from ft_core.control.liveness.strikes import Strikes
from ft_core.control.liveness.suspicion import NodeLiveness
from ft_core.control.node_failures import NodeFailures
from ft_core.control.observe.goodput import Account
from ft_core.control.phases import Rebuilding, Saving
from ft_core.control.prestart.attempts import Prestart
from ft_core.control.prestart.draining import Draining
from ft_core.control.prestart.notices import Notices
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.control.reports import Reports
from ft_core.control.succession import Succession
from ft_core.leadership.lease import Follower, Lease
from ft_core.node import epochs as node
from ft_core.node.events import Commit, DropAfter
from ft_core.node.link import pending_reports as said
from ft_core.node.machine import Agent
from ft_core.node.memory.copies import Copies
from ft_core.node.workers import standbys as ready
from ft_core.node.workers.worker_table import WorkerTable
from ft_core.protocol import messages as m
from ft_core.protocol.goodput import Cause
from ft_core.worker.events import AbortBefore, SayQuiesced
from ft_core.worker.machine import WorkerMachine
from ft_core.worker.states import Leaving, Loading, Training

from .control import SimController
from .node import SimNode
from .workers import SimWorker


def a_job_that_ends_leaves_nothing() -> None:
    """Its newest version is in memory, and is lost with it."""
    RecoveryCoordinator._has_something_to_save = lambda self: False  # type: ignore[method-assign]


def what_is_being_written_counts_as_saved() -> None:
    """The job ends as soon as nodes are told to write, and says that it is done."""

    def mutated(self: FinalSave, phase: Saving, last: LastVersion) -> None:
        self._saved(phase, last.version, "it will be")

    FinalSave._verify = mutated  # type: ignore[method-assign]


def what_is_on_storage_is_new_enough() -> None:
    """What storage has of the job is as good as what is in memory, however old it is."""
    begin = FinalSave._begin

    def mutated(self: FinalSave, phase: Saving) -> None:
        if (names := self._recovery.checkpoints.common(list(self._cluster.nodes))) and phase.last is None:
            self._saved(phase, max(names), names[max(names)])
        else:
            begin(self, phase)

    FinalSave._begin = mutated  # type: ignore[method-assign]


def what_all_see_is_all_there_is() -> None:
    """A node that sees no durable checkpoints says that there are none."""
    Checkpoints.seen = lambda self, nodes, now: self.common(nodes)  # type: ignore[method-assign]


def commit_after_the_barrier() -> None:
    """The commit is waited for after the barrier, not before it: who has passed does not know of all."""
    SimWorker.barrier_first = True


def nobody_waits_until_what_is_held_alike_is_compared() -> None:
    """A step goes ahead with what is wrong somewhere, and the version before is overwritten."""
    Copies.is_compared = lambda self, worker, version, now: True  # type: ignore[method-assign]


def what_was_not_compared_is_gone_on_from() -> None:
    """After a failure all go on from the newest version, whether it was compared or not."""
    original = version_choice.choose_version

    def mutated(*about: Any, newest: int | None = None, **more: Any) -> version_choice.Choice:
        return original(*about, **more)

    version_choice.choose_version = mutated


def survivors_keep_their_weights() -> None:
    """Who is where the job goes on from takes its weights for whole, which a gather has left torn."""
    SimWorker.survivors_derive = False


def a_pause_of_the_controller_counts() -> None:
    """Silence is measured by the wall, so a controller that was stopped finds everybody silent."""
    SimController.awake = property(lambda self: self.world.now)  # type: ignore[assignment,method-assign]


def silence_alone_is_a_verdict() -> None:
    """Neither other nodes that reach it nor steps that go on speak for a node that is not heard."""
    lost = NodeLiveness.lost

    def mutated(self: NodeLiveness, now: float, lived: float, *about: Any) -> str:
        self.answers = {}
        return lost(self, now, float("-inf"), *about)

    NodeLiveness.lost = mutated  # type: ignore[method-assign]


def a_busy_agent_is_a_silent_machine() -> None:
    """That something on the machine goes on says nothing for its agent."""
    pulse = NodeLiveness.pulse

    def mutated(self: NodeLiveness, now: float, number: int, stalled: float) -> None:
        pulse(self, now, number, stalled)
        self.pulsed = 0.0

    NodeLiveness.pulse = mutated  # type: ignore[method-assign]


def who_cannot_be_reached_has_ended() -> None:
    """Of a node whose connection broke, an answer that it is not reached is taken for its end."""
    answered = NodeLiveness.answered

    def mutated(self: NodeLiveness, witness: str, reach: m.ProbeResult, asked: int) -> None:
        answered(self, witness, "refused" if reach == "silent" else reach, asked)

    NodeLiveness.answered = mutated  # type: ignore[method-assign]


def out_of_sight_is_dead() -> None:
    """What nodes hold whose connections broke does not count, before the job is given up."""
    Decisions._wait_for_unreachable_nodes = lambda self, outcome: False  # type: ignore[method-assign]


def broken_links_are_not_looked_for() -> None:
    """Where connections break and nobody has died, nobody asks why."""
    FailureDetector.question_links = lambda self, now: []  # type: ignore[method-assign]


def both_ends_of_a_link_are_replaced() -> None:
    """Not one."""
    mend = NodeFailures._replace_broken_link_end

    def mutated(self: NodeFailures) -> None:
        count = len(self._out.effects)
        mend(self)
        for effect in self._out.effects[count:]:
            if isinstance(effect, Record) and effect.event == "link":
                for name in set(effect.more["nodes"]) & set(self._cluster.nodes):
                    self.node_lost(self._cluster.nodes[name], "its link is broken", m.Fault.TRANSPORT)

    NodeFailures._replace_broken_link_end = mutated  # type: ignore[method-assign]


def any_step_is_progress() -> None:
    """A step that is done again resets the count of futile recoveries."""
    progressed = Reports.on_progress

    def mutated(self: Reports, message: Any) -> None:
        progressed(self, message)
        if isinstance(message, m.Stepped):
            self._cluster.setbacks.attempts_without_progress = 0

    Reports.on_progress = mutated  # type: ignore[method-assign]


def a_report_is_final() -> None:
    """A worker that dies after its node's report still counts as alive in the decision."""
    ClusterState.worker_died = lambda self, node, role: None  # type: ignore[method-assign]


def nothing_is_said_twice() -> None:
    """What a node has not heard, since its connection broke, it is not told again."""
    Reports._remind = lambda self, node, epoch, shown: None  # type: ignore[method-assign]


def a_successor_is_not_told_of_steps() -> None:
    """Agents do not repeat to a new controller which roles have finished a step in the epoch."""
    keep = said.PendingReports.keep

    def mutated(self: said.PendingReports, message: Any, now: float) -> None:
        if not isinstance(message, m.Stepped):
            keep(self, message, now)

    said.PendingReports.keep = mutated  # type: ignore[method-assign]


def a_successor_waits_for_nobody() -> None:
    """A new controller takes over at once: who has not greeted it yet counts as lost."""

    def mutated(self: Succession) -> None:
        if isinstance(phase := self._recovery.phase, Rebuilding):
            phase.began = phase.heard_at = float("-inf")
        self._arriving = 0
        tick(self)

    tick, Succession.tick = Succession.tick, mutated  # type: ignore[method-assign]


def a_report_before_all_are_quiet() -> None:
    """A greeting counts as a report of the new epoch though workers are still in their steps."""
    holdings = node.EpochExecutor.holdings

    def mutated(self: node.EpochExecutor) -> m.Holdings:
        self.reported = self.epoch
        return holdings(self)

    node.EpochExecutor.holdings = mutated  # type: ignore[method-assign]


def a_report_differs_from_the_greeting() -> None:
    """An agent leaves out of a report what is as it greeted, though it has said otherwise since."""
    report = node.EpochExecutor.report

    def mutated(self: node.EpochExecutor) -> m.HoldingsChanged:
        greeting, found = self._reported[0], report(self)
        self._reported = greeting, self._reported[1]
        return found

    node.EpochExecutor.report = mutated  # type: ignore[method-assign]


def one_copy_is_enough() -> None:
    """The commit word is set as soon as a snapshot is whole, before it is anywhere else."""
    staged = node.EpochExecutor.staged

    def mutated(self: node.EpochExecutor, worker: Any, role: int, version: int) -> None:
        staged(self, worker, role, version)
        self.do(Commit(worker.number, version))

    node.EpochExecutor.staged = mutated  # type: ignore[method-assign]


def the_newest_version_of_anybody() -> None:
    """The decision takes the newest version that somebody holds, not the newest that everybody can have."""
    missing = version_choice._VersionIndex.missing

    def mutated(self: Any, version: int | None) -> Any:
        return [] if version == max(self.versions, default=None) else missing(self, version)

    version_choice._VersionIndex.missing = mutated  # type: ignore[method-assign]


def copies_of_another_past_are_kept() -> None:
    """Copies newer than the version that the job goes back to are not struck off."""
    do = SimNode._do
    SimNode._do = lambda self, e: None if isinstance(e, DropAfter) else do(self, e)  # type: ignore[method-assign]


def what_to_prepare_is_said_once() -> None:
    """A node that had not begun the plan when it was told to bring a group back is not told again."""
    Prestart.remind = lambda self, node, shown: []  # type: ignore[method-assign]


def newcomers_have_no_records() -> None:
    """Roles that are ready to come back do not count among those that have start-up operations on record."""
    Prestart.records = lambda self, roles: []  # type: ignore[method-assign]


def what_was_lost_on_the_way_is_unknown() -> None:
    """Of a role whose word on its segments was lost with its node, what others hold for it does not count."""
    ClusterState.remember_the_lost = lambda self: None  # type: ignore[method-assign]


def goes_on_without_unwinding() -> None:
    """A worker in a step takes the new epoch for the one that it is in, and finishes the step."""
    abort = WorkerMachine._abort

    def mutated(self: WorkerMachine, epoch: int) -> None:
        if not isinstance(self.state, Training):
            abort(self, epoch)
            return
        self.epoch = self.announced = epoch
        self._do(AbortBefore(epoch), SayQuiesced(epoch, "training"))

    WorkerMachine._abort = mutated  # type: ignore[method-assign]


def quiesced_before_it_has_unwound() -> None:
    """A worker answers an abort at once, though it is inside a step."""
    abort = WorkerMachine._abort

    def mutated(self: WorkerMachine, epoch: int) -> None:
        abort(self, epoch)
        if isinstance(self.state, Leaving):
            self._do(SayQuiesced(epoch, "training"))

    WorkerMachine._abort = mutated  # type: ignore[method-assign]


def what_to_go_on_from_is_loaded_before_the_step_is_left() -> None:
    """A worker does not wait until its main thread has unwound."""
    hear = WorkerMachine._hear

    def mutated(self: WorkerMachine, message: Any) -> None:
        if isinstance(message, m.Restore) and isinstance(self.state, Leaving):
            self._go(Loading(message))
        hear(self, message)

    WorkerMachine._hear = mutated  # type: ignore[method-assign]


def an_older_epochs_plan_is_obeyed() -> None:
    """What a worker was told of an epoch that has ended before it began counts for the next."""
    abort = WorkerMachine._abort

    def mutated(self: WorkerMachine, epoch: int) -> None:
        following, order = self._next, self._restore
        abort(self, epoch)
        self._next, self._restore = following, order

    WorkerMachine._abort = mutated  # type: ignore[method-assign]


def the_same_error_is_tried_for_ever() -> None:
    """That an exception comes again in the same step does not end the job."""
    Strikes.again = lambda self, lost: False  # type: ignore[method-assign]


def strikes_never_decay() -> None:
    """What was long ago counts against a node as well."""
    Strikes._current = Strikes._kept = lambda self, now: self._all  # type: ignore[method-assign]


def a_death_is_as_new_as_the_word_of_it() -> None:
    """What has failed long before a controller hears of it counts as if it had failed just then."""
    again = said.PendingReports.again
    said.PendingReports.again = lambda self, now: (  # type: ignore[method-assign]
        replace(each, age=0.0) if isinstance(each, m.WorkerLost) else each for each in again(self, now)
    )


def strikes_are_forgotten_by_a_new_controller() -> None:
    """It begins with a clean record of all nodes."""
    take = Strikes.take
    Strikes.take = lambda self, strikes, now: take(self, (), now)  # type: ignore[method-assign]


def an_older_epochs_report_counts() -> None:
    """The controller takes a node's report for one of the epoch under way."""
    settle = Decisions.settle

    def mutated(self: Decisions) -> None:
        for each in self._cluster.nodes.values():
            if each.holdings.reported:
                each.holdings.reported = self._cluster.epoch
        settle(self)

    Decisions.settle = mutated  # type: ignore[method-assign]


def an_older_epochs_abort_is_obeyed() -> None:
    """An agent goes back to an epoch that is over, as a controller wants it that does not know better."""
    hear = Agent._on_controller

    def mutated(self: Agent, message: Any) -> None:
        if isinstance(message, m.Abort) and message.epoch <= self.epochs.epoch:
            self.epochs.epoch = message.epoch - 1
        hear(self, message)

    Agent._on_controller = mutated  # type: ignore[method-assign]


def a_part_stays_over() -> None:
    """Also where the job goes back to a durable checkpoint of before its end."""
    start = RecoveryCoordinator.start_epoch

    def mutated(self: RecoveryCoordinator, decided: Any, done: Any = ()) -> None:
        self.cluster.script.parts = [-1] * len(self.cluster.script.parts)
        start(self, decided, done)

    RecoveryCoordinator.start_epoch = mutated  # type: ignore[method-assign]


def the_first_plan_is_all_there_is() -> None:
    """Where nobody is left who knows of training, there was none."""
    ClusterState.all_is_lost = property(lambda self: False)  # type: ignore[assignment,method-assign]


def an_older_epochs_progress_counts() -> None:
    """What a role has done in an epoch that is over, and repeats, is taken for one step of this."""
    progressed = Reports.on_progress

    def mutated(self: Reports, message: Any) -> None:
        progressed(self, replace(message, epoch=self._cluster.epoch))

    Reports.on_progress = mutated  # type: ignore[method-assign]


def what_is_staged_between_epochs_is_sent() -> None:
    """Nobody takes it, which looks like a broken link."""

    def mutated(self: node.EpochExecutor, worker: Any, role: int, version: int) -> None:
        self.do(*self._copies.staged(worker, role, version, self.epoch, self.now))

    node.EpochExecutor.staged = mutated  # type: ignore[method-assign]


def a_role_comes_back_to_an_older_epoch() -> None:
    """A node brings a replica group back by the plan of another epoch than it is in."""
    prepare = node.EpochExecutor.prepare

    def mutated(self: node.EpochExecutor, message: m.Prepare) -> None:
        plan, epoch = self.plan, self.epoch
        if plan is not None:
            self.plan, self.epoch = replace(plan, epoch=message.epoch), message.epoch
            prepare(self, message)
            self.plan, self.epoch = plan, epoch

    node.EpochExecutor.prepare = mutated  # type: ignore[method-assign]


def where_scripts_begin_is_unknown() -> None:
    """All go back to what is left, though newcomers' scripts have loaded a newer checkpoint of their own."""
    lay_out = ClusterState.lay_out

    def mutated(self: ClusterState, message: m.RoleLayout) -> None:
        lay_out(self, message)
        self.script.start_version = 0

    ClusterState.lay_out = mutated  # type: ignore[method-assign]


def a_drained_node_is_used_again() -> None:
    """Where roles need a place, it is a node like any other."""
    found = Decisions._outcome

    def mutated(self: Decisions, phase: Any) -> Any:
        going, self._cluster.draining = self._cluster.draining, []
        outcome = found(self, phase)
        self._cluster.draining = going
        return outcome

    Decisions._outcome = mutated  # type: ignore[method-assign]


def roles_move_at_any_time() -> None:
    """Not between two steps, but once their newcomers are ready."""
    Prestart.due = lambda self, cluster, now: sorted(self.places())  # type: ignore[method-assign]


def a_notice_is_heard_once() -> None:
    """What cannot be done about it at once is not done."""
    found = Notices._begin

    def mutated(self: Notices, *arguments: Any) -> Any:
        effects, going = found(self, *arguments), arguments[4]
        going.not_before = math.inf
        return effects

    Notices._begin = mutated  # type: ignore[method-assign]


def a_device_that_has_failed_is_like_any_other() -> None:
    """Its role goes back to it, though there are others."""
    ClusterState.faulted = lambda self, now: {}  # type: ignore[method-assign]


def who_was_moved_is_forgotten() -> None:
    """A role that is slow wherever it is goes from node to node."""
    Strikes.moved_as_slow = lambda self, now: ""  # type: ignore[method-assign]


def who_is_drained_is_forgotten_by_a_new_controller() -> None:
    """Nobody tells it."""
    Draining.on_greeting = lambda self, cluster, node, known: []  # type: ignore[method-assign]


def a_leader_does_not_mind_its_lease() -> None:
    """It goes on deciding when that may have run out."""
    Lease.holds = lambda self, now: True  # type: ignore[method-assign]


def a_leader_is_obeyed_until_a_newer_one_is_known() -> None:
    """An agent that cannot look for newer leaders goes on obeying the one that it has."""
    Follower.obeys = lambda self, now: self._speaker == self.term  # type: ignore[method-assign]


def a_step_that_is_cut_off_is_no_time() -> None:
    """What an epoch's end cuts off of a step is not accounted for."""

    def cut(self: Account, wall: float, to: Cause) -> dict[Cause, float]:
        self._mark = wall
        return {}

    Account._cut = cut  # type: ignore[method-assign]


def what_is_cut_off_was_well_spent() -> None:
    """It counts as a step that was done, for whoever reads the events as well."""

    def cut(self: Account, wall: float, to: Cause) -> dict[Cause, float]:
        self.finished(wall)
        return {}

    Account._cut = cut  # type: ignore[method-assign]


def a_successor_is_the_first() -> None:
    """A controller that takes over does not know how long ago its predecessor noted what time went to."""
    original = Account.__init__
    Account.__init__ = lambda self, wall, past=None, ago=0.0: original(self, wall, past)  # type: ignore[misc,method-assign]


def steps_are_done_again_unseen() -> None:
    """What was reached before is not known in the events that an epoch ends with."""
    original = Account.spent
    Account.spent = lambda self, wall: replace(original(self, wall), redone=0.0)  # type: ignore[method-assign]


def who_has_ended_is_gone() -> None:
    """Who takes a role over does not hear whose device and ports the kernel is still taking back."""
    WorkerTable.ending = ()  # type: ignore[assignment]


def steps_that_nobody_told_of_stay_unknown() -> None:
    """Those who were to tell of their samples are lost, and the plan says that the ledger has them."""
    original = plans.make

    def mutated(cluster: ClusterState, start: outcomes.NextEpoch, name: str, job: str) -> m.Plan:
        return replace(original(cluster, start, name, job), ledger_through=start.version or 0)

    plans.make = mutated


def a_standby_is_ready_for_ever() -> None:
    """One that has started a role takes it whatever the others go on from: the job may have begun anew."""
    ready.serves = lambda worker, plan: True  # type: ignore[assignment]


def what_a_standby_has_from_records_is_done() -> None:
    """It takes its role, though the others do again what it has from the records of those who are lost."""
    ready.covers = lambda counts, position, completed: True  # type: ignore[assignment]


def a_step_that_is_done_again_is_progress() -> None:
    """The ladder is climbed from below after it, and the job goes round for ever."""

    original = Setbacks.note_progress

    def mutated(self: Setbacks, newest: int) -> None:
        self.furthest_step = min(self.furthest_step, newest - 1)
        original(self, newest)

    Setbacks.note_progress = mutated  # type: ignore[method-assign]


def there_is_no_rung_above_memory() -> None:
    """All begin anew from it again and again."""
    original = ladder.next_rung

    def mutated(level: int, limit: int, **about: Any) -> ladder.Escalation | None:
        return original(min(level, 1), limit, **about)

    ladder.next_rung = mutated


LADDERS: dict[str, Callable[[], None]] = {
    mutation.__name__: mutation
    for mutation in (
        a_step_that_is_done_again_is_progress,
        there_is_no_rung_above_memory,
    )
}
"""Of jobs whose roles begin anew where to go on in place does not help."""

DRAINED: dict[str, Callable[[], None]] = {
    mutation.__name__: mutation
    for mutation in (
        a_drained_node_is_used_again,
        roles_move_at_any_time,
        a_notice_is_heard_once,
        a_device_that_has_failed_is_like_any_other,
        who_was_moved_is_forgotten,
        who_is_drained_is_forgotten_by_a_new_controller,
    )
}
"""Of what keeps a drain from costing anything."""

READY_MADE: dict[str, Callable[[], None]] = {
    mutation.__name__: mutation
    for mutation in (a_standby_is_ready_for_ever, what_a_standby_has_from_records_is_done)
}
"""Of when standbys that have started a role ahead of need are of use."""

DERIVED: dict[str, Callable[[], None]] = {
    mutation.__name__: mutation for mutation in (survivors_keep_their_weights,)
}
"""Of jobs in which not all is copied."""

FLIPPED: dict[str, Callable[[], None]] = {
    mutation.__name__: mutation
    for mutation in (
        nobody_waits_until_what_is_held_alike_is_compared,
        what_was_not_compared_is_gone_on_from,
    )
}
"""Of jobs in which a bit flips."""


def a_sick_node_is_like_any_other() -> None:
    """What its check has found leads to nothing."""
    found = DeviceFindings.on_finding

    def mutated(self: DeviceFindings, node: Node, finding: m.DeviceFinding) -> None:
        if finding.symptom is not m.Symptom.OTHER:
            found(self, node, finding)

    DeviceFindings.on_finding = mutated  # type: ignore[method-assign]


def who_is_being_checked_is_used() -> None:
    """A node has idle workers as soon as it has come."""
    Node.idle = property(lambda self: self.waiting)  # type: ignore[assignment, method-assign]


CHECKS: dict[str, Callable[[], None]] = {
    mutation.__name__: mutation for mutation in (a_sick_node_is_like_any_other, who_is_being_checked_is_used)
}
"""Of what is checked of nodes that join."""

ELECTED: dict[str, Callable[[], None]] = {
    mutation.__name__: mutation
    for mutation in (
        a_leader_does_not_mind_its_lease,
        a_leader_is_obeyed_until_a_newer_one_is_known,
    )
}
"""Of what keeps leaders apart."""

MUTATIONS: dict[str, Callable[[], None]] = {
    mutation.__name__: mutation
    for mutation in (
        commit_after_the_barrier,
        a_pause_of_the_controller_counts,
        silence_alone_is_a_verdict,
        a_busy_agent_is_a_silent_machine,
        who_cannot_be_reached_has_ended,
        out_of_sight_is_dead,
        broken_links_are_not_looked_for,
        both_ends_of_a_link_are_replaced,
        any_step_is_progress,
        a_report_is_final,
        nothing_is_said_twice,
        a_successor_is_not_told_of_steps,
        a_successor_waits_for_nobody,
        a_report_before_all_are_quiet,
        a_report_differs_from_the_greeting,
        one_copy_is_enough,
        the_newest_version_of_anybody,
        copies_of_another_past_are_kept,
        what_to_prepare_is_said_once,
        newcomers_have_no_records,
        what_was_lost_on_the_way_is_unknown,
        goes_on_without_unwinding,
        quiesced_before_it_has_unwound,
        what_to_go_on_from_is_loaded_before_the_step_is_left,
        an_older_epochs_plan_is_obeyed,
        the_same_error_is_tried_for_ever,
        strikes_never_decay,
        a_death_is_as_new_as_the_word_of_it,
        strikes_are_forgotten_by_a_new_controller,
        an_older_epochs_report_counts,
        an_older_epochs_abort_is_obeyed,
        a_part_stays_over,
        the_first_plan_is_all_there_is,
        an_older_epochs_progress_counts,
        what_is_staged_between_epochs_is_sent,
        a_role_comes_back_to_an_older_epoch,
        where_scripts_begin_is_unknown,
        a_step_that_is_cut_off_is_no_time,
        what_is_cut_off_was_well_spent,
        a_successor_is_the_first,
        steps_are_done_again_unseen,
        steps_that_nobody_told_of_stay_unknown,
        who_has_ended_is_gone,
        a_job_that_ends_leaves_nothing,
        what_is_being_written_counts_as_saved,
        what_is_on_storage_is_new_enough,
        what_all_see_is_all_there_is,
    )
}
