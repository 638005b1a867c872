"""The machine of a real agent, around which workers, memory and time are simulated."""

from __future__ import annotations

import itertools
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from ft_core.node import events as e
from ft_core.node.about import About
from ft_core.node.machine import Agent
from ft_core.node.memory.view import Words
from ft_core.node.workers.worker_table import Worker, WorkerState
from ft_core.protocol import messages as m
from ft_core.settings import Settings
from ft_core.state.manifest import Segment

_pids = itertools.count(1_000_000)


class Memory:
    """A node's memory, of which there is nothing but what it says of itself. Nothing is adopted."""

    def __init__(self, segment: Callable[[int], Segment]) -> None:
        self._segment = segment
        self.held: dict[int, list[int]] = {}
        """Role -> the versions that are kept of it."""
        self.kept: dict[str, list[int]] = {}
        """The same of segments that are kept for others."""
        self.steps: dict[int, int] = {}
        """By worker."""

    def keep(self, role: int, version: int) -> None:
        """A snapshot of a role that is played here."""
        self.held[role] = sorted({*self.held.get(role, []), version})[-2:]

    def keep_copy(self, segment: str, version: int) -> None:
        """One of what another node has."""
        self.kept[segment] = sorted({*self.kept.get(segment, []), version})[-2:]

    def drop_after(self, version: int) -> None:
        """What is newer is of a past that is done again."""
        for held in (*self.held.values(), *self.kept.values()):
            held[:] = [each for each in held if each <= version]

    def words(self, worker: int) -> Words:
        step = self.steps.get(worker, 0)
        return Words(version=step, tag=step, step_s=0.1, waited_s=0.0)

    def roles(self, adopted: bool) -> Collection[int]:
        return [] if adopted else self.held

    def versions(self, role: int, adopted: bool = False) -> list[int]:
        return [] if adopted else list(self.held.get(role, []))

    def segments(self, role: int, adopted: bool = False) -> Sequence[Segment]:
        return [self._segment(role)] if self.versions(role, adopted) else []

    def replicas(self) -> dict[str, list[int]]:
        return {segment: list(versions) for segment, versions in self.kept.items()}

    def holders(self, segment: str) -> Sequence[int]:
        return self._segment(int(segment.partition("x")[0])).holders

    def sent(self, role: int) -> tuple[int, int]:
        return 0, 0

    def bandwidth(self) -> float:
        return 0.0

    def room(self, workers: Collection[int], agents: int) -> int:
        return 0

    def gpus(self) -> bool:
        return False

    def device_memory(self, worker: int) -> tuple[int, int]:
        return 0, 0

    def xids(self) -> dict[int, int]:
        return {}


