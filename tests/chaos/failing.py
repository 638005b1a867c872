"""Failures in another script, one after the other, as FT_TEST_FAILURES has them: see `failing_jobs`."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from textwrap import dedent

from failures import CASES, EVERY, Killed

from ft_core.process.inject import Injector
from ft_core.worker import session

CGROUP = "FT_TEST_CGROUP"
"""The directory of one in which there is little memory."""


class Failures(Injector):
    """In place of what `--ft-inject` has happen."""

    def __init__(self, job_dir: Path, text: str) -> None:
        super().__init__(job_dir, "")
        self._failures = [tuple(each) for each in json.loads(text)]

    @property
    def armed(self) -> bool:
        """There is always more to come."""
        return True

    def point(self, role: int, name: str, step: int) -> None:
        """Fail here, if it is this one's turn."""
        for number, (of, point, at, what) in enumerate(self._failures):
            if of in (role, EVERY) and (point, at) == (name, step) and self._due(number, role):
                self._marker(number).touch()
                self._marker(number, role).touch()
                happens(what)

    def _due(self, number: int, role: int) -> bool:
        return not self._marker(number, role).exists() and (not number or self._marker(number - 1).exists())

    def _marker(self, number: int, role: int | None = None) -> Path:
        one = "" if role is None else f"-{role}"
        return self._job_dir / f"failure-{number}{one}"


def happens(what: str) -> None:
    """A row of the table, or else a line of Python."""
    case = CASES.get(what, what)
    if not isinstance(case, Killed):
        text = case if isinstance(case, str) else dedent(case.text)
        exec(compile(text, what, "exec"), {"__name__": "__main__"})
    elif case.ordered:
        wait_for_the_end()
    elif case.out_of_memory:
        (Path(os.environ[CGROUP]) / "cgroup.procs").write_text(str(os.getpid()))
        while True:
            exhausted.append(b"\1" * (1 << 24))
    elif case.told is not None:
        current = session.current()
        assert current is not None
        current.comms.hung("the link has failed", True)
    elif case.code >= 0:
        os._exit(case.code)
    else:
        if case.code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), -case.code)


exhausted: list[bytes] = []


def wait_for_the_end() -> None:
    """Of this worker, or of the epoch."""
    current = session.current()
    assert current is not None
    while True:
        current.check_epoch()
        time.sleep(0.01)


def begin() -> None:
    """At the script's first line, which is a place as well: "begin"."""
    current = session.current()
    if current is not None:
        current._shell.injector = Failures(current.job_dir, os.environ["FT_TEST_FAILURES"])
        current.point("begin")


def end() -> None:
    """After the script's last line, which is one as well: "end"."""
    current = session.current()
    if current is not None:
        current.point("end")
