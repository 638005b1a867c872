"""The workers of a node, as values: what each is doing, and what it has said of itself."""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

from ft_core.protocol.messages import (
    Counts,
    Digest,
    Epoch,
    Fault,
    Redundancy,
    ReplicaGroup,
    ScriptFailed,
    SegmentId,
    Stage,
    Version,
    WorkerLost,
    WorkerPlan,
)

NONE = -1
"""The version of a state that is not there."""


class WorkerState(Enum):
    """What a worker is there for."""

    STARTING = auto()
    """The worker has not connected yet."""
    IDLE = auto()
    """The worker waits for a role."""
    PLAYING = auto()
    """The worker plays a role."""
    FINISHED = auto()
    """The worker has a role, and its script is done."""
    WITHDRAWN = auto()
    """The worker had a role, whose replica group has left: it is killed, and another takes its place."""
    AHEAD = auto()
    """The worker starts up a role that another worker here plays, or has started it, ahead of need:
    `node.workers.standbys`."""


@dataclass
class Worker:
    """A process that plays a role, or may."""

    number: int
    device: int
    """The device of the worker; -1: a standby, for any."""
    pid: int = 0
    doing: WorkerState = WorkerState.STARTING
    role: int = -1
    """The worker's role, if it has one; else -1."""
    quiesced: int = 0
    """The newest epoch for which it has left its step."""
    stage: Stage = "startup"
    counts: Counts = field(default_factory=dict)
    initial: Version | None = None
    """The version that its script starts from; known once it has entered training."""
    resumes: bool = False
    """Whether its script, started again, goes on from a checkpoint of its own."""
    ring: list[int] = field(default_factory=list)
    group: ReplicaGroup | None = None
    """The replica group of its role; known once it trains."""
    replicated: dict[int, Version] = field(default_factory=dict)
    """Role that it holds, its own or an adopted one -> the newest version that is safe in this epoch."""
    committed: Version = NONE
    """The worker's commit word."""
    sums: dict[Version, dict[SegmentId, Digest]] = field(default_factory=dict)
    """Version, of the newest ones -> the checksums of what others hold alike."""
    copy_s: float = 0.0
    """Seconds that it took to have its newest version safe."""
    completed: tuple[int, int] = (0, 0)
    """The epoch in which it has last come to the end of a part of its script, and how many that makes."""
    failed: ScriptFailed | None = None
    """What it has said of its end."""
    ordered: bool = False
    """Whether the controller wants its end, or this agent has no use for it any more."""
    target_role: int = -1
    """The role that it starts up ahead of need, or has started so; -1: none."""
    began_with: WorkerPlan | None = None
    """What it was told then."""
    records: tuple[Epoch, Counts] | None = None
    """What the worker of `target_role`, on another node, had on record, and in which epoch; None where it is
    here."""
    needed: bool = False
    """Whether the worker of that role has died since: it is to take its place."""
    answers_by: float = math.inf
    """When it should have said that it has left the epoch in which it was ready, once it has taken a role."""

    @property
    def plays(self) -> bool:
        """Whether it has a role."""
        return self.doing in (WorkerState.PLAYING, WorkerState.FINISHED)

    @property
    def is_ready(self) -> bool:
        """Whether it has started a role ahead of need, and waits for its state."""
        return self.doing is WorkerState.AHEAD and self.stage == "training"

    @property
    def state_is_replicated(self) -> bool:
        """Whether its script has said that every replica group has all the state."""
        return self.group is not None and self.group.redundancy is Redundancy.REPLICATED


class WorkerTable:
    """All of a node's workers, by number."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._ending: dict[int, int] = {}
        """Pids of workers that have ended and are not gone."""
        self._count = 0

    def add(self, device: int) -> Worker:
        """One more worker is to start, for that device, or (-1) for any."""
        worker = Worker(self._count, device)
        self._workers[worker.number] = worker
        self._count += 1
        return worker

    def remove(self, number: int) -> Worker:
        """Take out a worker that has ended."""
        worker = self._workers.pop(number)
        self._ending[number] = worker.pid
        return worker

    def gone(self, number: int) -> None:
        """Note that the process of a removed worker is gone."""
        self._ending.pop(number, None)

    @property
    def ending(self) -> tuple[int, ...]:
        """Processes that have something yet of what their successors need (INV-18, predecessors)."""
        return tuple(self._ending.values())

    def get(self, number: int) -> Worker | None:
        """The worker of that number, or None if it has ended."""
        return self._workers.get(number)

    def of_role(self, role: int) -> Worker | None:
        """The worker that plays the role here, if there is one."""
        return next((worker for worker in self.playing() if worker.role == role), None)

    def standby_for(self, role: int) -> Worker | None:
        """The worker that has started the role ahead of need, or is to, if there is one."""
        return next((worker for worker in self.ahead() if worker.target_role == role), None)

    def ahead(self) -> list[Worker]:
        """Workers that start up a role ahead of need, have done so, or are about to; no others of them."""
        there = (worker for worker in self._workers.values() if worker.target_role >= 0)
        return [w for w in there if not w.ordered and w.doing in (WorkerState.STARTING, WorkerState.AHEAD)]

    def playing(self) -> list[Worker]:
        """Workers with a role."""
        return [worker for worker in self._workers.values() if worker.plays]

    def idle(self) -> list[Worker]:
        """Workers that wait for a role, those tied to a device first."""
        found = (worker for worker in self._workers.values() if worker.doing is WorkerState.IDLE)
        return sorted(found, key=lambda worker: (worker.device < 0, worker.number))

    def choose(self, device: int, devices: int, faulted: Collection[int] = ()) -> Worker | None:
        """An idle worker: that of this device, or a standby, which takes this device or the first one that is
        not in use, and that no other idle worker is tied to; at last that of another device that is not in
        use. `faulted`: devices that are used only where there is no other."""
        if not (idle := self.idle()):
            return None
        free = set(range(devices)) - {other.device for other in self.playing()}
        sound = free.difference(faulted) or free
        order = [device, -1, *sorted(sound)] if device in sound else [*sorted(sound), -1]
        worker = next((worker for kind in order for worker in idle if worker.device == kind), idle[0])
        if worker.device < 0:
            loose = sound.difference(other.device for other in idle) or sound
            worker.device = device if device in sound else min(loose, default=device)
        return worker

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())


_TOLD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def lost(worker: Worker, code: int, version: Version, out_of_memory: bool) -> WorkerLost:
    """How a worker with a role has ended, for the controller. `version`: that of its control words.
    `out_of_memory`: whether the kernel has ended it for that."""
    said, how = worker.failed, in_words(code)
    if said is not None:
        fault, how = said.fault, f"{how}: {said.what}"
    elif code >= 0:
        fault = Fault.EXITED if code else Fault.LEFT
    elif worker.ordered or -code in _TOLD:
        fault = Fault.TERMINATED
    elif -code == signal.SIGKILL:
        fault = Fault.OUT_OF_MEMORY if out_of_memory else Fault.KILLED
        how += ", by the kernel: the memory of this machine, or of its cgroup, is used up" * out_of_memory
    else:
        fault = Fault.CRASHED
    return WorkerLost(
        role=worker.role,
        pid=worker.pid,
        exit=how,
        code=code,
        fault=fault,
        step=version if worker.stage == "training" else NONE,
        device=worker.device,
        signature=said.signature if said is not None else "",
        traceback=said.traceback if said is not None else "",
    )


def in_words(code: int) -> str:
    """How a process has ended."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.strsignal(-code) or "?"
    with suppress(ValueError):  # a real-time signal has no name of its own
        name = signal.Signals(-code).name
    return f"killed by {name}"