class SimulatedAgent:
    """An agent whose workers answer at once, and finish one step of each epoch."""

    def __init__(self, settings: Settings, name: str, node_rank: int, domain: str, memory: Memory) -> None:
        self.settings, self.name, self.node_rank, self.domain = settings, name, node_rank, domain
        self.memory = memory
        addresses = "127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:2"
        about = About(name, domain, node_rank, 1, *addresses, job_dir="/job", environment={})
        self.machine = Agent(about, settings, memory)
        self.durable: list[str] = []
        """Names of the durable checkpoints that it sees."""
        self.durable_error = ""
        """Why it sees none."""
        self.plans: list[m.NodePlan] = []
        """All that it has begun, as nodes came and went."""
        self.quiet = True
        """Whether workers leave their steps when they are told to; see `quiesced`."""
        self.steps = True
        """Whether workers finish a step of their own accord, one in each epoch."""
        self.code: int | None = None
        """The job's exit code, once the controller has said it."""
        self._to_step: dict[int, int] = {}
        """Worker -> the epoch in which it does a step, once what that begins with is safe."""
        self._events: deque[e.Event] = deque()
        self._handling = False
        self.handle(e.Begin())

    # -- what a test says that there is ------------------------------------------------------------

    def registers(self, role: int) -> m.Registered:
        """The first that a worker says of its role."""
        raise NotImplementedError

    def post(self, message: m.FromAgent) -> None:
        """To the controller."""
        raise NotImplementedError

    def replicate(self, order: e.Replicate) -> None:
        """A snapshot of this node's is to be kept elsewhere as well."""
        self.handle(e.Replicated(order))

    def begins_anew(self) -> None:
        """As a spare, under another name."""

    def die(self) -> None:
        """All at once, as by SIGKILL."""

    # -- what it is --------------------------------------------------------------------------------

    @property
    def plan(self) -> m.NodePlan | None:
        return self.machine.epochs.plan

    @property
    def epoch(self) -> int:
        return self.machine.epochs.epoch

    def began(self, plan: m.NodePlan) -> None:
        """Another controller's plan, that it has been sent."""
        self.machine.epochs.plan, self.machine.epochs.epoch = plan, plan.epoch

    def plays(self, role: int, step: int = 0) -> Worker:
        """An idle worker does from now on, and is so far."""
        worker = self.machine.crew.idle()[0]
        worker.doing, worker.role, worker.stage = WorkerState.PLAYING, role, "training"
        self.memory.steps[worker.number] = step
        return worker

    def worker(self, role: int) -> Worker:
        """That plays it."""
        found = self.machine.crew.of_role(role)
        assert found is not None
        return found

    # -- what workers do ---------------------------------------------------------------------------

    def hear_worker(self, role: int, message: m.FromWorker) -> None:
        """One of them says something."""
        self.handle(e.FromWorker(self.worker(role).number, message))

    def crash(self, role: int, code: int = -signal.SIGKILL) -> None:
        """The worker that plays `role` ends; a standby is started in its place."""
        self._end(self.worker(role).number, code)

    def step(self, role: int) -> None:
        """The worker finishes a step, of which there is a snapshot then."""
        steps, number = self.memory.steps, self.worker(role).number
        steps[number] += 1
        self._stage(role, steps[number])
        self.hear_worker(role, m.Stepped(self.epoch, role, steps[number]))

    def quiesced(self) -> None:
        """Workers that were not `quiet` have left their steps now."""
        self.quiet = True
        for worker in self.machine.crew.playing():
            self._leave_step(worker)

    def complete(self, role: int) -> None:
        """The worker has come to the end of its script's last part; it ends once all have."""
        self.hear_worker(role, m.Completed(self.epoch, role, part=1, version=1, last=True))

    def finish(self, role: int) -> None:
        """The worker's script has come to its end."""
        self.hear_worker(role, m.Finished(role))

    def _stage(self, role: int, version: int) -> None:
        self.memory.keep(role, version)
        self.hear_worker(role, m.Staged(role, version))

    def _leave_step(self, worker: Worker) -> None:
        if worker.quiesced < self.epoch:
            self.hear_worker(worker.role, m.Quiesced(self.epoch, worker.stage, {}))

    def _end(self, number: int, code: int) -> None:
        if self.machine.crew.get(number) is not None:
            self.handle(e.WorkerEnded(number, code, self.memory.steps.pop(number, -1)))
            self.handle(e.WorkerGone(number))

    def _hears(self, worker: Worker, message: m.ToWorker) -> None:
        role = worker.role
        match message:
            case m.Assign():
                self.memory.steps[worker.number] = 0
                self.hear_worker(role, self.registers(role))
            case m.Abort() if self.quiet:
                self._leave_step(worker)
            case m.Restore(epoch, version, parts):
                at = self.memory.steps[worker.number] = version or 0
                self._to_step[worker.number] = epoch
                if not parts:
                    self.hear_worker(role, m.Allocate(0, role, 0, [self.memory._segment(role).layout]))
                    self._stage(role, at)
                self.hear_worker(role, m.Restored(epoch, role, worker.pid, at, loaded=bool(parts)))
                self.hear_worker(role, m.Reopened(epoch, role))
            case m.SendCounts():
                self.hear_worker(role, m.OperationCounts(role, {}))
            case m.PauseAfterStep(epoch) if epoch:
                self.hear_worker(role, m.PausedAtStep(epoch, role))
            case m.Release(parts) if parts and worker.completed == (self.epoch, len(parts)):
                self.finish(role)
            case m.Exit():
                self._end(worker.number, 0)

    # -- the machine -------------------------------------------------------------------------------

    def handle(self, event: e.Event) -> None:
        """One after the other, also those that come of what another's effects have done."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for effect in self.machine.handle(self._events.popleft(), self.now()):
                    self._do(effect)
        finally:
            self._handling = False

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.ToController(message):
                self.post(message)
            case e.Report():
                self.post(self.machine.epochs.report())
            case e.ToWorker(number, message):
                if (worker := self.machine.crew.get(number)) is not None:
                    self._hears(worker, message)
            case e.Start(number):
                self.handle(e.Forked(number, next(_pids)))
                self.handle(e.WorkerReady(number))
            case e.Kill(number):
                self._end(number, -signal.SIGKILL)
            case e.UsePlan(plan):
                self.plans.append(plan)
            case e.DropAfter(version):
                self.memory.drop_after(version)
            case e.KeepOnly(roles):
                for role in set(self.memory.held) - roles:
                    del self.memory.held[role]
            case e.Replicate():
                self.replicate(effect)
            case e.Commit(number, version) if version >= 0 and self.steps:
                worker = self.machine.crew.get(number)
                if worker is not None and self._to_step.pop(number, None) == self.epoch:
                    self.step(worker.role)
            case e.FetchState(held=held, plan=plan):
                copies = []
                for role in held:
                    assert plan.version is not None
                    self.memory.keep(role, plan.version)
                    copies.append(m.CopyHere(role, 0, [0], [self.memory._segment(role).layout]))
                self.handle(e.StateFetched(effect, tuple(copies)))
            case e.LookForDurable(number):
                names = () if self.durable_error else tuple(self.durable)
                self.handle(e.DurableListed(number, names, self.durable_error))
            case e.KillNode():
                self.die()
            case e.BecomeSpare():
                self.die()
                self.begins_anew()
            case e.End(code):
                self.code = code
            case _:
                pass  # nobody asks for it, or a test answers in its own time
