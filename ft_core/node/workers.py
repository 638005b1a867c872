"""The agent's workers: starting them, telling them apart, noticing their death at once."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import multiprocessing
import os
import signal
import struct
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from ft_core.errors import FtError
from ft_core.node import preload
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.messages import FromWorker, Redundancy, ReplicaGroup, Stage, ToWorker
from ft_core.settings import Command
from ft_core.state.memory import ControlBlock, Word
from ft_core.worker import entry as worker
from ft_core.worker.logs import Tee

log = logging.getLogger(__name__)


_NO_SERVER = "its fork server has ended: no worker can be started, nor the end of one be known"


@dataclass
class Worker:
    """One worker process. `role` is None while it is a standby."""

    number: int
    device: int
    process: BaseProcess
    pid: int
    log_dir: Path
    control: ControlBlock
    channel: AsyncChannel[FromWorker] | None = None
    role: int | None = None
    quiesced: int = 0
    """The newest epoch for which it has left its step."""
    stage: Stage = "startup"
    counts: dict[str, int] = field(default_factory=dict)
    initial: int | None = None
    """The version that its script starts from; known once it has entered training."""
    resumes: bool = False
    """Whether its script, started again, goes on from a checkpoint of its own."""
    ring: list[int] = field(default_factory=list)
    group: ReplicaGroup | None = None
    """Known once it trains."""
    replicated: dict[int, int] = field(default_factory=dict)
    """By role that it holds, its own and adopted ones, the newest version that is safe in this epoch."""
    withdrawn: bool = False
    """It is ended, since its replica group has left, and another takes its place."""
    finished: bool = False
    traceback: str = ""

    @property
    def state_is_replicated(self) -> bool:
        """Whether its script has said that every replica group has all the state."""
        return self.group is not None and self.group.redundancy is Redundancy.REPLICATED

    @property
    def idle(self) -> bool:
        """Ready to be given a role."""
        return self.channel is not None and self.role is None and not self.withdrawn

    def post(self, message: ToWorker) -> None:
        """Send without waiting; a worker that is gone is noticed through its pid."""
        if self.channel is not None:
            with contextlib.suppress(ConnectionError):
                self.channel.post(message)


@dataclass(frozen=True)
class Exit:
    """How a worker ended: exit code (negative: signal) and its traceback if it had one."""

    code: int
    message: str

    @property
    def crashed(self) -> bool:
        """Ended by a signal: a failure of the machine or the process, not an error of the script."""
        return self.code < 0

    def __str__(self) -> str:
        if self.crashed:
            name = signal.strsignal(-self.code) or "?"
            with contextlib.suppress(ValueError):  # a real-time signal has no name of its own
                name = signal.Signals(-self.code).name
            return f"killed by {name}"
        return f"exit code {self.code}"


class WorkerPool:
    """Starts workers from a warm fork server and watches their pids."""

    def __init__(
        self,
        *,
        socket: str,
        secret: bytes,
        job_dir: Path,
        log_dir: Path,
        command: Command,
        redirects: int,
        tee: Tee,
        on_exit: Callable[[Worker, Exit], None],
    ) -> None:
        self._link = (socket, secret, str(job_dir))
        self._command = command
        self._log_dir, self._redirects, self._tee = log_dir, redirects, tee
        self._on_exit = on_exit
        self._numbers = itertools.count()
        self.workers: dict[int, Worker] = {}
        os.environ[preload.ENV] = "" if command.no_python else command.target
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["ft_core.node.preload"])
        # Now, while this process ignores SIGTERM: what is started from one that handles it dies of it.
        forkserver.ensure_running()
        self._server = _server()

    def start(self, device: int) -> Worker:
        """Fork a worker, which reports to the agent's socket and waits for a role there."""
        number = next(self._numbers)
        directory = self._log_dir / f"worker-{number}"
        logs = (self._redirects, str(directory))
        process = self._context.Process(
            target=worker.main,
            args=(*self._link, number, device, self._command, logs),
            name=f"worker-{number}",
        )
        process.start()
        assert process.pid is not None
        if _server() != self._server:  # multiprocessing has started another
            raise FtError(_NO_SERVER)
        self._tee.follow(directory)
        found = Worker(number, device, process, process.pid, directory, ControlBlock.create())
        self.workers[number] = found
        asyncio.get_running_loop().add_reader(process.sentinel, self._ended, found)
        return found

    def _ended(self, worker: Worker) -> None:
        asyncio.get_running_loop().remove_reader(worker.process.sentinel)
        # The fork server writes here how its child has ended; nothing but its own end closes the pipe before.
        # Where several have ended at once, `start` has read it already: multiprocessing cleans up by the way.
        known = worker.process._popen.returncode is not None  # type: ignore[attr-defined]
        if not known and not _readable(worker.process.sentinel):
            raise FtError(_NO_SERVER)
        worker.process.join()
        self.workers.pop(worker.number, None)
        self._tee.unfollow(worker.log_dir)
        if worker.channel is not None:
            worker.channel.close()
        self._on_exit(worker, Exit(worker.process.exitcode or 0, worker.traceback))

    def of_role(self, role: int) -> Worker | None:
        """The worker that plays `role`, if it lives."""
        return next((w for w in self.workers.values() if w.role == role), None)

    def playing(self) -> list[Worker]:
        """Workers that have a role."""
        return [w for w in self.workers.values() if w.role is not None]

    def idle(self) -> list[Worker]:
        """Workers that wait for a role, those tied to a device first."""
        return sorted((w for w in self.workers.values() if w.idle), key=lambda w: (w.device < 0, w.number))

    def traffic(self) -> bool:
        """Whether training traffic is in flight on this node."""
        return any(w.control[Word.TRAFFIC] > 0 for w in self.playing())

    def kill(self, worker: Worker) -> None:
        """SIGKILL one worker, unless it has just ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)

    def close(self) -> None:
        """End what is left."""
        for left in list(self.workers.values()):
            self.kill(left)


def _server() -> int | None:
    """The pid of the fork server."""
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def _readable(descriptor: int) -> int:
    """How many bytes can be read at once."""
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0])
