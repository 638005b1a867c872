"""The agent of a node: what it does about whatever happens. No input, no output, no clock.

It acts on the controller's epochs (abort, plan) and on its workers' messages; it decides nothing about the
job. It outlives its workers, and it works on while the controller is away.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, assert_never

import msgspec

from ft_core.node import holdings
from ft_core.node.copies import Copies
from ft_core.node.crew import NONE, Crew, Doing, Worker, in_words
from ft_core.node.events import (
    AnswerPeer,
    AskPeer,
    BecomeSpare,
    Begin,
    BeginEpoch,
    Bring,
    Brought,
    Commit,
    Connected,
    DropAfter,
    DurableDone,
    DurableListed,
    Effect,
    End,
    Event,
    Forked,
    FromController,
    FromWorker,
    KeepOnly,
    Kill,
    KillNode,
    LauncherGone,
    LookForDurable,
    NotConnected,
    PeerAsks,
    Replicated,
    Report,
    Reserve,
    ShowRest,
    Signalled,
    Start,
    Strike,
    Terminate,
    Tick,
    ToController,
    ToWorker,
    UsePlan,
    UseSettings,
    WorkerEnded,
    WorkerReady,
)
from ft_core.node.outage import Outage
from ft_core.node.said import OfRole, Said
from ft_core.node.termination import Termination
from ft_core.node.view import View
from ft_core.process.inject import ENV as INJECT_ENV
from ft_core.process.sigterm import ENDED, GRACE
from ft_core.protocol import messages as m
from ft_core.settings import Settings
from ft_core.state.manifest import Segment

log = logging.getLogger(__name__)

FAREWELL = 10.0
"""Seconds that workers whose scripts are done have to end, once the job is over."""
_TRAINED = 256
"""Steps that may pass while the controller is restarted, without the ledger missing one."""


@dataclass(frozen=True)
class About:
    """A node, and where it can be reached."""

    node: str
    domain: str
    node_rank: int
    """Position at the start; -1: a spare."""
    pid: int
    data: str
    """Address of its memory, for other agents."""
    store: str
    """Address of the stores of epochs, should role 0 be here."""
    master: str
    """Where a script may listen, should role 0 be here (MASTER_ADDR and MASTER_PORT)."""
    job_dir: str
    environment: Mapping[str, str]
    """What its workers have in theirs, where the job's settings do not say."""


class Phase(Enum):
    """Of an agent's life."""

    SERVING = auto()
    FAREWELL = auto()
    """The node is to end; workers whose scripts are done are waited for."""
    OVER = auto()


