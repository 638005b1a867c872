"""A node: its agent's machine, its memory, its workers, and what a shell does around them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from random import Random
from typing import TYPE_CHECKING

from ft_core.leadership import lease
from ft_core.node import events as ev
from ft_core.node.about import About
from ft_core.node.admission.child import LIMIT
from ft_core.node.machine import Agent
from ft_core.node.memory.view import Words
from ft_core.protocol import messages as m
from ft_core.state.manifest import Segment
from ft_core.state.placement import Places, replica_nodes, sender, spares_of

from .control import SimController
from .invariants import Invariant
from .store import SimStore
from .workers import SimWorker, to_layout
from .world import Link, Process

if TYPE_CHECKING:
    from .job import SimJob

_RECONNECT = 1.5
"""Seconds, at most; as a rule it is much quicker."""
_TRANSFER = 0.02
_FREES = 0.1
"""Seconds that the kernel has to take a worker's memory back, or two or three times as many, or none."""
_ASK = 3.0
"""Seconds after which a question to another agent has no answer."""
_PROBE = 1.0
"""Seconds that a node has to answer another."""


def domain_of(machine_name: str) -> str:
    """What a machine is lost with: as a rule nothing else."""
    return machine_name


class SimNode(Process):
    """One agent and what it has started. A node that begins anew has another name on the same machine."""

    def __init__(self, job: SimJob, machine_name: str, rank: int, again: int = 0) -> None:
        super().__init__(job.world, f"{machine_name}+{again}")
        self.job, self.machine_name, self.rank, self._again = job, machine_name, rank, again
        self.leaving = False
        self.noticed = False
        """Whether its machine is about to go, as it has heard."""
        self.broken: Counter[int] = Counter()
        """Devices that are, and how many workers more will die of it."""
        self.vanished = False
        """Whether its machine is no more, and nobody there says that nobody listens."""
        self.store = SimStore()
        self.workers: dict[int, SimWorker] = {}
        self.ending: dict[int, int] = {}
        """Pids of workers that have ended, by number, whose memory the kernel is still taking back."""
        self.link: Link | None = None
        self.plan: m.NodePlan | None = None
        self.epoch = 0
        about = About(
            node=self.name,
            domain=domain_of(machine_name),
            node_rank=rank,
            pid=job.pid(),
            data=f"{self.name}:1",
            store=f"{self.name}:2",
            master=f"{self.name}:3",
            job_dir="/job",
            environment={},
        )
        self.machine = Agent(about, job.settings, self)
        self.follower = lease.Follower(lease.trust(lease.LOOK) if job.arbiter is not None else math.inf)
        self._leader: SimController | None = None
        self._term = 0
        """In which that one leads."""
        """Who leads, as far as is known here."""
        self._looked = 0.0
        """When the newest look was begun that was answered, by the clock of its machine."""
        self.in_doubt = False
        """Whether it had no answer for longer than it obeys anybody, before it found the newest term."""
        if job.arbiter is not None:
            self.runs_at(1 + 0.05 * (2 * self.world.rng.random() - 1))
        self.trouble_at = float("-inf")
        """When it was last stopped, cut off, or its connection broken."""
        self.trouble = 0.0
        """For how many seconds in all, of late."""
        self.agent_alone = True
        """Whether that was its agent being stopped, and nothing else."""
        self.beside = Process(self.world, f"{self.name}/pulse")
        """What says that the machine lives."""
        self._lots = Random(f"{self.world.seed} {self.name}")
        """For what came later: seeds mean what they meant."""
        self._turned = 0.0
        self._led = 0
        """In which term the controller leads that it has met last."""
        self._met: tuple[SimController, m.Session] | None = None
        """Whom its agent has heard from last, and what he calls himself."""
        self._deferred: deque[tuple[float, object]] = deque()
        """What was said and is not clear to count, and when."""
        self.later(0.05 + self.world.rng.random() * 0.5, self._begin)

    def __str__(self) -> str:
        workers = [
            f"{w.number}: role {w.role}, {w.state}, v{w.version} e{w.epoch}/{w.pending}"
            for w in self.workers.values()
        ]
        state = "stopped, " if self.stopped else "" if self.link else "without controller, "
        return f"{self.name}: {state}{'; '.join(workers)}"

    def _begin(self) -> None:
        self.handle(ev.Begin())
        if self.job.arbiter is None:
            self.follower.looked(0.0, 1)
        else:
            self._look()
        self._connect()
        self._tick()
        self._pulse()

    def _pulse(self) -> None:
        """As `ft_core.node.link.pulse`."""
        if self._met is not None:
            controller, session = self._met
            number, stalled = round(self.world.now * 1e6), self.world.now - self._turned
            self.job.send_pulse(self, controller, m.Pulse(session, self.name, number, stalled))
        self.beside.later(self.job.settings.pulse, self._pulse)

    def _tick(self) -> None:
        self._turned = self.world.now
        self.handle(ev.Tick())
        self.later(self.job.settings.heartbeat, self._tick)

    # -- the controller ----------------------------------------------------------------------------

    def _look(self) -> None:
        """Who leads?"""
        arbiter, began = self.job.arbiter, self.clock
        assert arbiter is not None

        def answered(found: tuple[int, SimController | None] | None) -> None:
            if found is not None:
                if found[0] > self.follower.term:
                    self.in_doubt = self.clock - self._looked > self.follower.trust
                self._looked = began
                self.follower.looked(began, found[0])
                news = found[1] is not None and found[1] is not self._leader
                self._term, self._leader = found
                self._hear_deferred()
                if news and self._led:  # at once: whoever else it was to reach leads no more
                    self._connect()
            self.later(lease.LOOK * (0.5 + 0.5 * self.world.rng.random()), self._look)

        arbiter.ask(self, self.machine_name, lambda: (arbiter.term, arbiter.leader), answered)

    def _hear_deferred(self) -> None:
        """What has waited for a look, once it is clear whether it counts."""
        link = self.link
        if link is None:
            return
        if self.follower.deposed or (self._deferred and self.clock - self._deferred[0][0] > lease.DOUBT):
            self.world.trace(f"{self.name} does not obey whom it is connected to any more")
            self._deferred.clear()
            link.break_(self.world.rng.random())
            self._disconnected(link)
        while self._deferred and self.link is link and self.follower.obeys(self.clock):
            _, message = self._deferred.popleft()
            self.job.obeys(self, self._led, message)
            self.handle(ev.FromController(message))  # type: ignore[arg-type]

    def _connect(self) -> None:
        if self.link is not None:
            return
        nobody = self.job.arbiter is not None and self._leader is None
        link = None if nobody else self.job.connect(self, to=self._leader)
        if link is None or not link.open:
            self.handle(ev.NotConnected("nobody answers"))
            self.later(self._soon(), self._connect)
            return
        self.link = link
        link.heard[0] = lambda message: self._hear(link, message)
        link.ended[0] = lambda: self._disconnected(link)
        self._deferred.clear()
        self.follower.connected(self._term)
        self.handle(ev.Connected(max(1, self.follower.term)))

    def _soon(self) -> float:
        return _RECONNECT * self.world.rng.random() ** 3

    def _hear(self, link: Link, message: object) -> None:
        if self.link is not link:
            return
        self.world.trace(f"{self.name} <- ", message)
        if isinstance(message, m.LeaderHello):
            self.follower.led_by(message.term)
            self._led = message.term
            controller = link.ends[1]
            assert isinstance(controller, SimController)
            self._met = controller, message.session
        self._deferred.append((self.clock, message))
        self._hear_deferred()

    def _disconnected(self, link: Link) -> None:
        if self.link is link:
            self.link = None
            self.handle(ev.NotConnected("the connection has ended"))
            self.later(self._soon(), self._connect)

    # -- workers -----------------------------------------------------------------------------------

    def worker_ready(self, worker: SimWorker) -> None:
        """It has connected."""
        self.later(0.0, lambda: self.handle(ev.WorkerReady(worker.number)))

    def from_worker(self, worker: SimWorker, message: m.Message) -> None:
        """In order, and soon."""
        worker.outbox += 1
        number = worker.outbox

        def arrive() -> None:
            if worker.alive or number <= worker.outbox:
                self.world.trace(f"{self.name} <- {worker.name}: ", message)
                self.handle(ev.FromWorker(worker.number, message))  # type: ignore[arg-type]

        self.later(0.001, arrive)

    def end_worker(self, worker: SimWorker, code: int) -> None:
        """It ends, and its agent hears of that after what it has said; then its process is gone, which is not
        drawn by lot: seeds mean what they meant."""
        if not worker.alive:
            return
        self.world.trace(f"{worker.name} of role {worker.role} ends with {code}")
        worker.die()

        def ended() -> None:
            if self.workers.pop(worker.number, None) is not None:
                self.job.errors.ended(self, worker, code)
                self.ending[worker.number] = worker.pid
                self.handle(ev.WorkerEnded(worker.number, code, worker.words.version))
                self.later(worker.pid % 4 * _FREES, gone)

        def gone() -> None:
            del self.ending[worker.number]
            self.handle(ev.WorkerGone(worker.number))

        self.later(0.002 + 0.02 * self.world.rng.random(), ended)

    # -- what happens to a machine -----------------------------------------------------------------

    def kill(self) -> None:
        """It is gone at once, with its memory."""
        if not self.alive:
            return
        self.world.trace(f"{self.name} dies")
        self.job.memory_lost(self)
        for worker in self.workers.values():
            worker.die()
        self.die()
        if self.link is not None:
            self.link.break_(self.world.rng.random())

    def troubled(self, seconds: float, agent_alone: bool = False) -> None:
        """It is stopped, or cut off, or its connection broken, for so long."""
        if self.world.now - self.trouble_at > 2 * self.job.settings.silence_limit:
            self.trouble, self.agent_alone = 0.0, True
        self.trouble += seconds
        self.agent_alone &= agent_alone
        self.trouble_at = self.world.now

    def die(self) -> None:
        """With what is beside it."""
        super().die()
        self.beside.die()

    def stall(self, seconds: float, agent_alone: bool = False) -> None:
        """Everything on it stops for a while; or its agent."""
        self.troubled(seconds, agent_alone)
        self.job.outcome.pauses += 1
        stopped: list[Process] = [self, *([] if agent_alone else [self.beside, *self.workers.values()])]
        if not agent_alone:
            stopped += [c for c in self.job.controllers if c.machine_name == self.machine_name]
        for process in stopped:
            process.stop()

        def go_on() -> None:
            self.trouble_at = self.world.now
            for process in stopped:
                process.go_on()

        self.world.at(seconds, go_on)

    def healed(self) -> None:
        """Whatever is stopped goes on."""
        self.trouble_at = self.world.now
        for process in [self, self.beside, *self.workers.values()]:
            while process.alive and process.stopped:
                process.go_on()

    def notice(self, reason: str, seconds: float | None = None) -> None:
        """Its machine is about to go; without a `reason` it is not any more."""
        self.noticed = bool(reason)
        self.do(lambda: self.handle(ev.Noticed(reason, seconds)))

    def reports(self, xid: int, device: int) -> None:
        """A device does."""
        finding = m.DeviceFinding(m.Symptom.XID, xid, device, "", "")
        self.do(lambda: self.handle(ev.DeviceFound(finding)))

    def breaks(self, number: int) -> bool:
        """Whether the device of this worker does now, under it."""
        worker = self.machine.crew.get(number)
        if worker is None or not self.broken[worker.device]:
            return False
        self.broken[worker.device] -= 1
        return True

    def terminate(self) -> None:
        """SIGTERM."""
        self.leaving = True
        self.do(lambda: self.handle(ev.Terminate()))

    # -- the machine -------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        """One event, and its effects."""
        if not self.alive:
            return
        for effect in self.machine.handle(event, self.awake):
            self._do(effect)

    def _do(self, effect: ev.Effect) -> None:
        match effect:
            case ev.ToController(message):
                if isinstance(message, m.Suspect) and message.epoch != self.machine.epochs.plan_epoch:
                    raise Invariant.LINKS.broken(
                        f"{self.name} suspects a link in an epoch without a plan: {message}"
                    )
                if self.link is not None:
                    self.job.sent(message)
                    self.link.send(0, message)
            case ev.Report():
                self._do(ev.ToController(self.machine.epochs.report()))
            case ev.ToWorker(number, message):
                if isinstance(message, m.Assign) and message.plan.epoch != self.epoch:
                    raise Invariant.EPOCH_ORDER.broken(
                        f"{self.name}, in epoch {self.epoch}, gives a role away: {message}",
                    )
                if isinstance(message, m.Assign) and set(message.ending) != set(self.ending.values()):
                    raise Invariant.PREDECESSORS.broken(
                        f"{self.ending} are ending, and not waited for: {message}"
                    )
                if (worker := self.workers.get(number)) is not None:
                    worker.later(0.001, lambda: worker.hear(message))
            case ev.Start(number, device):
                worker = SimWorker(self, number, device, self.job.pid())
                self.workers[number] = worker
                self.later(0.0, lambda: self.handle(ev.Forked(number, worker.pid)))
            case ev.Kill(number):
                if (worker := self.workers.get(number)) is not None:
                    self.end_worker(worker, -9)
            case ev.Signal(number, even_so):
                if (worker := self.workers.get(number)) is not None and even_so:
                    self.end_worker(worker, -15)
                    self.later(0.0, lambda: self.handle(ev.Signalled(number)))
            case ev.Commit(number, version):
                if (worker := self.workers.get(number)) is not None:
                    worker.words.committed = version
                    worker.later(0.0, worker.pump)
            case ev.BeginEpoch(epoch):
                self.epoch = epoch
            case ev.UsePlan(plan):
                self.plan = plan
                self.epoch = plan.epoch
            case ev.DropAfter(version):
                self.store.drop_after(version)
            case ev.KeepOnly(roles, adopted):
                self.store.keep_only(roles, adopted)
            case ev.Reserve(number, request, adopted, _):
                self.store.allocate(request.role, request.slot, adopted)
                if (worker := self.workers.get(number)) is not None:
                    worker.later(0.001, lambda: worker.hear(m.Allocated(request.id, [0])))
            case ev.InvalidateCopy(role, slot, adopted):
                self.store.memory(role, adopted).held[slot] = (-1, 0)
            case ev.Replicate():
                self._replicate(effect)
            case ev.FetchState():
                self._bring(effect)
            case ev.LookForDurable(number):
                self.job.storage.list(self, number)
            case ev.WriteDurable():
                self.job.storage.save(self, effect, self.handle)
            case ev.WriteVersion():
                self.later(self.world.delay(self._lots), lambda: self._write_version(effect))
            case ev.Probe():
                self._probe(effect)
            case ev.AskRecords():
                self._ask_records(effect)
            case ev.ReadFlight(m.SendFlight(number, _, closely), _, playing, epoch):
                flight = self.job.training.flight
                there = ((self.workers.get(at), role) for at, role in playing.items())
                logs = tuple(
                    flight.log(w, role, epoch, role in closely) for w, role in there if w is not None
                )
                self.later(0.01, lambda: self.handle(ev.FlightRead(m.Flights(number, logs))))
            case ev.WriteStacks(number, _, end):
                self.later(0.1, lambda: self.handle(ev.Examined(number, end)))
            case ev.ExamineNode():
                self._examine()
            case ev.KillNode():
                self.kill()
            case ev.BecomeSpare():
                self.world.trace(f"{self.name} begins anew")
                self.kill()
                self.job.nodes.append(SimNode(self.job, self.machine_name, -1, self._again + 1))
            case ev.Say(text):
                self.world.trace(f"{self.name} says {text}")
            case ev.End():
                self.world.trace(f"{self.name} ends with {effect.code}")
                self.leaving = True
                if effect.code and not self.job.over:
                    self.job.memory_lost(self)
                for worker in self.workers.values():
                    worker.die()
                self.die()
                if self.link is not None:
                    self.link.break_(0.0)
                self.job.machine_ends(self)
            case ev.ShowRest() | ev.UseSettings() | ev.SetApart():
                pass
            case _:
                raise NotImplementedError(effect)

    # -- what others hold --------------------------------------------------------------------------

    def _reaches(self, other: SimNode | None) -> bool:
        if other is None or not other.alive:
            return False
        return self.job.network.joins(self.machine_name, other.machine_name)

    def _replicate(self, wanted: ev.Replicate) -> None:
        """Push what only this node has to others, which tear their older copy first."""
        plan = self.plan
        failed, targets, content = "", [], 0
        if plan is None or self.epoch != wanted.epoch or plan.epoch != wanted.epoch:
            failed = f"epoch {wanted.epoch} is over"
        else:
            adopter = plan.adopted.get(wanted.role)
            memory = self.store.memory(wanted.role, adopter is not None)
            slot = memory.find(wanted.version)
            copy = None if slot is None else memory.held[slot]
            if copy is None:
                failed = f"version {wanted.version} is no longer in memory"
            else:
                content = copy[1]
                targets = self._targets(wanted, plan, adopter)
        self._push(wanted, targets, content, failed)

    def _examine(self) -> None:
        """As `ft_core.node.admission`: it may take a while, or be ended."""
        seconds = self._lots.choice((0.2, 0.2, 1.0, 5.0, LIMIT))
        sick = self.machine_name in self.job.errors.sick_from_the_start
        found = m.Soundness.SICK if sick else m.Soundness.OK
        if seconds == LIMIT:
            found = m.Soundness.UNKNOWN
        check = m.NodeCheck("computation", found, "", "it computes wrongly" if sick else "")
        self.later(seconds, lambda: self.handle(ev.NodeExamined((check,), {}, "", ())))

    def _targets(
        self, wanted: ev.Replicate, plan: m.NodePlan, adopter: int | None
    ) -> list[tuple[Segment, str]]:
        """As `ft_core.node.memory.replicator`: which segments go to which nodes."""
        roles = plan.roles if adopter is None else {**plan.roles, wanted.role: plan.roles[adopter]}
        domains = {name: about.domain for name, about in plan.nodes.items()}
        guarded = self.machine.epochs.settings.guarded
        places = Places(roles, domains, spares_of(plan.nodes, roles), guarded)
        ring, k = places.ring(wanted.ring), self.machine.epochs.settings.replicas
        return [
            (segment, name)
            for segment in self.job.training.segments(wanted.role, adopter is not None)
            if sender(segment, roles) == wanted.role
            for name in replica_nodes(segment, places, k, ring)
        ]

    def _push(
        self, wanted: ev.Replicate, targets: list[tuple[Segment, str]], content: int, failed: str
    ) -> None:
        """One after the other."""
        if failed or not targets:
            self.later(0.001, lambda: self.handle(ev.Replicated(wanted, failed)))
            return
        (segment, name), rest = targets[0], targets[1:]
        other = self.job.named(name)
        if not self._reaches(other):
            self.later(0.3, lambda: self._push(wanted, [], 0, f"{name} is not there"))
            return
        assert other is not None

        def give_up() -> None:
            self._push(
                wanted, [], 0, "the epoch is over" if self.epoch != wanted.epoch else f"{name} is not there"
            )

        def begins() -> None:
            if other.epoch != wanted.epoch:
                self.later(0.01, lambda: self._push(wanted, [], 0, f"{name} is in another epoch"))
                return
            slot = other.store.push_begins(segment.id, segment.holders, (wanted.version, content))
            seconds = self.world.rng.random() * _TRANSFER * self.job.copying
            if slot is None:
                self.later(0.001, done)
            else:
                other.later(seconds, lambda: ends(slot))

        def ends(slot: int) -> None:
            if other.epoch == wanted.epoch and self.alive and self.epoch == wanted.epoch:
                other.store.push_ends(segment.id, slot, (wanted.version, content))
                self.later(0.001, done)

        over = False

        def done() -> None:
            nonlocal over
            over = True
            self._push(wanted, rest, content, "")

        def watch() -> None:
            if not over:
                if self.epoch != wanted.epoch or not self._reaches(other):
                    give_up()
                else:
                    self.later(0.3, watch)

        other.later(self.world.delay(), begins)
        self.later(0.3, watch)

    def _bring(self, wanted: ev.FetchState) -> None:
        """Have a version here, from another's memory or from storage if it is not."""
        self._bring_next(wanted, list(wanted.held) if wanted.plan.version is not None else [], ())

    def _bring_next(self, wanted: ev.FetchState, held: list[int], copies: tuple[m.CopyHere, ...]) -> None:
        """The rest of what is `held`, one after the other."""
        plan = wanted.plan
        version = plan.version
        if not held:
            self.later(0.03 * self.world.rng.random(), lambda: self.handle(ev.StateFetched(wanted, copies)))
            return
        assert version is not None
        role, rest = held[0], held[1:]
        memory = self.store.memory(role, role != wanted.role)

        def there(slot: int) -> None:
            layouts = [to_layout(s) for s in self.job.training.segments(role, role != wanted.role)]
            self._bring_next(wanted, rest, (*copies, m.CopyHere(role, slot, [0], layouts)))

        def found(content: int | None, problem: str) -> None:
            if content is None:
                self.later(0.1, lambda: self.handle(ev.StateFetched(wanted, (), problem)))
                return
            slot = memory.free()
            memory.held[slot] = (version, content)
            there(slot)

        sources = plan.sources.get(role)
        if (slot := memory.find(version)) is not None:
            there(slot)
        elif plan.origin == "durable":
            self.job.storage.read(self, plan.durable, role, found)
        elif plan.origin == "initial" and not sources:
            self._bring_next(wanted, rest, copies)
        else:
            contents = {self._ask(name, version, nodes) for name, nodes in (sources or {}).items()}
            content = contents.pop() if len(contents) == 1 else None
            found(content, f"role {role}, version {version}: {sources}")

    def _write_version(self, order: ev.WriteVersion) -> None:
        """As `NodeShell._write_version`: first what others have of it."""
        plan, version, first = order.plan, order.version, order.held[0]
        for role in order.held:
            memory = self.store.memory(role, role != first)
            if memory.find(version) is not None:
                continue
            sources = plan.sources.get(role, {})
            contents = {self._ask(segment, version, nodes) for segment, nodes in sources.items()}
            content = contents.pop() if len(contents) == 1 else None
            if content is None:
                self.handle(ev.VersionWritten(order, f"role {role}, version {version}: {sources}"))
                return
            memory.held[memory.free()] = (version, content)
        self.job.storage.save(
            self,
            ev.WriteDurable(first, version, plan, order.replicated),
            lambda done: self.handle(ev.VersionWritten(order, done.failed)),
        )

    def _ask(self, segment: str, version: int, nodes: Sequence[str]) -> int | None:
        for name in nodes:
            other = self.job.named(name)
            if self._reaches(other) and other is not None:
                found = other.store.content(segment, version, self.job.owners)
                if found is not None:
                    return found
        return None

    def _ask_records(self, asked: ev.AskRecords) -> None:
        """Of the worker that plays a role elsewhere, which answers sooner or later, if it lives."""
        other = self.job.named(asked.address.rpartition(":")[0])
        answered = False

        def answer(counts: m.Counts, failed: str = "") -> None:
            nonlocal answered
            if not answered:
                answered = True
                self.handle(ev.RecordsFound(asked.role, asked.epoch, counts, failed))

        def ask() -> None:
            workers = other.workers.values() if other is not None else ()
            player = next((worker for worker in workers if worker.plays and worker.role == asked.role), None)
            if player is None or not self._reaches(other):
                answer({}, "nobody plays it there")
            else:
                player.later(self.world.delay(self._lots), lambda: answer(player.counts()))

        self.later(_ASK, lambda: answer({}, "no answer"))
        if other is not None and self._reaches(other):
            other.later(self.world.delay(self._lots), ask)

    def _probe(self, order: ev.Probe) -> None:
        """Answered once all that was asked is answered, or the time for it is over."""
        reach: dict[str, m.ProbeResult] = {}
        over = False

        def answers(name: str, found: m.ProbeResult) -> None:
            reach[name] = found
            if len(reach) == len(order.nodes):
                end()

        def asked(name: str, other: SimNode) -> None:
            """It is asked, and may have ended, be stopped, or cut off, by now or later."""
            if not self.job.network.joins(self.machine_name, other.machine_name):
                if self.world.rng.random() < 0.5:  # somebody on the way says that it leads nowhere
                    answers(name, "silent")
            elif other.alive:
                other.do(lambda: self.later(0.001, lambda: answers(name, "reached")))
            elif not other.vanished:
                answers(name, "refused")

        def end() -> None:
            nonlocal over
            if not over:
                over = True
                silent: dict[str, m.ProbeResult] = dict.fromkeys(order.nodes, "silent")
                self.handle(ev.Probed(order.round, silent | reach))

        for name in order.nodes:
            other = next(node for node in self.job.nodes if node.name == name)
            self.later(self.world.delay(), lambda n=name, o=other: asked(n, o))  # type: ignore[misc]
        self.later(_PROBE, end)

    # -- View --------------------------------------------------------------------------------------

    def words(self, worker: int) -> Words:
        words = self.workers[worker].words
        step, waited = (words.step_ns / 1e9, words.waited_ns / 1e9) if self.job.shape.slow else (0.1, 0.0)
        return Words(words.version, words.tag, step, waited, *self.job.slow.parts(self, worker))

    def roles(self, adopted: bool) -> Collection[int]:
        return self.store.adopted if adopted else self.store.roles

    def versions(self, role: int, adopted: bool = False) -> list[int]:
        held = self.store.adopted if adopted else self.store.roles
        return held[role].versions() if role in held else []

    def segments(self, role: int, adopted: bool = False) -> Sequence[Segment]:
        return self.job.training.segments(role, adopted) if self.versions(role, adopted) else ()

    def replicas(self) -> dict[str, list[int]]:
        return {name: slots.versions() for name, slots in self.store.replicas.items()}

    def holders(self, segment: str) -> Sequence[int]:
        return self.store.holders.get(segment, ())

    def sent(self, role: int) -> tuple[int, int]:
        return 0, 0

    def room(self, workers: Collection[int], agents: int) -> int:
        return len(workers)

    def gpus(self) -> bool:
        return False

    def device_memory(self, worker: int) -> tuple[int, int]:
        return 0, 0

    def xids(self) -> dict[int, int]:
        return {}

    def bandwidth(self) -> float:
        return 0.0
