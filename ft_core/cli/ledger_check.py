"""`ftctl data verify`: whether a job has trained each sample exactly once, from its ledger."""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ft_core.elastic.ledger import NAME, Record, read_epoch
from ft_core.elastic.rules import Membership, Range

_SHOWN = 20
"""Problems, but for `--json`."""

_BEFORE, _WAITING = 0, -1
"""In place of a step: trained before the first on record, waiting after the last."""


@dataclass(frozen=True)
class Report:
    """What a ledger says of the steps and samples of its job."""

    steps: int
    samples: int
    """How many were trained."""
    waiting: int
    """Samples that were dealt in vain, and will be dealt again."""
    by_group: dict[int, int]
    """Samples trained, by replica group."""
    problems: tuple[str, ...]
    """Each a sentence. None: every sample dealt was trained once, or waits."""


def verify(lines: Iterable[str]) -> Report:
    """Replay a ledger: each sample once, no step missing, each group only where its gradients count.

    The last line may be torn, as when the controller was killed. What was trained before the first step on
    record (by an earlier job, whose checkpoint this one started from) is taken on trust.
    """
    replay, torn = _Replay(), ""
    for number, text in enumerate(lines, 1):
        if torn:
            replay.problems.append(torn)
            torn = ""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            torn = f"line {number} is not JSON: {text[:60]!r}"
            continue
        try:
            replay.line(data)
        except ValueError as error:
            replay.problems.append(f"line {number}: {error}")
    return replay.report()


class _Done(NamedTuple):
    """A step that counts, in little memory: there may be millions."""

    epoch: int
    pieces: tuple[Range, ...]
    counts: tuple[tuple[int, int], ...]
    """(group, samples)"""
    waiting: tuple[tuple[int, ...], ...]
    next: int
    content: int
    """Hash, to compare further reports of the step with."""


