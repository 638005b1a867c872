"""A node in the job's epochs: which one it is in, who plays its roles in it, and what it holds of them.

Here is what a plan means for a node (`EpochExecutor.begin`), and what it could give to the next one
(`EpochExecutor.holdings`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection
from typing import Any

import msgspec

from ft_core.node.about import About
from ft_core.node.events import (
    BeginEpoch,
    Commit,
    DropAfter,
    DurableDone,
    Effect,
    FetchState,
    KeepOnly,
    Kill,
    ReadFlight,
    RecordsFound,
    Replicated,
    Report,
    Say,
    ShowRest,
    StateFetched,
    ToController,
    ToWorker,
    UsePlan,
    UseSettings,
    VersionWritten,
    WriteStacks,
    WriteVersion,
)
from ft_core.node.link.pending_reports import PendingReports
from ft_core.node.memory import holdings
from ft_core.node.memory.copies import Copies
from ft_core.node.memory.view import View
from ft_core.node.workers.standbys import Ready
from ft_core.node.workers.worker_table import NONE, Worker, WorkerState, WorkerTable
from ft_core.protocol import messages as m
from ft_core.protocol.domains import place
from ft_core.protocol.groups import runs_of, text_of
from ft_core.protocol.table import pieces, with_news
from ft_core.settings import Settings

log = logging.getLogger(__name__)

ANSWERS = 10.0
"""Seconds in which a standby that was ready answers once it has a role: until then it has only waited."""


class EpochExecutor:
    """The epoch under way on one node, or what comes between two."""

    def __init__(self, about: About, settings: Settings, crew: WorkerTable, view: View) -> None:
        self.about, self.settings = about, settings
        self.configured: dict[str, Any] | None = None
        """Settings that the script has brought; `settings` has them in it."""
        self.epoch = 0
        self.reported = 0
        """The newest epoch before which no worker here is inside a step any more."""
        self.plan: m.NodePlan | None = None
        self.parts: list[m.Version] = []
        """The parts of the script that all roles have come to the end of, as far as is known here."""
        self.crew = crew
        self.said = PendingReports()
        self.now = 0.0
        self.effects: list[Effect] = []
        """What the event that is being handled has led to."""
        self._view = view
        self._copies = Copies(about.node)
        self.ready = Ready(about, crew, view)
        self._strikes: tuple[float, list[m.FailureRecord]] = 0.0, []
        """What a successor of the controller needs to know: when the controller last told of failures, and
        which."""
        self._stuck_at = math.inf
        """When workers are killed that have not left their step for this epoch."""
        self._writes: dict[int, tuple[m.SaveVersion, m.VersionSaved | None]] = {}
        """Role -> what is to be written of it before the job ends, and what came of that once it is known."""
        self._taken: set[int] = set()
        """Roles that were elsewhere in the epoch before, and have yet to do a step here."""
        self._taken_at = 0.0
        self._reported: tuple[m.Holdings | None, int] = None, 0
        """What was said over this connection of what is held here, and how often."""

    def do(self, *effects: Effect) -> None:
        """Have these carried out, after those that are there."""
        self.effects += effects

    def post(self, message: m.FromAgent) -> None:
        """Post a message to the controller, if there is one."""
        self.do(ToController(message))

    def say(self, message: m.OfRole) -> None:
        """Post what the controller must know, whichever it is by then."""
        of_its_worker = isinstance(message, m.WorkerLost | m.Unprotected | m.Finished)
        if of_its_worker and self.plan is not None and self.plan.roles.get(message.role) == self.about.node:
            message = msgspec.structs.replace(message, epoch=self.plan_epoch)
        self.said.keep(message, self.now)
        self.post(message)

    def tick(self) -> None:
        """Time has passed."""
        self.do(*self._copies.tick(self.now))
        for worker, version in self._copies.not_compared(self.now):
            self._commit(worker, version)
        if self.epoch > self.plan_epoch and self.now >= self._stuck_at:
            self._kill_stuck()
        self._look_for_silent_standbys()
        if self.plan is not None and self.epoch == self.plan_epoch:
            self.do(*self.ready.tick(self.plan, self.settings, self.now))

    def use(self, settings: dict[str, Any]) -> None:
        """Use settings that the script has brought, and the controller has checked."""
        self.configured, self.settings = settings, dataclasses.replace(self.settings, **settings)
        self.do(UseSettings(self.settings))
        self.post(m.Configured(settings))

    # -- what this node is, and has ----------------------------------------------------------------

    @property
    def plan_epoch(self) -> int:
        """The epoch of the newest plan that this node has begun; 0 before any."""
        return self.plan.epoch if self.plan else 0

    def roles_here(self) -> list[int]:
        """Roles that the plan places on this node."""
        places = self.plan.roles if self.plan else {}
        return [role for role, node in places.items() if node == self.about.node]

    def adopted_by(self, role: int) -> list[int]:
        """Roles that are away, whose state `role` holds and steps."""
        worker = self.crew.of_role(role)
        if self.plan is None or (worker is not None and worker.state_is_replicated):
            return []  # a plan that was made before it was known that every group has all the state
        return [away for away, adopter in self.plan.adopted.items() if adopter == role]

    def _adopted_here(self) -> list[int]:
        return [adopted for role in self.roles_here() for adopted in self.adopted_by(role)]

    def read_flight(self, question: m.SendFlight | m.DescribeFlight) -> None:
        """Have the flight records of the workers here read."""
        playing = {worker.number: worker.role for worker in self.crew.playing()}
        epoch = self.epoch if self.epoch == self.plan_epoch else -1
        self.do(ReadFlight(question, self._at_end(), playing, epoch))

    def _at_end(self) -> frozenset[int]:
        """Roles here that wait for others at the end of their scripts, or of a part."""

        def waits(worker: Worker) -> bool:
            epoch, part = worker.completed
            return worker.doing is WorkerState.FINISHED or (epoch == self.epoch and part > len(self.parts))

        return frozenset(worker.role for worker in self.crew.playing() if waits(worker))

    def heartbeat(self) -> m.Heartbeat:
        """The heartbeat: this node lives, and its roles are so far."""
        return m.Heartbeat(
            self.epoch,
            begun=self.plan.id if self.plan else "",
            roles=holdings.beats(self.crew, self._view),
            idle=self.idle,
            replicas=self._view.replicas(),
            xids=self._view.xids(),
            guarding=self.ready.guarding,
        )

    @property
    def idle(self) -> int:
        """How many workers may be given a role."""
        return len(self.crew.idle()) + self.ready.waiting

    def holdings(self) -> m.Holdings:
        """What this node could give to a recovery, as of now."""
        here = self.roles_here()
        replicas, holders = holdings.copies_held(here, self._view)
        return m.Holdings(
            epoch=self.epoch,
            begun=self.plan.id if self.plan else "",
            reported=self.reported,
            parts=self.parts,
            roles=holdings.roles_held(here, self.crew, self._view),
            replicas=replicas,
            segments=holders,
            idle=self.idle,
            store=self.about.store,
            master=self.about.master,
            configured=self.configured,
        )

    def greeting(self) -> m.Holdings:
        """The first report over a connection."""
        now = self.holdings()
        self._reported = now, 0
        return now

    def report(self) -> m.HoldingsChanged:
        """Another one."""
        now, (before, number) = self.holdings(), self._reported
        self._reported = now, number + 1
        return holdings.changed(before, now, number)

    def report_if_changed(self) -> None:
        """While nobody waits for it, say what need not be said in a recovery then: all but versions."""
        before, number = self._reported
        if self.epoch == self.plan_epoch and holdings.more_than_versions(
            holdings.changed(before, self.holdings(), number)
        ):
            self.do(Report())

    def send_state(self) -> None:
        """Give a controller the job's state, which goes with each plan."""
        if self.plan is not None:  # who asks has seen in the greeting that there is one
            plan, (at, kept) = self.plan, self._strikes
            for piece in pieces(plan):
                self.post(piece)
            strikes = [msgspec.structs.replace(s, age=s.age + self.now - at) for s in kept]
            self.post(m.KeptState(plan.state, strikes))

    def keep_strikes(self, strikes: list[m.FailureRecord]) -> None:
        """What the controller knows of failures."""
        self._strikes = self.now, strikes

    def _faulted(self) -> set[int]:
        """Devices of this node that have failed of late, as the controller knows."""
        here = self.strikes_here()
        return {s.device for s in here if s.fault in m.DEVICE_FAULTS and s.device >= 0}

    def strikes_here(self) -> list[m.FailureRecord]:
        """What counts against this node, as the controller knows."""
        at, kept = self._strikes
        where, limit = place(self.about.node), 60 * self.settings.strike_minutes
        return [s for s in kept if s.place == where and s.age + self.now - at <= limit]

    # -- from epoch to epoch -----------------------------------------------------------------------

    def abort(self, epoch: int) -> None:
        """Whatever is under way is of the past once `epoch` begins: workers leave their steps."""
        if epoch <= self.epoch:
            return
        self.epoch = epoch
        self._copies.epoch_ends()
        self.do(BeginEpoch(epoch))
        for worker in self.crew.playing():
            worker.replicated.clear()
            worker.committed = NONE
            self.do(Commit(worker.number, NONE), ToWorker(worker.number, m.Abort(epoch)))
        self.do(*self.ready.epoch_ends(epoch))
        self._stuck_at = self.now + self.settings.quiesce_timeout
        self.report_if_quiet()

    def report_if_quiet(self) -> None:
        """Report what this node holds, once no worker here is inside a step of an older epoch."""
        quiet = all(worker.quiesced >= self.epoch for worker in self.crew.playing())
        if quiet and self.reported < self.epoch and self.epoch != self.plan_epoch:
            self.reported = self.epoch
            self.do(Report())

    def _kill_stuck(self) -> None:
        self._stuck_at = math.inf
        for worker in self.crew.playing():
            if worker.quiesced < self.epoch:
                log.error(
                    "node %s: role %d did not leave its step within %.0f s; its worker %d is replaced",
                    *(self.about.node, worker.role, self.settings.quiesce_timeout, worker.pid),
                )
                self.do(WriteStacks(worker.number, worker.role, end=True))

    def _look_for_silent_standbys(self) -> None:
        """One that is stopped, or hangs, was ready by its own word, and stands in no collective: nobody else
        finds out that it is to blame."""
        for worker in self.crew.playing():
            if self.now >= worker.answers_by:
                worker.answers_by = math.inf
                log.error(
                    "node %s: the standby that was ready for role %d has not answered for %.0f s since it "
                    "was given the role; its worker %d is replaced",
                    *(self.about.node, worker.role, ANSWERS, worker.pid),
                )
                self.do(WriteStacks(worker.number, worker.role, end=True))

    def begin(self, plan: m.NodePlan) -> None:
        """Begin the epoch of `plan`: give roles to workers, bring their state here, let them go on."""
        if plan.epoch < self.epoch or plan.epoch == self.plan_epoch:
            return  # INV-2 (epoch order)
        before, first = self.roles_here(), not self.epoch
        self.plan, self.epoch, self.parts = plan, plan.epoch, plan.parts
        base = NONE if plan.version is None else plan.version
        self._copies.epoch_begins(base)
        for each in self.crew.playing():  # what is newer is done again, and may come to something else
            each.sums = {version: sums for version, sums in each.sums.items() if version <= base}
        self.do(UsePlan(plan))
        # INV-3 (one past): what is newer than the epoch's version is of a past that is done again.
        if plan.origin == "durable":
            self.do(DropAfter(NONE))  # what is held of the same version may be of another past
        elif plan.version is not None:
            self.do(DropAfter(plan.version))
        elif plan.restart_epoch == self.epoch:
            self.do(DropAfter(NONE))
            self.said.keep_only(())
        here = self.roles_here()
        self._taken = set() if first else (set(here) - set(before)) & set(plan.newcomers)
        self._say_what_is_taken_over()
        # Who has started ahead is of no use where all scripts begin anew.
        self._withdraw_all_but(() if plan.restart_epoch == self.epoch else here)
        told = self._worker_plan(plan)
        self.do(*self.ready.epoch_begins(told, here))
        adopted = self._adopted_here()
        self.said.keep_only({*here, *adopted})
        self.do(
            KeepOnly(frozenset(here) | self._source_of(False), frozenset(adopted) | self._source_of(True))
        )
        for role in here:
            if (worker := self.crew.of_role(role)) is not None:
                self.do(ToWorker(worker.number, m.PlanBegins(told)))
            elif role in plan.newcomers or role not in before:
                worker = self._take_over(role, told) or self._assign(role, plan.master, told)
            # Otherwise it has died since this node reported: the plan relies on it, so there will be another.
            if worker is not None:
                self._restore(worker, plan)

    def _say_what_is_taken_over(self) -> None:
        if self._taken and self.plan is not None:
            self._taken_at = self.now
            roles = f"role{'s' * (len(self._taken) > 1)} {text_of(runs_of(sorted(self._taken)))}"
            done = self.plan.version
            where = f", after step {done:,}" if done else ""
            self.do(Say(f"ftrun: this node, {self.about.node}, takes over {roles}{where}"))

    def stepped(self, role: int) -> None:
        """A role has done the first step of its epoch here."""
        if role in self._taken:
            self._taken.discard(role)
            if not self._taken:
                took = self.now - self._taken_at
                self.do(Say(f"ftrun: what this node has taken over trains here, after {took:.1f} s"))

    def _source_of(self, adopted: bool) -> frozenset[int]:
        """Roles whose memory here, wherever they are played now, has what this epoch begins with: until those
        who fetch it have made a step it may be all there is."""
        assert self.plan is not None
        plan, view = self.plan, self._view
        if plan.origin == "durable":
            return frozenset()
        held = view.roles(adopted)
        return frozenset(role for role in held if plan.version in view.versions(role, adopted))

    def nodes_changed(self, news: m.NodesChanged) -> None:
        """Nodes without a role have come, or gone, since the plan was made."""
        if self.plan is not None and (changed := with_news(self.plan, news)) is not self.plan:
            self.plan = changed
            self.do(UsePlan(changed))

    def withdraw(self, roles: Collection[int]) -> None:
        """Replace the workers of a replica group that takes no part: others may need the places."""
        for worker in self.crew.playing():
            if worker.role in roles:
                self.said.forget([worker.role])
                worker.doing = WorkerState.WITHDRAWN
                self.do(Kill(worker.number))

    def _withdraw_all_but(self, roles: Collection[int]) -> None:
        self.withdraw({worker.role for worker in self.crew.playing()}.difference(roles))

    def end_starts(self) -> None:
        """Another controller leads than the one that had roles start here ahead of their epoch. It does not
        know of them, nor what they have from others' records: of what it decides they are no part."""
        self._withdraw_all_but(self.roles_here())

    def prepare(self, message: m.Prepare) -> None:
        """Roles that come back while others train begin ahead of the epoch in which they take part."""
        if (plan := self.plan) is None or not message.epoch == plan.epoch == self.epoch:
            return  # it is said again, if it is still wanted in the next one
        told = msgspec.structs.replace(
            self._worker_plan(plan),
            origin="memory",
            counterparts=message.counterparts,
            surrogates=message.surrogates,
            completed=message.completed,
        )
        for role in message.roles:
            if self.crew.of_role(role) is None:
                self._assign(role, plan.master, told)
            elif (said := self.said.prepared(role)) is not None:
                self.post(said)  # it was withdrawn, which was not heard here, and is wanted again

    def _worker_plan(self, plan: m.NodePlan) -> m.WorkerPlan:
        """What roles must know. By the settings of now: the script may have brought some since the plan was
        made."""
        about = {name: getattr(plan, name) for name in m.EpochStart.__struct_fields__}
        return m.WorkerPlan(
            **{**about, "every": self.settings.period(plan.every)},
            completed=plan.completed,
            membership=plan.groups.membership,
            policy=self.settings.policy,
            lr_intervention=self.settings.lr_intervention,
            snapshot=self.settings.snapshot,
            verify=self.settings.verify,
            began_with=m.BeganWith(**dataclasses.asdict(self.settings.start)),
        )

    def _assign(self, role: int, master: str, plan: m.WorkerPlan) -> Worker | None:
        """Give the role to an idle worker."""
        self.said.forget([role])
        nproc = self.settings.nproc_per_node
        if (worker := self.crew.choose(role % nproc, nproc, self._faulted())) is None:
            self.say(m.NoIdleWorker(self.epoch, role))
            return None
        worker.doing, worker.role = WorkerState.PLAYING, role
        environment = self.about.environment_of(role, worker.device, master, self.settings)
        assign = m.Assign(role, environment, plan, self.crew.ending)
        self.do(ShowRest(role), ToWorker(worker.number, assign))
        return worker

    def _take_over(self, role: int, plan: m.WorkerPlan) -> Worker | None:
        """Give the role to a worker that has started it ahead of need, if there is one."""
        worker, effects = self.ready.takes(role, plan)
        if worker is not None:
            self.said.forget([role])
            self.do(ShowRest(role))
            if worker.quiesced < plan.epoch:
                worker.answers_by = self.now + ANSWERS
        self.do(*effects)
        return worker

    def prepare_standby(self, worker: Worker) -> None:
        """Have a worker that has connected start a role ahead of need."""
        plan = self.plan if self.epoch == self.plan_epoch else None
        now = None if plan is None else msgspec.structs.replace(self._worker_plan(plan), parts=self.parts)
        master = plan.master if plan is not None else ""
        self.do(*self.ready.begins(worker, now, master, self.settings))

    def records_found(self, found: RecordsFound) -> None:
        """What the worker of a role elsewhere has on record, which this node guards."""
        plan = self.plan if self.epoch == self.plan_epoch else None
        self.do(*self.ready.records_found(found, plan, self.now))

    # -- state -------------------------------------------------------------------------------------

    def _restore(self, worker: Worker, plan: m.NodePlan) -> None:
        """Have the plan's version of its role, and of what that adopts, in memory here, then let it load."""
        held = []
        if (version := plan.version) is not None:
            for role in [worker.role, *self.adopted_by(worker.role)]:
                there = version in self._view.versions(role, role != worker.role)
                if there or plan.origin != "initial" or plan.sources.get(role):
                    held.append(role)  # else its script makes the initial state by itself
        if held:
            self.do(FetchState(worker.number, worker.role, tuple(held), plan))
        else:
            self.do(ToWorker(worker.number, m.Restore(plan.epoch, version, [])))

    def brought(self, event: StateFetched) -> None:
        """What a role goes on from is in memory here, or nobody had it whole. If its epoch is over, the
        worker knows that."""
        order, plan = event.order, event.order.plan
        if event.failed:
            log.error("node %s: role %d: %s", self.about.node, order.role, event.failed)
            self.say(m.RestoreFailed(plan.epoch, order.role, event.failed))
        else:
            restore = m.Restore(plan.epoch, plan.version, list(event.copies))
            self.do(ToWorker(order.worker, restore))

    def staged(self, worker: Worker, role: int, version: int) -> None:
        """A snapshot is whole, of the role that `worker` plays, or of one that it has adopted."""
        if self.epoch == self.plan_epoch:
            self.do(*self._copies.staged(worker, role, version, self.epoch, self.now))

    def replicated(self, event: Replicated) -> None:
        """A snapshot is wherever it must be, or could not be sent."""
        if event.failed:
            self.do(*self._copies.failed(event, self.now, self.settings.heartbeat / 2))
            return
        plan = self.plan
        found = self._copies.safe(event, self.adopted_by, self.now)
        if found is not None and plan is not None:
            worker, version = found
            if self._copies.is_compared(worker, version, self.now):
                self._commit(worker, version, of=event.order.version)

    def _commit(self, worker: Worker, version: int, of: int | None = None) -> None:
        """What `worker` holds is safe, up to that version. `of`: what has become safe just now."""
        worker.committed = version
        self.do(Commit(worker.number, version))
        if self.plan is not None and of in (None, version):
            self.do(*self._copies.write(worker, version, self.plan, self.settings, self.now))

    def have_compared(self, worker: Worker, version: int, sums: dict[m.SegmentId, m.Digest]) -> None:
        """Tell the checksums of what a role holds alike with others, which has just made them. A successor of
        the controller hears of the version before, too."""
        before = max((each for each in worker.sums if each < version), default=None)
        worker.sums = {**({} if before is None else {before: worker.sums[before]}), version: sums}
        self.say(
            m.Checksums(
                self.plan_epoch,
                worker.role,
                worker.pid,
                worker.device,
                versions=worker.sums,
                alike=self._copies.alike,
            )
        )

    def verified(self, epoch: int, version: int) -> None:
        """All who hold something alike have the same in that version."""
        if epoch == self.epoch == self.plan_epoch:
            for worker, safe in self._copies.verified(version):
                self._commit(worker, safe)

    def save(self, wanted: m.SaveVersion) -> None:
        """The job ends: write what this node has to write of its last version."""
        plan = self.plan
        if plan is None or plan.id != wanted.plan:
            why = f"node {self.about.node} has not begun the newest plan"
            for role in wanted.roles:
                self.post(m.VersionSaved(wanted.epoch, role, wanted.version, why))
            return
        here = dict.fromkeys(wanted.roles, self.about.node)
        now = msgspec.structs.replace(
            plan,
            epoch=wanted.epoch,
            version=wanted.version,
            origin="memory",
            roles={**plan.roles, **here},
            sources=wanted.sources,
            away=wanted.away,
        )
        adopted = {} if wanted.replicated else plan.adopted
        for role in wanted.roles:
            held = role, *(away for away, adopter in adopted.items() if adopter == role)
            known, answer = self._writes.get(role, (None, None))
            if known != wanted:
                self._writes[role] = wanted, None
                self.do(WriteVersion(held, wanted.version, now, wanted.replicated))
            elif answer is not None:  # which was lost with the connection, perhaps
                self.post(answer)

    def version_written(self, event: VersionWritten) -> None:
        """A role's part of the last version is on storage, or could not be written."""
        order, why = event.order, event.failed
        if why:
            log.error("node %s: step %d, role %d: %s", self.about.node, order.version, order.held[0], why)
            why = f"node {self.about.node}: {why}"
        answer = m.VersionSaved(order.plan.epoch, order.held[0], order.version, why)
        wanted, _ = self._writes.get(answer.role, (None, None))
        if wanted is not None and wanted.version == answer.version:
            self._writes[answer.role] = wanted, answer
        self.post(answer)

    def written(self, event: DurableDone) -> None:
        """A snapshot is on storage, or could not be written."""
        self.do(*self._copies.written(event, self.now))
