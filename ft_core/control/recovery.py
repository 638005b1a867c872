"""The job's epochs: how they begin and end, what roles and nodes that are lost mean for them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, assert_never

from ft_core.control.cluster_state import ALL_IS_LOST, ClusterState, Node, epoch_of
from ft_core.control.completion import Completion
from ft_core.control.decide import ladder, plans
from ft_core.control.decide.deciding import (
    AskStorage,
    GiveUp,
    Outcome,
    Shortage,
    StandbyComes,
    Start,
    StartOver,
    can_be_spared,
    decide,
    older_than_promised,
)
from ft_core.control.decide.durable_names import Checkpoints
from ft_core.control.decide.forming import first_places
from ft_core.control.decide.ladder import Escalation, EscalationCause, Rung
from ft_core.control.events import Close, Emitted, End, Peer, PrintConsole, Record, Send
from ft_core.control.lead import takeover
from ft_core.control.liveness import strikes
from ft_core.control.liveness.failure_detector import FailureDetector
from ft_core.control.liveness.hangs.detector import Culprit, Detector, Inconclusive, Stalled
from ft_core.control.liveness.hangs.finding import Finding
from ft_core.control.liveness.links import Broken, Pair
from ft_core.control.observe import explain
from ft_core.control.observe.observations import (
    AllRestored,
    AllStepped,
    FailureCounted,
    FirstSign,
    NodeBeat,
    ScriptsDone,
    StepDone,
    TakenOver,
    TimeGoes,
)
from ft_core.control.phases import (
    TRANSITIONS,
    Done,
    Forming,
    Phase,
    Quiescing,
    Rebuilding,
    Running,
    Waiting,
)
from ft_core.control.plan_delivery import PlanDelivery
from ft_core.control.prestart.attempts import Prestart
from ft_core.control.prestart.draining import Draining
from ft_core.control.progress import Progress
from ft_core.control.samples import Samples
from ft_core.process.transitions import follow
from ft_core.protocol import messages as m
from ft_core.protocol.goodput import Cause

log = logging.getLogger(__name__)

# All limits, here and in the other modules, are in time that the controller's process was awake: what it
# missed by being stopped or held up is nobody else's fault.
REPEAT = 1.0
"""Seconds after which a plan is sent again to a node that has not begun it."""
STANDBY_GRACE = 20.0
"""Seconds that a healthy node has to bring up a standby before a crashed worker's role moves elsewhere."""
NEVER_MEET = ("mismatch", "circle")
"""Kinds of hangs in which it is proven that roles never meet again, whoever is to blame."""


