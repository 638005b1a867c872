"""Failures on purpose: SIGKILL or an error at a named point of a named step, once per job.

`FT_INJECT` (flag `--ft-inject`) is a comma-separated list of `ROLE@POINT:STEP[:HOW]`, for instance
`2@backward:5`: when role 2 gets to the backward pass with 5 steps done, its whole node (agent and
workers) is killed; with `:worker`, that worker only. The other ways are in `ERRORS`. For tests, demos and
drills.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ft_core.errors import ConfigError

ENV = "FT_INJECT"
POINTS = (
    "startup",
    "forward",
    "backward",
    "gradients",
    "optimizer",
    "gather",
    "d2h",
    "h2h",
    "recovery",
    "derive",
    "evaluate",
    "save",
    "between",
)
THREADS = ("d2h", "h2h")
"""Points that the script's main thread does not come by: nothing can be raised in it there."""


def _raise(error: Exception) -> None:
    raise error


def _spin() -> None:
    while True:
        pass


def _hold_the_lock() -> None:
    library = ctypes.PyDLL(None)  # which does not let go of the interpreter's lock
    while True:
        library.sleep(3600)


def _deadlock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


ERRORS: dict[str, Callable[[], object]] = {
    "error": lambda: _raise(RuntimeError("injected by --ft-inject")),
    "errors": lambda: _raise(RuntimeError("injected by --ft-inject, whenever this step is done")),
    "memory": lambda: _raise(MemoryError("injected by --ft-inject")),
    "exit": lambda: sys.exit(3),
    "_exit": lambda: os._exit(5),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": _spin,
    "lock": _hold_the_lock,
    "deadlock": _deadlock,
}
"""What else may happen to a worker, in its script: `errors` each time that it comes by, the others once.
The last four are hangs: it is stopped, loops, holds the interpreter's lock, waits for a lock of its own."""


FLIPS = ("weight", "moment")
"""What of a worker's state may have a bit flipped: nobody is told."""


@dataclass(frozen=True)
class Injection:
    """One failure to come."""

    role: int
    point: str
    step: int
    how: str
    """Empty: the whole node is killed."""

    @property
    def marker(self) -> str:
        """Name of the file in the job directory that says that it has happened."""
        return f"injected-{self.role}-{self.point}-{self.step}"


def parse(text: str) -> list[Injection]:
    """Read the flag. Raises ConfigError naming the part that is wrong."""
    found = []
    for part in filter(None, text.split(",")):
        try:
            role, rest = part.split("@")
            point, step, *more = rest.split(":")
            how = more[0] if more else ""
            if point not in POINTS or len(more) > 1 or how not in ("", "worker", *ERRORS, *FLIPS):
                raise ValueError
            if point in THREADS and how in (*ERRORS, *FLIPS):
                raise ValueError
            found.append(Injection(int(role), point, int(step), how))
        except ValueError:
            raise ConfigError(
                f"--ft-inject: cannot read {part!r}; expected ROLE@POINT:STEP[:HOW] with POINT one of "
                f"{', '.join(POINTS)}, and HOW worker or, but for {' and '.join(THREADS)}, "
                f"{', '.join((*ERRORS, *FLIPS))}"
            ) from None
    return found


class Injector:
    """Fires the injections of one process. Costs a comparison per point when there are none."""

    def __init__(self, job_dir: Path, text: str) -> None:
        self._pending = parse(text)
        self._job_dir = job_dir
        self.flip: Callable[[str], None] = lambda _: None
        """Flips a bit of the role's state, once there is one: of `FLIPS`, what."""

    @property
    def armed(self) -> bool:
        """Whether anything may still fire here."""
        return bool(self._pending)

    def succeeds(self, role: int, version: int | None) -> None:
        """This process plays `role` from now on, from `version`, after another whose job directory is not
        this one: what that has done on its way to there, a step beyond it at most, is not done again here."""
        for injection in self._pending:
            if injection.role == role and injection.step <= (0 if version is None else version + 1):
                with contextlib.suppress(OSError):
                    (self._job_dir / injection.marker).touch()

    def point(self, role: int, name: str, step: int) -> None:
        """Die here, or raise, if a failure is due."""
        for injection in self._pending:
            if (injection.role, injection.point, injection.step) == (role, name, step):
                self._fire(injection)

    def _fire(self, injection: Injection) -> None:
        marker = self._job_dir / injection.marker
        try:
            with marker.open("x") as file:  # the step is done again after the recovery: fire once only
                file.write(repr(time.monotonic()))
        except FileExistsError:
            if injection.how != "errors":
                return
        if injection.how in FLIPS:
            self.flip(injection.how)
            return
        if injection.how in ERRORS:
            ERRORS[injection.how]()
        if injection.how == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # an agent leads its process group: the whole node
