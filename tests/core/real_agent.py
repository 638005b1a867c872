"""A real agent with simulated workers, in the event loop of a test."""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import xxhash

from ft_core.node import events as e
from ft_core.node.link.pulse import Loop
from ft_core.node.shell import NodeShell
from ft_core.node.workers.processes import Process, WorkerPool
from ft_core.protocol import messages as m
from ft_core.settings import Settings, read_secret
from ft_core.state.manifest import layout
from ft_core.state.memory import ControlBlock


class Pool(WorkerPool):
    """Workers are numbers."""

    def __init__(self, agent: RealAgent) -> None:
        self.agent, self._processes, self._ended_with_role = agent, {}, []
        self.heard: dict[int, list[Any]] = defaultdict(list)

    def start(self, number: int, device: int) -> int:
        pid = 2_000_000 + number
        self._processes[number] = Process(number, None, pid, Path(), ControlBlock.create())  # type: ignore[arg-type]
        asyncio.get_running_loop().call_soon(self.agent._handle, e.WorkerReady(number))
        return pid

    def post(self, number: int, message: m.ToWorker) -> None:
        if number in self._processes:
            self.heard[number].append(message)
            asyncio.get_running_loop().call_soon(self.agent.worker_hears, number, message)

    def signal(self, number: int, what: signal.Signals) -> None:
        if self._processes.pop(number, None) is not None:
            self.agent._handle(e.WorkerEnded(number, -what))


class Nothing:
    """In place of parts of an agent that a test has no use for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class RealAgent(NodeShell):
    """`serve` begins; workers leave a step when told to, and finish one step of each epoch.

    Their snapshots are real, and so are the copies of them on other real agents.
    """

    pool: Pool

    def __init__(self, settings: Settings, job_dir: Path, node: str, node_rank: int) -> None:
        super().__init__(settings, read_secret(job_dir), job_dir, node, "", node_rank, Loop())
        self._tee = Nothing()  # type: ignore[assignment]

    def _make_pool(self) -> Pool:
        return Pool(self)

    def serve(self) -> None:
        self._open()
        self._begin()

    async def end(self) -> None:
        await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)
        self._relay.disconnected()
        if (channel := self._uplink._channel) is not None:
            channel.close()  # as the end of its process does
        self.transport.close()
        if self._done.done():
            self._done.result()  # an error of the agent's own

    def _kill_node(self) -> None:
        raise AssertionError(f"node {self.node} is told to kill its process group, which is the test's")

    @property
    def connected(self) -> bool:
        """Whether it can talk to a controller."""
        channel = self._uplink._channel
        return channel is not None and not channel.closing

    @property
    def nodes(self) -> set[str]:
        """That it knows of."""
        return set(self.machine.epochs.plan.nodes) if self.machine.epochs.plan else set()

    def number(self, role: int) -> int:
        """Of the worker that plays it."""
        worker = self.machine.crew.of_role(role)
        assert worker is not None
        return worker.number

    def crash(self, role: int) -> None:
        """The worker that plays `role` dies by a signal."""
        self.pool.signal(self.number(role), signal.SIGKILL)

    def step(self) -> None:
        """All workers finish a step."""
        for worker in self.machine.crew.playing():
            self._stage(worker.number, worker.role, self.store.memory(worker.role).versions()[-1] + 1)

    def committed(self) -> list[int]:
        """The newest version of each worker that is safe."""
        return [worker.committed for worker in self.machine.crew.playing()]

    def say(self, number: int, message: m.FromWorker) -> None:
        """As one of its workers."""
        self._handle(e.FromWorker(number, message))

    def worker_hears(self, number: int, message: m.ToWorker) -> None:
        """What a worker does about a message."""
        if (worker := self.machine.crew.get(number)) is None:
            return
        match message:
            case m.Exit():
                self.pool.signal(number, signal.SIGKILL)
            case m.Abort(epoch):
                self.say(number, m.Quiesced(epoch, worker.stage, worker.counts))
            case m.Assign():
                group = m.ReplicaGroup(0, 1, m.Redundancy.SHARDED)
                self.say(number, m.Registered(0, [], resumes=False, group=group, counts={}))
            case m.Restore(epoch, wanted, parts):
                version = wanted or 0
                if not parts:
                    self._stage(number, worker.role, version)
                role = worker.role
                self.say(number, m.Restored(epoch, role, worker.pid, version, loaded=bool(parts)))
                self.say(number, m.Reopened(epoch, role))
                self.say(number, m.Stepped(epoch, role, version + 1))
                self._stage(number, worker.role, version + 1)

    def _stage(self, number: int, role: int, version: int) -> None:
        """Eight bytes of state: the version."""
        segment, slot = layout((role,), [("state", "int64", (1,), 8)]), version % 2
        self.say(number, m.Allocate(0, role, slot, [segment.layout]))
        buffer = self.store.memory(role).slots[slot]
        assert buffer is not None
        data = version.to_bytes(8, "little")
        buffer.data(0)[:] = data
        buffer.checksums(0)[0] = xxhash.xxh3_64_intdigest(data)
        buffer.version = version
        self.say(number, m.Staged(role, version))