class _Replay:
    """The state of a ledger after some of its lines."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._epochs: dict[int, tuple[int, Membership]] = {}
        self._newest = -1
        self._steps: list[int] = []
        self._done: dict[int, _Done] = {}
        self._counts: dict[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]] = {}

    def line(self, data: Any) -> None:
        """The next line. Raises ValueError if it cannot be."""
        if not isinstance(data, dict):
            raise ValueError("not an object")
        if "membership" in data:
            self._epoch(*read_epoch(data))
        else:
            self._step(Record.from_json(data))

    def report(self) -> Report:
        """What is found if there are no more lines."""
        by_group: dict[int, int] = {}
        for done in self._done.values():
            for group, count in done.counts:
                by_group[group] = by_group.get(group, 0) + count
        waiting = self._done[self._steps[-1]].waiting if self._steps else ()
        if self._steps:
            self._check_steps()
            self._check_positions()
        return Report(
            steps=len(self._steps),
            samples=sum(by_group.values()),
            waiting=sum(end - first for _, first, end in waiting),
            by_group=dict(sorted(by_group.items())),
            problems=tuple(self.problems),
        )

    def _epoch(self, epoch: int, version: int, membership: Membership) -> None:
        if (known := self._epochs.get(epoch)) is not None:
            if known != (version, membership):
                raise ValueError(f"epoch {epoch} began differently before")
            return  # written again by a new controller: steps since then count
        if epoch < self._newest:
            raise ValueError(f"epoch {epoch} after epoch {self._newest}")
        self._epochs[epoch], self._newest = (version, membership), epoch
        self._go_back(version, epoch)

    def _go_back(self, version: int, epoch: int) -> None:
        """Steps after that version do not count, of earlier epochs than this one."""
        kept = bisect_right(self._steps, version)
        left = [step for step in self._steps[kept:] if self._done[step].epoch >= epoch]
        for step in set(self._steps[kept:]) - set(left):
            del self._done[step]
        self._steps[kept:] = left

    def _step(self, record: Record) -> None:
        if record.epoch > self._newest:
            raise ValueError(f"step {record.step} is of epoch {record.epoch}, which has not begun")
        if record.epoch not in self._epochs:  # its line was lost with a controller whose disk was full
            self._epochs[record.epoch] = record.since, self._epochs[self._newest][1]
            self._go_back(record.since, record.epoch)
        if record.epoch < self._newest and any(
            version < record.step for epoch, (version, _) in self._epochs.items() if epoch > record.epoch
        ):
            return  # reported late: void already
        content = hash(record[3:])
        if (known := self._done.get(record.step)) is not None:
            if known.content != content:
                raise ValueError(f"step {record.step} was reported differently before")
            return
        counts = tuple((group, sum(end - first for first, end in ranges)) for group, ranges in record.samples)
        insort(self._steps, record.step)
        self._done[record.step] = _Done(
            record.epoch,
            _joined(ranges for _, ranges in record.samples),
            self._counts.setdefault(counts, counts),
            record.waiting,
            record.next,
            content,
        )
        contributing = self._epochs[record.epoch][1].contributing(record.step)
        if strangers := [group for group, _ in record.samples if group not in contributing]:
            raise ValueError(
                f"groups {strangers} trained in step {record.step}, to which {list(contributing)} contribute"
            )

    def _check_steps(self) -> None:
        began = self._epochs[min(self._epochs)][0]
        if began and self._steps[0] > began + 1:
            self.problems.append(f"begun from step {began}, and step {self._steps[0]} is the first on record")
        for before, step in zip(self._steps, self._steps[1:], strict=False):
            if step > before + 1:
                self.problems.append(f"{_span(before + 1, step, 'step')}: not on record")

    def _check_positions(self) -> None:
        last = self._done[self._steps[-1]]
        pieces = [(first, end, step) for step, done in self._done.items() for first, end in done.pieces]
        pieces += [(first, end, _WAITING) for _, first, end in last.waiting]
        pieces += [(first, end, _BEFORE) for first, end in self._before()]
        at, owner = 0, _BEFORE
        for first, end, step in sorted(pieces):
            if first > at:
                self.problems.append(f"{_span(at, first)}: never trained, nor waiting")
            elif first < at:
                self.problems.append(f"{_span(first, min(at, end))}: {_place(owner)} and {_place(step)}")
            if end > at:
                at, owner = end, step
        if at < last.next:
            self.problems.append(f"{_span(at, last.next)}: never trained, nor waiting")
        elif at > last.next:
            self.problems.append(f"{_span(last.next, at)}: {_place(owner)}, but never dealt")

    def _before(self) -> list[Range]:
        """Trained before the first step on record: not in it, nor waiting after it, nor dealt later."""
        first = self._done[self._steps[0]]
        touched = sorted([*first.pieces, *((begin, end) for _, begin, end in first.waiting)])
        ends = accumulate((end for _, end in touched), max, initial=0)
        begins = [*(begin for begin, _ in touched), first.next]
        before = [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]
        if self._steps[0] == 1:  # nothing was dealt in vain yet, so what is missing in between was left out
            return [piece for piece in before if piece[0] == 0]
        return before


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `ftctl data verify`."""
    # Also before the word `data`, as with ftctl's other commands: what stands there must not be undone.
    parser.add_argument("--job-dir", type=Path, default=argparse.SUPPRESS, help="a job's, as above")
    parser.add_argument("--json", action="store_true", help="the same, for programs")


def main(args: argparse.Namespace) -> int:
    """Print what the ledger of a job says. Returns 1 if it has problems, 2 if there is none."""
    job_dir = args.job_dir or Path()
    try:
        with (job_dir / NAME).open(errors="replace") as lines:
            report = verify(lines)
    except OSError as error:
        why = (
            "a job has one from its first step on, if replica groups may leave it (--ft-policy shrink)"
            if (job_dir / "job.json").exists()
            else "give --job-dir, the directory of ftrun --job-dir"
        )
        print(f"ftctl data verify: no ledger of samples ({error}): {why}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(report), indent=1) if args.json else _text(report))
    return 1 if report.problems else 0


def _text(report: Report) -> str:
    lines = [
        f"{report.steps} steps, {report.samples} samples trained, {report.waiting} wait to be dealt again"
    ]
    lines += [f"group {group}: {count} samples" for group, count in report.by_group.items()]
    if not report.problems:
        return "\n".join([*lines, "no sample twice, none left out"])
    lines += report.problems[:_SHOWN]
    if len(report.problems) > _SHOWN:
        lines.append(f"{len(report.problems)} problems in all: --json shows them")
    return "\n".join(lines)


def _joined(ranges: Iterable[Iterable[Range]]) -> tuple[Range, ...]:
    """All in order, those that touch made one; those that overlap stay as they are."""
    joined: list[Range] = []
    for first, end in sorted(r for some in ranges for r in some):
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((first, end))
    return tuple(joined)


def _span(first: int, end: int, what: str = "sample") -> str:
    return f"{what} {first}" if end == first + 1 else f"{what}s {first} to {end - 1}"


def _place(step: int) -> str:
    named = {_BEFORE: "trained before the first step on record", _WAITING: "waiting after the last step"}
    return named.get(step, f"trained in step {step}")