class Agent:
    """One node's."""

    def __init__(self, about: About, settings: Settings, view: View) -> None:
        self.about, self.settings = about, settings
        self.phase = Phase.SERVING
        self.epoch = 0
        self.reported = 0
        """The newest epoch before which no worker here is inside a step any more."""
        self.plan: m.NodePlan | None = None
        self.configured: dict[str, Any] | None = None
        """Settings that the script has brought; `settings` has them in it."""
        self.crew = Crew()
        self._view = view
        self._copies = Copies(about.node)
        self._connected = False
        self._outage = Outage(about.node, settings.controller)
        self._termination = Termination()
        self._said = Said()
        self._asking: dict[int, m.Configure] = {}
        """Worker -> the settings that it brings and waits for."""
        self._trained: deque[m.Trained] = deque(maxlen=_TRAINED)
        """The newest steps' samples, for the ledger."""
        self._stuck_at = math.inf
        """When workers are killed that have not left their step for this epoch."""
        self._code = 0
        self._farewell_until = 0.0
        self._now = 0.0
        self._effects: list[Effect] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What is to be done about `event`, in this order. `now`: seconds that this process was awake."""
        self._now, self._effects = now, []
        if self.phase is Phase.SERVING or isinstance(event, LauncherGone):
            self._handle(event)
        elif self.phase is Phase.FAREWELL:
            if isinstance(event, WorkerEnded):
                self.crew.remove(event.worker)
            self._end_if_alone()
        return self._effects

    def _do(self, *effects: Effect) -> None:
        self._effects += effects

    def _handle(self, event: Event) -> None:
        match event:
            case Begin():
                for device in range(self.settings.nproc_per_node):
                    self._start(device)
                self._start(-1)  # the standby that takes over from a worker that crashes here
            case Connected():
                self._greet()
            case NotConnected():
                self._alone(event)
            case FromController(message):
                self._on_controller(message)
            case Forked(number, pid):
                if worker := self.crew.get(number):
                    worker.pid = pid
            case WorkerReady(number):
                if worker := self.crew.get(number):
                    worker.doing = Doing.IDLE
                    self._post(m.Idle(len(self.crew.idle())))
            case FromWorker(number, said):
                worker = self.crew.get(number)
                if worker is not None and worker.plays:
                    self._on_worker(worker, said)
            case WorkerEnded():
                self._worker_ended(event)
            case Signalled(number):
                self._termination.passed_on(number)
            case Replicated():
                self._replicated(event)
            case Brought():
                self._brought(event)
            case DurableDone():
                self._do(*self._copies.written(event))
            case DurableListed(number, names, error):
                self._post(m.DurableNames(number, list(names), error))
            case PeerAsks():
                self._ask_worker(event)
            case Tick():
                self._tick()
            case Terminate():
                if not self._termination.under_way:
                    self._termination.begin(self.crew.playing())
                    self._post(m.Leaving())
                    self._do(*self._termination.pass_on(self.crew.playing()))
            case LauncherGone():
                log.error("node %s: ftrun is gone; this agent stops", self.about.node)
                self._do(KillNode())
            case _:
                assert_never(event)

    def _tick(self) -> None:
        self._post(self._heartbeat())
        self._do(*self._termination.pass_on(self.crew.playing()))
        self._do(*self._copies.tick(self._now))
        if self.epoch > self.begun and self._now >= self._stuck_at:
            self._kill_stuck()
        if self._now >= self._termination.leave_at:
            self._leave()

    # -- the controller ------------------------------------------------------------------------

    def _post(self, message: m.FromAgent) -> None:
        self._do(ToController(message))

    def _say(self, message: OfRole) -> None:
        """Post what the controller must know, whichever it is by then."""
        self._said.keep(message)
        self._post(message)

    def _greet(self) -> None:
        self._connected = self._outage.served = True
        about = self.about
        who = about.node, about.pid, about.node_rank, about.domain, about.data
        # A controller that died may not have answered those, and not have written down these.
        said = [*self._said, *self._asking.values(), *self._trained]
        self._post(m.AgentHello(*who, self.holdings(), said))
        if self._termination.under_way:
            self._post(m.Leaving())

    def _alone(self, event: NotConnected) -> None:
        if self._connected:
            self._connected = False
            self._outage.begins(self._now)
            return
        node, address = self.about.node, self.settings.controller
        if event.refused and not self._outage.served:
            log.error(
                "node %s leaves: %s; check the job's secret file, and that all nodes run the same version",
                *(node, event.reason),
            )
            self._end(2)
            return
        if event.stranger:
            problem = f"whoever answers at {address} is not this job's controller: {event.reason}"
            self._outage.warn(problem, self._now)
        if self._outage.goes_on(bool(self.crew.playing()), self._now):
            self._end(1)

    def _on_controller(self, message: m.ToAgent) -> None:
        match message:
            case m.Abort(epoch):
                self._abort(epoch)
            case m.NodePlan():
                self._apply(message)
            case m.NodesChanged(number, nodes):
                if self.plan is not None and self.plan.id == number:
                    self._know(self.plan, nodes)
            case m.KillWorker(role):
                if role is None:
                    self._do(KillNode())
                elif worker := self.crew.of_role(role):
                    self._do(Kill(worker.number))
            case m.DescribeRole(role):
                self._post(holdings.role_state(role, self.crew, self._view))
            case m.ListDurable(number):
                self._do(LookForDurable(number))
            case m.SendHeartbeat():
                self._post(self._heartbeat())
            case m.Release() | m.SendCounts() | m.SendIssued() | m.Hold():
                self._do(*(ToWorker(worker.number, message) for worker in self.crew.playing()))
            case m.Prepare():
                self._prepare(message)
            case m.SendState():
                self._send_state()
            case m.GivenUp():
                log.warning(
                    "node %s was not heard of for too long, and the job has gone on without it: its workers "
                    "end, and it joins again as a spare",
                    self.about.node,
                )
                self.phase = Phase.OVER
                self._do(BecomeSpare())
            case m.Withdraw(roles):
                self._withdraw(roles)
            case m.UseSettings(values):
                # The controller has checked them.
                about: dict[str, Any] = dict(values)
                self.configured, self.settings = values, dataclasses.replace(self.settings, **about)
                self._do(UseSettings(self.settings))
                self._post(m.Configured(values))
            case m.ConfigureAnswer(number, asked, error):
                self._asking.pop(number, None)
                self._do(ToWorker(number, m.Refused(asked, error) if error else m.SettingsTaken(asked)))
            case m.Shutdown(code):
                self._end(code)
            case _:
                assert_never(message)

    def _send_state(self) -> None:
        if self.plan is not None:  # who asks has seen in the greeting that there is one
            state = msgspec.json.decode(self.plan.state, type=m.JobState)
            self._post(m.KeptState(state, self.plan.nodes))

    def _heartbeat(self) -> m.Heartbeat:
        begun = self.plan.id if self.plan else ""
        beats, replicas = holdings.beats(self.crew, self._view), self._view.replicas()
        return m.Heartbeat(self.epoch, begun, beats, len(self.crew.idle()), replicas)

    def holdings(self) -> m.Holdings:
        """What this node could give to a recovery, as of now."""
        here = self.roles_here()
        replicas, holders = holdings.copies_held(here, self._view)
        return m.Holdings(
            epoch=self.epoch,
            begun=self.plan.id if self.plan else "",
            reported=self.reported,
            roles=holdings.roles_held(here, self.crew, self._view),
            replicas=replicas,
            segments=holders,
            idle=len(self.crew.idle()),
            store=self.about.store,
            master=self.about.master,
            configured=self.configured,
        )

    # -- epochs --------------------------------------------------------------------------------

    @property
    def begun(self) -> int:
        """The epoch of the newest plan; 0 before any."""
        return self.plan.epoch if self.plan else 0

    def roles_here(self) -> list[int]:
        """Roles that the plan places on this node."""
        places = self.plan.roles if self.plan else {}
        return [role for role, node in places.items() if node == self.about.node]

    def _adopted_by(self, role: int) -> list[int]:
        worker = self.crew.of_role(role)
        if self.plan is None or (worker is not None and worker.state_is_replicated):
            return []  # a plan that was made before it was known that every group has all the state
        return [away for away, adopter in self.plan.worker.adopted.items() if adopter == role]

    def _adopted_here(self) -> list[int]:
        return [adopted for role in self.roles_here() for adopted in self._adopted_by(role)]

    def _abort(self, epoch: int) -> None:
        if epoch <= self.epoch:
            return
        self.epoch = epoch
        self._copies.epoch_ends()
        self._do(BeginEpoch(epoch))
        for worker in self.crew.playing():
            worker.replicated.clear()
            worker.committed = NONE
            self._do(Commit(worker.number, NONE), ToWorker(worker.number, m.Abort(epoch)))
        self._stuck_at = self._now + self.settings.quiesce_timeout
        self._report_if_quiet()

    def _report_if_quiet(self) -> None:
        """Once no worker here is inside a step of an older epoch, say what this node holds."""
        quiet = all(worker.quiesced >= self.epoch for worker in self.crew.playing())
        if quiet and self.reported < self.epoch and self.epoch != self.begun:
            self.reported = self.epoch
            self._do(Report())

    def _kill_stuck(self) -> None:
        self._stuck_at = math.inf
        for worker in self.crew.playing():
            if worker.quiesced < self.epoch:
                log.error(
                    "node %s: role %d did not leave its step within %.0f s; its worker %d is replaced",
                    *(self.about.node, worker.role, self.settings.quiesce_timeout, worker.pid),
                )
                self._do(Kill(worker.number))

    def _apply(self, plan: m.NodePlan) -> None:
        """Begin the epoch of `plan`: give roles to workers, bring their state here, let them go on."""
        if plan.epoch < self.epoch or plan.epoch == self.begun:
            return
        before, adopted_before = self.roles_here(), self._adopted_here()
        self.plan, self.epoch = plan, plan.epoch
        self._copies.epoch_ends()
        self._do(UsePlan(plan))
        if plan.worker.version is not None:
            self._do(DropAfter(plan.worker.version))
        elif plan.worker.started_over == self.epoch:
            self._do(DropAfter(NONE))
            self._said.keep_only(())
        here = self.roles_here()
        self._withdraw({worker.role for worker in self.crew.playing()} - set(here))
        adopted = self._adopted_here()
        self._said.keep_only({*here, *adopted})
        # A role that has moved away may still be fetched from here: its memory goes one epoch later.
        self._do(KeepOnly(frozenset([*here, *before]), frozenset([*adopted, *adopted_before])))
        for role in here:
            if (worker := self.crew.of_role(role)) is not None:
                self._do(ToWorker(worker.number, m.PlanBegins(self._with_settings(plan.worker))))
            elif role in plan.worker.newcomers or role not in before:
                worker = self._assign(role, plan.master, plan.worker)
            # Otherwise it has died since this node reported: the plan relies on it, so there will be another.
            if worker is not None:
                self._restore(worker, plan)

    def _know(self, plan: m.NodePlan, nodes: Mapping[m.NodeName, m.NodeAddress | None]) -> None:
        """Nodes without a role that have come, or gone (None), since the plan was made."""
        now = {name: where for name, where in {**plan.nodes, **nodes}.items() if where is not None}
        self.plan = msgspec.structs.replace(plan, nodes=now)
        self._do(UsePlan(self.plan))

    def _withdraw(self, roles: Collection[int]) -> None:
        """Replace the workers of a replica group that takes no part: others may need the places."""
        for worker in self.crew.playing():
            if worker.role in roles:
                self._said.forget([worker.role])
                worker.doing = Doing.WITHDRAWN
                self._do(Kill(worker.number))

    def _prepare(self, message: m.Prepare) -> None:
        """Roles that come back while others train begin ahead of the epoch in which they take part."""
        if self.plan is None or message.epoch != self.begun:
            return
        for role in message.roles:
            if self.crew.of_role(role) is None:
                self._assign(role, self.plan.master, message.worker)
            elif (said := self._said.prepared(role)) is not None:
                self._post(said)  # to another controller, which has asked before

    def _with_settings(self, plan: m.WorkerPlan) -> m.WorkerPlan:
        """The settings of now: the script may have brought some since the plan was made."""
        return msgspec.structs.replace(
            plan,
            policy=self.settings.policy,
            lr_intervention=self.settings.lr_intervention,
            began_with=m.BeganWith(**dataclasses.asdict(self.settings.start)),
        )

    def _assign(self, role: int, master: str, plan: m.WorkerPlan) -> Worker | None:
        """Give the role to an idle worker."""
        self._said.forget([role])
        nproc = self.settings.nproc_per_node
        if (worker := self.crew.choose(role % nproc, nproc)) is None:
            self._say(m.NoIdleWorker(self.epoch, role))
            return None
        worker.doing, worker.role = Doing.PLAYING, role
        environment = self._environment(role, worker.device, master)
        assign = m.Assign(role, self.settings.world_size, environment, self._with_settings(plan))
        self._do(ShowRest(role), ToWorker(worker.number, assign))
        return worker

    def _environment(self, role: int, local_rank: int, master: str) -> dict[str, str]:
        """The variables torchrun sets, and those by which an executed program could find us."""
        settings = self.settings
        host, port = master.rsplit(":", 1)
        return {
            "RANK": str(role),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(settings.world_size),
            "LOCAL_WORLD_SIZE": str(settings.nproc_per_node),
            "GROUP_RANK": str(role // settings.nproc_per_node),
            "GROUP_WORLD_SIZE": str(settings.nnodes),
            "ROLE_RANK": str(role),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(settings.world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.about.job_dir.rpartition("/")[2],
            **self.about.environment,
            "FT_JOB_DIR": self.about.job_dir,
            INJECT_ENV: settings.inject,
            **settings.environment,
        }

    # -- state ---------------------------------------------------------------------------------

    def _restore(self, worker: Worker, plan: m.NodePlan) -> None:
        """Have the plan's version of its role, and of what that adopts, in memory here, then let it load."""
        held = []
        if (version := plan.worker.version) is not None:
            for role in [worker.role, *self._adopted_by(worker.role)]:
                there = version in self._view.versions(role, role != worker.role)
                if there or plan.worker.origin != "initial" or plan.sources.get(role):
                    held.append(role)  # else its script makes the initial state by itself
        if held:
            self._do(Bring(worker.number, worker.role, tuple(held), plan))
        else:
            self._do(ToWorker(worker.number, m.Restore(plan.epoch, version, [])))

    def _brought(self, event: Brought) -> None:
        if event.failed:
            log.error("node %s: role %d: %s", self.about.node, event.role, event.failed)
            self._say(m.RestoreFailed(event.epoch, event.role, event.failed))
        elif self.plan is not None and self.epoch == event.epoch:
            restore = m.Restore(event.epoch, self.plan.worker.version, list(event.copies))
            self._do(ToWorker(event.worker, restore))

    def _staged(self, worker: Worker, role: int, version: int) -> None:
        if self.epoch == self.begun:
            self._do(*self._copies.staged(worker, role, version, self.epoch))

    def _replicated(self, event: Replicated) -> None:
        if event.failed:
            self._do(*self._copies.failed(event, self._now, self.settings.heartbeat / 2))
            return
        plan = self.plan
        found = self._copies.safe(event, self._adopted_by)
        if found is not None and plan is not None:
            worker, effects = found
            self._do(*effects)
            if worker.committed == event.version:
                self._do(*self._copies.write(worker, event.version, plan, self.settings))

    # -- workers -------------------------------------------------------------------------------

    def _start(self, device: int) -> None:
        self._do(Start(self.crew.add(device).number, device))

    def _on_worker(self, worker: Worker, message: m.FromWorker) -> None:
        role = worker.role
        match message:
            case m.WorkerHello():
                pass  # heard by whoever has taken the connection
            case m.Staged(of, version):
                self._staged(worker, of, version)
            case m.Allocate():
                self._allocate(worker, message)
            case m.Registered(version, ring, resumes, group):
                worker.stage, worker.initial, worker.ring = "training", version, ring
                worker.resumes, worker.group = resumes, group
                if role not in self.roles_here():
                    self._say(m.Prepared(role))
            case m.Quiesced(epoch, stage, counts):
                worker.quiesced, worker.stage, worker.counts = epoch, stage, counts
                self._report_if_quiet()
            case m.WorkerRestored(epoch, version, loaded):
                self._say(m.Restored(epoch, role, worker.pid, version, loaded))
                for held in [role, *self._adopted_by(role)] if loaded else []:
                    self._staged(worker, held, version)
            case m.WorkerStepped(epoch, version):
                self._say(m.Stepped(epoch, role, version))
            case m.WorkerReopened(epoch):
                self._say(m.Reopened(epoch, role))
            case m.WorkerUnprotected():
                self._say(m.Unprotected(role))
            case m.WorkerHeld(epoch):
                self._say(m.Held(epoch, role))
            case m.WorkerCompleted(epoch, part, last):
                self._say(m.Completed(epoch, role, part, last))
            case m.WorkerSuspects(epoch, reason):
                self._post(m.Suspect(epoch, role, reason))
            case m.WorkerCounts(counts):
                self._post(m.OperationCounts(role, counts))
            case m.WorkerIssued(number, epoch, step, at_end, issued):
                self._post(m.Issued(number, epoch, role, step, at_end, issued))
            case m.WorkerTrained(epoch, step, samples):
                self._trained.append(m.Trained(epoch, step, role, samples))
                self._post(self._trained[-1])
            case m.CorruptCopy(of, slot, reason):
                self._do(Strike(of, slot, adopted=of != role))
                self._say(m.RestoreFailed(self.epoch, role, reason))
            case m.AskStartupEntries() | m.AskProgress():
                self._ask_peer(worker, message)
            case m.StartupEntries() | m.Progress():
                self._do(AnswerPeer(message.id, message))
            case m.BringSettings(number, settings):
                self._asking[worker.number] = m.Configure(worker.number, number, settings)
                self._post(self._asking[worker.number])
            case m.ScriptFailed(traceback):
                worker.traceback = traceback
            case m.WorkerFinished():
                worker.doing = Doing.FINISHED
                self._say(m.Finished(role))
            case _:
                assert_never(message)

    def _allocate(self, worker: Worker, request: m.Allocate) -> None:
        adopted = request.role != worker.role
        self._say(
            m.RoleLayout(
                epoch=self.epoch,
                role=request.role,
                adopted=adopted,
                segments={Segment.of(s).id: list(s.holders) for s in request.segments},
                initial=worker.initial,
                resumes=worker.resumes,
                group=worker.group,
            )
        )
        self._do(Reserve(worker.number, request, adopted))

    def _ask_peer(self, worker: Worker, question: m.AskStartupEntries | m.AskProgress) -> None:
        """A newcomer here asks something of a role elsewhere: its agent is asked."""
        assert self.plan is not None
        node = self.plan.roles.get(question.holder, "")
        if (where := self.plan.nodes.get(node)) is None:
            error = f"role {question.holder} is on no node that is known here"
            self._do(ToWorker(worker.number, m.Refused(question.id, error)))
        else:
            self._do(AskPeer(worker.number, question, where.data))

    def _ask_worker(self, event: PeerAsks) -> None:
        """The same from the other side."""
        if (worker := self.crew.of_role(event.role)) is None:
            error = f"role {event.role} has no worker on node {self.about.node}"
            self._do(AnswerPeer(event.question.id, error))
        else:
            self._do(ToWorker(worker.number, event.question))

    def _worker_ended(self, event: WorkerEnded) -> None:
        worker, code = self.crew.remove(event.worker), event.code
        self._asking.pop(event.worker, None)
        if self._termination.explains(code):
            if self.crew.playing():
                self._termination.leave_at = min(self._termination.leave_at, self._now + GRACE)
            else:
                self._leave()
            return
        if worker.doing is Doing.PLAYING:
            how = in_words(code), code < 0, code, worker.traceback
            self._say(m.WorkerLost(worker.role, worker.pid, *how))
            self._start(-1)
        elif worker.doing is not Doing.FINISHED:
            self._start(worker.device)
        self._report_if_quiet()

    # -- the end -------------------------------------------------------------------------------

    def _leave(self) -> None:
        """End this node alone, and let the controller know that no failure did it."""
        self._post(m.Left())
        self._end(ENDED)

    def _end(self, code: int) -> None:
        self.phase, self._code, self._farewell_until = Phase.FAREWELL, code, self._now + FAREWELL
        self._do(*(ToWorker(worker.number, m.Exit()) for worker in self.crew.playing()))
        self._end_if_alone()

    def _end_if_alone(self) -> None:
        left = any(worker.doing is Doing.FINISHED for worker in self.crew)
        if not left or self._now >= self._farewell_until:
            self.phase = Phase.OVER
            self._do(End(self._code))
