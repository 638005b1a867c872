"""Where the time goes from when a worker begins, or an epoch ends, until its next step is done.

Each mark ends a phase and begins another. A line is written when the step is done: `timeline.jsonl`, beside
the worker's logs, with one line for each epoch that the worker has gone through. `ftctl timeline` reads them.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

log = logging.getLogger(__name__)

NAME = "timeline.jsonl"
_MOST = 64
"""Marks in one line: a script may build any number of models."""


class Timeline:
    """The time line of one process. Marks are made by its main thread."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._marks: list[tuple[str, float]] = []
        self.facts: dict[str, float] = {}
        """What else the next line says."""

    def begin(self, directory: Path) -> None:
        """The time line of this process begins; its logs are in `directory`."""
        self._path = directory / NAME
        self._marks = []

    def mark(self, phase: str) -> None:
        """It begins, and the one before ends. Nothing where it goes on."""
        goes_on = bool(self._marks) and self._marks[-1][0] == phase
        if self._path is not None and not goes_on and len(self._marks) < _MOST:
            self._marks.append((phase, time.monotonic()))

    def takes_over(self) -> None:
        """What was done before was done ahead of need: nobody has waited for it."""
        self._marks = []
        self.facts["ready"] = 1
        self.mark("role taken")

    @property
    def running(self) -> bool:
        """Whether there is a mark: no step was done since."""
        return bool(self._marks)

    def end(self, role: int, epoch: int) -> None:
        """A step is done: write the line."""
        if self._path is None or not self._marks:
            return
        now, clock = time.monotonic(), time.time()
        phases = [(name, round(clock - (now - at), 6)) for name, at in self._marks]
        line = {"role": role, "epoch": epoch, "phases": phases, "end": round(clock, 6), **self.facts}
        self._marks, self.facts = [], {}
        try:
            with self._path.open("a") as file:
                file.write(f"{json.dumps(line)}\n")
        except OSError as error:
            log.warning(
                "%s: %s; `ftctl timeline` will miss epoch %d of role %d", self._path, error, epoch, role
            )


timeline = Timeline()
"""This process's."""