class RecoveryCoordinator:
    """Takes the job from one epoch to the next: what has failed, who has reported, how it goes on."""

    def __init__(
        self, facts: ClusterState, ids: Callable[[], str], recorded: Mapping[str, int], settled: float
    ) -> None:
        """`facts`: what is known of the job. `ids`: makes texts that nobody else has. `recorded`: the newest
        epoch in which each event that comes once an epoch was written down, by its name. `settled`: the
        monotonic time in seconds before which an older leader may still be obeyed."""
        self.facts, self.settled = facts, settled
        self._phase: Phase = Forming()
        self.prestart = Prestart()
        self.draining = Draining()
        self.completion = Completion()
        self.checkpoints = Checkpoints()
        self.progress: Progress
        """How far the roles have come in the epoch under way."""
        self.samples = Samples()
        self.hangs = Detector()
        self._program = explain.A_PROGRAM if facts.settings.command.no_python else ""
        """Why what is run can never be protected, if so."""
        self.unprotected = self._program
        """Why scripts run without fault tolerance, if so."""
        self._so_far = ""
        """The same of those that may yet ask for it."""
        self.failure_detector = FailureDetector(facts)
        self.strikes_changed = False
        """Whether the agents have yet to be told."""
        self.escalation: Escalation | None = None
        """Who begins anew in the next epoch, where it is known that the others cannot go on with those."""
        self._workers_to_exit: deque[tuple[int, str]] = deque()
        """Roles whose workers were told to end for that, and their nodes."""
        self.leaving = False
        """Whether SIGTERM has come: what ends because of it is not replaced."""
        self.now = self.wall = 0.0
        self.effects: list[Emitted] = []
        """What the event that is being handled has led to."""
        self._ids, self._recorded = ids, dict(recorded)
        facts.stepped_epoch, facts.script_resumes = recorded.get("resumed", 0), "resumes" in recorded
        self._delivery = PlanDelivery(facts)
        self._lost: dict[int, tuple[str, int]] = {}
        """Role -> node and pid of the worker that was lost last."""
        self._last_failure: tuple[str, int, list[int]] = "", 1, []
        """Why, the exit code should it be the last, and the roles that were lost."""
        self._shortage = ""
        """What was said last of what the job waits for."""
        self._plan_was_inherited = False
        """Whether the plan is a former controller's: how far its roles have come is known from them alone."""

    @property
    def phase(self) -> Phase:
        """What the job is doing."""
        return self._phase

    def transition(self, to: Phase) -> None:
        """Enter another phase. Raises if the table in `phases` does not have it."""
        self._phase = follow(TRANSITIONS, self._phase, to)

    def do(self, *effects: Emitted) -> None:
        self.effects += effects

    def record(
        self,
        name: str,
        reason: str = "",
        roles: Collection[int] = (),
        time: TimeGoes | None = None,
        **more: Any,
    ) -> None:
        """A line of `events.jsonl`. `time`: what the job's time goes to from here on, where that is said."""
        self.do(Record(name, self.facts.epoch, reason, tuple(roles), more, time))

    def _once(self, name: str, reason: str = "", **more: Any) -> None:
        """Record what comes once an epoch: those who tell of it tell a restarted controller again."""
        if self._recorded.get(name, 0) < self.facts.epoch:
            self._recorded[name] = self.facts.epoch
            self.record(name, reason, **more, time=TimeGoes())
        self.facts.stepped_epoch = self._recorded.get("resumed", 0)

    # -- controllers and nodes that come back ------------------------------------------------------

    def turn_away_if_replaced(self, node: Node) -> bool:
        """Tell a node that a plan was made without it since it began its own, if so. Returns whether it was.

        Its roles are played elsewhere then, and its state is of a past that may have been done again. A node
        that was thought lost and is back before any such plan takes part as if nothing had been.
        """
        plan, begun = self.facts.plan, node.greeted_with  # INV-1 (one worker)
        if plan is None or not begun or node.name in plan.nodes or begun == plan.id:
            return False
        if epoch_of(begun) > plan.epoch:
            return False
        if node.hello.draining:  # it was to be taken out, and plays no role
            self.record("drained", "it was lost, and is back", node=node.name)
            self.do(Send(node.peer, m.Shutdown(code=0)), Close(node.peer))
            return True
        reason = f"node {node.name} is back, too late: it joins again as a spare"
        self.record("given_up", reason, node=node.name)
        self.do(Send(node.peer, m.GivenUp()), Close(node.peer))
        return True

    def rebuild_if_newer_plan(self, epoch: int) -> None:
        """Learn the plan of `epoch` first, which somebody has begun, if it is newer than what is known."""
        phase = self.phase
        if isinstance(phase, Rebuilding):
            if epoch > max(phase.newest, self.facts.plan_epoch):
                phase.newest, phase.asked_at = epoch, float("-inf")
        elif epoch > self.facts.plan_epoch:
            self.transition(Rebuilding(epoch, self.now, self.now))

    @property
    def plan_known(self) -> bool:
        """Whether this controller has the newest plan. Without it, a restarted one understands little."""
        return not isinstance(self.phase, Rebuilding) or self.facts.plan_epoch >= self.phase.newest

    def adopt_plan_of_predecessor(self, node: Node, told: m.KeptState) -> None:
        """Take over the state of another controller, from an agent that has begun its plan."""
        hosts, node.hosts = node.hosts, []
        state = plans.kept(told.state, hosts)
        if state.epoch <= self.facts.plan_epoch:
            return  # several were asked
        self.facts.take(state)
        self.facts.strikes.take(told.strikes, self.now)
        blamed = {strike.place for strike in told.strikes}
        for there in self.facts.nodes.values():
            if strikes.place(there.name) in blamed:  # missed, perhaps, by a leader that was none any more
                self.facts.strikes.lives(there.name, there.hello.pid)
        self._install_plan(state, None)
        self.prestart.taken_over(self.now)
        for node in list(self.facts.nodes.values()):
            if self.turn_away_if_replaced(node):
                self.facts.drop(node)

    def take_over(self, phase: Rebuilding, plan: m.Plan) -> None:
        """Go on where the former controller was, or begin a recovery where that is not possible."""
        facts = self.facts
        self.transition(Running())
        if facts.trained:
            facts.fill_catalogue(range(facts.settings.world_size))
        restoring = Cause.START_UP if plan.origin == "initial" else Cause.RESTORING
        self.do(TakenOver(takeover.found(facts, self.progress), restoring))
        reason = f"plan of epoch {plan.epoch} taken over"
        self.record("controller_restarted", reason, time=TimeGoes())
        if self.end_if_finished():
            return
        self.hear_of_parts(facts.nodes.values())
        self.release_if_complete()
        self.completion.taken_over()
        self.failure_detector.miss(set(plan.nodes) - set(facts.nodes), phase.heard_at)
        dead = takeover.dead(facts, plan)
        for reason, roles in phase.undone:
            self.record("detected", reason, roles)
        self.tell_of_nodes()
        self.do(*facts.to_all(self._delivery.nodes_without_roles()))
        self.strikes_changed = True
        if dead or phase.undone or takeover.unbegun(facts, plan) or facts.epoch > plan.epoch:
            self.fail("lost while the controller was away" if dead else "recovery was under way", dead)

    # -- plans -------------------------------------------------------------------------------------

    def _install_plan(self, plan: m.Plan, own: dict[m.NodeName, m.OwnPlan] | None) -> None:
        """From now on this plan counts. `own`: what single nodes must know of it; None: another controller
        has made it."""
        self.facts.plan, self.progress, self._plan_was_inherited = plan, Progress(plan), own is None
        self._delivery.new_plan(own)

    def _start_epoch(self, start: Start, counts: Sequence[tuple[int, m.Counts]] = ()) -> None:
        """Begin an epoch. `counts`: the start-up operations of newcomers that have replayed them already."""
        facts, before = self.facts, self.facts.plan
        self.prestart.epoch_begins(self.now)
        self.draining.epoch_begins(facts)
        self.failure_detector.begins()
        self.completion.left.clear()
        facts.groups.withdrawn = set()
        facts.groups.changed(start.version, start.roles)
        if before is None or (facts.initial_version is None and start.origin == "durable"):
            facts.started_from = start.version, start.origin
        if start.version is not None:
            facts.seen_at([start.version])
            # INV-14 (parts): a durable checkpoint may be of before a part's end.
            facts.parts = [end for end in facts.parts if end <= start.version]
        job = before.job if before is not None else self._ids()
        facts.takes_part(start.roles, start.lost)
        for role, known in counts:
            facts.records.say(role, known)
        plan = plans.make(facts, start, name=f"{facts.epoch}-{self._ids()}", job=job)
        self._install_plan(plan, plans.own_plans(facts, plan))
        self.transition(Running())
        self._shortage, self.escalation = "", None
        moved = {role: start.roles[role] for role in start.lost if role in start.roles}
        about = {"version": start.version, "origin": start.origin, "moved": moved}
        cause = Cause.START_UP if start.origin == "initial" else Cause.RESTORING
        time = TimeGoes(Cause.UNKNOWN if self.unprotected else cause, facts.epoch)
        self.tell_of_strikes()  # so that whoever has the plan knows of the failures before it
        self.record("decided", f"version {start.version} ({start.origin})", start.lost, time, **about)
        self._tell_of_protection()
        self.do(*self._delivery.to_all(before, self.now))
        if facts.settings.policy == "shrink":
            self.do(*self.samples.begin(facts))
            left = set(before.roles if before is not None else ()) - set(start.roles)
            returned = set(before.absent if before is not None else ()) & set(start.roles)
            for name, change in (("left", left), ("returned", returned)):
                if change:
                    self.record(name, f"replica groups {facts.groups.of(change)}", sorted(change))

    def on_greeting(self, node: Node, known: bool) -> None:
        """A node has greeted: it is told what it may have missed, and what it has told may be what was waited
        for. `known`: whether it was there before."""
        facts, roles = self.facts, set(node.holdings.roles)
        self.hear_of_parts([node])
        if facts.parts:
            self.do(Send(node.peer, m.Release(parts=facts.parts)))
        if kept := facts.strikes.value(self.now):
            self.do(Send(node.peer, m.KeepStrikes(kept)))
        self.remind(node, node.holdings.epoch, roles)
        here = facts.roles_by_node.get(node.name)
        if (
            here
            and isinstance(self.phase, Quiescing | Waiting)
            and node.applied_plan != facts.current_plan.id
        ):
            # Those who have started ahead for a plan that is over, and was not heard here, keep their places.
            newcomers = set(facts.current_plan.newcomers)
            if new := [role for role in here if role in newcomers]:
                self.do(Send(node.peer, m.Withdraw(roles=new)))
        if isinstance(self.phase, Running) and facts.current_plan.nodes.get(node.name) != node.address:
            self.tell_of_nodes()
        if facts.plan is not None and node.applied_plan == facts.plan.id:
            # Who has come and gone since the plan was made. From now on it knows what all know.
            self.do(Send(node.peer, self._delivery.nodes_without_roles()))
        self.do(*self.prestart.back(node, roles))
        self.do(*self.draining.greeted(facts, node, known))
        self.decide_if_ready()

    def remind(self, node: Node, epoch: int, shown: Collection[int]) -> None:
        """Bring a node to what it should do; with each of its heartbeats. It may not have heard an order,
        since its connection broke or a controller died over saying it. May end the epoch: where it has begun
        one that this controller does not know.

        `epoch` is the newest that it has heard of; `shown` are the roles that it has, or has workers for.
        """
        facts, running = self.facts, isinstance(self.phase, Running)
        if isinstance(self.phase, Forming | Rebuilding | Done):
            return
        plan = facts.current_plan
        split = node.applied_plan != plan.id and epoch_of(node.applied_plan) == facts.epoch
        if epoch > facts.epoch or (split and running):
            facts.epoch = max(facts.epoch, epoch)
            self.end_epoch("detected", f"node {node.name} is in epoch {epoch} of another controller", [])
            return
        if epoch < facts.epoch:
            self.do(Send(node.peer, m.Abort(epoch=facts.epoch)))
        # Roles that it has started ahead of need, for an attempt that was given up; it has not heard that.
        others = [role for role in shown if facts.places.get(role) != node.name]
        others = sorted(set(others).difference(self.prestart.on(node.name))) if others else others
        if others and node.applied_plan == plan.id:
            self.do(Send(node.peer, m.Withdraw(roles=others)))
        if not running:
            for role in sorted(shown):
                if anew := self._is_being_replaced(role):
                    self._workers_to_exit.append((role, node.name))
                if anew or role in facts.groups.withdrawn:
                    self.do(Send(node.peer, m.KillWorker(role=role)))
        elif node.applied_plan != plan.id:
            if self.now - node.plan_sent_at > REPEAT:
                self.do(*self._delivery.again_to(node, self.now))
        else:
            self.do(*self.prestart.remind(node, shown))

    def tell_of_nodes(self) -> None:
        """Nodes without a role have come or gone in the epoch under way: they keep copies for others."""
        if isinstance(self.phase, Running):
            self.do(*self._delivery.node_changes())

    # -- how far the roles are ---------------------------------------------------------------------

    def on_progress(self, message: m.Restored | m.Stepped | m.Reopened) -> None:
        facts = self.facts
        if facts.plan is None or message.epoch != facts.epoch:
            return
        due = self.progress.heard(message)
        if isinstance(message, m.Stepped):
            facts.seen_at([message.version])
            if isinstance(self.phase, Running):  # what is said again tells nothing of when it was
                self.do(StepDone(message.version))
            if due is not None:
                self.prestart.stepped()
        if due is not None:
            name, about = due
            if isinstance(message, m.Restored) and isinstance(self.phase, Running):
                self.do(AllRestored(facts.epoch, message.version, takeover.share(facts)))
                self._so_far = ""
            if name == "resumed" and isinstance(self.phase, Running):
                self.do(AllStepped(about["version"]))
            self._once(name, **about)
            if name == "resumed":
                facts.compact_catalogue(), facts.groups.value()  # while nobody waits for it
            if name == "resumed" and facts.script_resumes and "resumes" not in self._recorded:
                self._once(
                    "resumes",
                    reason="should the script have to be started again, it has checkpoints of its own",
                )

    def on_heartbeat(self, node: Node, beat: m.Heartbeat) -> None:
        """A node says that it lives, and how far its roles are: some thousands a second of a large job."""
        facts, now = self.facts, self.now
        newest = max([role.step for role in beat.roles.values()], default=-1)
        taking_part = self.prestart.taking_part(node.name, beat.roles)
        counts = beat.epoch == facts.epoch and isinstance(self.phase, Running)
        self.do(NodeBeat(node.name, node.beats, beat, taking_part if counts else {}, newest))
        node.beat(beat)
        node.liveness.beat(now)
        self.failure_detector.beat(beat.begun, newest, now)
        self.hangs.beat(taking_part, now)
        self.remind(node, beat.epoch, beat.roles.keys())
        if self.prestart.attempt is not None:
            self.do(*self.prestart.beat(facts, node.name))
        self.draining.beat(node, beat)
        # Kept here, because a node that is lost takes what it said with it.
        facts.seen_at([newest])

    def end_if_finished(self) -> bool:
        if not self.completion.over(self.facts.places):
            return False
        self.end_job(0, "every role has finished")
        return True

    def hear_of_parts(self, nodes: Iterable[Node]) -> None:
        """A former controller may have let all workers leave a part of their scripts. Of those who have asked
        it for that, some may be lost since: it is known to the agents of the others."""
        facts = self.facts
        if isinstance(self.phase, Forming) or facts.plan is None:
            return
        known = [n.holdings.parts for n in nodes if n.holdings.begun == facts.plan.id]
        found = max(known, key=len, default=[])
        if len(found) > len(facts.parts):
            facts.parts = found
            self.do(*facts.to_all(m.Release(parts=found)))

    def release_if_complete(self) -> None:
        """Let the workers leave a part of their scripts, once all have come to the end of it."""
        facts = self.facts
        if not isinstance(self.phase, Running):
            return
        if parts := self.completion.passed(facts.places, facts.plan_epoch, facts.parts):
            facts.parts = parts
            self.do(*facts.to_all(m.Release(parts=parts)))

    # -- failures ----------------------------------------------------------------------------------

    def worker_lost(self, node: Node, lost: m.WorkerLost) -> None:
        """A worker with a role has ended, for whatever reason."""
        role = lost.role
        if self._lost.get(role) == (node.name, lost.pid):
            return  # it is said again
        self._lost[role] = node.name, lost.pid
        where = f"worker {lost.pid} of role {role} on {node.name}: {lost.exit}"
        facts, same_again = self.facts, self.facts.strikes.again(lost)
        facts.seen_at([lost.step])
        if lost.fault is m.Fault.TERMINATED and self._is_being_replaced(role):
            if self.prestart.concerns(role, node.name):
                self.do(*self.prestart.fail(facts, where))
            else:
                facts.worker_died(node, role)
            self.decide_if_ready()
            return
        self._strike(strikes.of_worker(lost, node.name, facts.trained), node.hello.domain)
        if self.prestart.concerns(role, node.name):
            self.do(*self.prestart.fail(facts, where))
            return
        facts.worker_died(node, role)
        local = facts.initial_version is None or self.unprotected or self.completion.released
        if lost.fault is m.Fault.LEFT and local:
            self.completion.finished.add(role)
            if not self.completion.released:
                self.completion.left[role] = where
            self.end_if_finished()
            self._end_if_missed()
        elif lost.fault is m.Fault.LEFT:
            why = f"{where}, in the middle of training (os._exit?): the others would wait for it"
            self.escalate(EscalationCause(why, (role,), fault=lost.fault, node=node.name))
        elif lost.code > 0 and (self.unprotected or self.completion.released):
            self._script_failed(lost, where, node.name)
        elif why := strikes.ends(lost, facts.trained, same_again):
            self._script_failed(lost, f"{where}; {why}", node.name)
        elif facts.settings.max_restarts and facts.strikes.alike(lost):
            self._script_failed(lost, f"{where}; its start has failed of the same before", node.name)
        else:
            self.fail(where, [role], strikes.exit_code(lost), fault=lost.fault, node=node.name)

    def runs_unprotected(self, said: m.Unprotected) -> None:
        """The script does without fault tolerance, has until now, or does so from now on."""
        if self._is_being_replaced(said.role):
            return
        if said.so_far:
            self._so_far = said.reason if self.facts.initial_version is None else ""
        elif not self.unprotected:
            self.unprotected = said.reason
            self.do(TimeGoes(Cause.UNKNOWN))
        self._tell_of_protection()
        if self.unprotected and self.escalation is None and isinstance(self.phase, Quiescing | Waiting):
            # It had done so before it heard that the epoch is over, and takes part in no other.
            self.escalate(EscalationCause(f"the job is not protected: {self.unprotected}"))

    @property
    def not_protected(self) -> str:
        """Why nothing is, if so."""
        return self.unprotected or self._so_far

    def _tell_of_protection(self) -> None:
        """That there is none, once a job."""
        if self.not_protected and "unprotected" not in self._recorded:
            self._once("unprotected", explain.unprotected(self.not_protected))

    def suspected(self, node: Node, said: m.Suspect) -> None:
        """A worker saw connections break in this epoch."""
        self.failure_detector.suspected(node.name, said.reason, self.now)
        self.record("suspected", said.reason, [said.role])
        if said.by_link:  # also where nobody has to be replaced
            self._strike(strikes.of_link(node.name, said), node.hello.domain)
            self.tell_of_strikes()
        self._end_if_missed()

    def _end_if_missed(self) -> None:
        """Connections that break show that somebody waits for who has left."""
        missed = self.completion.missed(self.failure_detector.broke) if self.failure_detector.broke else None
        if missed is not None and not isinstance(self.phase, Done):
            self.escalate(EscalationCause(missed))

    def _script_failed(self, lost: m.WorkerLost, where: str, node: m.NodeName) -> None:
        """The script would fail of it again. Should the job end of it, then with the script's exit code."""
        short, code = explain.script_error(lost, self.facts.job_dir), strikes.exit_code(lost)
        cause = EscalationCause(
            where, (lost.role,), code, f"\n{lost.traceback}", f"\n{short}", lost.fault, node
        )
        if lost.fault in strikes.FINAL:
            self.end_job(code, cause.recorded, cause.said)
        else:
            self.escalate(cause)

    def escalate(self, cause: EscalationCause, incompatible: Collection[int] = ()) -> None:
        """To go on in place does not help: climb the ladder, whose last rung is the end of the job.

        `incompatible`: roles that provably cannot go on with each other.
        """
        facts, about = self.facts, cause.about
        if isinstance(self.phase, Done):
            return
        if self.escalation is not None and not isinstance(self.phase, Running):  # they begin anew already
            self.fail(cause.reason, list(cause.roles), **about)
            return
        facts.note_progress()
        escalation = None
        if not self.leaving and not isinstance(self.phase, Forming):
            escalation = ladder.next_rung(
                facts.escalation_level,
                facts.settings.max_restarts,
                incompatible=frozenset(incompatible),
                memory=facts.trained and not self.unprotected and not self.completion.released,
                diverged=cause.fault is m.Fault.DIVERGED,
                skip_durable=facts.trained and bool(self.unprotected),
            )
        if escalation is None:  # INV-7 (ends)
            how_often = ladder.in_words(facts.escalation_level)
            self.end_job(cause.code, how_often + cause.recorded, how_often + cause.said)
            return
        self.escalation, facts.escalation_level, facts.attempts_without_progress = (
            escalation,
            escalation.level,
            0,
        )
        if escalation.rung is Rung.RESTART:
            self.completion = Completion()
            self.unprotected, self._so_far = self._program, ""
        words = explain.begins_anew(escalation, cause.reason, facts.settings)
        if isinstance(self.phase, Running):
            self.end_epoch("detected", cause.reason, cause.roles, **about)
            self.record("begins_anew", words, cause.roles, rung=escalation.rung)
        elif isinstance(self.phase, Rebuilding):
            self.phase.undone.append((cause.reason, list(cause.roles)))
            self.record("begins_anew", words, cause.roles, rung=escalation.rung)
        else:
            self.record("detected", cause.reason, cause.roles, **about)
            self.end_epoch("begins_anew", words, cause.roles, rung=escalation.rung)

    def _is_being_replaced(self, role: int) -> bool:
        """Whether the worker of this role was told to end, since going on in place does not help."""
        if self.escalation is None or not isinstance(self.phase, Quiescing | Waiting):
            return False
        return self.escalation.replaces(role)

    def _workers_still_exiting(self) -> bool:
        """Whether workers live yet that are to be replaced in the next epoch. Forgets those that do not."""
        places = self.facts.places
        while self._workers_to_exit:  # all that have ended are looked at once, however many there are
            role, node = self._workers_to_exit[0]
            if places.get(role) == node and self.facts.alive(role, node):
                return True
            self._workers_to_exit.popleft()
        return False

    def _strike(self, strike: m.FailureRecord, domain: str) -> None:
        """Count a failure, here and for a successor."""
        facts, before = self.facts, self.facts.strikes.avoided(self.now)
        if not facts.strikes.add(strike, self.now):
            return
        self.strikes_changed = True
        self.do(FailureCounted(strike.fault, strike.place, domain))
        for place in sorted(facts.strikes.avoided(self.now) - before):
            count = len(facts.strikes.against(place, self.now))
            reason = explain.avoided(place, count, facts.settings)
            self.record("avoided", reason, node=place)
            log.warning("%s", reason)

    def tell_of_strikes(self) -> None:
        """Agents keep them for the controller's successor. Once for all that fails at a time."""
        if self.strikes_changed and not isinstance(self.phase, Rebuilding):
            self.strikes_changed = False
            self.do(*self.facts.to_all(m.KeepStrikes(self.facts.strikes.value(self.now))))

    def node_lost(self, node: Node, why: str, fault: m.Fault = m.Fault.NODE) -> None:
        """What happens when a node dies. `fault`: of which it did; but for `NODE`, it is not only out of
        sight.

        It is forgotten: what it says from now on is not heard, and should it come back after a plan was made
        without it, it joins as a spare (`turn_away_if_replaced`). If it was to bring a replica group back,
        that is given up, and nobody else notices. If it had roles, the epoch ends (`fail`, `end_epoch`): all
        workers leave their step (`Abort`), the other agents report what they hold (`HoldingsChanged`), and
        once all have (`decide_if_ready`), other nodes get its roles (`deciding.decide`, `_start_epoch`), or
        the job waits for one. If it had none, nobody stops: the others are told where no more copies are
        to be kept.
        """
        self.do(*self.draining.lost(self.facts, node.name))
        self.facts.drop(node)
        self.do(FirstSign(self.wall - node.liveness.silence(self.now)))
        if fault is m.Fault.NODE and not node.liveness.ended:
            self.failure_detector.miss([node.name], self.now)
        self.do(Close(node.peer))
        if self.prestart.on(node.name):
            self.do(*self.prestart.fail(self.facts, f"node {node.name} is lost"))
        self._strike(strikes.of_node(node.name, node.hello.pid, fault), node.hello.domain)
        roles = self.facts.roles_by_node.get(node.name, [])
        if roles:
            self.fail(f"node {node.name} lost: {why}", roles, fault=fault, node=node.name)
        else:
            self.record("spare_lost", f"node {node.name}: {why}", node=node.name)
            self.tell_of_nodes()
            self.decide_if_ready()

    def restore_failed(self, node: Node, reason: str, role: int) -> None:
        """A role cannot have its state. Before it is decided again: does its node reach those who have it?"""
        self.fail(reason, [role])
        if isinstance(self.phase, Quiescing | Waiting):
            self.failure_detector.fetch_failed(node.name, reason, self.now)

    def fail(
        self, reason: str, roles: list[int], code: int = 1, fault: m.Fault | None = None, node: str = ""
    ) -> None:
        """Roles have lost their worker or their state: end the epoch, unless it is ending already.

        `code`: what `ftrun` ends with, should the job end of it. `fault`: of which they have, and the `node`.
        """
        phase = self.phase
        more: dict[str, Any] = {"fault": fault, "node": node} if fault is not None else {}
        if isinstance(phase, Rebuilding):
            phase.undone.append((reason, roles))
        elif isinstance(phase, Forming | Done):
            self.record("detected", reason, roles, **more)
            self.form_if_ready()
        elif self.completion.released:
            # Training is behind everybody: nothing is left to lose.
            self.record("detected", f"{reason}; its script had only local work left", roles, **more)
            self.completion.finished |= set(roles)
            self.end_if_finished()
        elif isinstance(phase, Quiescing | Waiting):
            self.record("detected", reason, roles, **more)
            self.decide_if_ready()
        elif self.unprotected and self.escalation is None:
            reason = f"{reason}; the job is not protected: {self.unprotected}"
            self.escalate(EscalationCause(reason, tuple(roles), code, fault=fault, node=node))
        else:
            self.facts.attempts_without_progress, self._last_failure = (
                self.facts.attempts_without_progress + 1,
                (reason, code, roles),
            )
            self.end_epoch("detected", reason, roles, **more)

    def end_epoch(self, event: str, reason: str, roles: Collection[int], **more: Any) -> None:
        """Have all workers leave what they are in, and decide how to go on."""
        self.facts.epoch = self.facts.next_epoch()
        self.failure_detector.ends()
        self.do(*self.prestart.epoch_ends(self.facts, self.now))
        self.transition(Quiescing(self.now))
        self.checkpoints = self.checkpoints.forgotten()
        self.record(event, reason, roles, TimeGoes(Cause.DECISION), **more)
        if (escalation := self.escalation) is not None:
            ends = {role: node for role, node in self.facts.places.items() if escalation.replaces(role)}
            self._workers_to_exit = deque(ends.items())
            self._kill(ends)
        self.do(*self.facts.to_all(m.Abort(epoch=self.facts.epoch)))
        self.decide_if_ready()

    def _go_on_without(self, late: list[int]) -> None:
        """Replica groups that came back keep the others waiting: they leave once more, and try again."""
        facts = self.facts
        roles = facts.groups.roles(facts.groups.of(late))
        facts.groups.withdrawn |= set(roles)
        self.do(*self.prestart.give_up(facts, {role: facts.places[role] for role in roles}))
        limit = facts.settings.return_limit
        reason = f"roles {late} did not have their state within {limit:g} s"
        self.end_epoch("not_returning", reason, roles)

    # -- time --------------------------------------------------------------------------------------

    def disconnected(self, node: Node) -> None:
        """Its connection has ended. It may come back, unless others find that its process has ended: they are
        asked at once."""
        self.failure_detector.disconnected(node, self.now)
        self._judge_nodes()

    def probed(self, node: Node, answer: m.NodesProbed) -> None:
        """It says which others it reaches."""
        if self.failure_detector.probed(node, answer):
            self._judge_nodes()

    def _judge_nodes(self) -> None:
        """Those that are silent, or gone: who is lost, and who is to be asked about whom."""
        for node, why in self.failure_detector.lost(isinstance(self.phase, Running), self.now):
            self.node_lost(node, why)
        self.do(*self.failure_detector.questions(self.now))

    def check_nodes(self) -> None:
        """The same, and whether they reach each other."""
        self._judge_nodes()
        if isinstance(self.phase, Running | Quiescing | Waiting) and not self.unprotected:
            self.do(*self.failure_detector.question_links(self.now))
            if self.failure_detector.links.over:
                self._replace_broken_link_end()

    def _replace_broken_link_end(self) -> None:
        """All links were tried: replace one end of a broken one; if none is, begin an epoch with new
        connections."""
        facts, why = self.facts, self.failure_detector.broke
        first = {name: role for role, name in sorted(facts.places.items(), reverse=True)}
        none = facts.settings.world_size  # a node without a role is replaced rather than one with some
        failed = lambda name: len(facts.strikes.against(strikes.place(name), self.now))  # noqa: E731
        broken = self.failure_detector.links.found(failed, lambda name: first.get(name, none))
        replaced = "" if broken is None else self._replaceable(broken)
        if broken is not None and not replaced:
            # What they hold would be lost, or they would come back to the same link.
            one, other = broken.ends
            self.failure_detector.is_still_broken(f"{one} and {other} did not reach each other", self.now)
            what = (
                f"nodes {one} and {other} do not reach each other, and neither can be replaced: no other "
                "node could take over, or it holds what nobody else does"
            )
            if self._note_wait_reason(what):
                self._say_it_waits(what, [])
            return
        self.failure_detector.ends()
        if broken is not None:
            one, other = broken.ends
            node = facts.nodes[replaced]
            roles = facts.roles_by_node.get(node.name, [])
            what = f"nodes {one} and {other} do not reach each other; {node.name} is replaced"
            self.record("link", what, roles, nodes=[one, other], replaced=node.name)
            self.do(Send(node.peer, m.GivenUp()))
            other = one if node.name == other else other
            self.node_lost(node, f"its link to {other} is broken", m.Fault.TRANSPORT)
        if isinstance(self.phase, Running) and (why or broken is not None):
            # Who was replaced, if anybody, has no role: others' connections broke, too.
            who = "all others" if broken is not None else "all nodes"
            self.fail(f"connections broke, and {who} reach each other ({why or 'roles wait in vain'})", [])
        self.decide_if_ready()

    def _replaceable(self, broken: Broken) -> m.NodeName:
        """The end of a link that is replaced: rather that which was found than the other, and none that holds
        what nobody else does."""
        ends = sorted(broken.ends, key=lambda name: name != broken.replaced)  # INV-9 (links)
        able = (name for name in ends if not self._has_no_other(name, broken.ends))
        return next((name for name in able if can_be_spared(self.facts, name)), "")

    def _has_no_other(self, replaced: m.NodeName, ends: Pair) -> bool:
        """Whether the job would wait for a node if that one were replaced."""
        facts = self.facts
        needed = facts.settings.policy == "wait" and replaced in facts.roles_by_node
        return needed and not facts.nodes.keys() - facts.roles_by_node.keys() - set(ends) - set(
            facts.draining
        )

    def check_hangs(self) -> None:
        """Where nothing moves any more: who holds the others up, and another worker in its place."""
        if not isinstance(self.phase, Running) or self.unprotected or self.completion.released:
            self.hangs.rests(self.now)
            return
        facts = self.facts
        verdict = self.hangs.tick(facts, self.progress, self.now)
        if isinstance(verdict, m.SendFlight):
            self.do(*facts.to_all(verdict))
        elif isinstance(verdict, Culprit):
            self._kill_hung_workers(verdict.finding)
        elif isinstance(verdict, Stalled):
            found = verdict.finding
            log.warning("others wait for what is no hang, and nothing is replaced: %s", found.words)
            self.record("stalled", found.words, found.roles)
        elif isinstance(verdict, Inconclusive):
            found = verdict.finding
            self.do(FirstSign(self.wall - self.hangs.quiet(self.now)))
            log.warning("nothing moves, and it is not clear who is to blame: %s", found.words)
            self.record("hang", f"not explained: {found.words}", found.roles, explained=False)
            if verdict.hopeless:
                limit = facts.settings.hang_limit
                self.escalate(
                    EscalationCause(f"nothing has moved for --ft-hang-limit, {limit:g} s: {found.words}")
                )
            elif found.kind in ("transport", "silent"):
                roles = {*found.roles, found.witness} & facts.places.keys()
                self.failure_detector.stuck({facts.places[role] for role in roles}, self.now)
            elif found.kind in NEVER_MEET and facts.settings.max_restarts:
                incompatible = () if found.culprits else found.roles  # culprits have begun anew, in vain
                self.escalate(EscalationCause(f"roles will never meet again: {found.words}"), incompatible)

    def _kill_hung_workers(self, found: Finding) -> None:
        """Workers that hang are as good as dead: from here on it is a crash like any other."""
        log.error("%s: replaced, for it holds the others up", found.words)
        self.do(FirstSign(self.wall - self.hangs.quiet(self.now)))
        self.record("hang", found.words, found.culprits, explained=True)
        for role in [*found.culprits, *([found.witness] if found.witness >= 0 else [])]:
            node = self.facts.nodes.get(self.facts.places[role])
            if node is not None and (beat := node.beats.get(role)) is not None:
                self.do(Send(node.peer, m.Examine(role=role, pid=beat.pid, end=role in found.culprits)))

    def ask_about_script_end(self) -> None:
        facts = self.facts
        question = self.completion.question(facts.places, facts.plan_epoch, len(facts.parts), self.now)
        if question is not None:
            self.do(*facts.to_all(question))

    def drain(self, peer: Peer, node: m.NodeName) -> None:
        """Somebody wants a node out."""
        reason = ""
        if not isinstance(self.phase, Running):
            reason = f"the job is {self.phase.name}; ask again once it trains"
        elif self.unprotected or self.completion.released:
            reason = "the script runs without fault tolerance, or has come to its end"
        self.do(*self.draining.ask(self.facts, self.prestart, peer, node, reason))

    def advance_prestarts(self) -> None:
        """While all train, others may start: in place of those on a node that is drained, or of replica
        groups that are away."""
        facts, shrinks = self.facts, self.facts.settings.policy == "shrink"
        if self.progress.all_stepped:
            self.return_if_due()
            if not self.completion.released and isinstance(self.phase, Running):
                kept_by_all = facts.departing
                effects = self.draining.tick(facts, self.prestart, self.now)
                if facts.departing != kept_by_all:
                    self.tell_of_nodes()
                self.do(*effects)
                if shrinks:
                    self.do(*self.prestart.tick(facts, self.now))
            return
        if not shrinks:
            return
        restored = self.progress.restored
        late = self.prestart.returned.late(restored, facts.settings.return_limit, self.now)
        if late and restored:
            self._go_on_without(late)

    def return_if_due(self) -> None:
        if isinstance(self.phase, Running) and (roles := self.prestart.due(self.facts, self.now)):
            attempt = self.prestart.attempt
            if attempt is not None and attempt.leaves:
                self.end_epoch("moving", f"the roles of node {attempt.leaves} move", roles)
                return
            reason = f"replica groups {self.facts.groups.of(roles)} come back"
            self.end_epoch("returning", reason, roles)

    # -- decisions ---------------------------------------------------------------------------------

    def ask_durable_versions(self, nodes: Collection[str]) -> Mapping[int, str] | None:
        """Ask these nodes for the durable checkpoints that they can read, where they have not said yet.
        Returns those that all can, by version; None while somebody has not answered."""
        if not self.facts.settings.durable_dir:
            return {}
        self.do(*self.checkpoints.ask(self.facts.nodes, nodes))
        return self.checkpoints.common(nodes)

    def end_if_storage_unreadable(self) -> bool:
        """End the job where somebody cannot read what it depends on: to begin anew, or with less, where there
        may be something newer to go on from, would be wrong. Returns whether it has ended."""
        if errors := self.checkpoints.errors:
            where = f"durable checkpoints in {self.facts.settings.durable_dir} cannot be read"
            self.end_job(1, f"{where}: {'; '.join(errors.values())}")
        return bool(errors)

    def form_if_ready(self) -> None:
        """Begin the first epoch, once there are workers for all roles."""
        if not isinstance(self.phase, Forming) or self.now < self.settled:
            return
        facts = self.facts
        roles, in_vain = first_places(facts, self.now - self.phase.joined_at)
        if in_vain and self._note_wait_reason(what := explain.missing_at_the_start(in_vain)):
            self.record("waiting", what, time=TimeGoes(Cause.WAITING))
            log.warning("%s", what)
        if roles is None or (durable := self.ask_durable_versions(set(roles.values()))) is None:
            return
        if self.end_if_storage_unreadable():
            return
        if facts.forgotten and not durable and not (facts.script_resumes or facts.settings.max_restarts):
            self.end_job(1, ALL_IS_LOST)
            return
        facts.epoch = facts.next_epoch(self._recorded.values())
        if facts.forgotten:
            self.record("starting_over", ALL_IS_LOST)
            log.warning("%s", ALL_IS_LOST)
        if durable:
            self._start_epoch(Start(roles, max(durable), "durable", {}, [], durable[max(durable)]))
        else:
            self._start_epoch(Start(roles, None, "initial", {}, []))

    def decide_if_ready(self) -> None:
        """An epoch has ended: go on, once all nodes have reported and nothing is missing."""
        facts, phase = self.facts, self.phase
        if not isinstance(phase, Quiescing | Waiting):
            return
        if facts.disconnected or not facts.all_reported():
            return
        if self.failure_detector.suspects_link:
            return  # what is decided should work
        if self.escalation is not None and self._workers_still_exiting():
            return
        facts.note_progress()
        if facts.attempts_without_progress > strikes.TRIES:
            reason, code, roles = self._last_failure
            self.escalate(EscalationCause(explain.in_vain(facts, reason, roles), code=code))
            return
        facts.remember_the_lost()
        overdue = self.now - phase.since > STANDBY_GRACE
        avoided = facts.avoided(self.now)
        outcome = self._decide(overdue, avoided)
        attempt = self.prestart.attempt
        if isinstance(outcome, Shortage) and attempt is not None and attempt.leaves:
            self.do(*self.prestart.fail(facts, "others need the places more"))
            outcome = self._decide(overdue, avoided)
        if isinstance(outcome, StandbyComes) or self._wait_for_unreachable_nodes(outcome):
            self._enter_waiting(phase)
        elif isinstance(outcome, AskStorage):
            self.ask_durable_versions(outcome.nodes)
        elif isinstance(outcome, Shortage):
            self._handle_shortage(phase, outcome)
        elif isinstance(outcome, Start):
            if (
                outcome.origin != "durable"
                and older_than_promised(facts, outcome.version)
                and self.end_if_storage_unreadable()
            ):
                return
            self._start_epoch(outcome, self.prestart.records())
        elif isinstance(outcome, StartOver):
            if not self.end_if_storage_unreadable():
                self._restart_scripts(outcome)
        elif isinstance(outcome, GiveUp):
            self._nothing_in_memory_helps(outcome)
        else:
            assert_never(outcome)

    def _decide(self, overdue: bool, avoided: Collection[str]) -> Outcome:
        facts, starting = self.facts, self.prestart
        about = self.checkpoints.common, overdue, avoided, starting.clears(facts), self.escalation
        return decide(facts, starting.places(), *about)

    def _nothing_in_memory_helps(self, outcome: GiveUp) -> None:
        """There is only what scripts can begin with by themselves."""
        facts, problems = self.facts, self.checkpoints.errors.values()
        can = facts.settings.max_restarts and not problems and not facts.begins_with_durable
        if (
            not can
            or facts.groups.adopted(facts.places)
            or (self.escalation is not None and self.escalation.rung is Rung.RESTART)
        ):
            self.end_job(1, explain.the_end(facts, outcome, problems))
            return
        facts.escalation_level = max(
            facts.escalation_level, ladder.ALL_FROM_MEMORY
        )  # there is nothing for those rungs
        self.escalation = None
        self.escalate(EscalationCause(outcome.reason))

    def _wait_for_unreachable_nodes(self, outcome: Outcome) -> bool:
        """Wait for nodes that are merely out of sight, where what is decided without them is so bad that they
        had better be asked: they may live, and hold what is missing. Returns whether they are waited for."""
        facts = self.facts
        # Of those who train while nobody hears them it is not known how far they have come.
        nobody = facts.nodes.keys().isdisjoint(facts.roles_by_node)
        unknown = (facts.initial_version is not None or self._plan_was_inherited) and nobody
        if isinstance(outcome, Start):
            older = outcome.version is None or outcome.version < facts.newest_seen - 1
            bad = (facts.trained and older) or (unknown and outcome.origin != "memory")
        elif isinstance(outcome, Shortage):
            bad = False  # of workers: what the policy says
        else:
            bad = not isinstance(outcome, AskStorage) or facts.trained or unknown
        missed = self.failure_detector.missed(self.now) if bad else []
        if missed:
            what = (
                f"nodes {explain.some(missed)} cannot be reached, and without them {explain.loses(outcome)}"
            )
            if self._note_wait_reason(what):
                reason = f"{what}: waiting for them for {facts.settings.silence_limit:g} s"
                self.record("unreachable", reason, time=TimeGoes(Cause.WAITING))
                log.warning("%s; waiting for them for %g s", what, facts.settings.silence_limit)
            self.do(*self.failure_detector.look_for(missed, self.now))
        return bool(missed)

    def _restart_scripts(self, outcome: StartOver) -> None:
        """Memory does not suffice: end all workers; once they are replaced, let the scripts begin anew."""
        left = outcome.left
        if self._recorded.get("starting_over", 0) < self.facts.epoch:
            if self.escalation is None:
                log.warning("%s\nThe script is started again from its own newest checkpoint.", outcome.reason)
            self._recorded["starting_over"] = self.facts.epoch + bool(left)
            if not left:
                self.record("starting_over", outcome.reason)
        if left:
            self._kill(left)
            self.end_epoch("starting_over", outcome.reason, sorted(left))
            return
        self.facts.forget()
        self._start_epoch(Start(outcome.roles, None, "initial", {}, outcome.lost))

    def _kill(self, places: Mapping[int, str]) -> None:
        for role, node in places.items():
            if (there := self.facts.nodes.get(node)) is not None:
                self.do(Send(there.peer, m.KillWorker(role=role)))

    def _enter_waiting(self, phase: Quiescing | Waiting) -> None:
        """Something is missing, or still is: wait for it, unless that is so already."""
        if isinstance(phase, Quiescing):
            self.transition(Waiting(phase.since))

    def _handle_shortage(self, phase: Quiescing | Waiting, shortage: Shortage) -> None:
        """There are too few workers: wait for a node, or end the job, as the policy says."""
        facts = self.facts
        facts.groups.withdrawn |= set(facts.groups.roles(facts.groups.of(shortage.combine)))  # whole ones
        self._kill(shortage.combine)
        what, nodes = explain.shortage(facts, shortage)
        if self.leaving:
            self.end_job(1, f"{what}; the job was told to end (SIGTERM), so it does not wait for a node")
            return
        if facts.settings.policy == "stop" and nodes:
            self.end_job(1, f"{what}; policy is stop")
            return
        self._enter_waiting(phase)
        if nodes and self._note_wait_reason(what):
            self._say_it_waits(f"{what}; {explain.what_is_left(facts)}", shortage.roles)

    def _note_wait_reason(self, what: str) -> bool:
        """Note what the job waits for. Returns whether that is not what was said of it last."""
        before, self._shortage = self._shortage, what
        return what != before

    def _say_it_waits(self, what: str, roles: list[int]) -> None:
        how = explain.how_to_join(self.facts)
        running = isinstance(self.phase, Running)
        self.record("waiting", f"{what}: {how}", roles, None if running else TimeGoes(Cause.WAITING))
        log.warning("%s; waiting for a node: %s", what, how)

    def end_job(self, code: int, reason: str, shown: str = "") -> None:
        """End the job with this exit code, unless it is over. `shown`: on the console, if not `reason`."""
        if isinstance(self.phase, Done):
            return
        self.transition(Done(code))
        if code == 0:
            self.do(ScriptsDone())
        self.record("goodput", time=TimeGoes(Cause.UNKNOWN))
        self.record("finished" if code == 0 else "stopped", reason)
        if code:
            self.do(PrintConsole(f"ftrun: the job stops: {shown or reason}", "ERROR"))
        self.do(*self.facts.to_all(m.Shutdown(code=code)), End(code))
