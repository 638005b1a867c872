"""The machine of the controller: what comes from outside, and which part of the control it concerns.

A pure state machine: `Controller.handle(event, now)` returns effects, and `control.shell` carries them out.
Its state is soft: everything it knows it was told by the agents, and a new one learns it again from their
next greetings. Training does not notice its absence.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import assert_never

from ft_core.control import events as e
from ft_core.control.admission import Admission
from ft_core.control.changeovers import Changeovers
from ft_core.control.cluster.node import Node, epoch_of
from ft_core.control.cluster.state import ClusterState
from ft_core.control.corruption import Corruption
from ft_core.control.decide.groups import Groups
from ft_core.control.decisions import Decisions
from ft_core.control.device_findings import DeviceFindings
from ft_core.control.emitter import Emitter
from ft_core.control.hang_response import HangResponse
from ft_core.control.liveness.hangs.detector import Detector
from ft_core.control.node_failures import NodeFailures
from ft_core.control.observe import ctl
from ft_core.control.observe.goodput import Account
from ft_core.control.observe.observations import TimeGoes
from ft_core.control.observe.observer import Observer
from ft_core.control.observe.progress_reporter import ProgressReporter
from ft_core.control.operator_commands import OperatorCommands
from ft_core.control.phases import Done, Forming, Phase, Quiescing, Rebuilding, Running, Saving, Waiting
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.control.reports import Reports
from ft_core.control.script_ends import ScriptEnds
from ft_core.control.script_settings import ScriptSettings
from ft_core.control.slow_nodes import SlowNodes
from ft_core.control.succession import Succession
from ft_core.control.termination import Termination
from ft_core.control.view import JobView
from ft_core.control.worker_failures import WorkerFailures
from ft_core.protocol import messages as m
from ft_core.protocol.goodput import Spent
from ft_core.settings import Settings

log = logging.getLogger(__name__)

FAILURES = 3
"""Controllers in a row that fail of an error of their own before the job ends: the next one would meet the
same again."""
AT_ONCE = 1024
"""Start-up operations of which there is news that are looked at in one tick."""


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
        wall: float = 0.0,
    ) -> None:
        """`ids` draws names, lower-case letters and digits, that nobody else draws. `recorded`: of events
        that come once an epoch, the newest epoch that has them. `job`: its id. `pid` is what `ftctl` is told.
        It leads in `term`, and decides nothing before the time `settled`: until then somebody may obey
        another. `spent`: what the job's time went to until so many seconds `ago`, as a predecessor has noted
        it. `wall`: when this one begins, in all seconds."""
        self.cluster = ClusterState(settings, job_dir, Groups(settings.start), term)
        self._out = Emitter(self.cluster, recorded)
        self._recovery = RecoveryCoordinator(self.cluster, self._out, ids, settled)
        self._decisions = Decisions(self._recovery)
        self._hangs = Detector()
        self._hang_response = HangResponse(self._recovery, self._hangs)
        self._corruption = Corruption(self._recovery)
        self._changeovers = Changeovers(self._recovery)
        self._devices = DeviceFindings(self._recovery, self._changeovers)
        self._commands = OperatorCommands(self._recovery, self._changeovers)
        self._slow = SlowNodes(self._recovery, self._changeovers)
        self._admission = Admission(self._recovery, self._devices)
        self._scripts = ScriptEnds(self._recovery)
        self._reports = Reports(self._recovery, self._hangs, self._changeovers, self._scripts)
        self._worker_failures = WorkerFailures(self._recovery, self._scripts)
        self._node_failures = NodeFailures(self._recovery, self._scripts)
        self._termination = Termination(self._recovery, self._node_failures)
        self._succession = Succession(self._recovery, self._scripts, self._termination, self._on_news)
        self._script_settings = ScriptSettings(self._recovery, self._decisions)
        self._observer = Observer(Account(wall, spent, ago), wall)
        self.view = JobView(self._recovery, self._hangs, self._slow, self._observer, pid)
        """The job as others see it."""
        self._questions = ctl.Questions()
        self._reporter = ProgressReporter()
        self._job, self._alike = job, settings.alike
        command, _, self._flags = settings.digest.partition("-")
        self._known_commands = {command}
        """Digests of what the job's nodes run."""
        self._session = ids()
        self._starts_job = spent is None
        """Whether it has yet to record that the job has started."""

    @property
    def phase(self) -> Phase:
        """What the job is doing."""
        return self._recovery.phase

    @property
    def busy(self) -> bool:
        """Whether somebody waits for this controller, or soon may."""
        phase = self.phase
        return not isinstance(phase, Waiting | Done) and not (
            isinstance(phase, Running) and self._recovery.progress.all_stepped
        )

    def handle(self, event: e.Event, now: float, wall: float | None = None) -> list[e.Effect]:
        """What to do about `event`, in order. `now`: seconds for which this process was awake; `wall`: all
        seconds, if it was not always."""
        wall = now if wall is None else wall
        self._out.begin(now, wall)
        if self._starts_job:
            settings, self._starts_job = self.cluster.settings, False
            about = f"{settings.nnodes} nodes of {settings.nproc_per_node} workers"
            self._out.record("started", about, time=TimeGoes())
        self._handle(event)
        self._termination.let_go()  # first: who is told to end is not decided about
        self._decisions.settle()
        if isinstance(event, e.Tick):
            self._tell_progress()
        return self._observer.read(self._out.effects, self.cluster, self.phase, now, wall)

    def _handle(self, event: e.Event) -> None:
        if isinstance(event, e.Greeted):
            self._on_greeted(event.peer, event.hello)
        elif isinstance(event, e.Received):
            self._on_received(event.peer, event.message)
        elif isinstance(event, e.MessageBatch):
            for peer, message in event.messages:
                self._on_received(peer, message)
        elif isinstance(event, e.Pulsed):
            self._on_pulsed(event.pulses)
        elif isinstance(event, e.Tick):
            self._tick()
        elif isinstance(event, e.Disconnected):
            self._on_disconnected(event.peer)
        elif isinstance(event, e.Admitted):
            self._succession.on_heard()
        elif isinstance(event, e.Arriving):
            self._succession.on_arriving(event.connections)
        elif isinstance(event, e.Refused):
            log.warning("refused: %s", event.reason)
            self._out.record("refused", event.reason)
        elif isinstance(event, e.Terminate):
            self._termination.on_signal()
        elif isinstance(event, e.LauncherGone):
            self._recovery.end_job(1, "ftrun is gone", at_once=True)
        elif isinstance(event, e.Failed):
            why = f"{FAILURES} controllers in a row have failed, this one of {event.error}"
            self._recovery.end_job(1, why, at_once=True)
        else:
            assert_never(event)

    def _on_greeted(self, peer: e.Peer, hello: m.AgentHello) -> None:
        """An agent is there, or again. Its greeting is a report too."""
        cluster, node = self.cluster, Node.of(peer, hello, self._out.now)
        if hello.job not in ("", self._job):
            self._turn_away(peer, hello)
            return
        if not self._is_alike(hello):
            reason = f"node {hello.node} (process {hello.pid}) was started with another command line"
            told = m.OtherCommand(json.dumps(self._alike))
            self._out.emit(e.Refuse(reason), e.Send(peer, told), e.Close(peer))
            return
        if hello.term > cluster.term and not cluster.settings.leadership:
            reason = f"node {hello.node} obeys a controller of term {hello.term}"
            self._out.emit(e.Refuse(reason), e.Close(peer))
            return
        if hello.term > cluster.term:
            self._out.emit(e.Resign(hello.term))
            return
        self._out.emit(e.Send(peer, m.LeaderHello(cluster.term, self._session, self._job)))
        self._succession.on_heard()
        if isinstance(self.phase, Done):  # it has come while the others are told
            self._out.emit(e.Send(peer, m.Shutdown(code=self.phase.code)), e.Close(peer))
            return
        if self._succession.turn_away_if_replaced(node):
            return
        if cluster.strikes.lives(node.name, hello.pid):
            self._recovery.strikes_changed = True
        known = cluster.nodes.get(node.name)
        if known is not None:
            self._out.emit(e.Close(known.peer))
            node.liveness.pulses, node.counted = known.liveness.pulses, known.counted
        cluster.add(node)
        self._admission.on_joined(node, known)
        self._recovery.failure_detector.on_greeting(node.name)
        self._succession.rebuild_if_newer_plan(epoch_of(node.greeted_with))
        if not cluster.is_of_before_the_restart(node):
            cluster.versions.seen(node.holdings.versions())
        if isinstance(self.phase, Forming | Rebuilding):
            cluster.epoch = max(cluster.epoch, node.holdings.epoch, cluster.plan_epoch)
        if node.holdings.configured is not None:
            self._script_settings.on_use(node.holdings.configured)
        self._script_settings.tell(node)
        if known is None:
            self._termination.on_node_joined()
            if isinstance(self.phase, Forming):
                self.phase.joined_at = self._out.now
            if not isinstance(self.phase, Rebuilding):  # or all of them come again
                self._look_for_its_like(node)
            self._out.record("joined", node=node.name, agent_pid=hello.pid, domain=hello.domain)
            self._recovery.prestart.on_node_joined()
        self._succession.hear(node)
        self._reports.on_greeting(node, known is not None)

    def _is_alike(self, hello: m.AgentHello) -> bool:
        """Whether a node was started as this job was. Nodes that a job begins with may each have other
        arguments for the script, as under torchrun, and so may who comes in the place of one that is lost; a
        spare has those of one of them. Nobody who takes part is turned away."""
        command, _, flags = hello.digest.partition("-")
        if flags != self._flags and not hello.holdings.begun:
            return False
        if command in self._known_commands:
            return True
        if not (isinstance(self.phase, Forming) or hello.holdings.begun or self._replaces(hello)):
            return False
        self._known_commands.add(command)
        log.warning(
            "node %s runs another script than others, or has other arguments for it: so have roles that "
            "move there",
            hello.node,
        )
        return True

    def _replaces(self, hello: m.AgentHello) -> bool:
        """Whether it has a place in the job that no other node has."""
        others = (node.hello for node in self.cluster.nodes.values() if node.name != hello.node)
        return hello.node_rank >= 0 and all(other.node_rank != hello.node_rank for other in others)

    def _turn_away(self, peer: e.Peer, hello: m.AgentHello) -> None:
        """Refuse an agent of a former job that had this address and secret: what it knows is nothing of this
        one."""
        reason = (
            f"node {hello.node} (process {hello.pid}) is of job {hello.job}, this is {self._job}: end what "
            "is left of the other on its machine"
        )
        if not self.cluster.settings.leadership:
            reason += f"; or, to go on with that job, end this one and start it with --rdzv-id {hello.job}"
        self._out.emit(e.Refuse(reason), e.Send(peer, m.OtherJob(self._job)), e.Close(peer))

    def _look_for_its_like(self, node: Node) -> None:
        """Warn of two nodes that were started with the same rank: only one of them trains."""
        rank = node.hello.node_rank
        if rank not in range(self.cluster.settings.nnodes):
            return
        others = [other.name for other in self.cluster.nodes.values() if other.hello.node_rank == rank]
        if len(others) > 1:
            names = " and ".join(sorted(others))
            said = f"ftrun: {names} were all started with --node-rank {rank}: one trains, the others stand by"
            self._out.emit(e.PrintConsole(said, "WARNING"))

    def _on_pulsed(self, pulses: Iterable[m.Pulse]) -> None:
        """Nodes that have greeted live, unless this was said to another controller."""
        nodes, session, now = self.cluster.nodes, self._session, self._out.now
        for pulse in pulses:
            if pulse.session == session and (node := nodes.get(pulse.node)) is not None:
                node.liveness.pulse(now, pulse.number, pulse.stalled)

    def _on_disconnected(self, peer: e.Peer) -> None:
        self._questions.on_disconnected(peer)
        if (node := self.cluster.peers.get(peer)) is not None:
            self._node_failures.on_disconnected(node)

    def _on_received(self, peer: e.Peer, message: m.Message) -> None:
        if (node := self.cluster.peers.get(peer)) is not None:
            node.liveness.hear(self._out.now)
            self._on_agent_message(node, message)
        elif isinstance(message, m.AskStatus):
            self._out.emit(e.Send(peer, self.view.status()))
        elif isinstance(message, m.AskRows):
            self._out.emit(*self._questions.list_rows(self.cluster, peer, message, self._out.now))
        elif isinstance(message, m.AskMore):
            self._out.emit(*self._questions.more(peer))
        elif isinstance(message, m.Inject):
            self._commands.on_inject(peer, message)
        elif isinstance(message, m.AskHosts):
            self._out.emit(*ctl.hosts(self.cluster, peer))
        elif isinstance(message, m.Forgive):
            self._commands.on_forgive(peer, message.node)
        elif isinstance(message, m.DrainNode):
            self._changeovers.on_drain(peer, message.node)
        elif isinstance(message, m.DescribeRole | m.DescribeFlight):
            self._out.emit(*self._questions.ask(self.cluster, peer, message, self._out.now))
        else:  # it is lost: what it had said before is of no use, and it will greet again
            self._out.emit(e.Close(peer))

    # -- what agents say -----------------------------------------------------------------------

    def _on_agent_message(self, node: Node, message: m.Message) -> None:
        """Handle what is understood without a plan; the rest once the plan is known."""
        cluster = self.cluster
        if isinstance(message, m.Heartbeat):  # first, since nearly all are
            self._reports.on_heartbeat(node, message)
        elif isinstance(message, m.HoldingsChanged):
            if cluster.report(node, message):
                self._recovery.reconsider()
            else:  # it will say everything
                self._out.emit(e.Close(node.peer))
        elif isinstance(message, m.KeptState):
            self._succession.on_kept_state(node, message)
        elif isinstance(message, m.Hosts):
            node.hosts = [*(node.hosts if message.first else []), *message.hosts]
        elif isinstance(message, m.NodesProbed):
            self._node_failures.on_probed(node, message)
        elif isinstance(message, m.Idle):
            node.waiting = message.idle
            if isinstance(self.phase, Waiting):
                self._recovery.reconsider()
        else:
            self._succession.hear(node, message)

    def _on_news(self, node: Node, message: m.Message) -> None:
        cluster, now = self.cluster, self._out.now
        match message:
            case (
                m.WorkerLost(role=role, epoch=epoch)
                | m.Unprotected(role=role, epoch=epoch)
                | m.Finished(role=role, epoch=epoch)
            ) if cluster.has_successor(role, epoch):
                pass
            case m.WorkerLost():
                self._worker_failures.on_worker_lost(node, message)
            case m.NoIdleWorker(role=role) if self._recovery.prestart.concerns(role, node.name):
                self._out.emit(*self._recovery.prestart.fail(cluster, f"no idle worker on {node.name}"))
            case m.RestoreFailed(epoch=cluster.epoch, role=role, reason=reason):
                self._node_failures.on_restore_failed(node, f"role {role} on {node.name}: {reason}", role)
            case m.NoIdleWorker(epoch=cluster.epoch, role=role):
                self._recovery.fail(f"role {role} on {node.name}: no idle worker on its node", [role])
            case m.Checksums():
                self._corruption.on_checksums(node, message)
            case m.Restored() | m.Stepped() | m.Reopened():
                self._reports.on_progress(message)
            case m.Configure():
                self._script_settings.on_question(node, message)
            case m.Configured(configured=values):
                node.holdings.configured = values
                self._script_settings.answer_if_used()
            case m.RoleState():
                self._out.emit(*self._questions.on_role_state(cluster, message))
            case m.RoleFlight():
                self._out.emit(*self._questions.on_role_flight(message))
            case m.RoleLayout():
                cluster.lay_out(message)
            case m.Trained():
                self._out.emit(*self._recovery.samples.on_trained(cluster, message))
            case m.OperationCounts():
                self._out.emit(*self._recovery.prestart.on_counts(cluster, message))
            case m.Issued() if self._recovery.prestart.concerns(message.role, node.name):
                pass  # another worker of this role takes part
            case m.Issued():
                self._scripts.on_issued(message)
            case m.Prepared(role, counts):
                running = isinstance(self.phase, Running)
                started = self._recovery.prestart.on_prepared(cluster, node.name, role, counts, running, now)
                self._out.emit(*started)
            case m.PausedAtStep(epoch=cluster.epoch, role=role, version=version):
                self._changeovers.on_paused(role, version)
            case m.Unprotected():
                self._worker_failures.on_unprotected(message)
            case m.Suspect(epoch=epoch):
                if epoch == cluster.epoch:
                    self._node_failures.on_suspect(node, message)
            case m.DurableNames():
                if self._recovery.checkpoints.on_names(node, message):
                    self._script_settings.answer_if_used()
                    self._recovery.decision_due = True
            case m.DurableWritten():
                self._reports.on_durable_written(message)
            case m.DurableFailed():
                self._reports.on_durable_failed(node, message)
            case m.VersionSaved():
                self._decisions.final_save.on_saved(message)
            case m.Completed():
                self._scripts.on_completed(message)
            case m.Finished(role=role):
                self._scripts.on_finished(role)
            case m.Leaving():
                self._termination.on_node_told(node)
                self._changeovers.on_told(node)
            case m.Notice():
                self._changeovers.on_notice(node, message)
            case m.DeviceFinding():
                self._devices.on_finding(node, message)
            case m.NodeChecked():
                self._admission.on_checked(node, message)
            case m.Left():
                self._termination.on_node_left(node)
            case m.RestoreFailed() | m.NoIdleWorker() | m.PausedAtStep():
                pass  # of an epoch that is over
            case m.Flights():
                self._hangs.on_flights(node.name, message)
            case _:
                raise TypeError(f"{type(message).__name__} is nothing that an agent says")

    # -- the rest ------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self._out.now
        self._termination.tick()
        self._node_failures.tick()
        self._recovery.tell_of_strikes()
        self._out.emit(*self._questions.tick(now))
        self._script_settings.answer_if_used()
        asks = isinstance(self.phase, Quiescing) and self._recovery.checkpoints.asked
        if isinstance(self.phase, Forming | Waiting | Saving) or asks:
            self._recovery.decision_due = True  # it depends on the time as well
        self._succession.tick()
        self._scripts.tick()
        self._hang_response.tick()
        self._corruption.tick()
        self._slow.tick()
        self._admission.tick()
        self._changeovers.follow_notices()
        if not self.busy:
            self.cluster.records.prepare(AT_ONCE)
        if isinstance(self.phase, Running):
            self._changeovers.advance()

    def _tell_progress(self) -> None:
        """Tell people what is waited for, where that takes long."""
        told = isinstance(self.phase, Running) and not self._recovery.protection.unprotected
        progress = self._recovery.progress if told else None
        self._out.emit(*self._reporter.tick(self.cluster, self.phase, progress, self._out.now))
