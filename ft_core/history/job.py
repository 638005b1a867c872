"""What happened in a job and what it cost, out of the `events.jsonl` of those who have led it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ft_core.errors import ConfigError
from ft_core.history import goodput
from ft_core.history.goodput import Line
from ft_core.history.lines import OVER, is_event
from ft_core.protocol.domains import place
from ft_core.protocol.goodput import Cause, Spent

LONGEST = 10
"""Phases that are named."""
NEWEST = 200
"""Events that are shown, of those that are no node's coming."""
FEW = {"joined", "durable", "suspected", "refused", "spare_lost"}
"""Events of which there may be as many as nodes, or as checkpoints: counted, and not shown."""


@dataclass(frozen=True)
class Phase:
    """A time in which the job's time went to one thing."""

    cause: Cause
    began: float
    seconds: float
    epoch: int
    reason: str
    """The reason of the event that it began with."""


@dataclass(frozen=True)
class Recovery:
    """From a failure to the first step after it."""

    epoch: int
    """That went on."""
    began: float
    reason: str
    fault: str
    node: str
    origin: str
    version: int | None
    moved: dict[str, str]
    seconds: float | None
    """Until all roles had done a step; None: they have not, or another failure came before."""
    parts: dict[Cause, float]
    """What that went to."""


@dataclass(frozen=True)
class History:
    """What has happened in one job."""

    directory: str
    lines: list[Line]
    began: float
    ended: float
    """Seconds since 1970, of the last that is known."""
    end: str
    """How it has ended; empty: it has not, as far as is known."""
    seconds: dict[Cause, float]
    phases: list[Phase]
    recoveries: list[Recovery]
    failures: dict[str, Counter[str]]
    """By node, how many of which class."""
    avoided: dict[str, str]
    """Nodes that were, with why."""
    counts: Counter[str]
    """Events by name."""
    steps: list[tuple[float, int]]
    """When so many were done."""

    @property
    def goodput(self) -> float:
        """The part of the time that went to steps that count."""
        whole = sum(self.seconds.values())
        return self.seconds[Cause.PRODUCTIVE] / whole if whole else 0.0

    @property
    def longest(self) -> list[Phase]:
        """Those of what was lost."""
        lost = (phase for phase in self.phases if phase.cause is not Cause.PRODUCTIVE)
        return sorted(lost, key=lambda phase: -phase.seconds)[:LONGEST]

    @property
    def by_node(self) -> list[tuple[str, Counter[str]]]:
        """The failures of each, the most first."""
        return sorted(self.failures.items(), key=lambda each: -each[1].total())

    @property
    def told(self) -> list[Line]:
        """Events that are shown."""
        return [event for event in self.lines if event["event"] not in FEW][-NEWEST:]


def read(directory: Path, others: Iterable[Path] = ()) -> History:
    """The history in a job's directory. Raises ConfigError where nothing is in it, and OSError."""
    paths = [each / "events.jsonl" for each in (directory, *others)]
    found = [line for line in goodput.read(path for path in paths if path.exists()) if whole(line)]
    if not found:
        raise ConfigError(f"{directory} has no events.jsonl with anything in it: no controller has run there")
    return of(str(directory), found)


def of(directory: str, found: list[Line]) -> History:
    """The history that these events make, in order; there is one at least."""
    phases = list(_phases(found))
    counts = Counter(line["event"] for line in found)
    over = next((line for line in reversed(found) if line["event"] in OVER), None)
    ended = over or found[-1]
    return History(
        directory=directory,
        lines=found,
        began=found[0]["time"],
        ended=ended["time"],
        end=f"{over['event']}{': ' * bool(over['reason'])}{over['reason']}" if over else "",
        seconds=goodput.seconds(found),
        phases=phases,
        recoveries=list(_recoveries(found, phases)),
        failures=_failures(found),
        avoided={
            place(str(line.get("node"))): line["reason"] for line in found if line["event"] == "avoided"
        },
        counts=counts,
        steps=list(_steps(found)),
    )


def whole(line: Line) -> bool:
    """Whether it is an event, and what it says of time can be read."""
    try:
        for cause, seconds in line.get("unfinished", {}).items():
            Cause(cause), float(seconds)
        if "spent" in line:
            msgspec.convert(line["spent"], Spent)
        return is_event(line) and math.isfinite(line["monotonic"] + line["term"])
    except (AttributeError, TypeError, ValueError):
        return False


def _failures(lines: Iterable[Line]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for line in lines:
        if line["event"] == "detected" and line.get("fault") and line.get("node"):
            found.setdefault(place(str(line["node"])), Counter())[str(line["fault"])] += 1
    return found


def _phases(lines: Iterable[Line]) -> Iterator[Phase]:
    """In order, without gaps."""
    now: tuple[Cause, float, int, str] | None = None
    at = 0.0
    for line in lines:
        at = line["time"]
        if "spent" not in line or line["event"] in OVER:
            continue
        cause = msgspec.convert(line["spent"], Spent).now
        if now is not None and now[0] is cause and now[2] == line["epoch"]:
            continue
        if now is not None:
            cut = {Cause(name): seconds for name, seconds in line.get("unfinished", {}).items()}
            began = max(now[1], at - sum(cut.values()))
            yield Phase(now[0], now[1], began - now[1], *now[2:])
            for part, seconds in cut.items():
                seconds = min(seconds, at - began)
                yield Phase(part, began, seconds, line["epoch"], _why(line))
                began += seconds
        now = cause, at, line["epoch"], _why(line)
    if now is not None:
        yield Phase(now[0], now[1], at - now[1], *now[2:])


def _why(line: Line) -> str:
    """What has come to pass; that of a sum of the time is no reason."""
    return line["reason"] if line["reason"] and line["event"] != "goodput" else line["event"]


def _recoveries(lines: Iterable[Line], phases: list[Phase]) -> Iterator[Recovery]:
    first: Line | None = None
    decided: Line | None = None
    for line in lines:
        if first is None and line["event"] == "detected" and "spent" in line:
            first, decided = line, None
        elif first is not None and line["event"] == "decided":
            decided = line
        elif first is not None and (line["event"] == "resumed" or line["event"] in OVER):
            yield _recovery(first, decided, line, phases)
            first = None
    if first is not None:
        yield _recovery(first, decided, None, phases)


def _recovery(first: Line, decided: Line | None, last: Line | None, phases: list[Phase]) -> Recovery:
    began = first["time"] - first.get("unfinished", {}).get(Cause.DETECTION, 0.0)
    resumed = last is not None and last["event"] == "resumed"
    parts = dict.fromkeys(Cause, 0.0)
    for phase in phases:
        if last is not None and began - 1e-6 <= phase.began < last["time"]:
            parts[phase.cause] += min(phase.seconds, last["time"] - phase.began)
    about = decided or {}
    moved = about.get("moved")
    return Recovery(
        epoch=(decided or first)["epoch"],
        began=began,
        reason=first["reason"],
        fault=str(first.get("fault", "")),
        node=str(first.get("node", "")),
        origin=str(about.get("origin", "")),
        version=about.get("version"),
        moved={str(role): str(node) for role, node in moved.items()} if isinstance(moved, dict) else {},
        seconds=last["time"] - began if last is not None and resumed else None,
        parts={cause: seconds for cause, seconds in parts.items() if seconds},
    )


def _steps(lines: Iterable[Line]) -> Iterator[tuple[float, int]]:
    for line in lines:
        if "spent" in line:
            yield line["time"], msgspec.convert(line["spent"], Spent).version
