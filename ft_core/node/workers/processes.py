"""The processes of an agent's workers: forking them, reaching them, noticing their death at once."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import signal
import struct
import termios
import threading
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from ft_core.comm import flight_memory
from ft_core.errors import FtError
from ft_core.node.workers import entry, preload
from ft_core.node.workers.flight import Recorded
from ft_core.process import ending
from ft_core.protocol import messages as m
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.settings import Command
from ft_core.state.memory import ControlBlock, Word
from ft_core.worker.logs import Tee

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Has torch ask for huge pages where it takes 2 MiB and more from the system. A newcomer's weights, gradients
and moments are new memory, a gigabyte of which is 260,000 page faults otherwise, while all others wait; and
the kernel takes as long to take it back from a worker that was killed, before anybody hears of its end."""
_TUNABLES, _MALLOC = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
"""Has glibc do so for all its memory. torch alone loses up to 2 MiB of each tensor to small pages, half of
one of 4 MiB: it asks for what the tensor has, which does not begin where a huge page does, and ends at the
header of the next."""
_NO_SERVER = "its fork server has ended (it says why): no worker can be started, nor the end of one be known"


def use_huge_pages(environment: MutableMapping[str, str]) -> None:
    """Have processes that are started with this environment use huge pages, unless it says something else."""
    environment.setdefault(_HUGE_PAGES, "1")
    if _MALLOC not in (tunables := environment.get(_TUNABLES, "")):
        environment[_TUNABLES] = f"{tunables}:{_MALLOC}=1".lstrip(":")


@dataclass
class Process:
    """What the shell knows of one worker."""

    number: int
    process: BaseProcess
    pid: int
    log_dir: Path
    control: ControlBlock
    channel: AsyncChannel[m.FromWorker] | None = None
    watched: bool = False
    """Whether a thread waits for its main thread's end."""
    apart: bool = False
    """Whether its flight record is nobody's."""


