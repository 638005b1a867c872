"""The agent of a node: what it does about whatever happens. No input, no output, no clock.

It acts on the controller's epochs (abort, plan) and on its workers' messages; it decides nothing about the
job. It outlives its workers, and it works on while the controller is away.

Here is what comes from outside: messages, workers that come and go, signals, time. What it means for the
epoch under way is in `node.epochs`.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import assert_never

from msgspec.structs import replace

from ft_core.node.about import About
from ft_core.node.admission.checked import Checked, findings
from ft_core.node.devices.reported import Reported
from ft_core.node.epochs import EpochExecutor
from ft_core.node.events import (
    AnswerPeer,
    AskPeer,
    BecomeSpare,
    Begin,
    Connected,
    DeviceFound,
    DurableDone,
    DurableListed,
    Effect,
    End,
    Event,
    Examined,
    ExamineNode,
    FlightRead,
    Forked,
    FromController,
    FromWorker,
    InvalidateCopy,
    Kill,
    KillNode,
    LauncherGone,
    LookForDurable,
    NodeExamined,
    NotConnected,
    Noticed,
    PeerAsks,
    Probe,
    Probed,
    RecordsFound,
    Replicated,
    Reserve,
    Signalled,
    Start,
    StateFetched,
    Terminate,
    Tick,
    ToWorker,
    VersionWritten,
    WorkerEnded,
    WorkerGone,
    WorkerReady,
    WriteStacks,
)
from ft_core.node.link.outage import Outage
from ft_core.node.memory import holdings
from ft_core.node.memory.view import View
from ft_core.node.metrics import NodeNumbers
from ft_core.node.phases import TRANSITIONS, Farewell, Over, Phase, Serving
from ft_core.node.termination import ANSWER, Termination
from ft_core.node.workers.worker_table import Worker, WorkerState, WorkerTable, in_words, lost
from ft_core.process.sigterm import ENDED, GRACE
from ft_core.process.transitions import follow
from ft_core.protocol import messages as m
from ft_core.protocol.table import Received
from ft_core.settings import Settings
from ft_core.state.manifest import Segment

log = logging.getLogger(__name__)

FAREWELL = 10.0
"""Seconds that workers whose scripts are done have to end, once the job is over."""
_TRAINED = 256
"""Steps that may pass while the controller is restarted, without the ledger missing one."""


SAME = 0.2
"""After which part of the limit of silence a heartbeat says again what the last one said. That the node lives
is said by the process beside its agent."""


class Agent:
    """State machine of one node."""

    def __init__(self, about: About, settings: Settings, view: View) -> None:
        self.about = about
        self._phase: Phase = Serving()
        self.crew = WorkerTable()
        self.epochs = EpochExecutor(about, settings, self.crew, view)
        self._do, self._post, self._say = self.epochs.do, self.epochs.post, self.epochs.say
        self._view = view
        self._plans = Received()
        self._beat: tuple[float, m.Heartbeat | None] = -math.inf, None
        """When this node has beaten last, over this connection, and what it said."""
        self._connected = False
        self._session = ""
        """The session of the controller that leads, or has led last."""
        self._outage = Outage(about.node, settings.meeting)
        self._termination = Termination()
        self._asking: dict[int, m.Configure] = {}
        """Worker -> the settings that it brings and waits for."""
        self._trained: deque[m.Trained] = deque(maxlen=_TRAINED)
        """The newest steps' samples, for the ledger."""
        self.draining = False
        """Whether it is to be taken out."""
        self.drained = False
        """Whether it was, and nobody needs it any more."""
        self._launched, self._digest = settings, settings.digest
        """The settings that `ftrun` has given, and their digest."""
        self._devices = Reported(60 * settings.strike_minutes)
        self._checked = Checked()
        self._notice: tuple[str, float] | None = None
        """Why this machine is about to go, and when."""

    @property
    def phase(self) -> Phase:
        """The phase of this agent's life."""
        return self._phase

    @property
    def _now(self) -> float:
        return self.epochs.now

    def _go(self, to: Phase) -> None:
        self._phase = follow(TRANSITIONS, self._phase, to)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What is to be done about `event`, in this order. `now`: seconds that this process was awake."""
        self.epochs.now, self.epochs.effects = now, []
        if isinstance(self.phase, Serving) or isinstance(event, LauncherGone):
            self._handle(event)
        elif isinstance(self.phase, Farewell):
            if isinstance(event, WorkerEnded):
                self.crew.remove(event.worker)
            self._end_if_alone(self.phase)
        return self.epochs.effects

    def numbers(self) -> NodeNumbers:
        """The node's numbers for metrics, as of now."""
        beat = self.epochs.heartbeat()
        workers = Counter(worker.doing.name.lower() for worker in self.crew)
        states = {doing.name.lower(): workers[doing.name.lower()] for doing in WorkerState}
        return NodeNumbers(
            self.about.node,
            self.about.domain,
            connected=self._connected,
            epoch=self.epochs.epoch,
            workers=states,
            roles=beat.roles,
            copies=len(beat.replicas),
        )

    def _handle(self, event: Event) -> None:
        match event:
            case Begin():
                for device in range(self.epochs.settings.nproc_per_node):
                    self._start(device)
                self._start(-1)  # the standby that takes over from a worker that crashes here
            case Connected(term, job):
                self._greet(term, job)
            case NotConnected():
                self._alone(event)
            case FromController(message):
                self._on_controller(message)
            case Forked(number, pid):
                if worker := self.crew.get(number):
                    worker.pid = pid
            case WorkerReady(number):
                if worker := self.crew.get(number):
                    self._connected_worker(worker)
            case FromWorker(number, said):
                if (worker := self.crew.get(number)) is not None:
                    self._hear(worker, said)
            case WorkerEnded():
                self._worker_ended(event)
            case WorkerGone(number):
                self.crew.gone(number)
            case Signalled(number):
                self._termination.passed_on(number)
            case Replicated():
                self.epochs.replicated(event)
            case StateFetched():
                self.epochs.brought(event)
            case DurableDone():
                self.epochs.written(event)
            case VersionWritten():
                self.epochs.version_written(event)
            case DurableListed(number, names, error, others):
                self._post(m.DurableNames(number, list(names), error, list(others)))
            case FlightRead(answer):
                self._post(answer)
            case Probed(number, reach):
                self._post(m.NodesProbed(number, reach))
            case Examined(number, end):
                if end and self.crew.get(number) is not None:
                    self._do(Kill(number))
            case PeerAsks():
                self._ask_worker(event)
            case RecordsFound():
                self.epochs.records_found(event)
            case Noticed(reason, seconds):
                self._notice = (
                    (reason, math.inf if seconds is None else self._now + seconds) if reason else None
                )
                self._tell_notice()
            case DeviceFound(finding):
                self._report(finding)
            case NodeExamined(checks=checks, findings=reported):
                for finding in findings(checks, reported):  # first: whoever hears the answer knows of them
                    self._report(finding)
                self._post(self._checked.ended(event, self._now))
            case Tick():
                self._tick()
            case Terminate():
                if not self._termination.under_way:
                    asks = self._connected and self._has_others()
                    self._termination.begin(self.crew.playing(), self._now + ANSWER * asks)
                    if "shutdown_timeout" in (settings := self._launched).given:
                        self._termination.leave_at = self._now + settings.shutdown_timeout
                    self._post(m.Leaving())
                    self._do(*self._termination.pass_on(self.crew.playing(), self._now))
                    self._leave_if_told()
            case LauncherGone():
                log.error("node %s: ftrun is gone; this agent stops", self.about.node)
                self._do(KillNode())
            case _:
                assert_never(event)

    def _tick(self) -> None:
        beat, now = self.epochs.heartbeat(), self._now
        settings, ago = self.epochs.settings, now - self._beat[0]
        news = beat != self._beat[1] and ago >= settings.pulse - settings.heartbeat / 2
        if news or ago >= settings.silence_limit * SAME:
            self._beat = now, beat
            self._post(beat)
            if self._connected:
                self.epochs.report_if_changed()
        self._do(*self._termination.pass_on(self.crew.playing(), self._now))
        self.epochs.tick()
        if self._now >= self._termination.leave_at:
            self._leave()

    # -- the controller ------------------------------------------------------------------------

    def _greet(self, term: int, job: str) -> None:
        self._connected = self._outage.served = True
        self._beat = -math.inf, None
        about = self.about
        # A controller that died may not have answered the questions, nor have written down the samples.
        said = [*self.epochs.said.again(self._now), *self._asking.values(), *self._trained]
        self._post(
            m.AgentHello(
                about.node,
                term,
                about.pid,
                about.node_rank,
                about.domain,
                about.data,
                holdings=self.epochs.greeting(),
                said=said,
                draining=self.draining,
                job=job,
                digest=self._digest,
            )
        )
        if self._notice is not None:
            self._tell_notice()
        for finding in self._devices.again(self._now):
            self._post(finding)
        if self._termination.under_way:
            self._post(m.Leaving())

    def _report(self, finding: m.DeviceFinding) -> None:
        if self._devices.add(finding, self._now):
            self._post(finding)

    def _tell_notice(self) -> None:
        reason, at = self._notice or ("", math.inf)
        self._post(m.Notice(reason, None if at == math.inf else max(0.0, at - self._now)))

    def _has_others(self) -> bool:
        """Whether there are nodes on which roles of this one might go on."""
        return self.epochs.plan is not None and len(self.epochs.plan.nodes) > 1

    def _alone(self, event: NotConnected) -> None:
        was, self._connected = self._connected, False
        if was and not event.other_job:
            self._outage.begins(self._now)
            self._leave_if_told()
            return
        node, address = self.about.node, self.epochs.settings.meeting
        if event.refused and not self._outage.served:
            log.error("node %s leaves: %s", node, event.reason)
            self._end(2)
            return
        if event.other_job:
            self._outage.warn(event.reason, self._now)
        if event.stranger:
            problem = f"whoever answers at {address} is not this job's controller: {event.reason}"
            self._outage.warn(problem, self._now)
        if self._outage.goes_on(bool(self.crew.playing()), self._now, event.reason):
            self._end(1)
        else:
            self._leave_if_told()

    def _refused(self, differences: str) -> None:
        """The job was started with another command line: roles that went on here would be other ones."""
        said = f"it was started with another command line than the job it came to: {differences}"
        if self.epochs.plan is not None:
            self._outage.warn(said, self._now)
            return
        log.error(
            "node %s leaves: %s; give it that of the job; or for another job, another address and --job-dir",
            *(self.about.node, said),
        )
        self._end(2)

    def _on_controller(self, message: m.ToAgent) -> None:
        match message:
            case m.LeaderHello(session=session):
                if session != self._session:
                    self._session = session
                    self.epochs.end_starts()
            case m.OtherJob():
                pass  # heard by whoever has taken the connection
            case m.OtherCommand(alike):
                self._refused("; ".join(self._launched.differences(json.loads(alike)).values()))
            case m.Abort(epoch):
                self.epochs.abort(epoch)
            case m.Hosts() | m.OwnPlan():
                self._plans.hear(message)
            case m.SharedPlan():
                if (plan := self._plans.plan(message, self.epochs.plan)) is not None:
                    self._look_for_its_place(plan)
                    self.epochs.begin(plan)
            case m.NodesChanged():
                self.epochs.nodes_changed(message)
            case m.Verified(epoch, version):
                self.epochs.verified(epoch, version)
            case m.KillWorker(role):
                if role is None:
                    self._do(KillNode())
                elif worker := self.crew.of_role(role):
                    worker.ordered = True
                    self._do(Kill(worker.number))
            case m.DescribeRole(role):
                self._post(holdings.role_state(role, self.crew, self._view))
            case m.Examine(role, pid, end):
                worker = self.crew.of_role(role)
                if worker is not None and worker.pid == pid:
                    self._do(WriteStacks(worker.number, role, end))
            case m.SendFlight() | m.DescribeFlight():
                self.epochs.read_flight(message)
            case m.ListDurable(number):
                self._do(LookForDurable(number))
            case m.ProbeNodes(number, addresses):
                self._do(Probe(number, addresses))
            case m.SendHeartbeat(number):
                self._post(replace(self.epochs.heartbeat(), answers=number))
            case m.Drain(wanted):
                self.draining = wanted
                self._termination.answered(wanted)
                self._do(*self._termination.pass_on(self.crew.playing(), self._now))
            case m.Release(parts):
                self.epochs.parts = parts
                self._tell_players(message)
            case m.SendCounts() | m.SendIssued() | m.PauseAfterStep():
                self._tell_players(message)
            case m.Prepare():
                self.epochs.prepare(message)
            case m.SendState():
                self.epochs.send_state()
            case m.GivenUp():
                log.warning(
                    "the job goes on without node %s, which was not heard of for too long, or does not reach "
                    "another: its workers "
                    "end, and it joins again as a spare",
                    self.about.node,
                )
                self._go(Over())
                self._do(BecomeSpare())
            case m.Withdraw(roles):
                self.epochs.withdraw(roles)
            case m.UseSettings(values):
                self.epochs.use(values)
            case m.ConfigureAnswer(number):
                self._asking.pop(number, None)
                self._do(ToWorker(number, message))
            case m.KeepStrikes(strikes):
                self.epochs.keep_strikes(strikes)
                self._devices.counts(self.epochs.strikes_here())
            case m.CheckNode(again):
                answer = self._checked.asked(again, self._now)
                if isinstance(answer, m.NodeChecked):
                    self._post(answer)
                elif answer:
                    self._do(ExamineNode())
            case m.SaveVersion():
                self.epochs.save(message)
            case m.Shutdown(code, drained):
                self.drained = drained
                announced = self._notice is not None or self._termination.under_way
                self._end(ENDED if drained and announced else code)
            case _:
                assert_never(message)

    def _look_for_its_place(self, plan: m.NodePlan) -> None:
        """Whoever was started as one of those that train is told that it does not."""
        node, rank = self.about.node, self.about.node_rank
        trains = node in plan.roles.values() or rank not in range(self.epochs.settings.nnodes)
        if self.epochs.plan is None and not trains:
            log.warning(
                "node %s was started with --node-rank %d, and stands by as a spare: another has that place",
                *(node, rank),
            )

    # -- workers -------------------------------------------------------------------------------

    def _tell_players(self, message: m.ToWorker) -> None:
        self._do(*(ToWorker(worker.number, message) for worker in self.crew.playing()))

    def _connected_worker(self, worker: Worker) -> None:
        if worker.target_role >= 0:
            self.epochs.prepare_standby(worker)
            return
        worker.doing = WorkerState.IDLE
        self._post(m.Idle(self.epochs.idle))

    def _start(self, device: int) -> None:
        self._do(Start(self.crew.add(device).number, device))

    def _hear(self, worker: Worker, message: m.FromWorker) -> None:
        ahead = worker.doing is WorkerState.AHEAD
        if not ahead and not worker.plays:
            pass  # it has no role yet, or none any more
        elif not _speaks_for_itself(worker, message):
            what = f"it has sent {type(message).__name__} in the name of another worker"
            worker.failed = m.ScriptFailed(m.Fault.ENGINE, what, "", "")
            self._do(Kill(worker.number))
        elif ahead:
            self._on_standby(worker, message)
        else:
            self._on_worker(worker, message)

    def _on_worker(self, worker: Worker, message: m.FromWorker) -> None:
        role = worker.role
        match message:
            case m.WorkerHello():
                pass  # heard by whoever has taken the connection
            case m.Staged(of, version, sums):
                if of == role and sums:
                    self.epochs.have_compared(worker, version, sums)
                self.epochs.staged(worker, of, version)
            case m.Allocate():
                self._allocate(worker, message)
            case m.Registered(version, ring, resumes, group, counts):
                worker.stage, worker.initial, worker.ring = "training", version, ring
                worker.resumes, worker.group, worker.counts = resumes, group, counts
                if worker.doing is WorkerState.AHEAD:
                    self.epochs.ready.registered(worker)
                elif role not in self.epochs.roles_here():
                    self._say(m.Prepared(role, counts))
            case m.Quiesced(epoch, stage, counts):
                worker.quiesced, worker.stage, worker.counts = epoch, stage, counts
                worker.answers_by = math.inf
                if worker.plays:
                    self.epochs.report_if_quiet()
            case m.Restored(version=version, loaded=loaded):
                if loaded:  # it needs no memory of its own, if both buffers have been filled from elsewhere
                    self._lay_out(worker, role, self._view.segments(role))
                self._say(message)
                for held in [role, *self.epochs.adopted_by(role)] if loaded else []:
                    self.epochs.staged(worker, held, version)
            case m.Stepped():
                self._say(message)
                self.epochs.stepped(role)
            case m.Completed(epoch=epoch, part=part):
                worker.completed = epoch, part
                self._say(message)
            case m.Finished():
                worker.doing = WorkerState.FINISHED
                self._say(message)
            case m.Reopened() | m.PausedAtStep() | m.Unprotected() | m.Suspect():
                self._say(message)
            case m.OperationCounts() | m.Issued():
                self._post(message)
            case m.Trained():
                self._trained.append(message)
                self._post(message)
            case m.Configure():
                self._asking[worker.number] = message
                self._post(message)
            case m.CorruptCopy(of, slot, reason):
                self._do(InvalidateCopy(of, slot, adopted=of != role))
                self._say(m.RestoreFailed(self.epochs.epoch, role, reason))
            case m.AskStartupEntries() | m.AskProgress():
                self._ask_peer(worker, message)
            case m.StartupEntries() | m.Progress():
                self._do(AnswerPeer(message.id, message))
            case m.ScriptFailed():
                worker.failed = message
                self._do(ToWorker(worker.number, m.FailureNoted()))
            case _:
                assert_never(message)

    def _on_standby(self, worker: Worker, message: m.FromWorker) -> None:
        """One that starts a role ahead of need: the job hears nothing of it."""
        match message:
            case m.Registered() | m.Quiesced() | m.ScriptFailed() | m.Configure():
                self._on_worker(worker, message)
            case m.AskStartupEntries() | m.AskProgress():
                self._ask_peer(worker, message)
            case m.Unprotected(so_far=False) | m.Finished():
                worker.failed = m.ScriptFailed(m.Fault.EXITED, "it does not come to any training", "", "")
                self._do(Kill(worker.number))
            case _:
                pass

    def _allocate(self, worker: Worker, request: m.Allocate) -> None:
        self._lay_out(worker, request.role, [Segment.of(layout) for layout in request.segments])
        adopted, again = request.role != worker.role, not self.crew.ending
        self._do(Reserve(worker.number, request, adopted, again))

    def _lay_out(self, worker: Worker, role: int, segments: Sequence[Segment]) -> None:
        """Say what the state of a role is, which `worker` plays or has adopted."""
        self._say(
            m.RoleLayout(
                epoch=self.epochs.epoch,
                role=role,
                adopted=role != worker.role,
                segments={segment.id: segment.held_by for segment in segments},
                # One that began while others trained begins where they were, and not where a script does.
                initial=worker.initial if worker.began_with is None else None,
                resumes=worker.resumes,
                group=worker.group,
            )
        )

    def _ask_peer(self, worker: Worker, question: m.AskStartupEntries | m.AskProgress) -> None:
        """A newcomer here asks something of a role elsewhere: its agent is asked."""
        assert self.epochs.plan is not None
        node = self.epochs.plan.roles.get(question.holder, "")
        if (where := self.epochs.plan.nodes.get(node)) is None:
            error = f"role {question.holder} is on no node that is known here"
            self._do(ToWorker(worker.number, m.Refused(question.id, error)))
        else:
            self._do(AskPeer(worker.number, question, where.data))

    def _ask_worker(self, event: PeerAsks) -> None:
        """Answer an agent whose worker asks one of this node, by asking that."""
        question = event.question
        if (worker := self.crew.of_role(question.holder)) is None:
            error = f"role {question.holder} has no worker on node {self.about.node}"
            self._do(AnswerPeer(question.id, error))
        else:
            self._do(ToWorker(worker.number, question))

    def _worker_ended(self, event: WorkerEnded) -> None:
        worker, code = self.crew.remove(event.worker), event.code
        self._asking.pop(event.worker, None)
        if worker.target_role >= 0:
            self.epochs.ready.ended(worker, in_words(code), self._now)
            if worker.needed:  # in the place of whom it would have taken
                self._start(-1)
            return
        if self._termination.explains(code):
            self.epochs.report_if_quiet()  # else nobody knows what could be saved of what is held here
            if self.crew.playing():
                self._termination.leave_at = min(self._termination.leave_at, self._now + GRACE)
            else:
                self._leave()
            return
        # One that is done and was told to end is to be replaced: all scripts are started again.
        again = worker.doing is WorkerState.FINISHED and worker.ordered
        if worker.doing is WorkerState.PLAYING or again:
            self._say(lost(worker, code, event.version, event.out_of_memory))
            replaced, effects = self.epochs.ready.needed(worker.role)
            self._do(*effects)
            if not replaced:
                self._start(-1)
        elif worker.doing is not WorkerState.FINISHED:
            self._start(worker.device)
        self.epochs.report_if_quiet()

    # -- the end -------------------------------------------------------------------------------

    def _leave_if_told(self) -> None:
        """Where nobody trains, and nobody is there who could say whether this node is needed, or the job has
        not begun: it waits, and need not."""
        waits = not self._connected or self.epochs.plan is None
        if self._termination.under_way and waits and not self.crew.playing():
            self._leave()

    def _leave(self) -> None:
        """Let the controller know that no failure did it. What this node holds may be wanted yet, so it stays
        for the controller's word; where there is none it ends, and after a while."""
        self._post(m.Left())
        if self._connected and self.epochs.plan is not None and not self._termination.stays:
            self._termination.stay(self._now + self.epochs.settings.shutdown_timeout)
        else:
            self._end(ENDED)

    def _end(self, code: int) -> None:
        self._go(farewell := Farewell(code, self._now + FAREWELL))
        self._do(*(ToWorker(worker.number, m.Exit()) for worker in self.crew.playing()))
        self._end_if_alone(farewell)

    def _end_if_alone(self, farewell: Farewell) -> None:
        left = any(worker.doing is WorkerState.FINISHED for worker in self.crew)
        if not left or self._now >= farewell.until:
            self._go(Over())
            self._do(End(farewell.code))


def _speaks_for_itself(worker: Worker, said: m.FromWorker) -> bool:
    """Whether a message that the controller gets as it is says who has said it."""
    if isinstance(said, m.Configure):
        return said.worker == worker.number
    return not isinstance(said, m.FromRole) or said.role == worker.role
