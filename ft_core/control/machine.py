"""The controller: one per job. Liveness, epochs, recovery decisions; control messages only.

A pure state machine: `Controller.handle(event, now)` returns effects, and `control.shell` carries them out.
Its state is soft: everything it knows it was told by the agents, and a new one learns it again from their
next greetings. Training does not notice its absence.

What happens when a node dies: `Controller._node_lost`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

import msgspec

from ft_core.control import ctl, plans
from ft_core.control.completion import Completion
from ft_core.control.deciding import AskStorage, GiveUp, Shortage, StandbyComes, Start, StartOver, decide
from ft_core.control.durable_names import Checkpoints
from ft_core.control.events import (
    Admitted,
    Arriving,
    Close,
    Disconnected,
    Effect,
    End,
    Event,
    Failed,
    Greeted,
    LauncherGone,
    Peer,
    Received,
    Record,
    Refused,
    Say,
    Send,
    Terminate,
    Tick,
)
from ft_core.control.facts import Facts, Node, Operations, completed, epoch_of, records, versions
from ft_core.control.groups import Groups
from ft_core.control.phases import Done, Forming, Phase, Quiescing, Rebuilding, Running, Waiting
from ft_core.control.returning import Returning
from ft_core.control.samples import Samples
from ft_core.control.script_settings import ScriptSettings, answer, spares_started, warn_of_spares
from ft_core.errors import ConfigError
from ft_core.process.sigterm import ENDED, GRACE
from ft_core.protocol.messages import (
    Abort,
    AgentHello,
    AskStatus,
    Completed,
    Configure,
    Configured,
    DescribeRole,
    DurableFailed,
    DurableNames,
    DurableWritten,
    Finished,
    GivenUp,
    Heartbeat,
    Held,
    Holdings,
    Idle,
    Inject,
    Issued,
    JobState,
    KeptState,
    KillWorker,
    Leaving,
    Left,
    Message,
    NodesChanged,
    NoIdleWorker,
    OperationCounts,
    Prepared,
    Release,
    Reopened,
    Restored,
    RestoreFailed,
    RoleLayout,
    RoleState,
    SendState,
    Shutdown,
    Stepped,
    Suspect,
    Trained,
    Unprotected,
    Withdraw,
    WorkerLost,
)
from ft_core.settings import Settings

log = logging.getLogger(__name__)

_FRAMES = re.compile(r'^  File ".*\n(?:    .*\n)*', re.M)
"""Of a traceback."""
# All limits below, and that of silence, are in time that the controller's process was awake: what it missed
# by being stopped or held up is nobody else's fault.
RETURN_GRACE = 0.3
"""Seconds that an agent whose connection broke has to come back before its node counts as lost."""
SIGNAL_LAG = 0.02
"""Seconds in which the controller's process notices a signal that it was sent before a message."""
REBUILD_GRACE = 2.0
"""Seconds without news that a restarted controller waits for the nodes of the plan it was told of."""
FORM_GRACE = 120.0
"""Seconds without a new node after which one that is missing at the start is replaced by a spare: images are
pulled and imports are done at each machine's own pace."""
REPEAT = 1.0
"""Seconds after which a plan is sent again to a node that has not begun it, or another is asked for it."""
STANDBY_GRACE = 20.0
"""Seconds that a healthy node has to bring up a standby before a crashed worker's role moves elsewhere."""
FAILURES = 3
"""Controllers in a row that fail of an error of their own before the job ends: the next one would meet the
same again."""
FUTILE = 8
"""Recoveries in a row without a step that nobody had done before, after which the job is stopped."""


@dataclass
class Progress:
    """What roles have told of the epoch under way."""

    restored: dict[int, int] = field(default_factory=dict)
    """Role -> pid of its worker."""
    stepped: set[int] = field(default_factory=set)
    reopened: set[int] = field(default_factory=set)


