"""Simulated nodes that speak the real protocol with a real controller, and misbehave where a test says so.

    async def job() -> None:
        async with Fleet(tmp_path, nodes=2) as fleet:
            await fleet.event("resumed")
            fleet["node1"].lose(HoldingsChanged)
            fleet["node0"].crash(0)
            await fleet.event("resumed", 2)

    asyncio.run(job())

A node has an agent's machine, but no processes and no state, only what that tells of them: its workers
answer at once, and finish one step of each epoch. The controller is that of `ft_core.control.shell`, in this
event loop, or a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from core.simulated_agent import Memory, SimulatedAgent
from msgspec.structs import replace
from ports import free_port

from ft_core.control.cluster.state import ClusterState
from ft_core.control.shell import Shell
from ft_core.node import events as e
from ft_core.protocol import messages as m
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.groups import segment_id
from ft_core.protocol.messages import Message, Redundancy, ReplicaGroup
from ft_core.settings import Command, Settings, unique, write_secret
from ft_core.state.manifest import Segment

Event = dict[str, Any]
"""A line of `events.jsonl`."""
Action = Callable[[Message], Awaitable[bool]]
"""What happens to a message on its way; returns whether it arrives."""


class Node(SimulatedAgent):
    """One simulated agent, and its connection."""

    def __init__(self, fleet: Fleet, name: str, node_rank: int, domain: str = "") -> None:
        self.fleet = fleet
        self.sent: list[Message] = []
        """Everything that has gone out."""
        self.received: list[Message] = []
        self.killed = False
        self.connections = 0
        self._actions: dict[type[Message], list[Action]] = {}
        self._awake = asyncio.Event()
        self._awake.set()
        self._queue: asyncio.Queue[tuple[AsyncChannel[m.ToAgent], Message]] = asyncio.Queue()
        """What goes out, and over which connection."""
        self._channel: AsyncChannel[m.ToAgent] | None = None
        memory = Memory(lambda role: Segment(tuple(fleet.holders(role)), ()))
        super().__init__(fleet.settings, name, node_rank, domain or name, memory)
        self._tasks = [asyncio.create_task(work) for work in (self._connect(), self._send(), self._tick())]

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

    def begins_anew(self) -> None:
        self.fleet.join(unique(self.name), domain=self.domain)

    # -- its connection ------------------------------------------------------------------------

    def post(self, message: Message) -> None:
        if self._channel is not None:  # as the agent: what is lost is lost
            self._queue.put_nowait((self._channel, message))

    async def _connect(self) -> None:
        while self.code is None:
            with contextlib.suppress(OSError):
                channel = await AsyncChannel.connect(
                    self.fleet.settings.controller, self.fleet.secret, m.FROM_CONTROLLER
                )
                self.connections, self._channel = self.connections + 1, channel
                try:
                    self.handle(e.Connected())
                    await self._receive(channel)
                finally:
                    self._channel = None
                    channel.close()
                    self.handle(e.NotConnected("the connection has ended"))
            await asyncio.sleep(0.01)

    async def _receive(self, channel: AsyncChannel[m.ToAgent]) -> None:
        while self.code is None:
            message = await channel.recv()
            await self._awake.wait()
            if await self._arrives(message):
                self.received.append(message)
                self.handle(e.FromController(message))

    async def _send(self) -> None:
        while True:
            channel, message = await self._queue.get()
            if await self._arrives(message) and channel is self._channel:
                if isinstance(message, m.AgentHello):  # that a test knows its connections from each other
                    message = replace(message, pid=self.connections)
                with contextlib.suppress(OSError):
                    channel.post(message)
                    self.sent.append(message)

    async def _arrives(self, message: Message) -> bool:
        await self._awake.wait()
        actions = self._actions.get(type(message))
        return not actions or await actions.pop(0)(message)

    async def _tick(self) -> None:
        while True:
            await self._awake.wait()
            self.handle(e.Tick())
            await asyncio.sleep(self.fleet.settings.heartbeat)

    # -- its state -----------------------------------------------------------------------------

    def registers(self, role: int) -> m.Registered:
        groups, resumes = self.fleet.groups, self.fleet.resumes
        redundancy = Redundancy.REPLICATED if groups > 1 else Redundancy.SHARDED
        group = ReplicaGroup(role * groups // self.fleet.settings.world_size, groups, redundancy)
        return m.Registered(0, [], resumes, group, counts={})

    def replicate(self, order: e.Replicate) -> None:
        """To the next node of the plan, once that is in the same epoch."""
        if self.killed or self.plan is None or self.epoch != order.epoch:
            return
        nodes = self.fleet.nodes
        others = sorted(name for name in self.plan.nodes if name in nodes and not nodes[name].killed)
        keeper = nodes[others[(others.index(self.name) + 1) % len(others)]]
        if keeper.epoch < order.epoch:
            asyncio.get_running_loop().call_later(0.01, self.replicate, order)
            return
        if keeper is not self and keeper.epoch == order.epoch:
            keeper.memory.keep_copy(self.fleet.segment(order.role), order.version)
        super().replicate(order)


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
            self.controller = Shell(self.settings, self.secret, self.job_dir)
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

    def segment(self, role: int) -> str:
        """The name of a role's state."""
        return segment_id(self.holders(role))


def play(test: Callable[[Fleet], Awaitable[None]], job_dir: Path, **settings: Any) -> None:
    """Run `test` with a fleet."""

    async def job() -> None:
        async with Fleet(job_dir, **settings) as fleet:
            await test(fleet)

    asyncio.run(job())
