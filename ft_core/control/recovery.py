"""The job's epochs: how they begin and end, and what is tried where going on in place does not help.

Whoever finds that something has failed tells it here (`fail`, `escalate`). How the job goes on is decided
once the event has been handled (`control.decisions`): all that failed at once is one failure then.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ft_core.control.cluster.completion import Completion
from ft_core.control.cluster.progress import Progress
from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide import ladder, plans
from ft_core.control.decide.durable_names import Checkpoints
from ft_core.control.decide.ladder import Escalation, EscalationCause, Failure, Rung
from ft_core.control.decide.outcomes import NextEpoch
from ft_core.control.emitter import Emitter
from ft_core.control.events import End, PrintConsole
from ft_core.control.liveness import strikes
from ft_core.control.liveness.failure_detector import FailureDetector
from ft_core.control.observe import explain
from ft_core.control.observe.observations import FailureCounted, ScriptsDone, TimeGoes
from ft_core.control.phases import (
    TRANSITIONS,
    Done,
    Ending,
    Forming,
    Phase,
    Quiescing,
    Rebuilding,
    Running,
    Saving,
    Waiting,
)
from ft_core.control.plan_delivery import PlanDelivery
from ft_core.control.prestart.attempts import Prestart
from ft_core.control.prestart.draining import Draining
from ft_core.control.protection import Protection
from ft_core.control.samples import Samples
from ft_core.process.transitions import follow
from ft_core.protocol import messages as m
from ft_core.protocol.checkpoint_names import parse
from ft_core.protocol.goodput import Cause

log = logging.getLogger(__name__)


class RecoveryCoordinator:
    """Takes the job from one epoch to the next, and owns what the parts share: all that an epoch's beginning
    or end concerns."""

    def __init__(self, cluster: ClusterState, out: Emitter, ids: Callable[[], str], settled: float) -> None:
        """`ids`: makes texts that nobody else has. `settled`: the time, as of events, before which an older
        leader may still be obeyed."""
        self.cluster, self.out, self.settled = cluster, out, settled
        self._phase: Phase = Forming()
        self.decision_due = False
        """Whether something has happened since the last decision that it may depend on."""
        self.prestart = Prestart()
        self.draining = Draining()
        self.completion = Completion()
        self.checkpoints = Checkpoints()
        self.progress: Progress
        """How far the roles have come in the epoch under way."""
        self.plan_was_inherited = False
        """Whether the plan is a former controller's: how far its roles have come is known from them alone."""
        self.delivery = PlanDelivery(cluster)
        self.samples = Samples()
        self.protection = Protection(out, a_program=cluster.settings.command.no_python)
        self.failure_detector = FailureDetector(cluster)
        self.strikes_changed = False
        """Whether the agents have yet to be told."""
        self.last_failure = Failure("")
        """The failure that ended an epoch last."""
        self.escalation: Escalation | None = None
        """The rung of the ladder that the next epoch tries, where going on in place does not help."""
        self._workers_to_exit: deque[tuple[int, str]] = deque()
        """Roles whose workers were told to end for that rung, and their nodes."""
        self.leaving = False
        """Whether SIGTERM has come: what ends because of it is not replaced."""
        self._shortage = ""
        """What was said last of what the job waits for."""
        self._ids = ids
        cluster.stepped_epoch = out.recorded_in("resumed")
        cluster.script.resumes = bool(out.recorded_in("resumes"))

    @property
    def phase(self) -> Phase:
        """What the job is doing."""
        return self._phase

    def transition(self, to: Phase) -> None:
        """Enter another phase. Raises if the table in `phases` does not have it."""
        self._phase = follow(TRANSITIONS, self._phase, to)

    @property
    def recovering(self) -> bool:
        """Whether an epoch has ended, and the next has yet to begin."""
        return isinstance(self._phase, Quiescing | Waiting | Saving)

    def reconsider(self) -> None:
        """Something has changed that a decision may depend on: if an epoch has ended, decide once more."""
        self.decision_due |= self.recovering

    # -- epochs --------------------------------------------------------------------------------------

    def install_plan(self, plan: m.Plan, own: dict[m.NodeName, m.OwnPlan] | None) -> None:
        """Let this plan count from now on. `own`: what single nodes must know of it; None: another controller
        has made it."""
        self.cluster.plan, self.progress, self.plan_was_inherited = plan, Progress(plan), own is None
        self.delivery.new_plan(own)
        if own is None:  # whatever was to begin anew here was of another past
            self.escalation, self.cluster.script.begun_here = None, False
            self._workers_to_exit.clear()
            self.cluster.versions.verified = self.cluster.versions.tainted = None

    def start_epoch(self, start: NextEpoch, counts: Sequence[tuple[int, m.Counts]] = ()) -> None:
        """Begin an epoch. `counts`: the start-up operations of newcomers that have replayed them already."""
        cluster, before, now = self.cluster, self.cluster.plan, self.out.now
        self.prestart.epoch_begins(start.roles, now)
        self.draining.epoch_begins(cluster)
        self.failure_detector.epoch_begins()
        self.completion.left.clear()
        self.completion.finished -= set(start.newcomers)  # their scripts run once more
        cluster.groups.withdrawn = set()
        cluster.groups.changed(start.version, start.roles)
        if before is None or (cluster.versions.initial is None and start.origin == "durable"):
            cluster.script.started_from = start.version, start.origin
        cluster.script.begun_here |= before is None
        job = before.job if before is not None else self._ids()
        if start.durable and parse(start.durable).job != job:
            cluster.script.begun_from = start.durable
        if start.version is not None and (start.durable or cluster.versions.tainted is not None):
            cluster.versions.leave(cluster.epoch, start.version)
        cluster.versions.epoch_begins(start.version)
        if start.version is not None:
            # INV-14 (parts): a durable checkpoint may be of before a part's end.
            cluster.script.parts = [end for end in cluster.script.parts if end <= start.version]
        cluster.takes_part(start.roles, start.newcomers)
        for role, known in counts:
            cluster.records.say(role, known)
        plan = plans.make(cluster, start, name=f"{cluster.epoch}-{self._ids()}", job=job)
        self.install_plan(plan, plans.own_plans(cluster, plan))
        self.transition(Running())
        self._shortage, self.escalation = "", None
        moved = {role: start.roles[role] for role in start.newcomers if role in start.roles}
        about = {"version": start.version, "origin": start.origin, "moved": moved}
        cause = Cause.START_UP if start.origin == "initial" else Cause.RESTORING
        time = TimeGoes(Cause.UNKNOWN if self.protection.unprotected else cause, cluster.epoch)
        self.tell_of_strikes()  # so that whoever has the plan knows of the failures before it
        self.out.record(
            "decided", f"version {start.version} ({start.origin})", start.newcomers, time, **about
        )
        self.protection.record()
        self.out.emit(*self.delivery.to_all(before, now))
        if cluster.settings.policy == "shrink":
            self.out.emit(*self.samples.begin(cluster))
            left = set(before.roles if before is not None else ()) - set(start.roles)
            returned = set(before.absent if before is not None else ()) & set(start.roles)
            for name, change in (("left", left), ("returned", returned)):
                if change:
                    self.out.record(name, f"replica groups {cluster.groups.of(change)}", sorted(change))

    def end_epoch(
        self, event: str, reason: str, roles: Collection[int], between_steps: bool = False, **more: Any
    ) -> None:
        """Have all workers leave what they are in, and nodes report what they hold: then it is decided how
        to go on. `between_steps`: all have finished one, and wait for that."""
        cluster = self.cluster
        cluster.epoch = cluster.next_epoch()
        self.failure_detector.forget_broken()
        self.out.emit(*self.prestart.epoch_ends(cluster, self.out.now))
        self.transition(Quiescing(self.out.now))
        self.checkpoints = self.checkpoints.forgotten()
        goes = TimeGoes(Cause.DECISION, between_steps=between_steps)
        self.out.record(event, reason, roles, goes, **more)
        if (escalation := self.escalation) is not None:
            ends = {role: node for role, node in cluster.places.items() if escalation.replaces(role)}
            self._workers_to_exit = deque(ends.items())
            self.kill_workers(ends)
        self.out.send_to_all(m.Abort(epoch=cluster.epoch))
        self.decision_due = True

    def kill_workers(self, places: Mapping[int, str]) -> None:
        """End the workers of these roles there."""
        for role, node in places.items():
            if (there := self.cluster.nodes.get(node)) is not None:
                self.out.send(there, m.KillWorker(role=role))

    def tell_of_nodes(self) -> None:
        """Nodes without a role have come or gone in the epoch under way: they keep copies for others."""
        if isinstance(self.phase, Running):
            self.out.emit(*self.delivery.node_changes())

    # -- failures ------------------------------------------------------------------------------------

    def fail(
        self,
        reason: str,
        roles: Sequence[int],
        code: int = 1,
        fault: m.Fault | None = None,
        node: str = "",
    ) -> None:
        """Roles have lost their worker or their state: end the epoch, unless it is ending already.

        `code`: what `ftrun` ends with, should the job end of it. `fault`: of which they have, and the `node`.
        """
        phase, out = self.phase, self.out
        failure = Failure(reason, tuple(roles), code, fault, node)
        more = failure.about
        if isinstance(phase, Rebuilding):
            phase.failures.append(failure)
        elif isinstance(phase, Forming | Saving | Done):
            out.record("detected", reason, roles, **more)
            self.decision_due = True
        elif self.completion.released:
            # Training is behind everybody: nothing is left to lose.
            out.record("detected", f"{reason}; its script had only local work left", roles, **more)
            self.completion.finished |= set(roles)
            self.end_if_finished()
        elif self.recovering:
            out.record("detected", reason, roles, **more)
            self.decision_due = True
        elif self.protection.unprotected and self.escalation is None:
            reason = f"{reason}; the job is not protected: {self.protection.unprotected}"
            self.escalate(EscalationCause(reason, tuple(roles), code, fault=fault, node=node))
        else:
            self.cluster.setbacks.attempts_without_progress += 1
            self.last_failure = failure
            self.end_epoch("detected", reason, roles, **more)

    def escalate(self, cause: EscalationCause, incompatible: Collection[int] = ()) -> None:
        """Climb the ladder, since going on in place does not help; its last rung is the end of the job.

        `incompatible`: roles that provably cannot go on with each other.
        """
        cluster, out, about = self.cluster, self.out, cause.about
        if isinstance(self.phase, Done):
            return
        if isinstance(self.phase, Saving) or (isinstance(self.phase, Rebuilding) and self.phase.ending):
            self.fail(cause.reason, cause.roles, **about)
            return
        if self.escalation is not None and not isinstance(self.phase, Running):  # they begin anew already
            self.fail(cause.reason, cause.roles, **about)
            return
        cluster.setbacks.note_progress(cluster.versions.newest_seen)
        escalation = None
        if not self.leaving and not isinstance(self.phase, Forming):
            unprotected = bool(self.protection.unprotected)
            escalation = ladder.next_rung(
                cluster.setbacks.escalation_level,
                cluster.settings.max_restarts,
                incompatible=frozenset(incompatible),
                memory=cluster.versions.trained and not unprotected and not self.completion.released,
                diverged=cause.fault is m.Fault.DIVERGED,
                skip_durable=cluster.versions.trained and unprotected,
            )
        if escalation is None:  # INV-7 (ends)
            how_often = ladder.in_words(cluster.setbacks.escalation_level)
            self.end_job(cause.code, how_often + cause.recorded, how_often + cause.said)
            return
        self.escalation = escalation
        cluster.setbacks.escalation_level, cluster.setbacks.attempts_without_progress = escalation.level, 0
        if escalation.rung is Rung.RESTART:
            self.completion = Completion()
            self.protection.scripts_restart()
        words = explain.begins_anew(escalation, cause.reason, cluster.settings)
        if isinstance(self.phase, Running):
            self.end_epoch("detected", cause.reason, cause.roles, **about)
            out.record("begins_anew", words, cause.roles, rung=escalation.rung)
        elif isinstance(self.phase, Rebuilding):
            self.phase.failures.append(cause)
            out.record("begins_anew", words, cause.roles, rung=escalation.rung)
        else:
            out.record("detected", cause.reason, cause.roles, **about)
            self.end_epoch("begins_anew", words, cause.roles, rung=escalation.rung)

    def is_being_replaced(self, role: int) -> bool:
        """Whether the worker of this role was told to end, since going on in place does not help."""
        return self.escalation is not None and self.recovering and self.escalation.replaces(role)

    def must_exit(self, role: int, node: m.NodeName) -> None:
        """Note a worker that is still there, and is to be replaced."""
        self._workers_to_exit.append((role, node))

    def workers_still_exiting(self) -> bool:
        """Whether workers live yet that are to be replaced in the next epoch. Forgets those that do not."""
        places = self.cluster.places
        while self._workers_to_exit:  # all that have ended are looked at once, however many there are
            role, node = self._workers_to_exit[0]
            if places.get(role) == node and self.cluster.alive(role, node):
                return True
            self._workers_to_exit.popleft()
        return False

    def strike(self, strike: m.FailureRecord, domain: str) -> None:
        """Count a failure, here and for a successor."""
        cluster, now = self.cluster, self.out.now
        before = cluster.strikes.avoided(now)
        if not cluster.strikes.add(strike, now):
            return
        self.strikes_changed = True
        if strike.fault not in strikes.FINDINGS:
            self.out.emit(FailureCounted(strike.fault, strike.place, domain))
        for place in sorted(cluster.strikes.avoided(now) - before):
            count = len(cluster.strikes.against(place, now))
            reason = explain.avoided(place, count, strike, cluster.settings)
            self.out.record("avoided", reason, node=place)
            log.warning("%s", reason)

    def tell_of_strikes(self) -> None:
        """Agents keep them for the controller's successor. Once for all that fails at a time."""
        if self.strikes_changed and not isinstance(self.phase, Rebuilding):
            self.strikes_changed = False
            self.out.send_to_all(m.KeepStrikes(self.cluster.strikes.value(self.out.now)))

    # -- waiting, and the end ------------------------------------------------------------------------

    def note_wait_reason(self, what: str) -> bool:
        """Note what the job waits for. Returns whether that is not what was said of it last."""
        before, self._shortage = self._shortage, what
        return what != before

    def tell_it_waits(self, what: str, roles: list[int]) -> None:
        """Say, where people see it, that a node is waited for."""
        how = explain.how_to_join(self.cluster)
        running = isinstance(self.phase, Running)
        time = None if running else TimeGoes(Cause.WAITING)
        self.out.record("waiting", f"{what}: {how}", roles, time)
        log.warning("%s; waiting for a node: %s", what, how)

    def end_if_finished(self) -> bool:
        """End the job if all scripts are done. Returns whether they are."""
        if not self.completion.over(self.cluster.places):
            return False
        self.end_job(0, "every role has finished")
        return True

    def end_job(self, code: int, reason: str, shown: str = "", *, at_once: bool = False) -> None:
        """End the job with this exit code, unless it is over or ends already. `shown`: on the console, if not
        `reason`. What is in memory is written to storage first (`final_save`), unless scripts are done, or it
        has to end `at_once`."""
        phase, now = self.phase, self.out.now
        if isinstance(phase, Done) or (isinstance(phase, Saving) and not at_once):
            return
        if isinstance(phase, Rebuilding) and self.cluster.plan is not None and code and not at_once:
            phase.ending = phase.ending or Ending(code, reason, shown)  # what there is to save will be known
            return
        if code:
            self.out.emit(PrintConsole(f"ftrun: the job stops: {shown or reason}", "ERROR"))
        if at_once or code == 0 or not self._has_something_to_save():
            self.finish(code, reason)
            return
        self.escalation = None  # INV-25 (saved)
        if isinstance(phase, Running):
            self.end_epoch("stopping", reason, ())
        else:
            self.out.record("stopping", reason, time=TimeGoes(Cause.DECISION))
        self.checkpoints = self.checkpoints.forgotten()
        self.transition(Saving(code, reason, now, now + self.cluster.settings.shutdown_timeout))
        self.decision_due = True

    def _has_something_to_save(self) -> bool:
        """Whether a step was done, of which nodes hold what they need to do it once more."""
        there = isinstance(self.phase, Running | Quiescing | Waiting) and self.cluster.versions.trained
        return there and bool(self.cluster.nodes) and not self.protection.unprotected

    def finish(self, code: int, reason: str) -> None:
        """The job is over."""
        self.transition(Done(code))
        if code == 0:
            self.out.emit(ScriptsDone())
        self.out.record("goodput", time=TimeGoes(Cause.UNKNOWN))
        self.out.record("finished" if code == 0 else "stopped", reason)
        self.out.send_to_all(m.Shutdown(code=code))
        self.out.emit(End(code))