class WorkerPool:
    """Starts workers from a warm fork server and watches their pids. They go by the numbers that they are
    given; what is asked of one that has ended is not done."""

    def __init__(
        self,
        *,
        socket: str,
        secret: bytes,
        job_dir: Path,
        log_dir: Path,
        command: Command,
        redirects: int,
        json: bool,
        ended: Callable[[int, int, int, int], None],
        gone: Callable[[int], None],
    ) -> None:
        """`json`: workers log so. `ended` is told a worker's number, its pid, its exit code, negative for a
        signal, and the version that its control words have: it does nothing any more. `gone`, then, when the
        kernel has taken back all that it had."""
        self._link = (socket, secret, str(job_dir))
        self._command = command
        self._log_dir, self._redirects, self._json = log_dir, redirects, json
        self._ended, self._gone = ended, gone
        self._processes: dict[int, Process] = {}
        """The workers that have not ended."""
        self._ended_with_role: list[Recorded] = []
        """Workers that ended in this epoch: what they did last is of interest until they are replaced."""
        self._tee: Tee
        self._server: int | None = None

    def open(self, tee: Tee) -> None:
        """Start the fork server. `tee` shows what workers print."""
        self._tee = tee
        os.environ[preload.ENV] = "" if self._command.no_python else self._command.target
        use_huge_pages(os.environ)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["ft_core.node.workers.warm"])
        # Now, while this process ignores SIGTERM: what is started from one that handles it dies of it.
        forkserver.ensure_running()
        self._server = _server()

    def start(self, number: int, device: int) -> int:
        """Fork a worker, which reports to the agent's socket and waits for a role there. Returns its pid."""
        directory = self._log_dir / f"worker-{number}"
        logs = (self._redirects, str(directory))
        process = self._context.Process(
            target=entry.main,
            args=(*self._link, number, device, self._command, logs, self._json),
            name=f"worker-{number}",
        )
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            raise FtError(_NO_SERVER) from error
        assert process.pid is not None
        if _server() != self._server:  # multiprocessing has started another
            raise FtError(_NO_SERVER)
        self._tee.follow(directory)
        found = Process(number, process, process.pid, directory, ControlBlock.create())
        self._processes[number] = found
        asyncio.get_running_loop().add_reader(process.sentinel, self._is_gone, found)
        return found.pid

    def aside(self, target: Callable[..., object], *arguments: object) -> BaseProcess:
        """Fork a process that is no worker, with the same imports done. It ends with this one."""
        process = self._context.Process(target=target, args=arguments, name=target.__module__, daemon=True)
        process.start()
        return process

    def _is_gone(self, worker: Process) -> None:
        asyncio.get_running_loop().remove_reader(worker.process.sentinel)
        # The fork server writes here how its child has ended; nothing but its own end closes the pipe before.
        # Where several have ended at once, `start` has read it already: multiprocessing cleans up by the way.
        known = worker.process._popen.returncode is not None  # type: ignore[attr-defined]
        if not known and not _readable(worker.process.sentinel):
            raise FtError(_NO_SERVER)
        worker.process.join()
        self._tee.unfollow(worker.log_dir)
        self._has_ended(worker, worker.process.exitcode or 0)
        self._gone(worker.number)

    def _has_ended(self, worker: Process, code: int) -> None:
        if self._processes.pop(worker.number, None) is None:
            return  # that was noticed when it began to end
        last = Recorded(None, worker.control)
        if last.role != flight_memory.NOBODY and not worker.apart:
            self._ended_with_role.append(last)
        if worker.channel is not None:
            worker.channel.close()
        self._ended(worker.number, worker.pid, code, worker.control[Word.VERSION])

    def heard(self, number: int) -> None:
        """A message of a worker's has come, after the greeting: it holds its lock. From now on its end is
        noticed when it begins; where the kernel does not tell, when the process is gone."""
        worker = self._processes.get(number)
        if worker is None or worker.watched:
            return
        worker.watched, loop = True, asyncio.get_running_loop()

        def watch() -> None:
            if worker.control.life.holder_ends(lambda: number in self._processes):
                with contextlib.suppress(RuntimeError):  # this agent itself ends
                    loop.call_soon_threadsafe(self._is_ending, worker)

        threading.Thread(target=watch, name=f"ft-life-{number}", daemon=True).start()

    def _is_ending(self, worker: Process) -> None:
        if worker.number not in self._processes:
            return
        if not (how := ending.status(worker.pid)):
            return  # it executes another program; or has left without an error, which nobody waits for
        if worker.channel is not None and not worker.channel.drained:  # what it has said, it has said before
            asyncio.get_running_loop().call_soon(self._is_ending, worker)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)  # should its main thread have ended alone
        self._has_ended(worker, os.waitstatus_to_exitcode(how))

    def connect(self, number: int, channel: AsyncChannel[m.FromWorker]) -> bool:
        """A worker has come, by this connection, and is greeted. False: it has died since."""
        if (worker := self._processes.get(number)) is None:
            return False
        worker.channel = channel
        self.post(number, m.Welcome(worker.control.memory.address))
        return True

    def post(self, number: int, message: m.ToWorker) -> None:
        """Send without waiting; the end of one is noticed through its pid."""
        worker = self._processes.get(number)
        if worker is not None and worker.channel is not None:
            with contextlib.suppress(ConnectionError):
                worker.channel.post(message)

    def control(self, number: int) -> ControlBlock | None:
        """A worker's control words; None if it has ended."""
        worker = self._processes.get(number)
        return worker.control if worker else None

    def recorded(self, playing: Mapping[int, int]) -> list[Recorded]:
        """What there is of flight records, those of workers that have ended first. `playing`: the roles that
        workers were given, by their numbers."""
        live = ((number, w) for number, w in self._processes.items() if not w.apart)
        found = (Recorded(w.pid, w.control, playing.get(number, -1), w.log_dir) for number, w in live)
        return [*self._ended_with_role, *found]

    def set_apart(self, number: int, apart: bool) -> None:
        """Whether a worker's flight record is not that of the role that it shows."""
        if (worker := self._processes.get(number)) is not None:
            worker.apart = apart

    def forget_ended(self) -> None:
        """Others have taken their places."""
        self._ended_with_role.clear()

    def traffic(self) -> bool:
        """Whether training traffic is in flight on this node."""
        return any(worker.control[Word.TRAFFIC] > 0 for worker in list(self._processes.values()))

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to a worker, unless it has just ended by itself."""
        if (worker := self._processes.get(number)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, what)

    def log_dir(self, number: int) -> Path | None:
        """Where a worker's output goes; None: it has ended."""
        worker = self._processes.get(number)
        return worker.log_dir if worker else None

    def pid(self, number: int) -> int | None:
        """The pid of that worker, or None if it has ended."""
        worker = self._processes.get(number)
        return worker.pid if worker else None

    def close(self) -> None:
        """Kill the workers that are left."""
        for number in list(self._processes):
            self.signal(number, signal.SIGKILL)


def _server() -> int | None:
    """The pid of the fork server."""
    return forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]


def _readable(descriptor: int) -> int:
    """How many bytes can be read at once."""
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))[0])
