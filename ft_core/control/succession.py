"""What a controller learns from the agents of its predecessor's job, and what it makes of those that knew
another one.

It is `Rebuilding` from the first greeting that tells of a plan which it does not have. It asks for that plan,
keeps what agents say meanwhile, and waits for the nodes of the plan; once all have come, or it is clear who
does not, it goes on where its predecessor was, or begins a recovery.
"""

from __future__ import annotations

from collections.abc import Callable

from ft_core.control.cluster.node import Node, epoch_of
from ft_core.control.decide import plans
from ft_core.control.observe.goodput import Found
from ft_core.control.observe.observations import TakenOver, TimeGoes
from ft_core.control.phases import Forming, Missing, Rebuilding, Running, Saving
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.control.script_ends import ScriptEnds
from ft_core.control.termination import Termination
from ft_core.protocol import messages as m
from ft_core.protocol.domains import place
from ft_core.protocol.goodput import Cause

GRACE = 1.5
"""Seconds that the nodes of the plan have to come, once the first has told of it."""
QUIET = 1.0
"""Seconds without news that they are waited for in any case; or as long as it took the others to come, which
is longer where there are thousands of them."""
REPEAT = 1.0
"""Seconds after which another is asked for the plan."""


class Succession:
    """What one controller takes over from the one before it."""

    def __init__(
        self,
        recovery: RecoveryCoordinator,
        scripts: ScriptEnds,
        termination: Termination,
        understand: Callable[[Node, m.Message], None],
    ) -> None:
        """`understand`: handles what an agent says, once the plan is known."""
        self._recovery, self._scripts, self._termination = recovery, scripts, termination
        self._cluster, self._out, self._understand = recovery.cluster, recovery.out, understand
        self._arriving = 0
        """Connections that have not said yet who they are."""

    # -- nodes come --------------------------------------------------------------------------------

    def on_heard(self) -> None:
        """Somebody who knows the secret was heard."""
        if isinstance(self._recovery.phase, Rebuilding):
            self._recovery.phase.heard_at = self._out.now

    def on_arriving(self, connections: int) -> None:
        """Take note of how many connections have yet to say who they are."""
        self._arriving = connections

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

    # -- the plan is learnt ------------------------------------------------------------------------

    @property
    def plan_known(self) -> bool:
        """Whether this controller has the newest plan. Without it, a restarted one understands little."""
        phase = self._recovery.phase
        return not isinstance(phase, Rebuilding) or self._cluster.plan_epoch >= phase.newest

    def on_kept_state(self, node: Node, told: m.KeptState) -> None:
        """Take over the state of another controller, from an agent that has begun its plan."""
        cluster = self._cluster
        hosts, node.hosts = node.hosts, []
        plan = plans.kept(told.state, hosts)
        if plan.epoch <= cluster.plan_epoch:
            return  # several were asked
        cluster.take_over(plan)
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

    def hear(self, node: Node, *news: m.Message) -> None:
        """Handle what a node says, in the order in which it was said: what came with its greeting, and before
        the plan was known; or keep it until then."""
        node.messages_before_plan += news
        if self.plan_known:
            said, node.messages_before_plan = node.messages_before_plan, []
            for message in said:
                self._understand(node, message)

    # -- the job goes on ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Go on once everybody was heard, or it is clear who does not come."""
        cluster, now, phase = self._cluster, self._out.now, self._recovery.phase
        if not isinstance(phase, Rebuilding):
            return
        begun = (epoch_of(node.greeted_with) for node in cluster.nodes.values())
        phase.newest = max(begun, default=0)
        if not self.plan_known:
            self._ask_for_plan(phase)
            return
        for node in list(cluster.nodes.values()):
            self.hear(node)
        if self._recovery.phase is not phase:
            return
        if cluster.plan is None:
            self._recovery.transition(Forming(now))  # those who knew of a plan are gone again
        elif now >= self._recovery.settled and self._all_are_here(phase):
            self._termination.look_whether_all_leave()
            self._take_over(phase, cluster.plan)

    def _ask_for_plan(self, phase: Rebuilding) -> None:
        """Ask one of those who have begun the newest plan what it is."""
        if self._out.now - phase.asked_at < REPEAT:
            return
        nodes = self._cluster.nodes.values()
        there = [node for node in nodes if epoch_of(node.greeted_with) == phase.newest]
        asked = there[phase.asked % len(there)]
        phase.asked_at, phase.asked = self._out.now, phase.asked + 1
        self._out.send(asked, m.SendState())

    def _all_are_here(self, phase: Rebuilding) -> bool:
        """Whether it has heard from everybody, spares with their copies included, or it is clear who does not
        come."""
        cluster, now = self._cluster, self._out.now
        missing = cluster.current_plan.nodes.keys() - cluster.nodes.keys()
        if not missing:
            return True
        quiet, limit = now - phase.heard_at, cluster.settings.silence_limit
        waits = self._arriving and quiet <= limit
        rest = max(QUIET, min(phase.heard_at - phase.began, limit))
        if waits or now - phase.began <= GRACE or quiet <= min(rest, limit):
            return False
        if phase.missing is None or phase.missing.names != missing:
            phase.missing = Missing(missing, cluster.all_left_without(missing))
        return quiet > (rest if phase.missing.covered else limit)

    def _take_over(self, phase: Rebuilding, plan: m.Plan) -> None:
        """Go on where the former controller was, or begin a recovery where that is not possible."""
        cluster, recovery, out = self._cluster, self._recovery, self._out
        recovery.transition(Running())
        if cluster.versions.trained:
            cluster.catalogue.fill(range(cluster.settings.world_size), cluster.nodes.values())
        restoring = Cause.START_UP if plan.origin == "initial" else Cause.RESTORING
        out.emit(TakenOver(self._how_far(plan), restoring))
        out.record("controller_restarted", f"plan of epoch {plan.epoch} taken over", time=TimeGoes())
        if self._scripts.on_plan_taken_over():
            return
        recovery.failure_detector.miss(set(plan.nodes) - set(cluster.nodes), phase.heard_at)
        # Who has yet to begin the plan is sent it: what its roles go on from only the former controller knew.
        behind = {name for name, node in cluster.nodes.items() if node.applied_plan != plan.id}
        given = {role for role in plan.newcomers if plan.roles.get(role) in behind}
        dead = [r for r, node in plan.roles.items() if r not in given and not cluster.alive(r, node)]
        for failure in phase.failures:  # without its class: the former controller may have recorded that
            out.record("detected", failure.reason, failure.roles)
        recovery.tell_of_nodes()
        out.send_to_all(recovery.delivery.nodes_without_roles())
        recovery.strikes_changed = True
        unbegun = not behind.isdisjoint(cluster.roles_by_node)
        if (ending := phase.ending) is not None:
            recovery.end_job(ending.code, ending.reason, ending.shown)
        elif dead or phase.failures or unbegun or cluster.epoch > plan.epoch:
            why = "lost while the controller was away" if dead else "recovery was under way"
            recovery.fail(why, dead)

    def _how_far(self, plan: m.Plan) -> Found:
        """How far the epoch under way is."""
        cluster, progress = self._cluster, self._recovery.progress
        nodes, initial = cluster.nodes_with_roles(), cluster.versions.initial
        base = (initial or 0) if plan.version is None else plan.version
        held = [v for node in nodes for role in node.holdings.roles.values() for v in role.versions]
        newest = max([base, *held])
        return Found(
            epoch=plan.epoch,
            base=base,
            version=newest,
            restored=progress.all_restored,
            share=cluster.share,
            step=max((beat.step_s for node in nodes for beat in node.beats.values()), default=0.0),
            stepped=progress.all_stepped or newest > base,
        )
