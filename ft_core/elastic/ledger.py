"""The ledger of samples: which step trained which of them, as roles report it to the controller.

Replica groups that leave and come back change who trains what (`elastic`). `ledger_check` tells from the file
alone whether each sample was trained exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ft_core.elastic.rules import Membership, Range

NAME = "ledger.jsonl"
"""Its name in the job directory."""

KEPT = 1024
"""Steps whose reports are compared; roles may be that far apart in what they have reported."""


class Record(NamedTuple):
    """What a role reports of a step."""

    epoch: int
    since: int
    """The version that the epoch began from: with it a step can be placed though the epoch's line is lost."""
    step: int
    samples: tuple[tuple[int, tuple[Range, ...]], ...]
    """By group, in the order of the groups."""
    waiting: tuple[tuple[int, ...], ...]
    """What `Deal.waiting` is after the step."""
    next: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Inverse of `to_json`. Raises ValueError for anything else."""
        samples = data.get("samples")
        if not isinstance(samples, Mapping) or not all(str(group).isdecimal() for group in samples):
            raise ValueError(f"samples {samples!r}: not an object of ranges by group")
        groups = ((int(group), _ranges(ranges, 2)) for group, ranges in samples.items())
        return cls(
            _number(data, "epoch"),
            _number(data, "since"),
            _number(data, "step", least=1),
            tuple(sorted((group, ranges) for group, ranges in groups if ranges)),
            _ranges(data.get("waiting"), 3),
            _number(data, "next"),
        )

    def to_json(self) -> dict[str, Any]:
        """A line of the ledger."""
        return self._asdict() | {"samples": {str(group): ranges for group, ranges in self.samples}}

    def differs(self, other: Record) -> str:
        """In what; empty if in nothing but the epoch."""
        for name in ("samples", "waiting", "next"):
            if (mine := getattr(self, name)) != (its := getattr(other, name)):
                return f"{name} {mine} and {name} {its}"
        return ""


class Ledger:
    """For the controller. A new controller goes on with it. `write` takes its lines.

    The first one comes with elastic groups: a job without them has none.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._line = write
        self._known: dict[tuple[int, int], Record] = {}

    def epoch(self, epoch: int, version: int | None, membership: Mapping[str, Any]) -> None:
        """An epoch begins from `version` (None: start-up). Steps after that count no more.

        `membership` as from `Membership.to_json`. Raises ValueError if it is not.
        """
        line = {"epoch": epoch, "version": version, "membership": membership}
        read_epoch(line)
        self._write(line)

    def step(self, message: Mapping[str, Any]) -> str | None:
        """A role has finished a step. Returns how its report differs from another role's, if it does.

        `message`: epoch, since, step (counted from 1), samples ({group: [[first, end], ...]} of those that
        contributed), waiting and next (of the `Deal` after the step). Raises ValueError for another shape.
        """
        record = Record.from_json(message)
        key = record.epoch, record.step
        if (first := self._known.get(key)) is not None:
            difference = first.differs(record)
            return f"roles disagree on step {record.step}: {difference}" if difference else None
        self._write(record.to_json())
        self._known[key] = record
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return None

    def _write(self, line: Mapping[str, Any]) -> None:
        self._line(json.dumps(line) + "\n")


def read_epoch(data: Mapping[str, Any]) -> tuple[int, int, Membership]:
    """The content of an epoch's line; start-up is version 0. Raises ValueError for anything else."""
    version = 0 if data.get("version") is None else _number(data, "version")
    try:
        membership = Membership.from_json(data["membership"])
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"membership {data.get('membership')!r}: not a membership") from None
    if membership.groups < 1:
        raise ValueError("membership of no replica group")
    return _number(data, "epoch"), version, membership


def _number(data: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = data.get(name)
    if type(value) is not int or value < least:
        raise ValueError(f"{name} {value!r}: not a whole number of {least} or more")
    return value


def _ranges(value: Any, width: int) -> tuple[Any, ...]:
    """Ranges, each the last two of `width` numbers."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r}: not a list of ranges")
    for item in value:
        if (
            not isinstance(item, list | tuple)
            or len(item) != width
            or {*map(type, item)} != {int}
            or min(item) < 0
            or item[-2] >= item[-1]
        ):
            raise ValueError(f"{item!r}: not {width} whole numbers, of which the last two are a range")
    return tuple(map(tuple, value))
