"""Epochs that begin without a failure: roles that move off a node, replica groups that come back, and another
number of steps between two protected versions.

Roles start ahead of need (`control.prestart`), while all others train; here the job changes over to them.
"""

from __future__ import annotations

from ft_core.control.cluster.node import Node
from ft_core.control.events import Peer
from ft_core.control.observe.observations import StepDone
from ft_core.control.period import TRIES, ProtectionPeriod
from ft_core.control.phases import Quiescing, Running, Waiting
from ft_core.control.prestart.notices import Notices
from ft_core.control.prestart.stop import Stop, release
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.protocol.messages import NodeName, Notice


class Changeovers:
    """The changeovers of one job."""

    def __init__(self, recovery: RecoveryCoordinator) -> None:
        self._recovery, self._cluster, self._out = recovery, recovery.cluster, recovery.out
        self._notices = Notices()
        self._period = ProtectionPeriod()

    def on_drain(self, peer: Peer, node: NodeName) -> None:
        """Somebody wants a node out."""
        recovery = self._recovery
        asked = recovery.draining.ask(self._cluster, recovery.prestart, peer, node, self.objection())
        self._out.emit(*asked)

    def on_notice(self, node: Node, notice: Notice) -> None:
        """The machine of a node is about to go."""
        self._out.emit(*self._notices.on_notice(self._cluster, node, notice, self._out.now))
        self.follow_notices()

    def drain_sick(self, node: Node, why: str) -> None:
        """A device of a node is about to fail, or has."""
        self._notices.sick(self._cluster, node, why, self._out.now)
        self.follow_notices()

    def drain_slow(self, node: Node, why: str) -> None:
        """A role of a node is slow, and there is nothing against taking the node out."""
        recovery = self._recovery
        begun = recovery.draining.begin(self._cluster, recovery.prestart, node.name, why)
        self._out.emit(*begun)

    def forgive(self, where: str) -> None:
        """Nothing counts any more against the devices of a machine."""
        self._notices.forgive(where)

    def on_told(self, node: Node) -> None:
        """A node has got SIGTERM."""
        self._out.emit(*self._notices.on_told(self._cluster, node, self._out.now))
        self.follow_notices()

    def follow_notices(self) -> None:
        """Drain those that are about to go, where that is possible by now."""
        recovery = self._recovery
        self._out.emit(
            *self._notices.tick(
                self._cluster,
                recovery.draining,
                recovery.prestart,
                self._out.now,
                why_not=self.objection(),
                recovers=self._recovers,
                job_leaves=recovery.leaving,
            )
        )

    @property
    def _recovers(self) -> bool:
        """Whether all may have to go back to what one node alone holds: until they have done a step again."""
        recovery, plan = self._recovery, self._cluster.plan
        if isinstance(recovery.phase, Running):
            again = plan is not None and plan.origin == "memory"
            return again and not (recovery.progress.all_stepped or self.objection())
        return isinstance(recovery.phase, Quiescing | Waiting)

    def objection(self) -> str:
        """Why no node can be taken out at present; empty, as a rule."""
        recovery = self._recovery
        if not isinstance(recovery.phase, Running):
            return f"the job is {recovery.phase.name}; ask again once it trains"
        if recovery.protection.unprotected or recovery.completion.released:
            return "the script runs without fault tolerance, or has come to its end"
        return ""

    def advance(self) -> None:
        """While all train, others may start: in place of those on a node that is drained, or of replica
        groups that are away."""
        cluster, recovery, now = self._cluster, self._recovery, self._out.now
        shrinks = cluster.settings.policy == "shrink"
        if recovery.progress.all_stepped:
            self._begin_if_due()
            if not recovery.completion.released and isinstance(recovery.phase, Running):
                before = cluster.departing
                effects = recovery.draining.tick(cluster, recovery.prestart, now)
                if cluster.departing != before:  # all hear of it first: the effects ask whether they have
                    recovery.tell_of_nodes()
                self._out.emit(*effects)
                if shrinks:
                    self._out.emit(*recovery.prestart.tick(cluster, now))
                self._change_period()
            return
        if not shrinks:
            return
        restored = recovery.progress.restored
        late = recovery.prestart.returned.late(restored, cluster.settings.return_limit, now)
        if late and restored:
            self._go_on_without(late)

    def _change_period(self) -> None:
        """Protect versions more seldom where steps wait for copies, or more often again."""
        cluster, recovery, period, now = self._cluster, self._recovery, self._period, self._out.now
        if recovery.protection.unprotected or not isinstance(recovery.phase, Running):
            return
        stop = self._stop_for_period
        if recovery.prestart.attempt is not None:  # the epoch that it leads to brings the change along
            period.stop = None
        elif stop is not None and stop.asked >= TRIES and now > stop.no_later_than:
            cluster.every = cluster.current_plan.every
            period.begins_anew()
            self._out.emit(*release(cluster))
        elif stop is not None:
            self._out.emit(*stop.ask_again(cluster, now))
        elif (every := period.wanted(cluster, now)) is not None:
            cluster.every = every
            period.stop = Stop(patient=True, unheld=set(cluster.places))
            self._out.emit(*period.stop.ask(cluster, now))

    @property
    def _stop_for_period(self) -> Stop | None:
        """The request to stop for another period, if there is one in the epoch under way."""
        stop = self._period.stop
        if stop is not None and stop.epoch != self._cluster.epoch:
            stop = self._period.stop = None
        return stop

    def on_beat(self, node: NodeName) -> None:
        """A node says how far its roles are."""
        stop = self._stop_for_period
        self._out.emit(*self._recovery.prestart.on_beat(self._cluster, node))
        if stop is not None:
            self._out.emit(*stop.on_beat(self._cluster, node))

    def on_paused(self, role: int, version: int) -> None:
        """A role has stopped at the end of the step that made this version, as it was asked to."""
        self._out.emit(StepDone(version))  # all of this step's time has been well spent
        cluster, stop, now = self._cluster, self._stop_for_period, self._out.now
        self._out.emit(*self._recovery.prestart.on_paused(cluster, role, now))
        if stop is not None:
            self._out.emit(*stop.on_paused(cluster, role, now))
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        """Begin an epoch with those that are ready, once nobody would be disturbed by it."""
        recovery = self._recovery
        if not isinstance(recovery.phase, Running):
            return
        if leaves := recovery.prestart.leaves():
            groups = self._cluster.groups.of(self._cluster.roles_by_node.get(leaves, []))
            self._cluster.groups.withdrawn |= set(self._cluster.groups.roles(groups))
            roles = sorted(self._cluster.groups.withdrawn)
            reason = f"replica groups {groups} leave with node {leaves}"
            recovery.end_epoch("shrinking", reason, roles, between_steps=True)
            return
        stop = self._stop_for_period
        roles = recovery.prestart.due(self._cluster, self._out.now)
        if not roles:
            if stop is not None and stop.due(self._out.now):
                every = self._cluster.every
                reason = f"a version is protected every {every} steps"
                recovery.end_epoch("period", reason, (), between_steps=True, every=every)
            return
        attempt = recovery.prestart.attempt
        if attempt is not None and attempt.leaves:
            reason = f"the roles of node {attempt.leaves} move"
            recovery.end_epoch("moving", reason, roles, between_steps=True)
            return
        reason = f"replica groups {self._cluster.groups.of(roles)} come back"
        recovery.end_epoch("returning", reason, roles, between_steps=True)

    def _go_on_without(self, late: list[int]) -> None:
        """Replica groups that came back keep the others waiting: they leave once more, and try again."""
        cluster, recovery = self._cluster, self._recovery
        roles = cluster.groups.roles(cluster.groups.of(late))
        cluster.groups.withdrawn |= set(roles)
        self._out.emit(*recovery.prestart.give_up(cluster, {role: cluster.places[role] for role in roles}))
        reason = f"roles {late} did not have their state within {cluster.settings.return_limit:g} s"
        recovery.end_epoch("not_returning", reason, roles)
