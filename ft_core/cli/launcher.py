"""The processes of this machine that belong to a job: `ftrun` starts them, and waits for the job's end."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from ft_core.errors import FAILED, FAILED_NOTE, ConfigError
from ft_core.process import last_line
from ft_core.process.async_writer import say
from ft_core.process.sigterm import ENDED
from ft_core.protocol.sockets import reserve, split_address

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_POLL = 0.05
_STOP_GRACE = 15.0
"""Seconds that agents have to end once the controller has."""
_AGAIN = 1.0
"""Seconds after which SIGTERM is passed on once more."""
_AS_ONE = 2.0
"""Seconds in which SIGTERM counts once, however often it comes: Slurm sends it to every process, for the step
and for the job, and a shell among these passes it on."""
_LASTING = 60.0
"""Seconds for which a process has worked well enough not to count among those that fail in a row."""
_STANDS_IN = 3.0
"""Seconds for which a node is not replaced that the others here stand in for: a process that starts takes the
cores from those who recover."""
_TRIES = 3
"""Agents, each in the place of the one before, that fail as they are starting before no more are started."""
_RETRY = 1.0
"""Seconds until another try where a process could not be started."""
_LONGEST_PATH = 60
"""Bytes that TMPDIR may have: with the names below it, the path of a Unix socket has 107 at most."""
_ALL_FAILED = (
    "ftrun: the job stops: all nodes have failed as they were starting, of the errors above; none is left"
)


class _Started(NamedTuple):
    """An agent."""

    temporary: str
    """Directory of its own."""
    at: float
    failed_before: int
    """How many have failed in a row whose place it has."""


class _Place(NamedTuple):
    """The place of a node that has died."""

    failed_before: int
    until: float
    """When another is started at the latest."""


class Launcher:
    """Starts the processes of this machine and waits for the end of the job."""

    def __init__(self, job_dir: Path) -> None:
        """Raises ConfigError: see `place_for_sockets`."""
        self._job_dir = job_dir
        self._controller: subprocess.Popen[bytes] | None = None
        self._controller_began = 0.0
        self._controllers_failed = 0
        self._elected = False
        self._about: list[str] = []
        """What each controller is told."""
        self._alone_at: float | None = None
        """Since when there is no agent left."""
        self._agents: list[subprocess.Popen[bytes]] = []
        self._sockets_in = place_for_sockets()
        self._last_line = last_line.make()
        self._running: dict[subprocess.Popen[bytes], _Started] = {}
        """Agents that have not ended, as far as is known."""
        self._given_up = False
        """Whether the last agent that ended had failed as it was starting, and none took its place."""
        self._reserved: socket.socket | None = None
        self._claim: TextIO | None = None
        self.numbers = itertools.count()
        self.respawn = False
        """Start a new node for each that dies, as a cluster's scheduler would."""
        self.needed = 1
        """With so many others, a little later."""
        self._places: list[_Place] = []
        self.standalone = False
        """All nodes of the job are here."""
        self.sole_node = False
        """Nor is one needed elsewhere, though spares may join from there."""
        self.patience = math.inf
        """Seconds that workers have to end after SIGTERM, if they handle it."""
        self._told_at: float | None = None
        """When SIGTERM has come, for the first time."""
        self._interrupted = False
        """Whether that was Ctrl-C."""
        self._pass_on_at = math.inf
        self._deadline = math.inf
        self._not_started_at = -math.inf
        """When a process could not be started, if that was the last that was to be."""

    def claim(self) -> None:
        """The job directory, for as long as this process lives: the processes of a job that another `ftrun`
        began there would read what this one is about to write. Raises ConfigError if it is not to be had,
        and OSError where nothing can be written."""
        self._claim = (self._job_dir / "lock").open("a")
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self._job_dir} is the directory of a job that runs; give a new one"
            ) from None
        except OSError:
            pass  # there are no locks on this storage
        if (self._job_dir / "events.jsonl").exists():
            raise ConfigError(f"{self._job_dir} is the directory of an earlier job; give a new one")

    def reserve(self, address: str) -> str:
        """`address`, of port 0, with a free port. No other program is given it while this process lives.

        Neither before the controller listens there, nor between one and the next.
        """
        host, _ = split_address(address)
        self._reserved = reserve(host)
        return f"{address.rpartition(':')[0]}:{self._reserved.getsockname()[1]}"

    def controller(self, *about: str) -> None:
        """Start the controller; `wait` starts another should it die."""
        self._controller, self._controller_began = (
            self._start("ft_core.control", *self._about, *about),
            time.monotonic(),
        )

    def candidate(self, spare: bool) -> None:
        """The same where any node may run the controller: it is there as long as this one's agent. `spare`:
        no job begins with this node."""
        self._elected, self._about = True, ["--spare"] * spare
        self.controller()

    def _next_controller(self, code: int) -> None:
        """The last one was killed, or has failed: another takes over, and training goes on meanwhile."""
        lasted = time.monotonic() - self._controller_began
        # One that has worked for a while has failed of something else than its predecessors.
        before = self._controllers_failed if lasted < _LASTING else 0
        failed = before + (code == FAILED)
        if self._starts(partial(self.controller, "--failed-before", str(failed))):
            self._controllers_failed = failed

    def agent(self, node: str, node_rank: int, domain: str, failed_before: int = 0) -> None:
        """Start one, with a directory for its sockets that goes when it ends. `node_rank` -1: a spare."""
        temporary = tempfile.mkdtemp(prefix="ft-agent-", dir=self._sockets_in)
        about = ["--node", node, "--node-rank", str(node_rank), "--domain", domain, "--temporary", temporary]
        beside = self._controller is not None and not self._elected
        try:
            (Path(temporary) / FAILED_NOTE).touch()
            agent = self._start("ft_core.node", *about, *(["--beside-controller"] if beside else []))
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._running[agent] = _Started(temporary, time.monotonic(), failed_before)
        self._agents.append(agent)

    def wait(self) -> int:
        """Until the job is over. Returns its exit code. Raises KeyboardInterrupt at the second Ctrl-C."""
        code = self._wait()
        return INTERRUPTED if self._interrupted and code == ENDED else code

    def _wait(self) -> int:
        while True:
            if self._told:
                self._pass_on()
            if self._controller is not None and (code := self._controller.poll()) is not None:
                if code >= 0 and code != FAILED:
                    self._reap()
                    return code
                if self._told and code == -signal.SIGTERM:
                    return ENDED  # it was just starting
                self._next_controller(code)
            for agent, failures in self._ended():
                again = self.respawn and failures < _TRIES and agent.returncode < 0
                self._given_up = failures > 0 and not again
                if again and not self._told:
                    self._agents.remove(agent)
                    self._places.append(_Place(failures, time.monotonic() + _STANDS_IN))
            self._fill_places()
            if not self._running:
                if (self.standalone or self.sole_node) and self._given_up and not self._told:
                    say(_ALL_FAILED, "ERROR")
                    return 1
                if self._controller is None or (self._elected and not self._is_waited_for()):
                    return max((abs(a.returncode) for a in self._agents), default=1)
                if self._told and not self.standalone and all(_left(a.returncode) for a in self._agents):
                    return ENDED  # the controller goes with its node; other nodes find another one
            if time.monotonic() > self._deadline:
                return ENDED
            time.sleep(_POLL)

    def _fill_places(self) -> None:
        now = time.monotonic()
        while self._places and (len(self._running) < self.needed or self._places[0].until <= now):
            if not self._told and not self._starts(partial(self._replace, self._places[0])):
                return
            self._places.pop(0)

    def _replace(self, place: _Place) -> None:
        self.agent(f"node{next(self.numbers)}", -1, "", place.failed_before)

    def _starts(self, start: Callable[[], None]) -> bool:
        """Whether what `start` starts is there; if not, it is to be called again: a machine without room, or
        without memory or descriptors, may have some again, and what runs here goes on meanwhile."""
        if time.monotonic() < self._not_started_at + _RETRY:
            return False
        try:
            start()
        except OSError as error:
            if self._not_started_at == -math.inf:
                say(f"ftrun: a process of the job cannot be started, and is tried again: {error}", "ERROR")
            self._not_started_at = time.monotonic()
            return False
        self._not_started_at = -math.inf
        return True

    def _is_waited_for(self) -> bool:
        """Whether a candidate may still find the job over, and say with which code, now that the agents have
        ended."""
        if self._alone_at is None:
            self._alone_at = time.monotonic()
        return time.monotonic() < self._alone_at + _STOP_GRACE

    @property
    def _told(self) -> bool:
        """Whether SIGTERM has come."""
        return self._told_at is not None

    def terminate(self) -> None:
        """SIGTERM has come: the workers get it too. Once more, later, and everything ends at once."""
        now = time.monotonic()
        if self._told_at is None:
            self._told_at = now
        elif now - self._told_at > _AS_ONE:
            sys.exit(ENDED)

    def interrupt(self) -> None:
        """Ctrl-C has come: as SIGTERM, but the next one ends everything, however soon it comes."""
        if self._told:
            raise KeyboardInterrupt
        self._interrupted = True
        self.terminate()

    def _pass_on(self) -> None:
        """Again and again, since a process that is just starting may miss it; to agents it is the same."""
        now = time.monotonic()
        if self._pass_on_at == math.inf:
            self._pass_on_at, self._deadline = now, now + self.patience
            say(
                "ftrun: told to end (SIGTERM): if this is one node of several, and the job can go on without "
                "it, its roles move; else the workers are told, and those that handle it end by themselves."
                f" Once more, after {_AS_ONE:.0f} s, ends them at once."
                if not self._interrupted
                else "ftrun: told to end (Ctrl-C), and tells the workers. Once more ends them at once."
            )
        if now < self._pass_on_at:
            return
        self._pass_on_at += _AGAIN
        for process in [*([self._controller] if self._controller else []), *self._agents]:
            process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End everything that was started here, whole process groups."""
        for process in [*self._agents, *([self._controller] if self._controller else [])]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._ended()

    def _ended(self) -> list[tuple[subprocess.Popen[bytes], int]]:
        """Agents that have ended since the last call; what they leave behind goes as well. With how many have
        failed in a row by now as they were starting."""
        found = []
        for agent in [agent for agent in self._running if agent.poll() is not None]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            started = self._running.pop(agent)
            failed = (Path(started.temporary) / FAILED_NOTE).exists()
            early = failed and time.monotonic() - started.at < _LASTING
            found.append((agent, started.failed_before + 1 if early else 0))
            shutil.rmtree(started.temporary, ignore_errors=True)
        return found

    def _reap(self) -> None:
        deadline = time.monotonic() + _STOP_GRACE
        while any(a.poll() is None for a in self._agents) and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, f"--parent={os.getpid()}", "--job-dir", str(self._job_dir)]
        command += [f"--last-line={self._last_line}", *arguments]
        about: dict[str, Any] = {"stdin": subprocess.DEVNULL, "pass_fds": [self._last_line]}
        return subprocess.Popen(command, start_new_session=True, **about)


def place_for_sockets() -> str:
    """The directory for temporary files, or /tmp where the path of a socket in it would be too long.

    Raises ConfigError if /tmp is of no use either: agents would wait for fork servers that cannot listen.
    """
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) <= _LONGEST_PATH:
        return place
    if not os.access("/tmp", os.W_OK | os.X_OK):
        raise ConfigError(
            f"TMPDIR {place!r} is too long for the sockets in it, and nothing can be written to /tmp: set "
            f"TMPDIR to a directory of at most {_LONGEST_PATH} bytes"
        )
    return "/tmp"


def _left(code: int) -> bool:
    """Whether an agent has ended for itself, and not because the job was over."""
    return code < 0 or code == ENDED
