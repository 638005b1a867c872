"""Failures on purpose: SIGKILL at a named point of a named step, once per job.

`FT_INJECT` (flag `--ft-inject`) is a comma-separated list of `ROLE@POINT:STEP[:worker]`, for instance
`2@backward:5`: when role 2 gets to the backward pass with 5 steps done, its whole node (agent and
workers) is killed; with `:worker`, that worker only. For tests, demos and drills.
"""

from __future__ import annotations

import os
import signal
import time
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
    "evaluate",
    "save",
    "between",
)


@dataclass(frozen=True)
class Injection:
    """One failure to come."""

    role: int
    point: str
    step: int
    worker_only: bool

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
            point, step, *scope = rest.split(":")
            if point not in POINTS or scope not in ([], ["worker"]):
                raise ValueError
            found.append(Injection(int(role), point, int(step), bool(scope)))
        except ValueError:
            raise ConfigError(
                f"--ft-inject: cannot read {part!r}; expected ROLE@POINT:STEP[:worker] "
                f"with POINT one of {', '.join(POINTS)}"
            ) from None
    return found


class Injector:
    """Fires the injections of one process. Costs a comparison per point when there are none."""

    def __init__(self, job_dir: Path, text: str) -> None:
        self._pending = parse(text)
        self._job_dir = job_dir

    @property
    def armed(self) -> bool:
        """Whether anything may still fire here."""
        return bool(self._pending)

    def point(self, role: int, name: str, step: int) -> None:
        """Die here if a failure is due. Does not return then."""
        for injection in self._pending:
            if (injection.role, injection.point, injection.step) == (role, name, step):
                self._fire(injection)

    def _fire(self, injection: Injection) -> None:
        marker = self._job_dir / injection.marker
        try:
            with marker.open("x") as file:  # the step is done again after the recovery: fire once only
                file.write(repr(time.monotonic()))
        except FileExistsError:
            return
        if injection.worker_only:
            os.kill(os.getpid(), signal.SIGKILL)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # an agent leads its process group: the whole node
