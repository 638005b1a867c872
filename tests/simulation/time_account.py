"""Where a job's time went, held against the clock and against what its events say by themselves."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ft_core.control import events as ev
from ft_core.control.observe.goodput import Account
from ft_core.history import goodput
from ft_core.protocol.goodput import Cause, Spent

from .invariants import Invariant
from .world import World

_LATE = 1.2
"""Seconds after which a step is known to be done."""
_ROUNDED = 0.01
"""Seconds of each sum that are lost when it is written."""


def line(record: ev.Record, term: int, at: float) -> goodput.Line:
    """As `events.jsonl` has it."""
    about = {"event": record.event, "epoch": record.epoch, "term": term, "monotonic": at, "time": at}
    found: Any = msgspec.json.decode(msgspec.json.encode({**about, **record.more}))
    return found


class Watched:
    """The account of one controller."""

    def __init__(self, before: dict[Any, float], began: float | None, passed: int) -> None:
        self._before, self._passed = before, passed
        self.began = began
        """When the job did, as far as is known."""

    def check(self, account: Account, now: float) -> None:
        """After every event."""
        total = sum(account.seconds.values()) + account.open(now)
        if self.began is None:
            self.began = now - total
        if abs(total - (now - self.began)) > _ROUNDED * (1 + self._passed):
            since = now - self.began
            raise Invariant.TIME.broken(
                f"{total:.3f} s are accounted for, {since:.3f} s have passed: {account.seconds}",
            )
        for cause, seconds in account.seconds.items():
            if seconds < self._before.get(cause, 0.0) - _ROUNDED:
                raise Invariant.TIME.broken(
                    f"{cause} was {self._before[cause]:.3f} s, and is {seconds:.3f} s"
                )
        self._before = dict(account.seconds)


class TimeAccount:
    """Of one job."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lines: list[goodput.Line] = []
        self._newest: Watched | None = None
        self._passed = 0
        self.said = 0
        """Lines, in the file or not."""
        self._unnoted = 0.0
        """Seconds between what a successor was left, where that was not the last, and its own first word; and
        between what a controller accounted for and said."""
        self._left, self._lost = (0, 0.0), False
        """The newest term, and when what its leader was left is of; and whether that was not the last."""

    def write(self, line: goodput.Line) -> None:
        """It is in the file, and not lost with a disk that is full."""
        self._lines.append(line)
        term, at = self._left
        if "spent" in line and line["term"] < term:  # of a leader that does not know yet that it is none
            self._lost = True
        elif "spent" in line and self._lost:
            self._unnoted += line["time"] - at
            self._lost = False

    def stood_still(self, seconds: float) -> None:
        """A controller has, between an event and what it says of it."""
        self._unnoted += seconds

    def controller(self, term: int, spent: Spent | None, at: float) -> Watched:
        """One leads in this term, with what was left by its predecessors at that time."""
        newest = max((each["time"] for each in self._lines if "spent" in each), default=at)
        if spent is None:
            self._unnoted += newest
            self._newest = Watched({}, None, 0)
            return self._newest
        self._passed += 1
        # Of several at once it may have been left the first.
        last = [each["spent"]["now"] for each in self._lines if "spent" in each and each["time"] == newest]
        self._left, self._lost = (term, at - spent.open), newest > at or last[-1:] not in ([], [spent.now])
        began = self._newest.began if self._newest is not None else None
        self._newest = Watched(dict(spent.seconds), began, self._passed)
        return self._newest

    def check_steps(self, account: Account, steps: dict[tuple[int, int], float]) -> None:
        """What went to steps, of a controller that saw them all. `steps`: when the first role was done, by
        epoch and version. Of an epoch's first step it is not known when it began: it is as long as others."""
        if self._passed or len(self._lines) < self.said:
            return
        began = {each["epoch"]: each["time"] for each in self._lines if each["event"] == "state_restored"}
        # An agent that is held up tells late that its roles train: until then that is no step to anybody.
        heard = {each["epoch"]: each["time"] for each in self._lines if each["event"] == "resumed"}
        least, most, reached = 0.0, 0.0, 0
        followed = [at - steps[e, v - 1] for (e, v), at in steps.items() if (e, v - 1) in steps]
        longest = max(followed, default=0.0)
        epochs, unheard = set(), set()
        for (epoch, version), at in steps.items():
            over = min((each["time"] for each in self._lines if each["epoch"] > epoch), default=math.inf)
            if version > reached and at <= over:  # else somebody has yet to hear that this epoch is over
                since = max(steps.get((epoch, version - 1), 0.0), began.get(epoch, 0.0)) or at
                first = (epoch, version - 1) not in steps
                took = max(0.0, min(at - since, longest) if first else at - since)
                epochs.add(epoch)
                most += took
                # A worker that dies at its step's end, or an agent that is busy, may not have told of it:
                # then it is the same step, done again, that was well spent.
                if at > over - _LATE:
                    unheard.add(version)
                if version not in unheard:
                    least += 0.0 if first else max(0.0, min(took, at - heard.get(epoch, math.inf)))
                    reached = version
        after = self._world.now - max(steps.values(), default=self._world.now)
        good = sum(account.seconds[c] for c in (Cause.PRODUCTIVE, Cause.DEGRADED, Cause.SAVING))
        late = _LATE * (1 + len(epochs))
        if not least - late < good < most + late + after:
            both = f"{least:.2f} to {most:.2f} s"
            raise Invariant.TIME.broken(f"steps took {both}, and {after:.2f} s came after: {account.seconds}")

    def compare(self, account: Account) -> None:
        """At the end: what the events say, and what the controller does."""
        lines = goodput.in_order(self._lines)
        read = goodput.seconds(lines)
        total = sum(account.seconds.values())
        # The end is said once whoever keeps the lease has agreed.
        late = abs(sum(read.values()) - total)
        allowed = 0.01 * total + 0.1 + self._unnoted + late
        if len(self._lines) < self.said:
            return  # the disk is full, or successors were left what no file has
        apart = sum(abs(read[cause] - seconds) for cause, seconds in account.seconds.items()) / 2
        if apart > allowed:
            raise Invariant.TIME.broken(
                f"{apart:.2f} s of {total:.2f} s are accounted for otherwise than events say:\n"
                f"  account {account.seconds}\n  events  {read}",
            )
