"""What agents say of themselves and of their roles' progress, and what they are reminded of in return."""

from __future__ import annotations

from collections.abc import Collection

from ft_core.control.changeovers import Changeovers
from ft_core.control.cluster.node import Node, epoch_of
from ft_core.control.liveness.hangs.detector import Detector
from ft_core.control.observe.observations import AllRestored, AllStepped, NodeBeat, PartWritten, StepDone
from ft_core.control.phases import Done, Forming, Rebuilding, Running, Saving
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.control.script_ends import ScriptEnds
from ft_core.protocol import messages as m

BEING_WRITTEN = 8
"""Durable checkpoints, at most, of which it is known who has written a part."""
REPEAT = 1.0
"""Seconds after which a plan is sent again to a node that has not begun it."""


class Reports:
    """Takes in what the agents of one job say while all is well, or seems so."""

    def __init__(
        self,
        recovery: RecoveryCoordinator,
        hangs: Detector,
        changeovers: Changeovers,
        scripts: ScriptEnds,
    ) -> None:
        self._recovery, self._hangs = recovery, hangs
        self._changeovers, self._scripts = changeovers, scripts
        self._not_written = (0, -1)
        """The epoch and version of the last durable checkpoint that failed."""
        self._written: dict[tuple[m.Epoch, m.Version], set[m.Role]] = {}
        """Whose parts of a durable checkpoint are on storage, of those that are not whole yet."""
        self._cluster, self._out = recovery.cluster, recovery.out

    def on_greeting(self, node: Node, known: bool) -> None:
        """A node has greeted: it is told what it may have missed, and what it has told may be what was waited
        for. `known`: whether it was there before."""
        cluster, recovery, out = self._cluster, self._recovery, self._out
        roles = set(node.holdings.roles)
        self._scripts.on_parts_known([node])
        if cluster.script.parts:
            out.send(node, m.Release(parts=cluster.script.parts))
        if kept := cluster.strikes.value(out.now):
            out.send(node, m.KeepStrikes(kept))
        self._remind(node, node.holdings.epoch, roles)
        here = cluster.roles_by_node.get(node.name)
        if here and recovery.recovering and node.applied_plan != cluster.current_plan.id:
            # Those who have started ahead for a plan that is over, and was not heard here, keep their places.
            newcomers = set(cluster.current_plan.newcomers)
            if new := [role for role in here if role in newcomers]:
                out.send(node, m.Withdraw(roles=new))
        running = isinstance(recovery.phase, Running)
        if running and cluster.current_plan.nodes.get(node.name) != node.address:
            recovery.tell_of_nodes()
        if cluster.plan is not None and node.applied_plan == cluster.plan.id:
            # Who has come and gone since the plan was made. From now on it knows what all know.
            out.send(node, recovery.delivery.nodes_without_roles())
        out.emit(*recovery.prestart.back(node, roles))
        out.emit(*recovery.draining.on_greeting(cluster, node, known))
        recovery.reconsider()

    def _remind(self, node: Node, epoch: int, shown: Collection[int]) -> None:
        """Bring a node to what it should do; with each of its heartbeats. It may not have heard an order,
        since its connection broke or a controller died over saying it. May end the epoch: where it has begun
        one that this controller does not know.

        `epoch` is the newest that it has heard of; `shown` are the roles that it has, or has workers for.
        """
        cluster, recovery, out = self._cluster, self._recovery, self._out
        if isinstance(recovery.phase, Forming | Rebuilding | Done):
            return
        if isinstance(recovery.phase, Saving) and epoch >= cluster.epoch:
            return  # the job ends, whatever another controller wanted
        plan, running = cluster.current_plan, isinstance(recovery.phase, Running)
        split = node.applied_plan != plan.id and epoch_of(node.applied_plan) == cluster.epoch
        if epoch > cluster.epoch or (split and running):
            cluster.epoch = max(cluster.epoch, epoch)
            reason = f"node {node.name} is in epoch {epoch} of another controller"
            recovery.end_epoch("detected", reason, [])
            return
        if epoch < cluster.epoch:
            out.send(node, m.Abort(epoch=cluster.epoch))
        # Roles that it has started ahead of need, for an attempt that was given up; it has not heard that.
        others = [role for role in shown if cluster.places.get(role) != node.name]
        others = sorted(set(others).difference(recovery.prestart.on(node.name))) if others else others
        if others and node.applied_plan == plan.id:
            out.send(node, m.Withdraw(roles=others))
        if not running:
            for role in sorted(shown):
                if anew := recovery.is_being_replaced(role):
                    recovery.must_exit(role, node.name)
                if anew or role in cluster.groups.withdrawn:
                    out.send(node, m.KillWorker(role=role))
        elif node.applied_plan != plan.id:
            if out.now - node.plan_sent_at > REPEAT:
                out.emit(*recovery.delivery.again_to(node, out.now))
        else:
            out.emit(*recovery.prestart.remind(node, shown))

    def on_heartbeat(self, node: Node, beat: m.Heartbeat) -> None:
        """A node says that it lives, and how far its roles are: some thousands a second of a large job."""
        cluster, recovery, out = self._cluster, self._recovery, self._out
        newest = max([role.step for role in beat.roles.values()], default=-1)
        taking_part = recovery.prestart.taking_part(node.name, beat.roles)
        counts = beat.epoch == cluster.epoch and isinstance(recovery.phase, Running)
        out.emit(NodeBeat(node.name, node.counted, beat, taking_part if counts else {}, newest))
        node.beat(beat)
        node.liveness.beat(out.now)
        recovery.failure_detector.on_beat(beat.begun, newest, out.now)
        self._hangs.on_beat(taking_part, out.now)
        self._remind(node, beat.epoch, beat.roles.keys())
        self._changeovers.on_beat(node.name)
        recovery.draining.on_beat(node, beat)
        # Kept here, because a node that is lost takes what it said with it.
        cluster.versions.seen([newest])

    def on_progress(self, message: m.Restored | m.Stepped | m.Reopened) -> None:
        """A role has come further in an epoch; the last one lets all of them have come so far."""
        cluster, recovery, out = self._cluster, self._recovery, self._out
        if cluster.plan is None or message.epoch != cluster.epoch:
            return
        due = recovery.progress.on_progress(message)
        running = isinstance(recovery.phase, Running)
        if isinstance(message, m.Stepped):
            cluster.versions.seen([message.version])
            if running:  # what is said again tells nothing of when it was
                out.emit(StepDone(message.version))
            if due is not None:
                recovery.prestart.on_stepped()
        if due is None:
            return
        if isinstance(message, m.Restored) and running:
            out.emit(AllRestored(cluster.epoch, message.version, cluster.share))
            recovery.protection.asked_for()
        if due.event == "resumed" and running:
            out.emit(AllStepped(due.fields["version"]))
        out.record_once(due.event, **due.fields)
        if due.event == "resumed":
            cluster.stepped_epoch = out.recorded_in("resumed")
            cluster.catalogue.packed(), cluster.groups.value()  # for the next plan, while nobody waits for it
            if cluster.script.resumes and not out.recorded_in("resumes"):
                reason = "should the script have to be started again, it has checkpoints of its own"
                out.record_once("resumes", reason)

    def on_durable_written(self, message: m.DurableWritten) -> None:
        """A role's part of a durable checkpoint is on storage. One event a checkpoint, once it is whole: a
        successor reads all events before it leads."""
        checkpoint = message.epoch, message.version
        roles = self._written.setdefault(checkpoint, set())
        roles.add(message.role)
        if whole := len(roles) == self._cluster.settings.world_size:
            self._written = {other: there for other, there in self._written.items() if other > checkpoint}
            self._out.record("durable", version=message.version)
        elif len(self._written) > BEING_WRITTEN:
            del self._written[min(self._written)]
        self._out.emit(PartWritten(message.seconds, whole))

    def on_durable_failed(self, node: Node, message: m.DurableFailed) -> None:
        """A role's part could not be written. One event a checkpoint: the other roles' parts fail of the
        same, or because this one did."""
        checkpoint = self._cluster.epoch, message.version
        if checkpoint != self._not_written:
            self._not_written = checkpoint
            reason = f"node {node.name}: {message.reason}"
            self._out.record("durable_failed", reason, [message.role], version=message.version)
