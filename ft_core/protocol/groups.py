"""What process groups, and series of operations in them, are called: the same on all members and newcomers.

Code handles the types. In messages, whose keys are strings, and in the epoch's store their text stands for
them: `str(x)`, and `parse` makes it what it was.

    0-3:1#0             the first group of roles 0, 1, 2 and 3; the operations of all of its members
    12/0-6:2,7#1        ... of the second group of roles 0, 2, 4, 6 and 7, in training step 12
    load/0-3:1#0        ... in a section of its own
    0-3:1#0/2>1         what role 2 sends to role 1 there
    5+/0-3:1#0          all that there is in steps from 5 on, see `Steps`
    0-3:1#0/end         nothing more comes, see `Ended`

Roles alone are said in the same way, whichever they are: `0-6:2,7`. With many roles, those that have
something in common are a few runs, as a rule.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ft_core.errors import ProtocolError

_RUN = r"[0-9]+(?:-[0-9]+:[0-9]+)?"
RUNS = rf"{_RUN}(?:,{_RUN})*"
"""Roles as text: a regular expression."""
_RUNS = re.compile(RUNS)
_MOST = 1 << 20
"""Roles that are said at once."""
_GROUP = rf"(?P<runs>{_RUN}(?:,{_RUN})*)#(?P<ordinal>[0-9]+)"
_SERIES = rf"(?:(?P<step>[0-9]+)/|(?P<section>[a-z]+)/)?{_GROUP}(?:/(?P<source>[0-9]+)>(?P<target>[0-9]+))?"
_TALLY = re.compile(rf"(?:(?P<first>[0-9]+)\+/)?{_SERIES}(?P<end>/end)?")


def runs_of(roles: Iterable[int]) -> tuple[range, ...]:
    """Roles in any order, each once, as the same runs whatever the order was."""
    ordered, runs, at = sorted(roles), [], 0
    while at < len(ordered):
        last = at
        stride = ordered[at + 1] - ordered[at] if at + 1 < len(ordered) else 1
        while last + 1 < len(ordered) and ordered[last + 1] - ordered[last] == stride:
            last += 1
        runs.append(range(ordered[at], ordered[last] + 1, stride))
        at = last + 1
    return tuple(runs)


def text_of(runs: Iterable[range]) -> str:
    """Runs as text."""
    return ",".join(f"{r[0]}" if len(r) == 1 else f"{r[0]}-{r[-1]}:{r.step}" for r in runs)


def segment_id(holders: Sequence[int]) -> str:
    """What the state is called that these roles, ascending, have in common."""
    digest = hashlib.sha256(",".join(map(str, holders)).encode()).hexdigest()[:12]
    return f"{holders[0]}x{len(holders)}-{digest}"


def roles_in(text: str) -> tuple[range, ...]:
    """The roles that a text of `text_of` names. Raises ProtocolError."""
    if text.isdecimal() and text.isascii() and len(text) < 10:
        return (range(int(text), int(text) + 1),)
    return _roles_in(text)


@lru_cache(maxsize=1 << 14)
def _roles_in(text: str) -> tuple[range, ...]:
    try:
        if not _RUNS.fullmatch(text):
            raise ValueError("it reads otherwise")
        runs = tuple(map(_run, text.split(",")))
        if max(run[-1] for run in runs) >= 1 << 31 or sum(map(len, runs)) > _MOST:
            raise ValueError("there are not so many")
    except ValueError as error:
        raise ProtocolError(f"{text[:200]!r} are no roles: {error}") from None
    return runs


@dataclass(frozen=True, slots=True)
class GroupId:
    """A process group: its roles, and how many groups of the same roles were created before it."""

    runs: tuple[range, ...]
    """The roles, ascending. Made by `of`, so that equal groups have equal runs."""
    ordinal: int

    @classmethod
    def of(cls, members: Iterable[int], ordinal: int) -> GroupId:
        """The id of a group of these roles, in any order."""
        return cls(runs_of(members), ordinal)

    @classmethod
    def parse(cls, text: str) -> GroupId:
        """Inverse of `str`. Raises ProtocolError."""
        found = Series.parse(text)
        if found != Series(found.group):
            raise ProtocolError(f"{text[:200]!r} is not a process group alone")
        return found.group

    def __contains__(self, role: int) -> bool:
        return any(role in run for run in self.runs)

    def __str__(self) -> str:
        return f"{text_of(self.runs)}#{self.ordinal}"


@dataclass(frozen=True, slots=True)
class Series:
    """Operations that are counted together, from 0 on: on all who take part alike."""

    group: GroupId
    pair: tuple[int, int] | None = None
    """The roles that send and receive, of point-to-point operations. None: for the whole group."""
    step: int | None = None
    """Where a script issues operations between training steps: how many it had done."""
    section: str = ""
    """Small letters, for operations that are counted apart from all others; excludes `step`."""

    @classmethod
    def parse(cls, text: str) -> Series:
        """Inverse of `str`. Raises ProtocolError."""
        found = parse(text)
        if not isinstance(found, Series):
            raise ProtocolError(f"{text[:200]!r} is not a series of operations")
        return found

    def needs(self, role: int) -> bool:
        """Whether operations are not completed without this role."""
        return role in (self.group if self.pair is None else self.pair)

    def at(self, step: int | None) -> Series:
        """The same series in another step."""
        return replace(self, step=step)

    def __str__(self) -> str:
        prefix = self.section if self.step is None else str(self.step)
        pair = "" if self.pair is None else f"/{self.pair[0]}>{self.pair[1]}"
        return f"{prefix}/{self.group}{pair}" if prefix else f"{self.group}{pair}"


@dataclass(frozen=True, slots=True)
class Steps:
    """A series in all steps from `first` on; as many as are counted are over, so that no operations come any
    more in those before."""

    first: int
    series: Series
    """Without a step."""

    def __str__(self) -> str:
        return f"{self.first}+/{self.series}"


@dataclass(frozen=True, slots=True)
class Ended:
    """A series that somebody adds nothing to any more. Its count is 1."""

    series: Series

    def __str__(self) -> str:
        return f"{self.series}/end"


RecordCount = Series | Steps | Ended
"""What a role counts of its start-up operations: operations on record, steps that are over, ends."""


def series_of(tally: RecordCount) -> Series:
    """The series that a count is about."""
    return tally if isinstance(tally, Series) else tally.series


@lru_cache(maxsize=1 << 17)  # the same come with every report; of the largest jobs, tens of thousands
def parse(text: str) -> RecordCount:
    """What `str` made a text of. Raises ProtocolError."""
    try:
        return _parsed(text)
    except ValueError as error:  # a stride of zero, or more digits than an int takes
        raise ProtocolError(f"{text[:200]!r} is not a process group: {error}") from None


def _parsed(text: str) -> RecordCount:
    match = _TALLY.fullmatch(text)
    if match is None:
        raise ValueError("it reads otherwise")
    first, step, source, target = match["first"], match["step"], match["source"], match["target"]
    if first is not None and (step or match["section"] or match["end"]):
        raise ValueError("it is of two kinds")
    series = Series(
        GroupId(tuple(map(_run, match["runs"].split(","))), int(match["ordinal"])),
        None if source is None else (int(source), int(target)),
        None if step is None else int(step),
        match["section"] or "",
    )
    return Ended(series) if match["end"] else series if first is None else Steps(int(first), series)


def _run(text: str) -> range:
    numbers = list(map(int, re.split("[-:]", text)))
    first, last, stride = numbers if len(numbers) == 3 else [*numbers, *numbers, 1]
    if last < first:
        raise ValueError(f"{text} goes backwards")
    return range(first, last + 1, stride)
