"""What a job's time went to, computed from its `events.jsonl` alone, also of one that was killed.

It does not read the sums that the controller has written there (`spent.seconds`): it adds up the times
between the lines, by what each line says that time goes to from then on, and splits those of training by
what its lines tell of them. A test holds the two against each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ft_core.protocol.goodput import Cause, Spent

Line = dict[str, Any]
"""A line of `events.jsonl`."""
_END = ("finished", "stopped")


def read(paths: Iterable[Path]) -> list[Line]:
    """The lines of a job's events in order, of all machines that have led it. Torn ones are left out. Raises
    OSError."""
    found = []
    for path in paths:
        for text in path.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue  # its writer has died
            if isinstance(line, dict) and {"event", "term", "time", "monotonic"} <= line.keys():
                found.append(line)
    return in_order(found)


def in_order(lines: Iterable[Line]) -> list[Line]:
    """Those of one leader after those of the one before; that one's are over where the next one's begin."""
    by_term: dict[int, list[Line]] = {}
    for line in lines:
        by_term.setdefault(line["term"], []).append(line)
    found: list[Line] = []
    for _, part in sorted(by_term.items()):
        while found and found[-1]["time"] > part[0]["time"]:
            found.pop()
        found += part
    return found


def seconds(lines: Iterable[Line]) -> dict[Cause, float]:
    """What they say that the job's time went to, until the last of them."""
    found = dict.fromkeys(Cause, 0.0)
    before: Line | None = None
    now, training = Spent(Cause.START_UP), 0.0
    for line in _until_the_end(lines):
        if before is not None:
            passed = _between(before, line)
            if now.now is Cause.PRODUCTIVE:
                training += passed
            else:
                found[now.now] += passed
        before = line
        if "spent" not in line:
            continue
        then = msgspec.convert(line["spent"], Spent)
        cut = {Cause(cause): part for cause, part in line.get("unfinished", {}).items()}
        if now.now is not Cause.PRODUCTIVE:  # something else went on than was known
            for cause, part in cut.items():
                found[cause] += part
                found[now.now] -= part
        elif then.now is not now.now or then.epoch != now.epoch:
            _split(found, training, cut, then)
            training = 0.0
        now = then
    if now.now is Cause.PRODUCTIVE:  # it was killed, or goes on
        _split(found, training, {}, now)
    return found


def _split(found: dict[Cause, float], training: float, cut: dict[Cause, float], about: Spent) -> None:
    """Add the seconds of an epoch's training."""
    parts = [*cut.items(), (Cause.REDONE, about.redone), (Cause.SAVING, about.waited)]
    good = training
    for cause, part in parts:
        part = min(part, good)  # they are more only where lines are lost
        found[cause] += part
        good -= part
    found[Cause.PRODUCTIVE] += good * about.share
    found[Cause.DEGRADED] += good * (1 - about.share)


def _until_the_end(lines: Iterable[Line]) -> Iterator[Line]:
    for line in lines:
        yield line
        if line["event"] in _END:
            return


def _between(before: Line, line: Line) -> float:
    """Seconds; two machines' clocks may differ, and one may have been set."""
    passed = line["monotonic"] - before["monotonic"]
    if line["term"] != before["term"] or passed < 0:
        passed = line["time"] - before["time"]
    return max(0.0, float(passed))
