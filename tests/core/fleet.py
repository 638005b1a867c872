"""Simulated nodes that speak the real protocol with a real controller, and misbehave where a test says so.

    async def job() -> None:
        async with Fleet(tmp_path, nodes=2) as fleet:
            await fleet.event("resumed")
            fleet["node1"].lose(HoldingsChanged)
            fleet["node0"].crash(0)
            await fleet.event("resumed", 2)

    asyncio.run(job())

A node has no processes and no state, only what it tells of them: its workers answer at once, and finish
one step of each epoch. The controller is that of `ft_core.control.shell`, in this event loop, or a process of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from ports import free_port

from ft_core.control.cluster.state import ClusterState
from ft_core.control.shell import Shell
from ft_core.node.memory.holdings import changed
from ft_core.protocol import messages as m
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.groups import runs_of, text_of
from ft_core.protocol.messages import Message, Redundancy, ReplicaGroup
from ft_core.protocol.table import Received, hosts_of, pieces
from ft_core.settings import Command, Settings, unique, write_secret

Event = dict[str, Any]
"""A line of `events.jsonl`."""
Action = Callable[[Message], Awaitable[bool]]
"""What happens to a message on its way; returns whether it arrives."""

_pids = itertools.count(1_000_000)


@dataclass
class Worker:
    """What an agent knows of one that plays a role."""

    stage: m.Stage = "startup"
    step: int = 0
    pid: int = field(default_factory=lambda: next(_pids))


class Node:
    """One simulated agent."""

    def __init__(self, fleet: Fleet, name: str, node_rank: int, domain: str = "") -> None:
        self.fleet, self.name, self.node_rank, self.domain = fleet, name, node_rank, domain or name
        self.idle = fleet.settings.nproc_per_node + 1
        self.plan: m.NodePlan | None = None
        self._plans = Received()
        self.epoch = 0
        self.workers: dict[int, Worker] = {}
        self.versions: dict[int, list[int]] = {}
        """Snapshots of the roles that are, or were, played here."""
        self.replicas: dict[str, list[int]] = {}
        """Segments kept for others."""
        self.durable: list[str] = []
        """Names of the durable checkpoints that it sees."""
        self.durable_error = ""
        """Why it sees none."""
        self.sent: list[Message] = []
        """Everything that has gone out."""
        self.plans: list[m.NodePlan] = []
        """All that it was sent."""
        self.received: list[Message] = []
        self.quiet = True
        """Whether workers leave their steps when they are told to; see `quiesced`."""
        self.steps = True
        """Whether workers finish a step of their own accord, one in each epoch."""
        self.code: int | None = None
        """The job's exit code, once the controller has said it."""
        self.killed = False
        self.connections = 0
        self._actions: dict[type[Message], list[Action]] = {}
        self._awake = asyncio.Event()
        self._awake.set()
        self._queue: asyncio.Queue[Message] = asyncio.Queue()
        self._channel: AsyncChannel[m.ToAgent] | None = None
        self._reported = 0
        self._reports = 0
        """Over this connection, after the greeting."""
        self._said: dict[tuple[type[Message], int], Message] = {}
        self._tasks = [asyncio.create_task(work) for work in (self._connect(), self._send(), self._beat())]

    # -- misbehaviour --------------------------------------------------------------------------

    def on(self, kind: type[Message], action: Action) -> None:
        """`action` is done to the next message of that kind, sent or received."""
        self._actions.setdefault(kind, []).append(action)

    def lose(self, kind: type[Message]) -> None:
        """The next message of that kind, and the connection with it, is lost; the agent connects again."""

        async def action(_: Message) -> bool:
            self.disconnect()
            return False

        self.on(kind, action)

    def delay(self, kind: type[Message], until: Awaitable[object]) -> None:
        """The next message of that kind, and all behind it, waits."""

        async def action(_: Message) -> bool:
            await until
            return True

        self.on(kind, action)

    def disconnect(self) -> None:
        """The connection breaks."""
        if self._channel is not None:
            self._channel.close()

    def pause(self) -> None:
        """Neither send nor read anything; the connection stays."""
        self._awake.clear()

    def go_on(self) -> None:
        """After `pause`."""
        self._awake.set()

    def die(self) -> None:
        """All at once, as by SIGKILL."""
        self.killed = True
        self.disconnect()
        for task in self._tasks:
            task.cancel()

    def crash(self, role: int) -> None:
        """The worker that plays `role` dies by a signal; a standby is started in its place."""
        worker = self.workers.pop(role)
        self.idle += 1
        about = {"exit": "killed by SIGKILL", "code": -9, "fault": m.Fault.KILLED}
        self.say(m.WorkerLost(role=role, pid=worker.pid, **about))
        self._report_if_quiet()

    # -- what workers do -----------------------------------------------------------------------

    def step(self, role: int) -> None:
        """The worker finishes a step, and its snapshot is kept here and on the next node."""
        worker = self.workers[role]
        worker.step += 1
        self._keep(role, worker.step)
        self.say(m.Stepped(epoch=self.epoch, role=role, version=worker.step))

    def quiesced(self) -> None:
        """Workers that were not `quiet` have left their steps now."""
        self.quiet = True
        self._report_if_quiet()

    def complete(self, role: int) -> None:
        """The worker has come to the end of its script's last part; it ends once all have."""
        self.say(m.Completed(epoch=self.epoch, role=role, part=1, version=1, last=True))

    def finish(self, role: int) -> None:
        """The worker's script has come to its end."""
        self.say(m.Finished(role=role))

    def _keep(self, role: int, version: int) -> None:
        self.versions[role] = sorted({*self.versions.get(role, []), version})[-2:]
        others = sorted(node.name for node in self.fleet.nodes.values() if not node.killed)
        keeper = self.fleet.nodes[others[(others.index(self.name) + 1) % len(others)]]
        if keeper is not self:
            held = keeper.replicas.setdefault(self.fleet.segment(role), [])
            held[:] = sorted({*held, version})[-2:]

    # -- the agent -----------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        self._queue.put_nowait(message)

    def say(self, message: Message) -> None:
        """Post it, and with each greeting again."""
        self._said[type(message), message.role] = message  # type: ignore[attr-defined]
        self.post(message)

    def _forget(self, roles: Collection[int]) -> None:
        self._said = {key: kept for key, kept in self._said.items() if key[1] not in roles}

    @property
    def begun(self) -> str:
        return self.plan.id if self.plan is not None else ""

    def holdings(self) -> m.Holdings:
        """As an agent reports it."""
        roles, segment = {}, self.fleet.segment
        for role in self.roles_here():
            worker, versions = self.workers.get(role), self.versions.get(role, [])
            roles[role] = m.RoleHeld(
                alive=worker is not None,
                stage=worker.stage if worker else "startup",
                versions=list(versions),
                segments=[segment(role)] if versions else [],
            )
        gone = {segment(r): v for r, v in self.versions.items() if r not in self.roles_here()}
        replicas = {name: list(versions) for name, versions in (self.replicas | gone).items()}
        held = {*replicas, *(segment(role) for role in self.roles_here() if self.versions.get(role))}
        return m.Holdings(
            epoch=self.epoch,
            begun=self.begun,
            reported=self._reported,
            parts=[],
            roles=roles,
            replicas=replicas,
            segments={name: self.fleet.held_by(role) for role, name in sorted((_role(n), n) for n in held)},
            idle=self.idle,
            store="127.0.0.1:1",
            master="127.0.0.1:2",
            configured=None,
        )

    def hello(self) -> m.AgentHello:
        """As an agent greets; its pid tells which of its connections it is."""
        return m.AgentHello(
            node=self.name,
            term=1,
            pid=self.connections,
            node_rank=self.node_rank,
            domain=self.domain,
            data="127.0.0.1:1",
            holdings=self.holdings(),
            said=list(self._said.values()),  # type: ignore[arg-type]
            draining=False,
            job="",
        )

    def heartbeat(self) -> m.Heartbeat:
        """As an agent beats."""
        about = {"committed": -1, "step_s": 0.1, "waited_s": 0.0, "h2h_bytes": 0, "h2h_snapshots": 0}
        roles = {
            role: m.RoleBeat(pid=w.pid, step=w.step, tag=w.step, held=self.versions.get(role, []), **about)
            for role, w in self.workers.items()
        }
        seen = {"epoch": self.epoch, "begun": self.begun}
        return m.Heartbeat(**seen, roles=roles, idle=self.idle, replicas=self.replicas)

    def roles_here(self) -> list[int]:
        plan = self.plan
        return [role for role, node in plan.roles.items() if node == self.name] if plan is not None else []

    async def _connect(self) -> None:
        while self.code is None:
            with contextlib.suppress(OSError):
                channel = await AsyncChannel.connect(
                    self.fleet.settings.controller, self.fleet.secret, m.FROM_CONTROLLER
                )
                self.connections += 1
                hello = self.hello()
                if await self._arrives(hello):
                    self.sent.append(hello)
                    channel.post(hello)
                    self._channel, self._reports = channel, 0
                    try:
                        await self._receive(channel)
                    finally:
                        self._channel = None
                        channel.close()
            await asyncio.sleep(0.01)

    async def _receive(self, channel: AsyncChannel[m.ToAgent]) -> None:
        while True:
            message = await channel.recv()
            await self._awake.wait()
            if await self._arrives(message):
                self.received.append(message)
                self._on_controller(message)

    async def _send(self) -> None:
        while True:
            message = await self._queue.get()
            if await self._arrives(message) and self._channel is not None:
                if isinstance(message, m.HoldingsChanged):
                    message = replace(message, number=self._reports)
                    self._reports += 1
                with contextlib.suppress(OSError):  # as the agent: what is lost is lost
                    self._channel.post(message)
                    self.sent.append(message)

    async def _arrives(self, message: Message) -> bool:
        await self._awake.wait()
        actions = self._actions.get(type(message))
        return not actions or await actions.pop(0)(message)

    async def _beat(self) -> None:
        while True:
            self.post(self.heartbeat())
            await asyncio.sleep(self.fleet.settings.heartbeat)

    def _on_controller(self, message: Message) -> None:
        match message:
            case m.Abort(epoch=epoch) if epoch > self.epoch:
                self.epoch = epoch
                self._report_if_quiet()
            case m.Hosts() | m.OwnPlan():
                self._plans.hear(message)
            case m.SharedPlan():
                if (plan := self._plans.plan(message, self.plan)) is not None:
                    self.plans.append(plan)
                    self._apply(plan)
            case m.NodesChanged(id=name, nodes=nodes) if self.plan is not None and name == self.plan.id:
                hosts = set(self.plan.roles.values())
                idle = {node for node in self.plan.nodes if node not in hosts}
                now = {**self.plan.nodes, **dict.fromkeys(idle if message.all else ()), **nodes}
                there = {node: about for node, about in now.items() if about is not None}
                self.plan = replace(self.plan, nodes=there)
            case m.KillWorker(role=None):
                self.die()
            case m.KillWorker(role=role) if role in self.workers:
                self.crash(role)
            case m.SendHeartbeat():
                self.post(self.heartbeat())
            case m.ListDurable(id=number):
                names = [] if self.durable_error else list(self.durable)
                self.post(m.DurableNames(id=number, names=names, error=self.durable_error))
            case m.SendCounts():
                for role in self.workers:
                    self.post(m.OperationCounts(role=role, counts={}))
            case m.Prepare(epoch=epoch, roles=roles) if self.plan is not None and epoch == self.plan.epoch:
                for role in roles:
                    if role not in self.workers:
                        self._assign(role)
                    self.say(m.Prepared(role=role, counts={}))
            case m.Withdraw(roles=roles):
                self._withdraw(roles)
            case m.PauseAfterStep():
                for role in self.workers:
                    self.say(m.PausedAtStep(epoch=self.epoch, role=role))
            case m.Release():
                for role in self.workers:
                    if (m.Completed, role) in self._said:
                        self.finish(role)
            case m.SendState():
                assert self.plan is not None
                for piece in pieces(self.plan.id, hosts_of(self.plan.roles, self.plan.nodes).values()):
                    self.post(piece)
                self.post(m.KeptState(state=self.plan.state))
            case m.GivenUp():
                self.die()
                self.fleet.join(unique(self.name), domain=self.domain)
            case m.Shutdown(code=code):
                self.code = code
                self.disconnect()

    @property
    def _planned(self) -> int:
        return self.plan.epoch if self.plan is not None else 0

    def _report_if_quiet(self) -> None:
        if (self.quiet or not self.workers) and self._reported < self.epoch != self._planned:
            self._reported = self.epoch
            self.post(changed(None, self.holdings(), 0))

    def _apply(self, plan: m.NodePlan) -> None:
        if plan.epoch < self.epoch or plan.epoch == self._planned:
            return
        before = self.roles_here()
        self.plan, self.epoch = plan, plan.epoch
        here, version = self.roles_here(), plan.version or 0
        for held in (*self.versions.values(), *self.replicas.values()):
            held[:] = [each for each in held if each <= version]
        self._withdraw(set(self.workers) - set(here))
        self._forget({role for _, role in self._said} - set(here))
        for role in here:
            if role not in self.workers:
                if role in before and role not in plan.newcomers:
                    continue  # it has died since
                self._assign(role)
            if role in self.workers:
                self._train(role, version)

    def _assign(self, role: int) -> None:
        self._forget([role])
        if self.idle:
            self.workers[role] = Worker()
            self.idle -= 1
        else:
            self.say(m.NoIdleWorker(epoch=self.epoch, role=role))

    def _withdraw(self, roles: Collection[int]) -> None:
        self._forget(roles)
        for role in set(roles) & set(self.workers):
            del self.workers[role]
            self.idle += 1

    def _train(self, role: int, version: int) -> None:
        worker, settings = self.workers[role], self.fleet.settings
        about = {"epoch": self.epoch, "role": role}
        per, worker.stage = settings.world_size // self.fleet.groups, "training"
        redundancy = Redundancy.REPLICATED if self.fleet.groups > 1 else Redundancy.SHARDED
        group = ReplicaGroup(role // per, self.fleet.groups, redundancy)
        layout = {"adopted": False, "segments": {self.fleet.segment(role): self.fleet.held_by(role)}}
        self.say(m.RoleLayout(**about, **layout, initial=0, resumes=self.fleet.resumes, group=group))
        worker.step = version
        self._keep(role, version)
        self.say(m.Restored(**about, version=version, loaded=True, pid=worker.pid))
        self.say(m.Reopened(**about))
        if self.steps:
            self.step(role)


class Fleet:
    """A job of simulated nodes, `node0` and so on, the last `spares` of which have no role at first."""

    def __init__(
        self,
        job_dir: Path,
        nodes: int = 2,
        nproc: int = 1,
        spares: int = 0,
        groups: int = 1,
        ranks: list[int] | None = None,
        **settings: Any,
    ) -> None:
        """`groups`: replica groups, of roles in a row. `ranks`: those of the nodes that are simulated, if not
        all. `settings`: as in `ft_core.settings`."""
        about: Event = {
            "replicas": 1 if nodes > 1 else 0,
            "spares": spares,
            "heartbeat": 0.1,
            "max_restarts": 0,
        }
        about |= settings
        about["controller"] = f"127.0.0.1:{free_port()}"
        self.settings = Settings(nodes, nproc, Command("train.py"), **about)
        self.job_dir, self.groups = job_dir, groups
        self.resumes = False
        """Whether the script, started again, goes on from a checkpoint of its own."""
        self._ranks = range(nodes + spares) if ranks is None else ranks
        job_dir.mkdir(exist_ok=True)
        self.settings.write(job_dir)
        write_secret(job_dir)
        self.secret = (job_dir / "secret").read_bytes().strip()
        self.nodes: dict[str, Node] = {}
        self.controller: Shell | None = None
        """While it runs in this process."""
        self._running: asyncio.Task[int] | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Fleet:
        self._sigterm = signal.getsignal(signal.SIGTERM)
        await self.start_controller()
        for number in self._ranks:
            self.join(f"node{number}", number if number < self.settings.nnodes else -1)
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.die()
        await self.stop_controller()
        await asyncio.gather(
            *(task for n in self.nodes.values() for task in n._tasks), return_exceptions=True
        )
        signal.signal(signal.SIGTERM, self._sigterm)  # a controller that ends ignores it

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def join(self, name: str, node_rank: int = -1, domain: str = "") -> Node:
        """One node more, or in the place of one that died."""
        self.nodes[name] = Node(self, name, node_rank, domain)
        return self.nodes[name]

    async def start_controller(self, process: bool = False) -> None:
        """The first, or the next one after `stop_controller`; `process`: as a process of its own."""
        if process:
            command = [sys.executable, "-m", "ft_core.control", "--job-dir", str(self.job_dir)]
            self._process = await asyncio.create_subprocess_exec(*command)
        else:
            self.controller = Shell(self.settings, self.job_dir)
            self._running = asyncio.create_task(self.controller.run())

    async def stop_controller(self) -> None:
        """All at once, as by SIGKILL."""
        process, running = self._process, self._running
        self.controller = self._running = self._process = None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if running is not None:
            own = [t for t in asyncio.all_tasks() if t.get_coro().__qualname__.startswith("Shell.")]
            for task in own:
                task.cancel()
            await asyncio.gather(*own, return_exceptions=True)

    async def ended(self) -> int:
        """Until the controller ends the job; its exit code."""

        def code() -> int | None:
            if self._running is not None and self._running.done():
                return self._running.result()
            return self._process.returncode if self._process is not None else None

        await self.until(lambda: code() is not None)
        found = code()
        assert found is not None
        return found

    @property
    def cluster(self) -> ClusterState:
        """What the controller in this process knows."""
        assert self.controller is not None
        return self.controller.machine.cluster

    def events(self, name: str = "") -> list[Event]:
        """What the controller has recorded, or that of one name."""
        if self.controller is not None:
            assert self.controller.events.flush(10)
        path = self.job_dir / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return [event for event in found if not name or event["event"] == name]

    async def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Until `condition` is true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s; the events: {self.events()[-8:]}"
            if self._running is not None and self._running.done():
                self._running.result()  # an error of the controller's own
            await asyncio.sleep(0.01)

    async def event(self, name: str, count: int = 1, seconds: float = 60) -> Event:
        """Until `count` events of that name are recorded; the last of them."""
        await self.until(lambda: len(self.events(name)) >= count, seconds)
        return self.events(name)[count - 1]

    def holders(self, role: int) -> list[int]:
        """The roles that have the same state: one in each replica group."""
        per = self.settings.world_size // self.groups
        return list(range(role % per, self.settings.world_size, per))

    def held_by(self, role: int) -> str:
        """The same as messages have it."""
        return text_of(runs_of(self.holders(role)))

    def segment(self, role: int) -> str:
        """The name of a role's state."""
        holders = self.holders(role)
        return f"{holders[0]}x{len(holders)}-{holders[0]:08x}"


def _role(segment: str) -> int:
    """The first of those that have this state."""
    return int(segment.partition("x")[0])


def play(test: Callable[[Fleet], Awaitable[None]], job_dir: Path, **settings: Any) -> None:
    """Run `test` with a fleet."""

    async def job() -> None:
        async with Fleet(job_dir, **settings) as fleet:
            await test(fleet)

    asyncio.run(job())
