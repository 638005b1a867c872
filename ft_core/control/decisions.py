"""Decides how the job goes on, where that is open: whether it can begin, and what follows an epoch's end.

What is best is found by pure functions (`decide.next_epoch`, `decide.forming`); here it is asked for once all
have reported, and carried out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from typing import assert_never

from ft_core.control.admission import left_out, too_few_are_sound
from ft_core.control.cluster.state import ALL_IS_LOST
from ft_core.control.decide import ladder
from ft_core.control.decide.forming import first_places
from ft_core.control.decide.ladder import EscalationCause, Rung
from ft_core.control.decide.next_epoch import decide, older_than_promised
from ft_core.control.decide.outcomes import (
    AwaitStandby,
    ListCheckpoints,
    NextEpoch,
    NoStateLeft,
    NotEnoughWorkers,
    Outcome,
    RestartScripts,
)
from ft_core.control.final_save import FinalSave
from ft_core.control.liveness import strikes
from ft_core.control.observe import explain
from ft_core.control.observe.observations import TimeGoes
from ft_core.control.phases import Forming, Quiescing, Running, Saving, Waiting
from ft_core.control.prestart.attempts import STANDBY_GRACE
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.protocol.goodput import Cause

log = logging.getLogger(__name__)

SPARES_COME = 10.0
"""Seconds without a new node after which a job that is not to begin with sick ones has too few others."""
_ROUNDS = 16
"""Decisions that one event may lead to, one by the other: restarts that are left, and some."""


class Decisions:
    """What one controller decides."""

    def __init__(self, recovery: RecoveryCoordinator) -> None:
        self._recovery, self._cluster, self._out = recovery, recovery.cluster, recovery.out
        self.final_save = FinalSave(recovery)
        self._told_of_sizes = False

    def settle(self) -> None:
        """Decide, until nothing has happened that the last decision did not know of. The end of each
        event."""
        for _ in range(_ROUNDS):
            if not self._recovery.decision_due:
                return
            self._recovery.decision_due = False
            phase = self._recovery.phase
            if self._recovery.checkpoints.asked:
                self._recovery.checkpoints.look(self._cluster.nodes, self._cluster.past)
            if isinstance(phase, Forming):
                self._form(phase)
            elif isinstance(phase, Quiescing | Waiting):
                self._recover(phase)
            elif isinstance(phase, Saving):
                self.final_save.advance(phase)
        raise RuntimeError(f"epoch {self._cluster.epoch}: decisions lead to nothing but decisions")

    def ask_durable_versions(self, nodes: Collection[str]) -> Mapping[int, str] | None:
        """Ask these nodes for the durable checkpoints that they can read, where they have not said yet.
        Returns them by version; None while somebody has not answered, or they may yet agree."""
        if not self._cluster.settings.durable_dir:
            return {}
        checkpoints, now = self._recovery.checkpoints, self._out.now
        checkpoints.look(self._cluster.nodes, self._cluster.past)
        self._out.emit(*checkpoints.ask(self._cluster.nodes, nodes, now))
        if (silent := checkpoints.silent(nodes, now)) and self._recovery.note_wait_reason(
            what := explain.storage_hangs(self._cluster, silent)
        ):
            running = isinstance(self._recovery.phase, Running)
            self._out.record("waiting", what, time=None if running else TimeGoes(Cause.WAITING))
            log.warning("%s", what)
        found = checkpoints.seen(nodes, now)
        if found == {} and checkpoints.others and not self._told_of_sizes:
            self._told_of_sizes = True
            what = explain.of_other_sizes(self._cluster, checkpoints.others)
            self._out.record("durable_unused", what)
            log.warning("%s", what)
        return found

    def end_if_storage_unreadable(self) -> bool:
        """End the job where somebody cannot read what it depends on: to begin anew, or with less, where there
        may be something newer to go on from, would be wrong. Returns whether it has ended."""
        there = self._cluster.nodes
        if errors := {n: e for n, e in self._recovery.checkpoints.errors.items() if n in there}:
            where = f"durable checkpoints in {self._cluster.settings.durable_dir} cannot be read"
            self._recovery.end_job(1, f"{where}: {'; '.join(errors.values())}")
        return bool(errors)

    def _tell_who_lacks(self) -> set[str]:
        """Nodes that do not see the newest checkpoint that others see, which is said once."""
        checkpoints = self._recovery.checkpoints
        lacking = checkpoints.lacking(self._out.now)
        if new := lacking - checkpoints.told:
            checkpoints.told |= new
            what = explain.lacking(self._cluster, checkpoints, new)
            self._out.record("durable_unused", what, nodes=sorted(new))
            log.warning("%s", what)
        return lacking

    def _end_for_want_of_storage(self, nodes: Collection[str]) -> None:
        """End the job, as these nodes cannot go on from what others see, and nobody can in their place."""
        why = explain.lacking(self._cluster, self._recovery.checkpoints, nodes)
        self._recovery.end_job(1, f"{why}. No other node can be used in place of those that do not see it")

    # -- the first epoch -----------------------------------------------------------------------------

    def _form(self, phase: Forming) -> None:
        """Begin the first epoch, once there are workers for all roles."""
        if self._out.now < self._recovery.settled:
            return
        cluster, recovery = self._cluster, self._recovery
        quiet, out = self._out.now - phase.joined_at, left_out(cluster, self._out.now)
        lacking = self._tell_who_lacks()
        roles, in_vain = first_places(cluster, quiet, {*out, *lacking})
        if roles is None and out and quiet > SPARES_COME and (why := too_few_are_sound(cluster, out)):
            recovery.end_job(1, why)
            return
        left = len(cluster.nodes.keys() - out.keys() - lacking)
        if lacking and quiet > SPARES_COME and left < cluster.settings.first_nodes <= len(cluster.nodes):
            self._end_for_want_of_storage(lacking)
            return
        if in_vain and recovery.note_wait_reason(what := explain.missing_at_the_start(in_vain)):
            self._out.record("waiting", what, time=TimeGoes(Cause.WAITING))
            log.warning("%s", what)
        if roles is None or (durable := self.ask_durable_versions(set(roles.values()))) is None:
            return
        if self.end_if_storage_unreadable():
            return
        can_begin = durable or cluster.script.resumes or cluster.settings.max_restarts
        if cluster.all_is_lost and not can_begin:
            recovery.end_job(1, ALL_IS_LOST)
            return
        cluster.epoch = cluster.next_epoch(self._out.recorded_epochs)
        if cluster.all_is_lost:
            self._out.record("starting_over", ALL_IS_LOST)
            log.warning("%s", ALL_IS_LOST)
        if durable:
            newest = max(durable)
            recovery.start_epoch(NextEpoch(roles, newest, "durable", {}, [], durable[newest]))
        else:
            recovery.start_epoch(NextEpoch(roles, None, "initial", {}, []))

    # -- after an epoch's end ------------------------------------------------------------------------

    def _recover(self, phase: Quiescing | Waiting) -> None:
        """Go on, once all nodes have reported and nothing is missing."""
        cluster, recovery = self._cluster, self._recovery
        if cluster.disconnected or not cluster.all_reported():
            return
        if recovery.failure_detector.suspects_link:
            return  # what is decided should work
        if recovery.escalation is not None and recovery.workers_still_exiting():
            return
        cluster.setbacks.note_progress(cluster.versions.newest_seen)
        if cluster.setbacks.attempts_without_progress > strikes.TRIES:
            failure = recovery.last_failure
            reason = explain.in_vain(cluster, failure.reason, failure.roles)
            recovery.escalate(EscalationCause(reason, code=failure.code))
            return
        cluster.remember_the_lost()
        outcome = self._outcome(phase)
        if isinstance(outcome, AwaitStandby) or self._wait_for_unreachable_nodes(outcome):
            self._enter_waiting(phase)
        elif isinstance(outcome, ListCheckpoints):
            self.ask_durable_versions(outcome.nodes)
        elif isinstance(outcome, NextEpoch) and (lack := self._lacking(outcome)):
            self._replace_who_lacks(outcome, lack)
        elif isinstance(outcome, NotEnoughWorkers):
            self._handle_shortage(phase, outcome)
        elif isinstance(outcome, NextEpoch):
            older = outcome.origin != "durable" and older_than_promised(cluster, outcome.version)
            if not older or not self.end_if_storage_unreadable():
                self._tell_of_need(outcome)
                recovery.start_epoch(outcome, recovery.prestart.records(outcome.roles))
        elif isinstance(outcome, RestartScripts):
            if not self.end_if_storage_unreadable():
                self._restart_scripts(outcome)
        elif isinstance(outcome, NoStateLeft):
            self._nothing_in_memory_helps(outcome)
        else:
            assert_never(outcome)

    def _lacking(self, start: NextEpoch) -> list[str]:
        """The nodes that are given roles, and do not see the durable checkpoint that all are to load."""
        return self._recovery.checkpoints.without(start.durable, set(start.roles.values()))

    def _replace_who_lacks(self, start: NextEpoch, lacking: Collection[str]) -> None:
        """Have others play the roles of these nodes, if there are others: their workers end for that."""
        cluster, unusable = self._cluster, {*self._recovery.checkpoints.lacking(self._out.now), *lacking}
        roles = {role: node for role, node in start.roles.items() if node in lacking}
        usable = cluster.nodes.keys() - unusable - set(cluster.draining)
        there, capacity = Counter(start.roles.values()), cluster.settings.nproc_per_node
        taken = Counter(start.roles[role] for role in start.newcomers if role in start.roles)
        free = sum(max(0, min(cluster.nodes[n].idle - taken[n], capacity - there[n])) for n in usable)
        if free < len(roles) or not roles.keys().isdisjoint(start.newcomers):
            self._end_for_want_of_storage(lacking)
        else:
            self._recovery.kill_workers(roles)

    def _tell_of_need(self, start: NextEpoch) -> None:
        """Nodes that are not to be used while there is another are given roles."""
        given: dict[str, list[int]] = {}
        for role in start.newcomers:
            given.setdefault(start.roles.get(role, ""), []).append(role)
        for name in sorted(self._cluster.avoided(self._out.now).intersection(given)):
            what = f"node {name} is given roles {given[name]}, though it is avoided: there is no other"
            self._out.record("used_in_need", what, given[name], node=name)
            log.warning("%s", what)

    def _outcome(self, phase: Quiescing | Waiting) -> Outcome:
        """What is best. A start ahead of need is given up where others need its places more."""
        cluster, prestart, now = self._cluster, self._recovery.prestart, self._out.now
        checkpoints, avoided = self._recovery.checkpoints, {*cluster.avoided(now), *self._tell_who_lacks()}

        def found() -> Outcome:
            return decide(
                cluster,
                starting=prestart.places(),
                durable=lambda nodes: checkpoints.seen(nodes, now),
                standby_overdue=now - phase.since > STANDBY_GRACE,
                avoided=avoided,
                clears=prestart.clears(cluster) or cluster.checking(),
                escalation=self._recovery.escalation,
                faulted=cluster.faulted(now),
            )

        outcome = found()
        attempt = prestart.attempt
        if isinstance(outcome, NotEnoughWorkers) and attempt is not None and attempt.leaves:
            self._out.emit(*prestart.fail(cluster, "others need the places more"))
            outcome = found()
        return outcome

    def _nothing_in_memory_helps(self, outcome: NoStateLeft) -> None:
        """There is only what scripts can begin with by themselves."""
        cluster, recovery = self._cluster, self._recovery
        problems = recovery.checkpoints.errors.values()
        can = cluster.settings.max_restarts and not problems and not cluster.begins_with_durable
        tried = recovery.escalation is not None and recovery.escalation.rung is Rung.RESTART
        if not can or tried or cluster.groups.adopted(cluster.places):
            recovery.end_job(1, explain.the_end(cluster, outcome, problems))
            return
        # There is nothing for the rungs that begin with memory.
        cluster.setbacks.escalation_level = max(cluster.setbacks.escalation_level, ladder.ALL_FROM_MEMORY)
        recovery.escalation = None
        recovery.escalate(EscalationCause(outcome.reason))

    def _wait_for_unreachable_nodes(self, outcome: Outcome) -> bool:
        """Wait for nodes that are merely out of sight, where what is decided without them is so bad that they
        had better be asked: they may live, and hold what is missing. Returns whether they are waited for."""
        cluster, detector, now = self._cluster, self._recovery.failure_detector, self._out.now
        # Of those who train while nobody hears them it is not known how far they have come.
        nobody = cluster.nodes.keys().isdisjoint(cluster.roles_by_node)
        reached_training = cluster.versions.initial is not None or self._recovery.plan_was_inherited
        unknown = reached_training and nobody
        if isinstance(outcome, NextEpoch):
            older = outcome.version is None or outcome.version < cluster.versions.newest_seen - cluster.redone
            bad = (cluster.versions.trained and older) or (unknown and outcome.origin != "memory")
        elif isinstance(outcome, NotEnoughWorkers):
            bad = False  # of workers: what the policy says
        else:
            bad = not isinstance(outcome, ListCheckpoints) or cluster.versions.trained or unknown
        missed = detector.missed(now) if bad else []
        if missed:
            limit = cluster.settings.silence_limit
            names, cost = explain.some(missed), explain.loses(outcome)
            what = f"nodes {names} cannot be reached, and without them {cost}"
            if self._recovery.note_wait_reason(what):
                reason = f"{what}: waiting for them for {limit:g} s"
                self._out.record("unreachable", reason, time=TimeGoes(Cause.WAITING))
                log.warning("%s; waiting for them for %g s", what, limit)
            self._out.emit(*detector.look_for(missed, now))
        return bool(missed)

    def _restart_scripts(self, outcome: RestartScripts) -> None:
        """Memory does not suffice: end all workers; once they are replaced, let the scripts begin anew."""
        left, recovery, epoch = outcome.still_alive, self._recovery, self._cluster.epoch
        if self._out.recorded_in("starting_over") < epoch:
            if recovery.escalation is None:
                log.warning("%s\nThe script is started again from its own newest checkpoint.", outcome.reason)
            self._out.note_recorded("starting_over", epoch + bool(left))
            if not left:
                self._out.record("starting_over", outcome.reason)
        if left:
            recovery.kill_workers(left)
            recovery.end_epoch("starting_over", outcome.reason, sorted(left))
            return
        self._cluster.forget()
        recovery.start_epoch(NextEpoch(outcome.roles, None, "initial", {}, outcome.lost))

    def _enter_waiting(self, phase: Quiescing | Waiting) -> None:
        """Something is missing, or still is: wait for it, unless that is so already."""
        if isinstance(phase, Quiescing):
            self._recovery.transition(Waiting(phase.since))

    def _handle_shortage(self, phase: Quiescing | Waiting, shortage: NotEnoughWorkers) -> None:
        """There are too few workers: wait for a node, or end the job, as the policy says."""
        cluster, recovery = self._cluster, self._recovery
        groups = cluster.groups
        groups.withdrawn |= set(groups.roles(groups.of(shortage.release_workers_of)))  # whole ones
        recovery.kill_workers(shortage.release_workers_of)
        what, nodes = explain.shortage(cluster, shortage)
        if recovery.leaving:
            told = "the job was told to end (SIGTERM), so it does not wait for a node"
            recovery.end_job(1, f"{what}; {told}")
            return
        if cluster.settings.policy == "stop" and nodes:
            recovery.end_job(1, f"{what}; policy is stop")
            return
        self._enter_waiting(phase)
        if recovery.note_wait_reason(what):
            recovery.tell_it_waits(f"{what}; {explain.what_is_left(cluster)}", shortage.roles)
