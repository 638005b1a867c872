"""The controller: one per job. Liveness, epochs, recovery decisions; control messages only.

A pure state machine: `Controller.handle(event, now)` returns effects, and `control.shell` carries them out.
Its state is soft: everything it knows it was told by the agents, and a new one learns it again from their
next greetings. Training does not notice its absence.

Here is what comes from outside: connections, messages, signals, time. What it means for the job is in
`control.recovery`: there is also what happens when a node dies (`RecoveryCoordinator.node_lost`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, assert_never

from msgspec.structs import replace

from ft_core.control.cluster_state import ClusterState, Node, epoch_of
from ft_core.control.decide import risk
from ft_core.control.decide.groups import Groups
from ft_core.control.decide.ladder import EscalationCause
from ft_core.control.events import (
    Admitted,
    Arriving,
    Close,
    Disconnected,
    Effect,
    Event,
    Failed,
    Greeted,
    LauncherGone,
    MessageBatch,
    Peer,
    PrintConsole,
    Pulsed,
    Received,
    Refuse,
    Refused,
    Resign,
    Send,
    Terminate,
    Tick,
)
from ft_core.control.lead import takeover
from ft_core.control.observe import ctl
from ft_core.control.observe.goodput import Account, Standing
from ft_core.control.observe.job_metrics import Numbers, counted
from ft_core.control.observe.observations import PartWritten, TimeGoes
from ft_core.control.observe.observer import Observer
from ft_core.control.observe.overview import Overview, overview
from ft_core.control.observe.progress_reporter import ProgressReporter
from ft_core.control.phases import Done, Forming, Phase, Rebuilding, Running, Waiting
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.control.script_settings import ScriptSettings, answer, spares_started, warn_of_spares
from ft_core.control.termination import Termination
from ft_core.errors import ConfigError
from ft_core.process.sigterm import ENDED
from ft_core.protocol import messages as m
from ft_core.protocol.goodput import Spent
from ft_core.settings import Settings

log = logging.getLogger(__name__)

FAILURES = 3
"""Controllers in a row that fail of an error of their own before the job ends: the next one would meet the
same again."""
AT_ONCE = 1024
"""Operations that are looked at in a tick, of those of which there is news."""


class Controller:
    """State machine of one job."""

    def __init__(
        self,
        settings: Settings,
        job_dir: str,
        ids: Callable[[], str],
        recorded: Mapping[str, int],
        job: str = "",
        pid: int = 0,
        term: int = 1,
        settled: float = 0.0,
        spent: Spent | None = None,
        ago: float = 0.0,
    ) -> None:
        """`ids` draws names, lower-case letters and digits, that nobody else draws. `recorded`: of events
        that come once an epoch, the newest epoch that has them. `job`: its id. `pid` is what `ftctl` is told.
        It leads in `term`, and decides nothing before the time `settled`: until then somebody may obey
        another. `spent`: what the job's time went to until so many seconds `ago`, as a predecessor has noted
        it."""
        self.cluster = ClusterState(settings, job_dir, Groups(settings.start), term)
        self._recovery = RecoveryCoordinator(self.cluster, ids, recorded, settled)
        self._do, self._record = self._recovery.do, self._recovery.record
        self._script = ScriptSettings()
        self._spent = spent, ago
        self._began = False
        self._observer: Observer
        """What is told of the job; there once anything has happened."""
        self._questions = ctl.Questions()
        self._bulletin = ProgressReporter()
        self._counted = risk.Last()
        self._termination = Termination()
        self._job, self._pid = job, pid
        self._session = ids()
        self._arriving = 0
        """Connections that have not said yet who they are."""
        self._told_to_end: set[m.NodeName] = set()
        """Nodes that were; if that is all that there are, the job was."""
        self._terminated = False
        """Whether this controller was, by SIGTERM, and not single nodes alone."""
        self._to_dismiss: set[m.NodeName] = set()
        """Those of them that nobody needs, and that have yet to hear that they may."""
        self._not_written = (0, -1)
        """The epoch and version of the last durable checkpoint that failed."""

    @property
    def phase(self) -> Phase:
        """What the job is doing."""
        return self._recovery.phase

    @property
    def _now(self) -> float:
        return self._recovery.now

    @property
    def busy(self) -> bool:
        """Whether somebody waits for this controller, or soon may."""
        phase = self.phase
        return not isinstance(phase, Waiting | Done) and not (
            isinstance(phase, Running) and self._recovery.progress.all_stepped
        )

    @property
    def account(self) -> Account:
        """Where the job's time goes; there once anything has happened."""
        return self._observer.account

    def numbers(self, wall: float, since_1970: float) -> Numbers:
        """For metrics, as of now: the same moment by the wall clock and in seconds since 1970."""
        cluster, epochs, account, counts = self.cluster, self._recovery, self.account, self._observer.metrics
        settings, groups = cluster.settings, cluster.groups.membership.groups
        there = round(groups * len(cluster.places) / settings.world_size)
        at = counts.durable
        return Numbers(
            job={
                "job": cluster.plan.job if cluster.plan is not None else "",
                "nodes": str(settings.nnodes),
                "workers": str(settings.world_size),
                "replicas": str(settings.replicas),
                "policy": settings.policy,
                "term": str(cluster.term),
            },
            phase=self.phase.name,
            epoch=cluster.epoch,
            step=account.version,
            spares=sum(node.idle > 0 for node in cluster.spares()),
            groups=(there, groups - there) if groups else None,
            failures=dict(counts.failures),
            recoveries=dict(counts.recoveries),
            rungs=dict(counts.rungs),
            recovery={phase: counted(each) for phase, each in counts.phases.items()},
            steps=counted(counts.steps),
            steps_redone=account.steps_redone,
            seconds=account.until(wall),
            waited=counts.waited,
            sent=counts.sent,
            durable=None if at is None else since_1970 - (wall - at),
            suspects=len(epochs.hangs.suspects),
            xids=dict(counts.xids),
            loss=counts.loss,
            writes=counted(counts.writes),
            broken=cluster.strikes.broken(epochs.now),
            held=risk.held(cluster, self._counted) if cluster.plan is not None else None,
            standing=self._standing(wall),
            unprotected=epochs.not_protected,
        )

    def overview(self, wall: float, since_1970: float) -> Overview:
        """For the page, likewise."""
        epochs, numbers = self._recovery, self.numbers(wall, since_1970)
        roles = epochs.completion.finished, epochs.hangs.suspects
        return overview(self.cluster, numbers, *roles, self.account.step, epochs.now)

    def _standing(self, wall: float) -> Standing:
        """How the job gets on."""
        epochs, account = self._recovery, self.account
        over = epochs.unprotected or epochs.completion.released or isinstance(self.phase, Forming | Done)
        return Standing(account.now, None if over else account.since_step(wall), account.patience)

    def handle(self, event: Event, now: float, wall: float | None = None) -> list[Effect]:
        """What to do about `event`, in order. `now`: seconds for which this process was awake; `wall`: all
        seconds, if it was not always."""
        epochs = self._recovery
        epochs.now, epochs.wall, epochs.effects = now, now if wall is None else wall, []
        if not self._began:
            (spent, ago), self._began = self._spent, True
            self._observer = Observer(Account(epochs.wall, spent, ago), epochs.wall)
            if spent is None:
                settings = self.cluster.settings
                about = f"{settings.nnodes} nodes of {settings.nproc_per_node} workers"
                epochs.record("started", about, time=TimeGoes())
        self._handle(event)
        return self._observer.read(epochs.effects, self.cluster, self.phase, epochs.now, epochs.wall)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Greeted):
            self._greet(event.peer, event.hello)
        elif isinstance(event, Received):
            self._receive(event.peer, event.message)
        elif isinstance(event, MessageBatch):
            for peer, message in event.messages:
                self._receive(peer, message)
        elif isinstance(event, Pulsed):
            self._pulsed(event.pulses)
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
            self._recovery.leaving = self._terminated = True
            if isinstance(self.phase, Forming):
                self._recovery.end_job(ENDED, "it was told to end (SIGTERM) before it had begun")
        elif isinstance(event, LauncherGone):
            self._recovery.end_job(1, "ftrun is gone")
        elif isinstance(event, Failed):
            self._recovery.end_job(
                1, f"{FAILURES} controllers in a row have failed, this one of {event.error}"
            )
        else:
            assert_never(event)

    def _greet(self, peer: Peer, hello: m.AgentHello) -> None:
        """An agent is there, or again. Its greeting is a report too."""
        cluster, node = self.cluster, Node.of(peer, hello, self._now)
        if hello.job not in ("", self._job):
            self._turn_away(peer, hello)
            return
        if hello.term > cluster.term and not cluster.settings.leadership:
            self._do(Refuse(f"node {hello.node} obeys a controller of term {hello.term}"), Close(peer))
            return
        if hello.term > cluster.term:
            self._do(Resign(hello.term))
            return
        self._do(Send(peer, m.LeaderHello(cluster.term, self._session, self._job)))
        self._heard()
        if isinstance(self.phase, Done):  # it has come while the others are told
            self._do(Send(peer, m.Shutdown(code=self.phase.code)), Close(peer))
            return
        if self._recovery.turn_away_if_replaced(node):
            return
        if cluster.strikes.lives(node.name, hello.pid):
            self._recovery.strikes_changed = True
        known = cluster.nodes.get(node.name)
        if known is not None:
            self._do(Close(known.peer))
            node.liveness.pulses = known.liveness.pulses
        cluster.add(node)
        self._recovery.failure_detector.greeted(node.name)
        self._recovery.rebuild_if_newer_plan(epoch_of(node.greeted_with))
        cluster.seen_at(node.holdings.versions())
        if isinstance(self.phase, Forming | Rebuilding):
            cluster.epoch = max(cluster.epoch, node.holdings.epoch, cluster.plan_epoch)
        if node.holdings.configured is not None:
            self._take_settings(node.holdings.configured)
        self._do(*self._script.tell(node))
        if known is None:
            self._recovery.leaving = self._terminated  # until it says that it was told to end as well
            if isinstance(self.phase, Forming):
                self.phase.joined_at = self._now
            if not isinstance(self.phase, Rebuilding):  # or all of them come again
                self._look_for_its_like(node)
            self._record("joined", node=node.name, agent_pid=hello.pid, domain=hello.domain)
            self._recovery.prestart.node_joined()
        self._hear(node)
        self._recovery.on_greeting(node, known is not None)

    def _turn_away(self, peer: Peer, hello: m.AgentHello) -> None:
        """An agent of a former job that had this address and secret: what it knows is nothing of this one."""
        reason = (
            f"node {hello.node} (process {hello.pid}) is of job {hello.job}, this is {self._job}: end what "
            "is left of the other on its machine"
        )
        if not self.cluster.settings.leadership:
            reason += f"; or, to go on with that job, end this one and start it with --rdzv-id {hello.job}"
        self._do(Refuse(reason), Send(peer, m.OtherJob(self._job)), Close(peer))

    def _look_for_its_like(self, node: Node) -> None:
        """Two nodes that were started with the same number: one of them only stands by."""
        rank = node.hello.node_rank
        if rank not in range(self.cluster.settings.nnodes):
            return
        others = [other.name for other in self.cluster.nodes.values() if other.hello.node_rank == rank]
        if len(others) > 1:
            names = " and ".join(sorted(others))
            said = f"ftrun: {names} were all started with --node-rank {rank}: one trains, the others stand by"
            self._do(PrintConsole(said, "WARNING"))

    def _pulsed(self, pulses: Iterable[m.Pulse]) -> None:
        """Nodes that have greeted live, unless this was said to another controller."""
        nodes, session, now = self.cluster.nodes, self._session, self._now
        for pulse in pulses:
            if pulse.session == session and (node := nodes.get(pulse.node)) is not None:
                node.liveness.pulse(now, pulse.number, pulse.stalled)

    def _heard(self) -> None:
        """Somebody who knows the secret was heard."""
        if isinstance(self.phase, Rebuilding):
            self.phase.heard_at = self._now

    def _disconnected(self, peer: Peer) -> None:
        self._questions.disconnected(peer)
        if (node := self.cluster.peers.get(peer)) is not None:
            self._recovery.disconnected(node)

    def _receive(self, peer: Peer, message: m.Message) -> None:
        if (node := self.cluster.peers.get(peer)) is not None:
            node.liveness.hear(self._now)
            self._on_agent(node, message)
        elif isinstance(message, m.AskStatus):
            epochs = self._recovery
            status = ctl.status(self.cluster, self.phase, epochs.completion.finished, self._pid, epochs.now)
            seconds = {str(cause): s for cause, s in self.account.until(epochs.wall).items() if s}
            about = {"complaint": self._standing(epochs.wall).complaint, "unprotected": epochs.not_protected}
            epochs.do(Send(peer, replace(status, seconds=seconds, **about)))
        elif isinstance(message, m.AskRows):
            self._do(*self._questions.list_rows(self.cluster, peer, message, self._now))
        elif isinstance(message, m.AskMore):
            self._do(*self._questions.more(peer))
        elif isinstance(message, m.Inject):
            self._do(*ctl.inject(self.cluster, peer, message))
        elif isinstance(message, m.AskHosts):
            self._do(*ctl.hosts(self.cluster, peer))
        elif isinstance(message, m.Forgive):
            self._do(*ctl.forgive(self.cluster, peer, message.node, self._now))
            self._recovery.strikes_changed = True
        elif isinstance(message, m.DrainNode):
            self._recovery.drain(peer, message.node)
        elif isinstance(message, m.DescribeRole | m.DescribeFlight):
            self._do(*self._questions.ask(self.cluster, peer, message, self._now))
        else:  # it is lost: what it had said before is of no use, and it will greet again
            self._do(Close(peer))

    # -- what agents say -----------------------------------------------------------------------

    def _on_agent(self, node: Node, message: m.Message) -> None:
        """What is understood without a plan; the rest once that is known."""
        cluster = self.cluster
        if isinstance(message, m.Heartbeat):  # first, since nearly all are
            self._recovery.on_heartbeat(node, message)
        elif isinstance(message, m.HoldingsChanged):
            if cluster.report(node, message):
                self._recovery.decide_if_ready()
            else:  # it will say everything
                self._do(Close(node.peer))
        elif isinstance(message, m.KeptState):
            self._recovery.adopt_plan_of_predecessor(node, message)
        elif isinstance(message, m.Hosts):
            node.hosts += message.hosts
        elif isinstance(message, m.NodesProbed):
            self._recovery.probed(node, message)
        elif isinstance(message, m.Idle):
            node.idle = message.idle
            if isinstance(self.phase, Waiting):
                self._recovery.decide_if_ready()
        elif not self._recovery.plan_known:
            node.messages_before_plan.append(message)
        else:
            self._hear(node)  # in the order in which it was said
            self._on_news(node, message)

    def _on_news(self, node: Node, message: m.Message) -> None:
        cluster, now = self.cluster, self._now
        match message:
            case m.WorkerLost():
                self._recovery.worker_lost(node, message)
            case m.NoIdleWorker(role=role) if self._recovery.prestart.concerns(role, node.name):
                self._do(*self._recovery.prestart.fail(cluster, f"no idle worker on {node.name}"))
            case m.RestoreFailed(epoch=cluster.epoch, role=role, reason=reason):
                self._recovery.restore_failed(node, f"role {role} on {node.name}: {reason}", role)
            case m.NoIdleWorker(epoch=cluster.epoch, role=role):
                self._recovery.fail(f"role {role} on {node.name}: no idle worker on its node", [role])
            case m.Restored() | m.Stepped() | m.Reopened():
                self._recovery.on_progress(message)
            case m.Configure():
                self._asked_for_settings(node, message)
            case m.Configured(configured=values):
                node.holdings.configured = values
                self._settle()
            case m.RoleState():
                self._do(*self._questions.described(cluster, message))
            case m.RoleFlight():
                self._do(*self._questions.flight(message))
            case m.RoleLayout():
                cluster.lay_out(message)
            case m.Trained():
                self._do(*self._recovery.samples.trained(cluster, message))
            case m.OperationCounts():
                self._do(*self._recovery.prestart.counted(cluster, message))
            case m.Issued() if self._recovery.prestart.concerns(message.role, node.name):
                pass  # another worker of this role takes part
            case m.Issued():
                if (found := self._recovery.completion.answered(message, cluster.plan_epoch)) is not None:
                    self._recovery.escalate(EscalationCause(found))
            case m.Prepared(role, counts):
                running = isinstance(self.phase, Running)
                started = self._recovery.prestart.prepared(cluster, node.name, role, counts, running, now)
                self._do(*started)
            case m.PausedAtStep(epoch=cluster.epoch, role=role):
                self._do(*self._recovery.prestart.held(cluster, role, now))
                self._recovery.return_if_due()
            case m.Unprotected():
                self._recovery.runs_unprotected(message)
            case m.Suspect(epoch=epoch):
                if epoch == cluster.epoch:
                    self._recovery.suspected(node, message)
            case m.DurableNames():
                if self._recovery.checkpoints.answered(node, message):
                    self._reconsider()
            case m.DurableWritten(role=role, version=version, seconds=seconds):
                self._record("durable", roles=[role], version=version)
                self._do(PartWritten(version, cluster.settings.world_size, seconds))
            case m.DurableFailed(version=version):
                # One event a checkpoint: the other roles' parts fail of the same, or because this one did.
                if (cluster.epoch, version) != self._not_written:
                    self._not_written = (cluster.epoch, version)
                    reason = f"node {node.name}: {message.reason}"
                    self._record("durable_failed", reason, [message.role], version=version)
            case m.Completed():
                self._recovery.completion.said(message)
                self._recovery.release_if_complete()
            case m.Finished(role=role):
                self._recovery.completion.finished.add(role)
                self._recovery.end_if_finished()
            case m.Leaving():
                self._record("leaving", f"node {node.name} was told to end (SIGTERM)", node=node.name)
                self._told_to_end = {*(self._told_to_end & cluster.nodes.keys()), node.name}
                if not isinstance(self.phase, Rebuilding):  # or others are yet to be heard of
                    self._look_whether_all_leave()
                self._to_dismiss |= {node.name} - cluster.roles_by_node.keys()
                self._dismiss()
            case m.Left():
                node.liveness.leaves = True
                self._termination.node_left(node.name, now)
            case m.RestoreFailed() | m.NoIdleWorker() | m.PausedAtStep():
                pass  # of an epoch that is over
            case m.Flights():
                self._recovery.hangs.answered(node.name, message)
            case _:
                raise TypeError(f"{type(message).__name__} is nothing that an agent says")

    # -- the rest ------------------------------------------------------------------------------

    def _hear(self, node: Node) -> None:
        """What was said before the plan was here, and with the greeting."""
        if self._recovery.plan_known:
            said, node.messages_before_plan = node.messages_before_plan, []
            for message in said:
                self._on_news(node, message)

    def _rebuild(self, phase: Rebuilding) -> None:
        """Once it has heard from everybody, or it is clear who does not come, go on."""
        cluster, now = self.cluster, self._now
        phase.newest = takeover.newest(cluster)
        if not self._recovery.plan_known:
            self._do(*takeover.ask(cluster, phase, now))
            return
        for node in list(cluster.nodes.values()):
            self._hear(node)
        if self.phase is not phase:
            return
        if cluster.plan is None:
            self._recovery.transition(Forming(now))  # those who knew of a plan are gone again
        elif now >= self._recovery.settled and takeover.complete(cluster, phase, self._arriving, now):
            self._look_whether_all_leave()
            self._recovery.take_over(phase, cluster.plan)

    def _asked_for_settings(self, node: Node, question: m.Configure) -> None:
        """A worker of `node` brings settings."""
        started = spares_started(self.cluster)
        try:
            news = self._script.take(self.cluster, question.settings)
        except ConfigError as error:
            self._do(Send(node.peer, answer(question, str(error))))
            return
        if news:
            self._settings_taken()
            values = question.settings.items()
            self._record("configured", ", ".join(f"{name} {value}" for name, value in values))
            if self.cluster.settings.spares > started:
                warn_of_spares(self.cluster, started)
        self._script.asking.append((node.peer, question))
        self._settle()

    def _take_settings(self, values: Mapping[str, Any]) -> None:
        """An agent uses them already, of a former controller."""
        try:
            if self._script.take(self.cluster, values):
                self._settings_taken()
        except ConfigError as error:
            self._recovery.end_job(1, str(error))

    def _settings_taken(self) -> None:
        self._recovery.checkpoints = self._recovery.checkpoints.forgotten()
        for node in self.cluster.nodes.values():
            self._do(*self._script.tell(node))

    def _settle(self) -> None:
        """Answer the workers that brought settings, once the agents of all roles use them."""
        cluster = self.cluster
        if not isinstance(self.phase, Running) or not self._script.used_by_all(cluster):
            return
        # INV-13 (settings): no role trains before all use the same. The directory may be known only now: then
        # nobody has begun to train without what is in it.
        durable = self._recovery.ask_durable_versions(cluster.roles_by_node)
        begins = (
            cluster.initial_version is None
            and cluster.started_from[1] != "durable"
            and not cluster.restart_epoch
        )
        if durable is None or (begins and self._recovery.end_if_storage_unreadable()):
            return
        if durable and begins:
            version = max(durable)
            cluster.started_from = version, "durable"
            reason = f"training starts from the durable checkpoint of step {version}"
            self._recovery.end_epoch("configured", reason, [])
            return
        self._do(*self._script.answer_all())

    def _look_whether_all_leave(self) -> None:
        """The job was told to end if all nodes were."""
        cluster = self.cluster
        self._recovery.leaving |= bool(cluster.roles_by_node) and self._told_to_end == cluster.nodes.keys()

    def _dismiss(self) -> None:
        """Nodes that were told to end, and that nobody needs, may; once nobody may obey another any more."""
        if not self._to_dismiss or self._now < self._recovery.settled or self._recovery.leaving:
            return
        names, self._to_dismiss = sorted(self._to_dismiss - self.cluster.roles_by_node.keys()), set()
        nodes = [node for name in names if (node := self.cluster.nodes.get(name)) is not None]
        self._do(*(Send(node.peer, m.Shutdown(code=ENDED)) for node in nodes))

    def _node_left(self, name: str) -> None:
        """All workers of a node have died of SIGTERM, which it had from outside."""
        if (node := self.cluster.nodes.get(name)) is None:
            return  # its connection has broken since, and that was enough
        if not self._recovery.leaving:
            self._recovery.node_lost(node, "it was told to end (SIGTERM)", m.Fault.TERMINATED)
            return
        # The job ends, or at least this machine, and what is left is the business of the next controller.
        self.cluster.drop(node)
        self._do(Close(node.peer))
        if self.cluster.nodes.keys().isdisjoint(self.cluster.roles_by_node):
            self._recovery.end_job(ENDED, "it was told to end (SIGTERM)")
        self._termination.end_later(name, self._now)

    def _reconsider(self) -> None:
        """More is known of the durable checkpoints."""
        self._recovery.form_if_ready()
        self._settle()
        self._recovery.decide_if_ready()

    def _tick(self) -> None:
        now = self._now
        self._dismiss()
        for name in self._termination.nodes_left(now):
            self._node_left(name)
        if reason := self._termination.overdue(now):
            self._recovery.end_job(ENDED, reason)
        self._recovery.check_nodes()
        self._recovery.tell_of_strikes()
        self._do(*self._questions.tick(now))
        self._settle()
        if isinstance(self.phase, Forming):
            self._recovery.form_if_ready()
        elif isinstance(self.phase, Rebuilding):
            self._rebuild(self.phase)
        elif isinstance(self.phase, Waiting):
            self._recovery.decide_if_ready()
        if isinstance(self.phase, Running):
            self._recovery.ask_about_script_end()
        self._recovery.check_hangs()
        if not self.busy:
            self.cluster.records.prepare(AT_ONCE)
        if isinstance(self.phase, Running):
            self._recovery.advance_prestarts()
        told = isinstance(self.phase, Running) and not self._recovery.unprotected
        progress = self._recovery.progress if told else None
        self._do(*self._bulletin.tick(self.cluster, self.phase, progress, now))
