"""Commands of the operator's that the controller runs when something happens (`--ft-on EVENT=COMMAND`).

A command has the line of `events.jsonl` on its standard input. It is run by threads and processes of its own:
nothing waits for it but the end of the job, for a few seconds. What becomes of it is only logged.

An event that is recorded runs its commands once. It is told neither surely nor at most once where a
controller is lost: what that had not begun yet is not told, and what its successor records again (a job that
still waits) is told again. Commands only come from the command line of this machine: none is ever read from
the network.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ft_core.control.events import Record
from ft_core.control.observe.recorded import EVENTS
from ft_core.errors import ConfigError
from ft_core.leadership.etcd import USER
from ft_core.protocol.domains import place
from ft_core.settings import SECRET_ENV

log = logging.getLogger(__name__)

LIMIT = 30.0
"""Seconds that a command may take."""
AT_ONCE = 4
"""Commands that run at the same time."""
WAITING = 64
"""Commands that wait for their turn; what comes beyond is not run."""
AT_THE_END = 5.0
"""Seconds for which the end of the job waits for commands, at most."""
_KILLED = 1.0
"""Seconds of these in which they go that were ended."""
_MARGIN = 5.0
"""Seconds beyond the limit after which it is clear that the process which keeps to it does not work."""
_SECRETS = (SECRET_ENV, USER)
"""Variables that no command is given."""
_PROCESS = Path(__file__).with_name("hook_process.py")


def parse(given: Iterable[str]) -> list[list[str]]:
    """The values of `--ft-on`: of each the event, and the words of the command. Raises ConfigError."""
    found = []
    for one in given:
        event, equals, command = one.partition("=")
        if not equals:
            raise ConfigError(f"--ft-on {one!r}: give EVENT=COMMAND")
        if event not in EVENTS:
            raise ConfigError(f"--ft-on {one!r}: there is no event {event!r}; there are {', '.join(EVENTS)}")
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"--ft-on {one!r}: {error}") from None
        if not words or not words[0]:
            raise ConfigError(f"--ft-on {one!r}: there is no command behind {event}=")
        if "\0" in one:
            raise ConfigError(f"--ft-on {one!r}: there is a zero byte in it")
        if "/" in words[0]:
            words[0] = str(Path(words[0]).expanduser().absolute())
        found.append([event, *words])
    return found


def check(hooks: Iterable[Sequence[str]]) -> None:
    """Raise ConfigError for a command that cannot be run on this machine."""
    for event, program, *_ in hooks:
        if shutil.which(program) is not None:
            continue
        if "/" not in program:
            raise ConfigError(f"--ft-on {event}: there is no program {program!r} on the PATH of this machine")
        if Path(program).is_file():
            raise ConfigError(f"--ft-on {event}: {program} cannot be executed: chmod +x {program}")
        raise ConfigError(f"--ft-on {event}: there is no program {program} on this machine")


class _Run(NamedTuple):
    """A command that is to be run."""

    command: Sequence[str]
    event: str
    epoch: int
    node: str
    line: str

    def __str__(self) -> str:
        about = f"node {self.node}, " if self.node else ""
        return f"--ft-on {self.event}={self.command[0]} ({about}epoch {self.epoch})"


class Hooks:
    """The commands of one controller."""

    def __init__(self, hooks: Iterable[Sequence[str]], about: Mapping[str, str]) -> None:
        """`hooks`: as of `Settings.hooks`. `about`: variables for the commands, beside this process's."""
        self._commands: dict[str, list[Sequence[str]]] = {}
        for event, *command in hooks:
            self._commands.setdefault(event, []).append(command)
        self._about = about
        self._changed = threading.Condition()
        self._waiting: deque[_Run] = deque()
        self._threads = 0
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = self._ended = False
        self._said: set[tuple[str, str]] = set()
        """What has been said of which command, since it worked last."""

    def tell(self, record: Record, line: str) -> None:
        """An event is recorded, in this line. Never waits."""
        node = place(str(record.more.get("node", "")))
        for command in self._commands.get(record.event, ()):
            run = _Run(command, record.event, record.epoch, node, line)
            with self._changed:
                if self._closed:
                    return
                problem = self._begin(run)
            if problem:
                self._failed(run, f"was not run: {problem}")

    def _begin(self, run: _Run) -> str:
        """Have it wait for its turn. Returns why that cannot be."""
        if len(self._waiting) >= WAITING:
            return f"{WAITING} others wait already"
        if self._threads < AT_ONCE:
            try:
                threading.Thread(target=self._work, name="ft-hook", daemon=True).start()
                self._threads += 1
            except RuntimeError as error:
                if not self._threads:
                    return str(error)
        self._waiting.append(run)
        return ""

    def close(self) -> None:
        """No command is begun any more; those that run have their time."""
        with self._changed:
            self._closed = True
            self._waiting.clear()

    def finish(self, seconds: float) -> None:
        """Wait until all has been run, and end what then still runs: for so long at most."""
        until = time.monotonic() + seconds
        with self._changed:
            if not self._changed.wait_for(lambda: not self._threads, seconds - _KILLED):
                self._ended, unbegun = True, list(self._waiting)
                for run in unbegun:
                    self._failed(run, "was not run: the job is over")
                for process in self._running:
                    _kill(process)
            self._closed = True
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._threads, until - time.monotonic())

    def _work(self) -> None:
        """Run what waits, until nothing does."""
        while True:
            with self._changed:
                if not self._waiting:
                    self._threads -= 1
                    self._changed.notify_all()
                    return
                run = self._waiting.popleft()
            if problem := self._run(run):
                self._failed(run, *problem)
            else:
                self._worked(run)

    def _run(self, run: _Run) -> tuple[str, str] | None:
        """What went wrong, and what the command has said last; None if all went well."""
        words = [sys.executable, "-I", "-S", str(_PROCESS), str(LIMIT), *run.command]
        try:
            with open(os.memfd_create("ft-event"), "w+b") as event:  # nobody need read it
                event.write(run.line.encode())
                event.seek(0)
                process = subprocess.Popen(
                    words,
                    stdin=event,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=self._environment(run),
                    start_new_session=True,
                )
        except OSError as error:
            return f"could not be run: {error.strerror}", ""
        with self._changed:
            self._running.add(process)
            if self._ended:
                _kill(process)
        try:
            told, _ = process.communicate(timeout=LIMIT + _MARGIN)
        except subprocess.TimeoutExpired:
            told = b""
        finally:
            with self._changed:
                self._running.discard(process)
                _kill(process)
            process.wait()
        return self._problem(told)

    def _problem(self, told: bytes) -> tuple[str, str] | None:
        """What the process that has run a command tells of it."""
        try:
            found = json.loads(told)
            code, said, late = found["code"], str(found["said"]), found["late"]
        except (ValueError, KeyError, TypeError):
            if self._ended:
                return f"was ended with the job, which had waited {AT_THE_END - _KILLED:g} s for it", ""
            return "was killed", told.decode(errors="replace").strip().rpartition("\n")[2]
        if late:
            return f"took longer than {LIMIT:g} s, and was ended", said
        if code is None:
            return "could not be run", said
        if code < 0:
            return f"was killed by signal {-code}", said
        return (f"has failed with exit code {code}", said) if code else None

    def _environment(self, run: _Run) -> dict[str, str]:
        found: dict[str, Any] = {**os.environ, **self._about, "FT_EVENT": run.event, "FT_NODE": run.node}
        for secret in _SECRETS:
            found.pop(secret, None)
        return found

    def _worked(self, run: _Run) -> None:
        with self._changed:
            self._said = {each for each in self._said if each[0] != str(run.command)}

    def _failed(self, run: _Run, what: str, said: str = "") -> None:
        """Log what went wrong, unless the same was said of this command and it has not worked since."""
        with self._changed:
            kind = str(run.command), what
            if kind in self._said:
                return
            self._said.add(kind)
        log.warning(
            "%s %s%s. The job is none the worse for it, and events.jsonl has the event; the same is not said "
            "again until the command works",
            *(run, what, f": {said}" if said else ""),
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and what it has started, but for what has left its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
