"""A worker: the real machine, around which threads are modelled and a main thread that trains a number.

The main thread is a generator that says what it waits for; a new epoch interrupts it where it may be
interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft_core.elastic.rules import Deal, Membership
from ft_core.protocol import messages as m
from ft_core.protocol.groups import GroupId, runs_of, text_of
from ft_core.worker import events as ev
from ft_core.worker.machine import WorkerMachine
from ft_core.worker.states import (
    AtEnd,
    Finished,
    Holding,
    Leaving,
    Loading,
    NoRole,
    Quiet,
    Restoring,
    StartUp,
    State,
    Stuck,
    Training,
)

from .invariants import Invariant
from .training import Content, after
from .world import Process

if TYPE_CHECKING:
    from .node import SimNode

TORN = -1
_STARTUP = 2
"""Collectives of the start-up phase."""


class EpochChanged(Exception):  # noqa: N818 - as the engine's
    """Thrown into the main thread."""


@dataclass
class Until:
    """Something that the main thread waits for."""

    true: Callable[[], bool]
    interruptible: bool = True


Thread = Generator[Until, None, None]


@dataclass
class Words:
    """The control words that agent and worker share."""

    version: int = -1
    tag: int = -1
    committed: int = -1
    step_ns: int = 0
    waited_ns: int = 0
    traffic: int = 0


class SimWorker(Process):
    """One process. Its agent hears of its end by its pid."""

    barrier_first = False
    """Wait for the commit after the barrier instead of before it: a mutation."""
    secures_together = True
    """False, as a mutation: a version that is protected out of turn overwrites one that others may need."""
    survivors_derive = True
    """False, as a mutation: they take part, and keep the weights that they have."""

    def __init__(self, node: SimNode, number: int, device: int, pid: int) -> None:
        super().__init__(node.world, f"{node.name}/worker{number}")
        self.node, self.number, self.device, self.pid = node, number, device, pid
        self.training = node.job.training
        self.words = Words()
        self.machine = WorkerMachine(pid)
        self.version, self.content = 0, 1
        self.weights: Content | None = 1
        """What is derived of the content: of which, or of none."""
        self._derived = 0
        """In which epoch."""
        self.deal = Deal(1)
        self.membership = Membership(node.job.shape.groups)
        self.outbox = 0
        self.hung = False
        """Whether its main thread does nothing any more."""
        self.reads = False
        """Whether it waits for data instead, and does not get on until it has them."""
        self.begun = 0
        """Start-up operations that this worker has done."""
        self._allocated: dict[int, list[int]] = {}
        self._ids = 0
        self._mapped: set[tuple[int, int]] = set()
        """Memory of its agent's that it knows, by role and slot."""
        self._copying = 0
        self._settings: str | None = None
        """What was said to the settings that it brings: empty if they are used."""
        self._left = 0
        """Parts of its script that it has left."""
        self.newest = self.oldest = self._base = 0
        """As `ft_core.worker.recovery`: the versions that are protected."""
        self._began = self._covered = 0
        """The version that its script began with, and that from which on it can make its steps again."""
        self._wait: Until | None = None
        self._thread: Thread = self._main()
        self.later(0.05 + 0.1 * self.world.rng.random(), lambda: node.worker_ready(self))

    @property
    def role(self) -> int | None:
        return None if isinstance(self.machine.state, NoRole) else self.machine.role

    @property
    def plays(self) -> bool:
        """Whether it has a role, and has not merely started one ahead of need."""
        return self.role is not None and not self.plan.detached

    @property
    def epoch(self) -> int:
        return self.machine.epoch

    @property
    def pending(self) -> int:
        """The newest epoch that it has heard of."""
        return self.machine.announced

    @property
    def plan(self) -> m.WorkerPlan:
        return self.machine.plan

    @property
    def state(self) -> State:
        return self.machine.state

    # -- the watcher thread, and what its machine wants ----------------------------------------------

    def hear(self, message: m.ToWorker) -> None:
        """A message of the agent."""
        match message:
            case m.Allocated():
                self._allocated[message.id] = message.address
            case m.ConfigureAnswer():
                self._settings = message.error
            case m.Refused() | m.FailureNoted() | m.Welcome() | m.StartupEntries() | m.Progress():
                pass
            case _:
                self.tell(ev.FromAgent(message))
        self.pump()

    def tell(self, event: ev.Event) -> None:
        """As `ft_core.worker.shell.WorkerShell.handle`."""
        for effect in self.machine.handle(event, self.world.now):  # its clock goes on while it is stopped
            match effect:
                case ev.Send(message):
                    self._say(message)
                case ev.SayQuiesced(epoch, stage):
                    self._say(m.Quiesced(epoch, stage, self.counts()))
                case ev.SayCounts():
                    self._say(m.OperationCounts(self.machine.role, self.counts()))
                case ev.SayIssued(number, epoch, at_end):
                    self._say(m.Issued(number, epoch, self.machine.role, self.version, at_end, {}, []))
                case ev.UsePlan(plan):
                    if plan.epoch > 1 and self.role not in plan.newcomers:
                        self.later(0.005, lambda: self._reopens(plan.epoch))
                case ev.EndProcess(code):
                    self.node.end_worker(self, code)

    def _reopens(self, epoch: int) -> None:
        """It has the communicators of that epoch."""
        if epoch == self.pending:
            self.node.job.achieved.add(("communicators_ready", epoch, self.role))
            self.tell(ev.Reopened(epoch))

    def _say(self, message: m.Message) -> None:
        self.node.from_worker(self, message)

    @property
    def _group(self) -> str:
        """That of all roles."""
        return str(GroupId.of(range(self.node.job.settings.world_size), 0))

    def counts(self) -> dict[str, int]:
        return {self._group: self.begun}

    # -- the main thread ---------------------------------------------------------------------------

    def pump(self) -> None:
        """Go on as far as possible."""
        while self.alive and not self.stopped and not self.hung and not self.reads:
            try:
                if self._wait is None:
                    self._wait = next(self._thread)
                elif self._wait.interruptible and self.pending > self.epoch:
                    self._wait = self._thread.throw(EpochChanged())
                elif self._wait.true():
                    self._wait = next(self._thread)
                else:
                    return
            except StopIteration:
                self.node.end_worker(self, 0)
                return

    def go_on(self) -> None:
        """SIGCONT."""
        super().go_on()
        self.pump()

    def _sleep(self, seconds: float, interruptible: bool = True) -> Thread:
        due = False

        def wake() -> None:
            nonlocal due
            due = True
            self.pump()

        self.later(seconds, wake)
        yield Until(lambda: due, interruptible)

    def _some(self, seconds: float) -> float:
        return seconds * (0.5 + self.world.rng.random())

    def _while(self, *states: type[State]) -> Thread:
        """As `ft_core.worker.shell.WorkerShell.wait_while`."""
        yield Until(lambda: not isinstance(self.state, states), False)

    def _main(self) -> Thread:
        yield from self._while(NoRole)
        yield from self._bring_settings()
        while self.begun < _STARTUP:
            yield from self._start_up()
        yield from self._begin()
        if self.node.job.shape.part:
            yield from self._persist(lambda: self._part(1, self.node.job.shape.part))
            self._left = 1
            yield from self._persist(self._between)
        yield from self._persist(lambda: self._part(self.last_part, None))
        self.tell(ev.ScriptDone())
        yield from self._while(Finished)

    @property
    def last_part(self) -> int:
        """The number of the last part of the script."""
        return 2 if self.node.job.shape.part else 1

    def _persist(self, action: Callable[[], Thread]) -> Thread:
        while True:
            try:
                yield from action()
                return
            except EpochChanged:
                yield from self._recover()

    def _bring_settings(self) -> Thread:
        assert self.role is not None
        settings = self.node.job.brought(self.role)
        if not settings:
            return
        self._say(m.Configure(self.number, 0, settings))
        yield Until(lambda: self._settings is not None, False)
        if self._settings:
            self._say(m.ScriptFailed(m.Fault.EXCEPTION, "FtError", "FtError @ train.py", self._settings))
            self.node.end_worker(self, 1)
            yield Until(lambda: False, False)
        self.tell(ev.SettingsBrought(settings))

    def _start_up(self) -> Thread:
        """One collective, or the record of it where somebody has completed it (`ft_core.comm.startup`)."""
        number = self.begun
        while True:
            yield Until(lambda: self.pending == self.epoch, False)
            epoch = self.epoch
            count, holder = self.plan.completed.get(self._group, (0, 0))
            if number < count:
                yield from self._sleep(self._some(0.02), False)
                if self.node.job.diverges:
                    yield from self._raise(m.Fault.DIVERGED)
                done = self.node.job.has_record(holder, number)
            elif self.plan.detached:
                yield from self._raise()
            else:
                exchange = self.training.join(self, "start", -1 - number, self.members)
                yield Until(lambda e=epoch, x=exchange: x.complete or self.pending > e, False)  # type: ignore[misc]
                done = exchange.complete
            if self.pending > epoch:
                continue  # its peers may not have it
            if done:
                self.begun += 1
                return
            yield Until(lambda e=epoch: self.pending > e, False)  # type: ignore[misc]

    def _between(self) -> Thread:
        """A collective of the script between two parts, which is recorded as well."""
        if (number := self.begun) > _STARTUP:
            return
        count, holder = self.plan.completed.get(self._group, (0, 0))
        if number < count:
            yield from self._sleep(self._some(0.02))
            yield Until(lambda: self.node.job.has_record(holder, number))
        else:
            exchange = self.training.join(self, "start", -1 - number, self.members)
            yield Until(lambda: exchange.complete)
        self.begun += 1

    @property
    def trains(self) -> bool:
        """Whether it has the state of its epoch, which is not over."""
        return isinstance(self.state, Training | Holding | AtEnd)

    @property
    def members(self) -> frozenset[int]:
        """The roles that take part, as far as this worker knows."""
        return frozenset(range(self.training.roles)) - frozenset(self.plan.absent)

    def _begin(self) -> Thread:
        self.tell(ev.Begins())
        yield from self._while(StartUp)
        job = self.node.job
        self.version, self.content = job.own_checkpoint(self.plan)
        self.weights = self.content
        self._began = self._covered = self.version
        self.words.version = self.words.tag = self.version
        ring = list(range(self.training.roles))
        group = job.group_of(self.role)
        registered = m.Registered(self.version, ring, job.shape.loads == "all", group, self.counts())
        job.training.begins(job.storage)
        self.tell(ev.Registers(registered))
        yield from self._take_up()

    def _recover(self) -> Thread:
        yield from self._quiesce()
        yield from self._take_up()

    def _take_up(self) -> Thread:
        while True:
            try:
                yield from self._catch_up()
                return
            except EpochChanged:
                yield from self._quiesce()

    def _quiesce(self) -> Thread:
        yield Until(lambda: self._copying == 0, False)
        yield from self._sleep(self._some(0.01), False)
        self.tell(ev.Unwound())
        yield from self._while(Quiet)
        if self.machine.parts < self._left:
            yield from self._replace()

    def _catch_up(self) -> Thread:
        yield from self._while(Restoring)
        if not isinstance(self.state, Loading):
            raise EpochChanged
        restore, loaded, job = self.state.restore, False, self.node.job
        changes = self.plan.membership
        if changes.groups:  # else the plan was made before the roles had told of their groups
            self.membership = Membership.of(changes)
        held = self.held
        without = set(held[1:]) - {copy.role for copy in restore.parts}
        if without and self.version:
            raise Invariant.NOTHING_LOST.broken(
                f"role {self.role} has no copy of what roles {sorted(without)} had alone",
            )
        for copy in restore.parts:
            if copy.role not in held:
                continue
            self._mapped.add((copy.role, copy.slot))
            found = self.node.store.read(copy.role, copy.slot, copy.role != self.role)
            yield from self._sleep(self._some(0.01))
            if found is None or found[0] != restore.version:
                self.tell(ev.FoundCorrupt(copy.role, copy.slot, "simulated"))
                yield from self._while(Stuck)
                raise EpochChanged
            elif copy.role == self.role:
                if not job.shape.derives:
                    self.weights = found[1]
                self.version, self.content = found
                loaded = True
            elif self.plan.epoch >= self.training.epoch and found[1] != self.training.truth.get(found[0]):
                raise Invariant.ONE_PAST.broken(
                    f"what role {copy.role} had alone is of another past at version {found[0]}",
                )
        if self.version < job.end_of(self.machine.parts):
            raise Invariant.PARTS.broken(f"a part is done, and role {self.role} is at version {self.version}")
        self.deal = Deal.from_json(self.training.deals[self.content])
        self._fill_the_ledger()
        self._base = self.newest = self.version
        self.oldest = min(self.oldest, self.newest)
        if not loaded:
            yield from self._copy()
        self.words.version = self.words.tag = self.version
        self.tell(ev.Loaded(self.version, loaded))
        job.achieved.add(("state_restored", self.epoch, self.role))
        if job.shape.loads == "each" and self.version < self._covered:
            yield from self._replace()
        self._covered = max(self._covered, self.oldest)

    def _replace(self) -> Thread:
        """As `Session.replace_worker`."""
        self._say(m.ScriptFailed(m.Fault.TERMINATED, "it cannot go back", "", ""))
        yield from self._sleep(0.002, False)
        self.node.end_worker(self, -9)
        yield Until(lambda: False, False)

    def _part(self, number: int, end: int | None) -> Thread:
        """To the version `end`, or that of the job; all leave it together."""
        if self.machine.parts >= number and end is not None:
            return
        job = self.node.job
        if self.machine.parts < number:
            yield from self._derive()
        while self.machine.parts < number and self.version < (job.steps if end is None else end):
            yield from self._step()
        if end is not None:
            yield from self._secure()
        yield Until(lambda: self._copying == 0)
        self.tell(ev.PartDone(number, self.version, last=end is None))
        yield from self._while(AtEnd)
        if isinstance(self.state, Leaving):
            raise EpochChanged

    def _derive(self) -> Thread:
        """As `ft_core.worker.recovery`: what no copy has is made by all together."""
        goes_on = self.epoch > 1 or self.plan.version is not None
        if self.node.job.shape.derives and self._derived < self.epoch and goes_on:
            yield from self._together("derive", 10**6 + self.version)
            if self.survivors_derive or self.role in self.plan.newcomers:
                self.weights = self.content
        self._derived = self.epoch

    def _together(self, kind: str, number: int) -> Thread:
        """A collective of all who take part."""
        exchange = self.training.join(self, kind, number, self.members)
        yield Until(lambda: exchange.complete)
        if self.pending > self.epoch:
            raise EpochChanged

    def _raise(self, fault: m.Fault = m.Fault.EXCEPTION) -> Thread:
        """An error of the script's."""
        self._say(m.ScriptFailed(fault, "ValueError", "ValueError @ train.py", "Traceback"))
        yield from self._sleep(0.002, False)
        self.node.end_worker(self, 1)
        yield Until(lambda: False, False)

    def _step(self) -> Thread:
        job, since = self.node.job, self.world.now
        step = self.version + 1
        self.deal.take(step, self.membership)
        yield from self._sleep(self._some(job.step))
        if job.errors.due(self):
            yield from self._raise()
        if self.node.breaks(self.number):
            yield from self._raise(m.Fault.DEVICE)
        if not self.barrier_first:
            yield from self._commit_wait()
        if job.errors.strays(self):
            yield from self._together("stray", 3 * 10**6 + self.version)
        exchange = self.training.join(self, "step", self.version, self.members)
        yield Until(lambda: exchange.complete)
        if self.pending > self.epoch:
            raise EpochChanged
        if self.barrier_first:
            yield from self._commit_wait()
        self.words.tag = -1
        self.weights = None
        yield from self._sleep(self._some(0.02), False)
        trained = self.deal.step_done(step, self.membership)
        if job.shape.derives:  # the optimizer has stepped, and the version is whole once all have gathered
            yield from self._together("gather", 2 * 10**6 + self.version)
        self.weights = self.content = after(self.content, 0 if job.shape.flips else self.epoch, step, trained)
        self.training.deals[self.content] = self.deal.to_json()
        self.version = step
        self.words.version = self.words.tag = self.version
        self.words.step_ns = int(1e9 * (self.world.now - since))
        self.training.stepped(self, trained)
        flips = job.flip == (self.role, self.version) and len(self.members) > 1
        if flips and self._sums(self.role, self.content):  # else nobody has the same
            job.flip, job.flips_of = None, self.role
            self.weights = self.content = self.content ^ 1
            self.training.deals[self.content] = self.deal.to_json()
        job.achieved.add(("resumed", self.epoch, self.role))
        poisoned = job.poison == (self.role, self.version)
        if self.machine.reports_step:
            self.tell(ev.StepDone(self.version))
        if poisoned:
            self.node.end_worker(self, -11)
            yield Until(lambda: False, False)
        if self._protects(step):
            yield from self._stage()
        if job.tells(self.role, self.membership.taking_part(step)):
            dealt = {group: list(ranges) for group, ranges in trained.items()}
            waiting = [(first, start, end) for first, start, end in self.deal.waiting]
            self._tell(step, m.Dealt(dealt, waiting, self.deal.next))
        yield from self._hold()
        if job.shape.saves and step % job.shape.saves == 0:
            yield from self._save()

    def _fill_the_ledger(self) -> None:
        """As `ft_core.worker.groups`."""
        entered, version = self.plan.ledger_through, self.plan.version or 0
        if entered < version and self.node.job.tells(self.role, self.membership.taking_part(version + 1)):
            for step, dealt in self.deal.entries_after(entered, self.membership):
                self._tell(step, dealt)

    def _tell(self, step: int, dealt: m.Dealt) -> None:
        self._say(m.Trained(self.epoch, self.plan.version, step, self.machine.role, dealt))

    def _save(self) -> Thread:
        """A checkpoint of the script's own: nobody begins beyond what all go back to (`Resumption`)."""
        yield from self._secure()
        exchange = self.training.join(self, "save", self.version, self.members)
        yield Until(lambda: exchange.complete)
        self.node.job.saved = self.version, self.content

    def _hold(self) -> Thread:
        """A replica group comes back: wait for that."""
        if self.version < self.machine.hold_at or not self._protects(self.version):
            return
        self.tell(ev.StepSafe(self.version))
        if (due := self.machine.deadline) is not None:
            self.later(due - self.world.now + 1e-6, self._tick)  # not a rounding error early
        yield from self._while(Holding)

    def _tick(self) -> None:
        self.tell(ev.Tick())
        self.pump()

    def _protects(self, version: int) -> bool:
        return (version - self._base) % self.plan.every == 0

    def _commit_wait(self) -> Thread:
        """As `Session.commit_wait`."""
        since = self.world.now
        if self._protects(self.version + 1) or self.version == self._base:
            yield Until(lambda: self.words.committed >= self.newest)
        else:
            yield Until(lambda: self._copying == 0)
        self.words.waited_ns += int(1e9 * (self.world.now - since))

    def _secure(self) -> Thread:
        """As `Session.secure`."""
        if self.newest != self.version:
            yield Until(lambda: self.words.committed >= self.newest)
            if self.secures_together:
                yield from self._together("secure", 4 * 10**6 + self.version)
            yield from self._stage()
        yield Until(lambda: self.words.committed >= self.version)

    def _stage(self) -> Thread:
        """Protect this version."""
        self.oldest, self.newest = self.newest, self.version
        self._covered = max(self._covered, self.oldest)
        yield from self._copy()

    def _copy(self) -> Thread:
        """Begin to copy the state, and what was adopted; the next step goes on meanwhile."""
        yield Until(lambda: self._copying == 0, False)
        for role in self.held:
            yield from self._stage_of(role)

    def _stage_of(self, role: int) -> Thread:
        memory = self.node.store.memory(role, role != self.role)
        slot = memory.free()
        if (role, slot) not in self._mapped:
            self._mapped.add((role, slot))
            self._ids += 1
            number = self._ids
            layouts = [to_layout(s) for s in self.training.segments(role, role != self.role)]
            self._say(m.Allocate(number, role, slot, layouts))
            yield Until(lambda: number in self._allocated, False)
        self._copying += 1
        memory.held[slot] = (TORN, 0)
        version, content = self.version, self.content

        def copied() -> None:
            self.node.store.write(memory, slot, version, content)
            self._copying -= 1
            self._say(m.Staged(role, version, self._sums(role, content)))
            self.pump()

        self.later(self._some(0.03), copied)

    def _sums(self, role: int, content: Content) -> dict[str, str]:
        """Of what others hold as well, where that is compared."""
        if not self.plan.verify or role != self.role:
            return {}
        alike = (s for s in self.training.segments(role) if len(s.holders) > 1)
        return {segment.id: f"{content % (1 << 64):016x}" for segment in alike}

    @property
    def held(self) -> list[int]:
        """Its own role, and those that it has adopted."""
        assert self.role is not None
        if self.node.job.shape.redundancy is not m.Redundancy.ADOPTABLE:
            return [self.role]
        return [self.role, *(role for role, by in self.plan.adopted.items() if by == self.role)]


def to_layout(segment: object) -> m.Layout:
    """For messages."""
    items = tuple(m.Item(i.name, i.dtype, i.shape, i.offset, i.nbytes) for i in segment.items)  # type: ignore[attr-defined]
    return m.Layout(text_of(runs_of(segment.holders)), items)  # type: ignore[attr-defined]
