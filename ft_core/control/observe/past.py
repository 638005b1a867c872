"""What has happened in a job, for its page: the end of `events.jsonl`, read by a thread of its own, since a
disk may hang."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ft_core.errors import ConfigError
from ft_core.history import job
from ft_core.history.goodput import Line, in_order
from ft_core.history.lines import OVER, Tail, parsed
from ft_core.protocol.goodput import Cause, Spent

log = logging.getLogger(__name__)

READ = 4 << 20
"""Bytes of the file's end that are read at first."""
LINES = 2000
"""Lines that are kept."""
SHOWN = 100
"""Recoveries, and events, that are shown."""
STRIPS = 400
"""The most strips of the time line."""
POINTS = 1000
"""The most points of the time before there was a controller that could be asked."""
REASON = 2000
"""Characters of a reason that are shown."""
EVERY = 0.5
"""Seconds between two looks."""
_NAMED = 8
"""How many of the roles that have moved are named."""
_KEPT = ("event", "time", "monotonic", "term", "epoch", "reason", "fault", "node", "version", "origin",
         "spent", "unfinished")  # fmt: skip
_OF_RECOVERIES = {"detected", "decided", "resumed", *OVER}


@dataclass(frozen=True)
class Told:
    """What the file tells; ready to be sent."""

    number: int = 0
    """Grows with each that differs."""
    recoveries: tuple[dict[str, Any], ...] = ()
    """The newest first."""
    phases: tuple[tuple[str, float, float], ...] = ()
    """Cause, when it began in seconds since 1970, and its seconds."""
    events: tuple[dict[str, Any], ...] = ()
    """The newest first."""
    points: tuple[tuple[float, float | None, float | None, int], ...] = ()
    """When, seconds of a step, goodput, steps done."""


class Past:
    """What has happened in one job until now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: deque[Line] = deque(maxlen=LINES)
        self._over = threading.Event()
        self.told = Told()

    def start(self) -> None:
        """Read the file in a thread, which nobody waits for."""
        threading.Thread(target=self._run, name="ft-page-events", daemon=True).start()

    def close(self) -> None:
        """Let the thread end soon."""
        self._over.set()

    def _run(self) -> None:
        tail: Tail | None = None
        try:
            while not self._over.wait(EVERY if tail is not None or self._path.exists() else 4 * EVERY):
                try:
                    tail = tail or Tail(self._path, READ)
                    self.take(tail.lines())
                except (OSError, ConfigError):  # it is not there yet, or its disk is not
                    continue
        except Exception:
            log.exception("the page shows no more events")

    def take(self, lines: Iterable[str]) -> None:
        """Lines that are new."""
        news = False
        for text in lines:
            line = parsed(text)
            if line is not None and job.whole(line) and _matters(line):
                self._lines.append(_short(line))
                news = True
        if news:
            self.told = _told(job.of("", in_order(self._lines)), self.told.number + 1)


def _matters(line: Line) -> bool:
    return "spent" in line or line["event"] in _OF_RECOVERIES or line["event"] not in job.FEW


def _short(line: Line) -> Line:
    """Without what grows with the job."""
    kept = {name: line[name] for name in _KEPT if name in line}
    moved = line.get("moved")
    if isinstance(moved, dict):
        kept["moved"] = dict(list(moved.items())[:_NAMED])
    return {**kept, "roles": line["roles"][:_NAMED], "reason": line["reason"][:REASON]}


def _told(found: job.History, number: int) -> Told:
    return Told(
        number,
        tuple(
            {
                "began": each.began,
                "epoch": each.epoch,
                "reason": each.reason,
                "fault": each.fault,
                "node": each.node,
                "origin": each.origin,
                "version": each.version,
                "moved": each.moved,
                "seconds": each.seconds,
                "parts": {str(cause): seconds for cause, seconds in each.parts.items()},
            }
            for each in reversed(found.recoveries[-SHOWN:])
        ),
        tuple((str(p.cause), p.began, p.seconds) for p in found.phases[-STRIPS:]),
        tuple(
            {"time": e["time"], "event": e["event"], "epoch": e["epoch"], "reason": e["reason"]}
            | {"node": str(e.get("node") or "")}
            for e in reversed(found.told[-SHOWN:])
        ),
        tuple(_point(line) for line in found.lines if "spent" in line)[-POINTS:],
    )


def _point(line: Line) -> tuple[float, float | None, float | None, int]:
    spent = msgspec.convert(line["spent"], Spent)
    whole = sum(spent.seconds.values())
    good = spent.seconds.get(Cause.PRODUCTIVE, 0.0) / whole if whole else None
    return line["time"], spent.step or None, good, spent.version