class Controller:
    """State machine of one job."""

    def __init__(
        self,
        settings: Settings,
        job_dir: str,
        ids: Callable[[], str],
        recorded: Mapping[str, int],
        pid: int = 0,
    ) -> None:
        """`ids` draws names, lower-case letters and digits, that nobody else draws. `recorded`: of events
        that come once an epoch, the newest epoch that has them. `pid` is what `ftctl` is told."""
        self.facts = Facts(settings, job_dir, Groups(settings.start))
        self.phase: Phase = Forming()
        self.returning = Returning()
        self.completion = Completion()
        self.checkpoints = Checkpoints()
        self.progress = Progress()
        self._script = ScriptSettings()
        self._samples = Samples()
        self._questions = ctl.Questions()
        self._ids, self._recorded, self._pid = ids, dict(recorded), pid
        self._encoded = msgspec.Raw()
        """The plan's state."""
        self._peers: dict[Peer, Node] = {}
        self._arriving = 0
        """Connections that have not said yet who they are."""
        self._lost: dict[int, tuple[str, int]] = {}
        """Role -> node and pid of the worker that was lost last."""
        self._last_failure = ""
        self._shortage = ""
        """What was said of the workers that the job waits for."""
        self._not_written = (0, -1)
        """The epoch and version of the last durable checkpoint that failed."""
        self._unprotected = settings.command.no_python
        self._suspicious: set[str] = set()
        """Nodes of which a worker, or the agent, saw a connection to a peer break in this epoch."""
        self._leaving = False
        """Whether SIGTERM has come: what ends because of it is not replaced."""
        self._left: list[tuple[str, float]] = []
        """Nodes of which all workers have ended of SIGTERM, and when they have said so."""
        self._ends: tuple[float, str] | None = None
        """When the job ends of SIGTERM, whatever its workers do, and why."""
        self._now = 0.0
        self._effects: list[Effect] = []

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do about `event`, in order. `now`: seconds for which this process was awake."""
        self._now, self._effects = now, []
        if isinstance(event, Greeted):
            self._greet(event.peer, event.hello)
        elif isinstance(event, Received):
            self._receive(event.peer, event.message)
        elif isinstance(event, Tick):
            self._tick()
        elif isinstance(event, Disconnected):
            self._disconnected(event.peer)
        elif isinstance(event, Admitted):
            self._heard()
        elif isinstance(event, Arriving):
            self._arriving = event.connections
        elif isinstance(event, Refused):
            log.warning("refused: %s", event.reason)
            self._record("refused", event.reason)
        elif isinstance(event, Terminate):
            # `ftrun` has it from outside, and passes it on to the agents as well.
            self._leaving = True
            if isinstance(self.phase, Forming):
                self._end(ENDED, "it was told to end (SIGTERM) before it had begun")
        elif isinstance(event, LauncherGone):
            self._end(1, "ftrun is gone")
        elif isinstance(event, Failed):
            self._end(1, f"{FAILURES} controllers in a row have failed, this one of {event.error}")
        else:
            assert_never(event)
        return self._effects

    def _do(self, *effects: Effect) -> None:
        self._effects += effects

    def _record(self, name: str, reason: str = "", roles: Collection[int] = (), **more: Any) -> None:
        """A line of `events.jsonl`."""
        self._do(Record(name, self.facts.epoch, reason, tuple(roles), more))

    def _once(self, name: str, **more: Any) -> None:
        """Record what comes once an epoch: those who tell of it tell a restarted controller again."""
        if self._recorded.get(name, 0) < self.facts.epoch:
            self._recorded[name] = self.facts.epoch
            self._record(name, **more)

    # -- connections ---------------------------------------------------------------------------

    def _greet(self, peer: Peer, hello: AgentHello) -> None:
        """An agent is there, or again. Its greeting is a report too."""
        facts, node = self.facts, Node.of(peer, hello, self._now)
        self._heard()
        if isinstance(self.phase, Done):  # it has come while the others are told
            self._do(Send(peer, Shutdown(code=self.phase.code)), Close(peer))
            return
        if self._was_given_up(node):
            return
        known = facts.nodes.get(node.name)
        if known is not None:
            self._forget_peer(known)
        facts.nodes[node.name] = self._peers[peer] = node
        self._look_for_plan(epoch_of(node.greeted_with))
        facts.seen_at(versions(node.holdings))
        if isinstance(self.phase, Forming | Rebuilding):
            facts.epoch = max(facts.epoch, node.holdings.epoch, facts.plan_epoch)
        if node.holdings.configured is not None:
            self._take_settings(node.holdings.configured)
        self._do(*self._script.tell(node))
        if known is None:
            if isinstance(self.phase, Forming):
                self.phase.joined_at = self._now
            self._record("joined", node=node.name, agent_pid=hello.pid, domain=hello.domain)
            self.returning.node_joined()
        self._hear(node)
        if facts.parts:
            self._do(Send(peer, Release(parts=facts.parts)))
        self._remind(node, node.holdings.epoch, set(node.holdings.roles))
        if isinstance(self.phase, Running):
            self._tell_of_nodes()
            self._do(Send(peer, NodesChanged(id=facts.begun.id, nodes=dict(facts.begun.nodes))))
        self._do(*self.returning.back(node, set(node.holdings.roles)))
        self._decide_if_ready()

    def _heard(self) -> None:
        """Of somebody who knows the secret."""
        if isinstance(self.phase, Rebuilding):
            self.phase.heard_at = self._now

    def _was_given_up(self, node: Node) -> bool:
        """Whether a plan was made without this node since it began its own; if so, it is told.

        Its roles are played elsewhere then, and its state is of a past that may have been done again. A node
        that was thought lost and is back before any such plan takes part as if nothing had been.
        """
        plan, begun = self.facts.plan, node.greeted_with
        if plan is None or not begun or node.name in plan.nodes or begun == plan.id:
            return False
        if epoch_of(begun) > plan.epoch:
            return False
        reason = f"node {node.name} is back, too late: it joins again as a spare"
        self._record("given_up", reason, node=node.name)
        self._do(Send(node.peer, GivenUp()), Close(node.peer))
        return True

    def _look_for_plan(self, epoch: int) -> None:
        """Somebody has begun a plan of `epoch`: if it is newer than what is known, learn it first."""
        phase = self.phase
        if isinstance(phase, Rebuilding):
            if epoch > max(phase.newest, self.facts.plan_epoch):
                phase.newest, phase.asked_at = epoch, float("-inf")
        elif epoch > self.facts.plan_epoch:
            self.phase = Rebuilding(epoch, self._now)

    def _disconnected(self, peer: Peer) -> None:
        self._questions.disconnected(peer)
        if (node := self._peers.get(peer)) is not None:
            node.gone_since = self._now

    def _forget_peer(self, node: Node) -> None:
        self._peers.pop(node.peer, None)
        self._do(Close(node.peer))

    def _receive(self, peer: Peer, message: Message) -> None:
        if isinstance(message, AskStatus):
            answer = ctl.status(self.facts, self.phase, self.completion.finished, self._pid)
            self._do(Send(peer, answer))
        elif isinstance(message, Inject):
            self._do(*ctl.inject(self.facts, peer, message))
        elif isinstance(message, DescribeRole):
            self._do(*self._questions.ask(self.facts, peer, message, self._now))
        elif (node := self._peers.get(peer)) is None:
            self._do(Close(peer))  # it is lost: what it had said before is of no use, and it will greet again
        else:
            node.seen = self._now
            self._on_agent(node, message)

    # -- what agents say -----------------------------------------------------------------------

    def _on_agent(self, node: Node, message: Message) -> None:
        """What is understood without a plan; the rest once that is known."""
        facts = self.facts
        if isinstance(message, KeptState):
            self._take(plans.kept(message))
        elif isinstance(message, Heartbeat):
            node.beat(message)
            self._remind(node, message.epoch, set(message.roles))
            self._do(*self.returning.beat(facts, node.name))
            # Kept here, because a node that is lost takes what it said with it.
            facts.seen_at(beat.step for beat in message.roles.values())
        elif isinstance(message, Idle):
            node.idle = message.idle
            if isinstance(self.phase, Waiting):
                self._decide_if_ready()
        elif isinstance(message, Holdings):
            node.report(message)
            facts.seen_at(versions(message))
            self._decide_if_ready()
        elif not self._planned:
            node.unheard.append(message)
        else:
            self._on_news(node, message)

    def _on_news(self, node: Node, message: Message) -> None:
        facts, now = self.facts, self._now
        match message:
            case WorkerLost():
                self._worker_lost(node, message)
            case NoIdleWorker(role=role) if self.returning.concerns(role):
                self._do(*self.returning.fail(facts, f"no idle worker on {node.name}"))
            case RestoreFailed(epoch=facts.epoch, role=role, reason=reason):
                self._fail(f"role {role} on {node.name}: {reason}", [role])
            case NoIdleWorker(epoch=facts.epoch, role=role):
                self._fail(f"role {role} on {node.name}: no idle worker on its node", [role])
            case Restored() | Stepped() | Reopened():
                self._progressed(message)
            case Configure():
                self._asked_for_settings(node, message)
            case Configured(configured=values):
                node.configured(values)
                self._settle()
            case RoleState():
                self._do(*self._questions.answered(facts, message))
            case RoleLayout():
                facts.lay_out(message)
            case Trained():
                self._do(*self._samples.trained(facts, message))
            case OperationCounts():
                self._do(*self.returning.counted(facts, message))
            case Issued():
                if (found := self.completion.answered(message, facts.plan_epoch)) is not None:
                    self._end(1, found)
            case Prepared(role=role):
                running = isinstance(self.phase, Running)
                self._do(*self.returning.prepared(facts, role, running, now))
            case Held(epoch=facts.epoch, role=role):
                self._do(*self.returning.held(facts, role, now))
                self._return_if_due()
            case Unprotected():
                self._unprotected = True
            case Suspect(epoch=epoch, role=role, reason=reason):
                if epoch == facts.epoch:
                    self._suspicious.add(node.name)
                self._record("suspected", reason, [role])
            case DurableNames():
                if self.checkpoints.answered(node, message):
                    self._reconsider()
            case DurableWritten(role=role, version=version):
                self._record("durable", roles=[role], version=version)
            case DurableFailed(version=version):
                # One event a checkpoint: the other roles' parts fail of the same, or because this one did.
                if (facts.epoch, version) != self._not_written:
                    self._not_written = (facts.epoch, version)
                    reason = f"node {node.name}: {message.reason}"
                    self._record("durable_failed", reason, [message.role], version=version)
            case Completed():
                self.completion.completed[message.role] = message
                self._release_if_complete()
            case Finished(role=role):
                self.completion.finished.add(role)
                self._end_if_finished()
            case Leaving():
                self._record("leaving", f"node {node.name} was told to end (SIGTERM)", node=node.name)
                if not self._leaving and node.name not in facts.places.values():
                    self._do(Send(node.peer, Shutdown(code=ENDED)))
            case Left():
                # Where `ftrun` has told all, this process was first, but may read the signal afterwards.
                self._left.append((node.name, now))
            case RestoreFailed() | NoIdleWorker() | Held():
                pass  # of an epoch that is over
            case _:
                raise TypeError(f"{type(message).__name__} is nothing that an agent says")

    # -- a controller that was restarted -------------------------------------------------------

    @property
    def _planned(self) -> bool:
        """Whether the newest plan is here. Without it, a restarted controller understands little."""
        return not isinstance(self.phase, Rebuilding) or self.facts.plan_epoch >= self.phase.newest

    def _hear(self, node: Node) -> None:
        """What was said before the plan was here, and with the greeting."""
        if self._planned:
            said, node.unheard = node.unheard, []
            for message in said:
                self._on_news(node, message)

    def _take(self, state: JobState) -> None:
        """Of another controller, from an agent that has begun it."""
        if state.epoch <= self.facts.plan_epoch:
            return  # several were asked
        self.facts.take(state)
        self._begin(state)
        self.returning.taken_over(self._now)
        for node in list(self.facts.nodes.values()):
            if self._was_given_up(node):
                del self.facts.nodes[node.name]
                del self._peers[node.peer]

    def _rebuild(self, phase: Rebuilding) -> None:
        """Once it has heard from everybody, or it is clear who does not come, go on."""
        facts, now = self.facts, self._now
        begun = {name: epoch_of(node.greeted_with) for name, node in facts.nodes.items()}
        phase.newest = max(begun.values(), default=0)
        if not self._planned:
            if now - phase.asked_at >= REPEAT:
                there = [node for name, node in facts.nodes.items() if begun[name] == phase.newest]
                self._do(Send(there[phase.asked % len(there)].peer, SendState()))
                phase.asked_at, phase.asked = now, phase.asked + 1
            return
        for node in list(facts.nodes.values()):
            self._hear(node)
        if self.phase is not phase:
            return
        if facts.plan is None:
            self.phase = Forming(now)  # those who knew of a plan are gone again
            return
        quiet = now - phase.heard_at
        late = quiet > REBUILD_GRACE and (not self._arriving or quiet > facts.settings.silence_limit)
        if not late and set(facts.places.values()) - set(facts.nodes):
            return
        self._take_over(phase, facts.plan)

    def _take_over(self, phase: Rebuilding, plan: JobState) -> None:
        """Go on where the former controller was, or begin a recovery where that is not possible."""
        facts = self.facts
        self.phase = Running()
        if facts.initial is not None and facts.reached > facts.initial:
            facts.fill_catalogue()
        self._record("controller_restarted", f"plan of epoch {plan.epoch} taken over")
        if self._end_if_finished():
            return
        self._release_if_complete()
        self.completion.taken_over()
        # Nodes that have not begun this plan are sent it, and give its newcomers workers.
        behind = {node.name for node in facts.nodes.values() if node.begun != plan.id}
        given = {role for role in plan.newcomers if plan.roles.get(role) in behind}
        dead = [
            role for role, node in plan.roles.items() if role not in given and not facts.alive(role, node)
        ]
        for reason, roles in phase.undone:
            self._record("detected", reason, roles)
        self._tell_of_nodes()
        if dead or phase.undone or facts.epoch > plan.epoch:
            self._fail("lost while the controller was away" if dead else "recovery was under way", dead)

    # -- plans ---------------------------------------------------------------------------------

    def _begin(self, state: JobState) -> None:
        self.facts.plan, self._encoded, self.progress = state, plans.encode(state), Progress()

    def _start(self, start: Start, done: Operations) -> None:
        """Begin an epoch. `done`: the start-up operations of those who take part, by group."""
        facts, before = self.facts, self.facts.plan
        self.returning.epoch_begins(self._now)
        facts.groups.withdrawn = set()
        facts.groups.changed(start.version, start.roles)
        if before is None or (facts.initial is None and start.origin == "durable"):
            facts.start = start.version, start.origin
        job = before.job if before is not None else self._ids()
        state = plans.state(facts, start, done, name=f"{facts.epoch}-{self._ids()}", job=job)
        self._begin(state)
        self.phase, self._shortage = Running(), ""
        moved = {role: node for role, node in start.roles.items() if role in start.lost}
        about = {"version": start.version, "origin": start.origin, "moved": moved}
        self._record("decided", f"version {start.version} ({start.origin})", start.lost, **about)
        for node in facts.nodes.values():
            self._send_plan(node)
        if facts.settings.policy == "shrink":
            self._do(*self._samples.begin(facts))
            left = set(before.roles if before is not None else ()) - set(start.roles)
            returned = set(before.absent if before is not None else ()) & set(start.roles)
            for name, change in (("left", left), ("returned", returned)):
                if change:
                    self._record(name, f"replica groups {facts.groups.of(change)}", sorted(change))

    def _send_plan(self, node: Node) -> None:
        node.planned = self._now
        plan = plans.node_plan(self.facts.begun, node.name, self.facts.settings, self._encoded)
        self._do(Send(node.peer, plan))

    def _remind(self, node: Node, epoch: int, shown: Collection[int]) -> None:
        """Say again what a node has not heard: its connection broke, or a controller died over saying it.

        `epoch` is the newest that it has heard of; `shown` are the roles that it has, or has workers for.
        """
        facts, running = self.facts, isinstance(self.phase, Running)
        if isinstance(self.phase, Forming | Rebuilding | Done):
            return
        plan = facts.begun
        split = node.begun != plan.id and epoch_of(node.begun) == facts.epoch
        if epoch > facts.epoch or (split and running):
            facts.epoch = max(facts.epoch, epoch)
            self._end_epoch("detected", f"node {node.name} is in epoch {epoch} of another controller", [])
            return
        if epoch < facts.epoch:
            self._do(Send(node.peer, Abort(epoch=facts.epoch)))
        if not running:
            for role in sorted(facts.groups.withdrawn & set(shown)):
                self._do(Send(node.peer, KillWorker(role=role)))
        elif node.begun != plan.id:
            if self._now - node.planned > REPEAT:
                self._send_plan(node)
        else:
            here = {role for role, name in plan.roles.items() if name == node.name}
            # Of a group whose start was given up, perhaps by a former controller.
            if others := set(shown) - here - self.returning.on(node.name):
                self._do(Send(node.peer, Withdraw(roles=sorted(others))))

    def _tell_of_nodes(self) -> None:
        """Nodes without a role have come or gone in the epoch under way: they keep copies for others."""
        if isinstance(self.phase, Running) and (changed := plans.nodes_changed(self.facts)) is not None:
            self.facts.plan, news = changed
            self._do(*self.facts.to_all(news))

    # -- how far the roles are -----------------------------------------------------------------

    def _progressed(self, message: Restored | Stepped | Reopened) -> None:
        facts, progress = self.facts, self.progress
        if facts.plan is None or message.epoch != facts.epoch:
            return
        roles = set(facts.plan.roles)
        if isinstance(message, Restored):
            progress.restored[message.role] = message.pid
            if roles <= set(progress.restored):
                self._once("state_restored", version=facts.plan.version, pids=dict(progress.restored))
        elif isinstance(message, Stepped):
            progress.stepped.add(message.role)
            facts.seen_at([message.version])
            if roles <= progress.stepped:
                self.returning.stepped()
                self._once("resumed", version=message.version)
        else:
            survivors = roles - set(facts.plan.newcomers)
            progress.reopened.add(message.role)
            if survivors and survivors <= progress.reopened:
                self._once("communicators_ready")

    def _end_if_finished(self) -> bool:
        if not self.completion.over(self.facts.places):
            return False
        self._end(0, "every role has finished")
        return True

    def _release_if_complete(self) -> None:
        """Let the workers leave a part of their scripts, once all have come to the end of it."""
        facts = self.facts
        if not isinstance(self.phase, Running):
            return
        if parts := self.completion.passed(facts.places, facts.plan_epoch, facts.parts):
            facts.parts = parts
            self._do(*facts.to_all(Release(parts=parts)))

    # -- settings that the script brings -------------------------------------------------------

    def _asked_for_settings(self, node: Node, question: Configure) -> None:
        """A worker of `node` brings settings."""
        started = spares_started(self.facts)
        try:
            news = self._script.take(self.facts, question.settings)
        except ConfigError as error:
            self._do(Send(node.peer, answer(question, str(error))))
            return
        if news:
            self._settings_taken()
            values = question.settings.items()
            self._record("configured", ", ".join(f"{name} {value}" for name, value in values))
            if self.facts.settings.spares > started:
                warn_of_spares(self.facts, started)
        self._script.asking.append((node.peer, question))
        self._settle()

    def _take_settings(self, values: Mapping[str, Any]) -> None:
        """An agent uses them already, of a former controller."""
        try:
            if self._script.take(self.facts, values):
                self._settings_taken()
        except ConfigError as error:
            self._end(1, str(error))

    def _settings_taken(self) -> None:
        self.checkpoints = self.checkpoints.forgotten()
        for node in self.facts.nodes.values():
            self._do(*self._script.tell(node))

    def _settle(self) -> None:
        """Answer the workers that brought settings, once the agents of all roles use them."""
        facts = self.facts
        if not isinstance(self.phase, Running) or not self._script.used_by_all(facts):
            return
        # The directory may be known only now; no role has begun to train without what is in it.
        if (durable := self._durable(set(facts.places.values()))) is None:
            return
        if durable and facts.initial is None and facts.start[1] != "durable":
            version = max(durable)
            facts.start = version, "durable"
            reason = f"training starts from the durable checkpoint of step {version}"
            self._end_epoch("configured", reason, [])
            return
        self._do(*self._script.answer_all())

    # -- failures ------------------------------------------------------------------------------

    def _worker_lost(self, node: Node, lost: WorkerLost) -> None:
        """A worker with a role has ended, for whatever reason."""
        role = lost.role
        if self._lost.get(role) == (node.name, lost.pid):
            return  # it is said again
        self._lost[role] = node.name, lost.pid
        where = f"worker {lost.pid} of role {role} on {node.name}: {lost.exit}"
        if self.returning.concerns(role):
            self._do(*self.returning.fail(self.facts, where))
            return
        node.worker_died(role)
        if lost.crashed:
            self._fail(where, [role])
        elif lost.code:
            # A traceback is in the worker's log, and shown from there.
            short = _FRAMES.split(lost.traceback)[-1].rstrip()
            if short != lost.traceback.rstrip():
                short += f"\nIts traceback is in {self.facts.job_dir}/logs/role-{role}/stderr.log"
            self._end(1, f"{where}\n{lost.traceback}", f"{where}\n{short}")
        elif self.facts.initial is None or self._unprotected or self.completion.released:
            self.completion.finished.add(role)
            self._end_if_finished()
        else:
            self._end(1, f"{where}, in the middle of training (os._exit?): the others would wait for it")

    def _node_lost(self, node: Node, why: str) -> None:
        """What happens when a node dies.

        It is forgotten: what it says from now on is not heard, and should it come back after a plan was made
        without it, it joins as a spare (`_was_given_up`). If it was to bring a replica group back, that is
        given up, and nobody else notices. If it had roles, the epoch ends (`_fail`, `_end_epoch`): all
        workers leave their step (`Abort`), the other agents report what they hold (`Holdings`), and once all
        have (`_decide_if_ready`), other nodes get its roles (`deciding.decide`, `_start`), or the job waits
        for one. If it had none, nobody stops: the others are told where no more copies are to be kept.
        """
        del self.facts.nodes[node.name]
        self._forget_peer(node)
        if self.returning.on(node.name):
            self._do(*self.returning.fail(self.facts, f"node {node.name} is lost"))
        roles = [role for role, name in self.facts.places.items() if name == node.name]
        if roles:
            self._fail(f"node {node.name} lost: {why}", roles)
        else:
            self._record("spare_lost", f"node {node.name}: {why}", node=node.name)
            self._tell_of_nodes()
            self._decide_if_ready()

    def _fail(self, reason: str, roles: list[int]) -> None:
        """Roles have lost their worker or their state: end the epoch, unless it is ending already."""
        phase = self.phase
        if isinstance(phase, Rebuilding):
            phase.undone.append((reason, roles))
        elif isinstance(phase, Forming | Done):
            self._record("detected", reason, roles)
            self._form_if_ready()
        elif self.completion.released:
            # Training is behind everybody: nothing is left to lose.
            self._record("detected", f"{reason}; its script had only local work left", roles)
            self.completion.finished |= set(roles)
            self._end_if_finished()
        elif isinstance(phase, Quiescing | Waiting):
            self._record("detected", reason, roles)
            self._decide_if_ready()
        elif self._unprotected:
            self._end(1, f"{reason}; the script runs without fault tolerance (--ft)")
        else:
            self.facts.futile, self._last_failure = self.facts.futile + 1, reason
            self._end_epoch("detected", reason, roles)

    def _end_epoch(self, event: str, reason: str, roles: Collection[int]) -> None:
        """Have all workers leave what they are in, and decide how to go on."""
        self.facts.epoch += 1
        self._suspicious.clear()
        self.phase = Quiescing(self._now)
        self.checkpoints = self.checkpoints.forgotten()
        self._record(event, reason, roles)
        self._do(*self.facts.to_all(Abort(epoch=self.facts.epoch)))
        self._decide_if_ready()

    def _go_on_without(self, late: list[int]) -> None:
        """Replica groups that came back keep the others waiting: they leave once more, and try again."""
        facts = self.facts
        roles = facts.groups.roles(facts.groups.of(late))
        facts.groups.withdrawn |= set(roles)
        self._do(*self.returning.give_up(facts, {role: facts.places[role] for role in roles}))
        limit = facts.settings.return_limit
        reason = f"roles {late} did not have their state within {limit:g} s"
        self._end_epoch("not_returning", reason, roles)

    def _node_left(self, name: str) -> None:
        """All workers of a node have died of SIGTERM, which it had from outside."""
        if (node := self.facts.nodes.get(name)) is None:
            return  # its connection has broken since, and that was enough
        if not self._leaving:
            self._node_lost(node, "it was told to end (SIGTERM)")
            return
        # The job ends, or at least this machine, and what is left is the business of the next controller.
        del self.facts.nodes[name]
        self._forget_peer(node)
        if not set(self.facts.places.values()) & set(self.facts.nodes):
            self._end(ENDED, "it was told to end (SIGTERM)")
        if self._ends is None:
            reason = f"it was told to end (SIGTERM); some workers handle that, but not those of {name}"
            self._ends = self._now + GRACE, reason

    # -- time ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        left, now = self._left, self._now
        self._left = [(name, at) for name, at in left if now - at <= SIGNAL_LAG]
        for name, at in left:
            if now - at > SIGNAL_LAG:
                self._node_left(name)
        if self._ends is not None and now > self._ends[0]:
            self._end(ENDED, self._ends[1])
        self._look_for_silence()
        self._do(*self._questions.tick(now))
        self._settle()
        if isinstance(self.phase, Forming):
            self._form_if_ready()
        elif isinstance(self.phase, Rebuilding):
            self._rebuild(self.phase)
        elif isinstance(self.phase, Waiting):
            self._decide_if_ready()
        if isinstance(self.phase, Running):
            self._watch_endings()
        if isinstance(self.phase, Running) and self.facts.settings.policy == "shrink":
            self._bring_groups_back()

    def _look_for_silence(self) -> None:
        limit = self.facts.settings.silence_limit
        for node in list(self.facts.nodes.values()):
            # A peer that saw its connections break as well leaves no doubt.
            grace = 0.0 if self._suspicious - {node.name} else RETURN_GRACE
            if node.gone_since is not None and self._now - node.gone_since > grace:
                self._node_lost(node, "its agent's connection broke")
            elif self._now - node.seen > limit:
                self._node_lost(node, f"no heartbeat for {limit:.1f} s")

    def _watch_endings(self) -> None:
        facts = self.facts
        question = self.completion.question(facts.places, facts.plan_epoch, facts.parts, self._now)
        if question is not None:
            self._do(*facts.to_all(question))

    def _bring_groups_back(self) -> None:
        facts = self.facts
        if set(facts.places) <= self.progress.stepped:
            self._return_if_due()
            if not self.completion.released:
                self._do(*self.returning.tick(facts))
            return
        restored = self.progress.restored
        late = self.returning.returned.late(restored, facts.settings.return_limit, self._now)
        if late and restored:
            self._go_on_without(late)

    def _return_if_due(self) -> None:
        if isinstance(self.phase, Running) and (roles := self.returning.due(self.facts, self._now)):
            reason = f"replica groups {self.facts.groups.of(roles)} come back"
            self._end_epoch("returning", reason, roles)

    # -- decisions -----------------------------------------------------------------------------

    def _durable(self, nodes: Collection[str]) -> Mapping[int, str] | None:
        """The durable checkpoints that these nodes can read, by version; None while they are asked."""
        if not self.facts.settings.durable_dir:
            return {}
        self._do(*self.checkpoints.ask(self.facts.nodes, nodes))
        return self.checkpoints.common(nodes)

    def _reconsider(self) -> None:
        """More is known of the durable checkpoints."""
        self._form_if_ready()
        self._settle()
        self._decide_if_ready()

    def _form_if_ready(self) -> None:
        """The first epoch: node rank i plays roles i*n .. i*n+n-1; a spare, if that node does not come."""
        if not isinstance(self.phase, Forming):
            return
        facts, settings = self.facts, self.facts.settings
        wanted, n = settings.first_nodes, settings.nproc_per_node
        ranked = {node.hello.node_rank: node for node in facts.nodes.values()}
        missing = [rank for rank in range(wanted) if rank not in ranked]
        if missing and self._now - self.phase.joined_at > FORM_GRACE:
            spares = [node for node in facts.nodes.values() if node.hello.node_rank not in range(wanted)]
            ranked |= dict(zip(missing, spares, strict=False))
            self._tell_of_missing(missing[len(spares) :])
        first = [ranked[rank] for rank in range(wanted) if rank in ranked]
        if len(first) < wanted or any(node.idle < n for node in first):
            return
        places = (node.name for node in first for _ in range(n))
        roles = dict(zip(settings.start.present, places, strict=True))
        if (durable := self._durable(set(roles.values()))) is None:
            return
        if self.checkpoints.errors:
            # To begin anew, where there may be something to go on from, would be wrong.
            where = f"durable checkpoints in {settings.durable_dir} cannot be read"
            self._end(1, f"{where}: {'; '.join(self.checkpoints.errors.values())}")
            return
        facts.epoch += 1
        if durable:
            self._start(Start(roles, max(durable), "durable", {}, [], durable[max(durable)]), {})
        else:
            self._start(Start(roles, None, "initial", {}, []), {})

    def _tell_of_missing(self, ranks: list[int]) -> None:
        """Nodes of these ranks are missing at the start, and there are no spares for them."""
        which = ", ".join(map(str, ranks))
        what = f"the job waits to begin: there is no node of rank {which}, and no spare for it"
        if ranks and what != self._shortage:
            self._shortage = what
            self._record("waiting", what)
            log.warning("%s", what)

    def _decide_if_ready(self) -> None:
        """An epoch has ended: go on, once all nodes have reported and nothing is missing."""
        facts, phase = self.facts, self.phase
        if not isinstance(phase, Quiescing | Waiting):
            return
        nodes = facts.nodes.values()
        if any(n.holdings.reported != facts.epoch or n.gone_since is not None for n in nodes):
            return
        if facts.reached > facts.goal:  # the failure is the first that comes after it
            facts.futile, facts.goal = min(facts.futile, 1), facts.reached
        if facts.futile > FUTILE:
            count = f"{FUTILE} recoveries in a row without a new step after step {facts.goal}"
            self._end(1, f"{count}; the last failure: {self._last_failure}")
            return
        overdue = self._now - phase.since > STANDBY_GRACE
        outcome = decide(facts, self.returning.places(), self.checkpoints.common, overdue)
        if isinstance(outcome, StandbyComes):
            self.phase = Waiting(phase.since)
        elif isinstance(outcome, AskStorage):
            self._durable(outcome.nodes)
        elif isinstance(outcome, Shortage):
            self._wait(phase, outcome)
        elif isinstance(outcome, Start):
            self._start(outcome, completed(records(nodes, outcome.roles)))
        elif isinstance(outcome, StartOver):
            self._start_over(outcome)
        elif isinstance(outcome, GiveUp):
            self._end(1, self._explained(outcome))
        else:
            assert_never(outcome)

    def _start_over(self, outcome: StartOver) -> None:
        """Memory does not suffice: end all workers; once they are replaced, let the scripts begin anew."""
        if left := outcome.left:
            log.warning("%s\nThe script is started again from its own newest checkpoint.", outcome.reason)
            self._kill(left)
            self._end_epoch("starting_over", outcome.reason, sorted(left))
            return
        self.facts.forget()
        self._start(Start(outcome.roles, None, "initial", {}, outcome.lost), {})

    def _kill(self, places: Mapping[int, str]) -> None:
        for role, node in places.items():
            self._do(Send(self.facts.nodes[node].peer, KillWorker(role=role)))

    def _wait(self, phase: Quiescing | Waiting, shortage: Shortage) -> None:
        """There are too few workers."""
        facts, roles = self.facts, shortage.roles
        facts.groups.withdrawn |= set(shortage.combine)
        self._kill(shortage.combine)
        nodes = sorted({facts.places[role] for role in roles} - set(facts.nodes))
        what = f"no worker for roles {roles} (lost nodes: {', '.join(nodes) or 'none'})"
        what += f", and the job cannot shrink: {shortage.reason}" if shortage.reason else ""
        if self._leaving:
            self._end(1, f"{what}; the job was told to end (SIGTERM), so it does not wait for a node")
            return
        if facts.settings.policy == "stop" and nodes:
            self._end(1, f"{what}; policy is stop")
            return
        self.phase = Waiting(phase.since)
        if nodes and what != self._shortage:
            self._shortage = what
            how = f"ftrun --join {facts.settings.controller} --job-dir {facts.job_dir}"
            what += f"; {self._what_is_left()}"
            self._record("waiting", f"{what}: {how}", roles)
            log.warning("%s; waiting for a node: %s", what, how)

    def _what_is_left(self) -> str:
        """While the job waits for nodes."""
        facts = self.facts
        if any(facts.alive(role, node) for role, node in facts.places.items()):
            return "survivors hold their state until a node joins"
        left = "no node is left" if not facts.nodes else "no node with a role is left"
        if facts.resumes or facts.settings.durable_dir:
            return f"{left}; once nodes join, the job goes on from what others hold, or its newest checkpoint"
        if facts.initial is None or facts.reached <= facts.initial:
            return f"{left}; no step was done yet, and the job begins once nodes join"
        return f"{left}, and no checkpoint: what other nodes hold may suffice, else start the job again"

    def _explained(self, outcome: GiveUp) -> str:
        """To the person who has to start the job again."""
        if not outcome.unrecoverable:
            return outcome.reason
        unread = [f"\nCheckpoints cannot be read: {why}" for why in self.checkpoints.errors.values()]
        advice = (
            "it goes on from the newest checkpoint of the script's own."
            if self.facts.resumes
            else "with checkpoints of its script's own that it resumes from (Megatron-LM's --save), or else "
            "with --ft-durable-interval, it will have something to fall back to."
        )
        return "".join([outcome.reason, *unread, f"\nStart the job again; {advice}"])

    def _end(self, code: int, reason: str, shown: str = "") -> None:
        """End the job with this exit code, unless it is over. `shown`: on the console, if not `reason`."""
        if isinstance(self.phase, Done):
            return
        self.phase = Done(code)
        self._record("finished" if code == 0 else "stopped", reason)
        if code:
            self._do(Say(f"ftrun: the job stops: {shown or reason}"))
        self._do(*self.facts.to_all(Shutdown(code=code)), End(code))
