"""A real agent with simulated workers, in the event loop of a test."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import xxhash

from ft_core.node.agent import Agent
from ft_core.node.inquiries import Inquiries
from ft_core.node.workers import Exit, Worker, WorkerPool
from ft_core.process.tasks import Tasks
from ft_core.protocol.messages import (
    Abort,
    Allocate,
    Assign,
    Quiesced,
    Redundancy,
    Registered,
    ReplicaGroup,
    Restore,
    Staged,
    ToWorker,
    WorkerReopened,
    WorkerRestored,
    WorkerStepped,
)
from ft_core.settings import Settings
from ft_core.state.manifest import layout
from ft_core.state.memory import ControlBlock, Word


class Peer:
    """The other end of a worker's connection."""

    def __init__(self, agent: RealAgent, worker: Worker) -> None:
        self.agent, self.worker, self.heard = agent, worker, []  # type: ignore[var-annotated]

    def post(self, message: ToWorker) -> None:
        self.heard.append(message)
        asyncio.get_running_loop().call_soon(self.agent.worker_hears, self.worker, message)

    def close(self) -> None:
        pass


class Pool(WorkerPool):
    """Workers are numbers."""

    def __init__(self, agent: RealAgent) -> None:
        self.agent, self.workers, self._numbers = agent, {}, itertools.count()

    def start(self, device: int) -> Worker:
        number = next(self._numbers)
        worker = Worker(number, device, None, 2_000_000 + number, Path(), ControlBlock.create())  # type: ignore[arg-type]
        worker.channel = Peer(self.agent, worker)  # type: ignore[assignment]
        self.workers[number] = worker
        return worker

    def kill(self, worker: Worker) -> None:
        if self.workers.pop(worker.number, None) is not None:
            self.agent._worker_ended(worker, Exit(-9, ""))


class Nothing:
    """In place of parts of an agent that a test has no use for."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class RealAgent(Agent):
    """`serve` begins; workers leave a step when told to, and finish one step of each epoch.

    Their snapshots are real, and so are the copies of them on other real agents.
    """

    def __init__(self, settings: Settings, job_dir: Path, node: str, node_rank: int) -> None:
        super().__init__(settings, job_dir, node, "", node_rank)
        self.pool = Pool(self)
        self._tee = self._departure = Nothing()  # type: ignore[assignment]

    def serve(self) -> None:
        self._done = asyncio.get_running_loop().create_future()
        self._inquiries = Inquiries(self.node, self.store, self.pool, self.transport)
        for device in range(self.settings.nproc_per_node):
            self.pool.start(device)
        self.pool.start(-1)
        self._tasks = Tasks(self._fail)
        self._tasks.spawn(self._serve_controller())
        self._tasks.spawn(self._heartbeat())

    async def end(self) -> None:
        await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)
        if self._controller is not None:
            self._controller.close()
        self.transport.close()
        assert self._done is not None
        if self._done.done():
            self._done.result()  # an error of the agent's own

    def _kill(self, role: int | None) -> None:
        assert role is not None, f"node {self.node} is told to kill its process group, which is the test's"
        super()._kill(role)

    def crash(self, role: int) -> None:
        """The worker that plays `role` dies by a signal."""
        worker = self.pool.of_role(role)
        assert worker is not None
        self.pool.kill(worker)

    def step(self) -> None:
        """All workers finish a step."""
        for worker in self.pool.playing():
            assert worker.role is not None
            newest = self.store.memory(worker.role).versions()[-1]
            self._stage(worker, worker.role, newest + 1)

    def committed(self) -> list[int]:
        """The newest version of each worker that is safe."""
        return [worker.control[Word.COMMITTED] for worker in self.pool.playing()]

    def worker_hears(self, worker: Worker, message: ToWorker) -> None:
        """What a worker does about a message."""
        if self.pool.workers.get(worker.number) is not worker:
            return
        match message:
            case Abort(epoch):
                self._on_worker(worker, Quiesced(epoch, worker.stage, worker.counts))
            case Assign():
                group = ReplicaGroup(0, 1, Redundancy.SHARDED)
                self._on_worker(worker, Registered(0, [], False, group))
            case Restore(epoch, version, parts):
                assert worker.role is not None
                version = version or 0
                if not parts:
                    self._stage(worker, worker.role, version)
                self._on_worker(worker, WorkerRestored(epoch, version, bool(parts)))
                self._on_worker(worker, WorkerReopened(epoch))
                self._on_worker(worker, WorkerStepped(epoch, version + 1))
                self._stage(worker, worker.role, version + 1)

    def _stage(self, worker: Worker, role: int, version: int) -> None:
        """Eight bytes of state: the version."""
        segments, slot = [layout((role,), [("state", "int64", (1,), 8)])], version % 2
        self._on_worker(worker, Allocate(0, role, slot, [segment.layout for segment in segments]))
        buffer = self.store.memory(role).slots[slot]
        assert buffer is not None
        data = version.to_bytes(8, "little")
        buffer.data(0)[:] = data
        buffer.checksums(0)[0] = xxhash.xxh3_64_intdigest(data)
        buffer.version = version
        self._on_worker(worker, Staged(role, version))
