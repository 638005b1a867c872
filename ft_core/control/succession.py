"""What a controller takes over from its predecessor, and what it makes of nodes that knew another one."""

from __future__ import annotations

from ft_core.control.cluster_state import Node, epoch_of
from ft_core.control.decide import plans
from ft_core.control.lead import takeover
from ft_core.control.observe.observations import TakenOver, TimeGoes
from ft_core.control.phases import Rebuilding, Running, Saving
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.control.reports import Reports
from ft_core.protocol import messages as m
from ft_core.protocol.domains import place
from ft_core.protocol.goodput import Cause


class Succession:
    """What one controller takes over from the one before it."""

    def __init__(self, recovery: RecoveryCoordinator, reports: Reports) -> None:
        self._recovery, self._reports = recovery, reports
        self._cluster, self._out = recovery.cluster, recovery.out

    def turn_away_if_replaced(self, node: Node) -> bool:
        """Tell a node that a plan was made without it since it began its own, if so. Returns whether it was.

        Its roles are played elsewhere then, and its state is of a past that may have been done again. A node
        that was thought lost and is back before any such plan takes part as if nothing had been.
        """
        plan, begun = self._cluster.plan, node.greeted_with  # INV-1 (one worker)
        if plan is None or not begun or node.name in plan.nodes or begun == plan.id:
            return False
        if epoch_of(begun) > plan.epoch:
            return False
        if node.hello.draining:  # it was to be taken out, and plays no role
            self._out.record("drained", "it was lost, and is back", node=node.name)
            self._out.send(node, m.Shutdown(code=0, drained=True))
        else:
            reason = f"node {node.name} is back, too late: it joins again as a spare"
            self._out.record("given_up", reason, node=node.name)
            self._out.send(node, m.GivenUp())
        self._out.close(node)
        return True

    def rebuild_if_newer_plan(self, epoch: int) -> None:
        """Learn the plan of `epoch` first, which somebody has begun, if it is newer than what is known."""
        phase, now = self._recovery.phase, self._out.now
        if isinstance(phase, Rebuilding):
            if epoch > max(phase.newest, self._cluster.plan_epoch):
                phase.newest, phase.asked_at = epoch, float("-inf")
        elif epoch > self._cluster.plan_epoch and not isinstance(phase, Saving):
            self._recovery.transition(Rebuilding(epoch, now, now))

    @property
    def plan_known(self) -> bool:
        """Whether this controller has the newest plan. Without it, a restarted one understands little."""
        phase = self._recovery.phase
        return not isinstance(phase, Rebuilding) or self._cluster.plan_epoch >= phase.newest

    def adopt_plan(self, node: Node, told: m.KeptState) -> None:
        """Take over the state of another controller, from an agent that has begun its plan."""
        cluster = self._cluster
        hosts, node.hosts = node.hosts, []
        plan = plans.kept(told.state, hosts)
        if plan.epoch <= cluster.plan_epoch:
            return  # several were asked
        cluster.take(plan)
        cluster.strikes.take(told.strikes, self._out.now)
        blamed = {strike.place for strike in told.strikes}
        for there in cluster.nodes.values():
            if place(there.name) in blamed:  # missed, perhaps, by a leader that was none any more
                cluster.strikes.lives(there.name, there.hello.pid)
        self._recovery.install_plan(plan, None)
        self._recovery.prestart.taken_over(self._out.now)
        for node in list(cluster.nodes.values()):
            if self.turn_away_if_replaced(node):
                cluster.drop(node)

    def take_over(self, phase: Rebuilding, plan: m.Plan) -> None:
        """Go on where the former controller was, or begin a recovery where that is not possible."""
        cluster, recovery, out = self._cluster, self._recovery, self._out
        recovery.transition(Running())
        if cluster.trained:
            cluster.fill_catalogue(range(cluster.settings.world_size))
        restoring = Cause.START_UP if plan.origin == "initial" else Cause.RESTORING
        out.emit(TakenOver(takeover.found(cluster, recovery.progress), restoring))
        out.record("controller_restarted", f"plan of epoch {plan.epoch} taken over", time=TimeGoes())
        if recovery.end_if_finished():
            return
        self._reports.hear_of_parts(cluster.nodes.values())
        recovery.release_if_complete()
        recovery.completion.taken_over()
        recovery.failure_detector.miss(set(plan.nodes) - set(cluster.nodes), phase.heard_at)
        dead = takeover.dead(cluster, plan)
        for failure in phase.failures:  # without its class: the former controller may have recorded that
            out.record("detected", failure.reason, failure.roles)
        recovery.tell_of_nodes()
        out.send_to_all(recovery.delivery.nodes_without_roles())
        recovery.strikes_changed = True
        if (ending := phase.ending) is not None:
            recovery.end_job(ending.code, ending.reason, ending.shown)
        elif dead or phase.failures or takeover.unbegun(cluster, plan) or cluster.epoch > plan.epoch:
            why = "lost while the controller was away" if dead else "recovery was under way"
            recovery.fail(why, dead)
