"""What the job's time goes to: an account of every second since it began, by `Cause`.

Pure, from events and time. The sum is the wall clock by construction (INV-17, time): what is accounted for is
so up to a *mark*, which then moves. While roles train it moves with each step that is seen to be done, since
only then is it known that the time was well spent; else with each event. What an epoch's end cuts off of a
step is split there: from the first sign of the failure on it was detection, before that work that is lost.

That all roles have their state does not mean that they train: newcomers may have to get to where the others
are, who stand still meanwhile. So time goes to steps once one is done in the epoch; of what came before, as
much as steps usually take was that one.

It goes on from its predecessor's (`Spent`), on whatever machine that was. Its size is that of the job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ft_core.control.observe.pace import Pace
from ft_core.protocol.goodput import Cause, Spent
from ft_core.protocol.messages import RoleBeat

_DIGITS = 3


@dataclass(frozen=True)
class Found:
    """What a controller that takes over finds of the epoch under way."""

    epoch: int
    base: int
    """The version that it began from."""
    version: int
    """The newest that a role has."""
    restored: bool
    """Whether all roles are there, and have their state."""
    share: float
    """The share of the replica groups that takes part."""
    step: float
    """Seconds that a step takes; 0: not known."""
    stepped: bool
    """Whether a step was done in it."""


@dataclass(frozen=True)
class Standing:
    """How a job gets on at a moment: what probes, status, page and metrics say of that."""

    cause: Cause
    """What its time goes to."""
    since: float | None
    """Seconds since a step was done last; None: none was, or none is to come."""
    limit: float
    """How many of these seconds are usual."""

    @property
    def complaint(self) -> str:
        """Why it does not get on, if so. That it starts is none, nor that nobody knows."""
        without = "" if self.since is None else f"no step for {self.since:.0f} s"
        if self.cause not in (Cause.PRODUCTIVE, Cause.START_UP, Cause.UNKNOWN):
            return f"{self.cause}: {without}" if without else str(self.cause)
        late = self.since is not None and self.since > self.limit
        return f"{without}, and up to {self.limit:.0f} s are usual" if late else ""


class Account:
    """The account that one controller keeps. All times are of the wall clock, in seconds since whenever."""

    def __init__(self, wall: float, past: Spent | None = None, ago: float = 0.0) -> None:
        """`past`: what a predecessor has noted, so many seconds ago."""
        self._mark = wall - max(0.0, ago) - past.open if past is not None else wall
        past = past or Spent(Cause.START_UP)
        self.now, self.epoch = past.now, past.epoch
        self.seconds = dict.fromkeys(Cause, 0.0) | past.seconds
        """Seconds by cause, up to the mark."""
        self.version, self.reached, self.share = past.version, past.reached, past.share
        self.step = past.step
        """Seconds that a step has taken last; 0 before any."""
        self.pace = Pace(past.step)
        self._stepped: float | None = self._mark if past.reached else None
        """When a step was seen to be done last; of a predecessor's it is known that it was not after that."""
        self._restored = False
        """Whether all roles have their state, and no step was done since."""
        self.steps_redone = 0
        """Steps done again that this controller has seen."""
        self._redone, self._waited = past.redone, past.waited
        self._goal = past.reached
        """The version up to which steps are done again in this epoch."""
        self._waits: dict[int, float] = {}
        """What each role had waited for copies when it was first heard of in this epoch."""
        self._longest = 0.0
        """The most that any of them has waited since; and what of it was accounted for."""
        self._counted = 0.0
        self._wrong = math.inf
        """When the first sign of a failure was, since the last step."""
        self._blind = self.now is Cause.PRODUCTIVE
        """Whether what happened since the mark was not seen."""

    @property
    def trains(self) -> bool:
        """Whether time goes to steps."""
        return self.now is Cause.PRODUCTIVE

    def open(self, wall: float) -> float:
        """Seconds that are not accounted for yet."""
        return max(0.0, wall - self._mark)

    def until(self, wall: float) -> dict[Cause, float]:
        """The seconds by cause, but for those of a step under way: they are somebody's once it is done."""
        late = 0.0 if self.trains else self.open(self._sure(wall))
        return {**self.seconds, self.now: self.seconds[self.now] + late}

    def since_step(self, wall: float) -> float | None:
        """Seconds since a step was done last; None: none was."""
        return None if self._stepped is None else max(0.0, wall - self._stepped)

    @property
    def patience(self) -> float:
        """How many of these seconds are usual for this job; in a recovery as in its start, too."""
        return self.pace.patience(0.0 if self.trains else self.seconds[Cause.START_UP])

    def spent(self, wall: float) -> Spent:
        """The account so far, for events and for a successor."""
        seconds = {cause: round(s, _DIGITS) for cause, s in self.seconds.items() if s}
        return Spent(
            *(self.now, seconds, self.epoch, self.version, self.reached, self.share),
            *(round(s, _DIGITS) for s in (self.step, self._redone, self._waited, self.open(wall))),
        )

    # -- what the job does -------------------------------------------------------------------------

    def to(
        self, cause: Cause, wall: float, epoch: int | None = None, between_steps: bool = False
    ) -> dict[Cause, float]:
        """Let the job's time go to `cause` from now on; `epoch`: the one that was decided on. Returns what
        was cut off of a step, if roles were training, by what it went to; `between_steps`: they have waited
        since the last."""
        if cause is self.now and self._restored and epoch in (None, self.epoch):
            self._pass(self.now, self._sure(wall))
            return {}
        cut = self._cut(wall, cause if between_steps else Cause.REDONE) if self.trains else {}
        self._pass(self.now, wall)
        self.now, self._blind, self._restored = cause, False, False
        self.epoch = self.epoch if epoch is None else epoch
        return cut

    def begins(self, epoch: int, version: int, share: float) -> None:
        """All roles have their state, that of `version`. Said again, it is no news."""
        if (self.trains or self._restored) and self.epoch == epoch:
            return
        self.epoch, self._restored = epoch, True
        self.version, self.share, self._goal = version, share, self.reached
        self._redone = self._waited = self._longest = self._counted = 0.0
        self._waits.clear()
        self._wrong = math.inf

    def resumes(self, version: int, wall: float) -> dict[Cause, float]:
        """All roles have done a step since, and this many now: they train. Returns what the time went to that
        was a step's, and not that of the roles which were on their way to it."""
        steps = version - self.version
        if not self._restored or steps <= 0:
            return {}
        self._pass(self.now, wall - steps * self.pace.usual)
        self._trains()
        before = dict(self.seconds)
        self._steps(steps, self.open(wall))
        self._redone = self._waited = 0.0  # what follows is counted from here on
        self._stepped = wall
        return _rounded({cause: self.seconds[cause] - before[cause] for cause in self.seconds})

    def stepped(self, version: int, wall: float) -> None:
        """Some role has done this many steps; so had all, but for the last one's end."""
        steps = version - self.version
        if not self.trains or steps <= 0:
            return
        self.step = self.open(wall) / steps
        self.pace.add(self.step, self.open(wall))
        self._steps(steps, self.open(wall))
        self._wrong, self._blind, self._stepped = math.inf, False, wall

    def heard(self, beats: Mapping[int, RoleBeat], newest: int, wall: float) -> None:
        """A node says, in this epoch, how far its roles are; the first of them."""
        if not (self.trains or self._restored) or not beats:
            return
        for role, beat in beats.items():
            waited = beat.waited_s - self._waits.setdefault(role, beat.waited_s)
            if waited > self._longest:
                self._longest = waited
        self.stepped(newest, wall)

    def wrong(self, since: float) -> None:
        """Something may have failed at that time."""
        self._wrong = min(self._wrong, since)

    def finished(self, wall: float) -> None:
        """The script has come to its end: what it did after its last step is as good as a step."""
        if self.trains:
            self._steps(0, self.open(wall))

    def taken_over(self, found: Found, restoring: Cause, wall: float) -> dict[Cause, float]:
        """What is under way when this controller takes over. `restoring`: what time goes to in that epoch
        before all have their state. Returns what the time since its predecessor's word went to, if not to
        what that had said.

        Steps were done meanwhile that nobody saw, as many as there are now, and took what steps take; when
        they were is not known, nor, if some role is lost, when that was.
        """
        step = found.step or self.step
        if self.epoch != found.epoch or self.now not in (Cause.PRODUCTIVE, restoring):
            cut = self.to(restoring, wall, found.epoch)
            if found.restored:
                self._goes_on(found, wall)
            return cut
        if self.trains:
            steps = max(0, found.version - self.version)
            self._steps(steps, min(self.open(wall), steps * step))
            return {}
        if not found.stepped:
            if found.restored:
                self._goes_on(found, wall)
            return {}
        done = min(self.open(wall), (found.version - found.base) * step)
        parts = {
            Cause.PRODUCTIVE: done * found.share,
            Cause.DEGRADED: done * (1 - found.share),
            Cause.UNKNOWN: 0.0 if found.restored else self.open(wall) - done,
        }
        for cause, seconds in parts.items():
            self.seconds[cause] += seconds
            self._mark += seconds
        self._goes_on(found, wall)
        return _rounded(parts)

    def _goes_on(self, found: Found, wall: float) -> None:
        """Go on in the epoch that a former controller has begun, with all roles in it."""
        self.begins(found.epoch, found.base, found.share)
        if found.stepped:
            self._pass(self.now, wall)
            self._trains()
            self.version, self.reached = found.version, max(self.reached, found.version)

    def _trains(self) -> None:
        self.now, self._restored, self._blind = Cause.PRODUCTIVE, False, False

    def _sure(self, wall: float) -> float:
        """The time until which it is known what time has gone to: the last of it may turn out to be a
        step's."""
        return wall - self.pace.usual if self._restored else wall

    # -- marks -------------------------------------------------------------------------------------

    def _pass(self, cause: Cause, until: float) -> None:
        """All time since the mark went to this."""
        self.seconds[cause] += self.open(until)
        self._mark = max(self._mark, until)

    def _steps(self, steps: int, seconds: float) -> None:
        """Enter that so many seconds since the mark went to so many steps."""
        again = max(0, min(self.version + steps, self._goal) - self.version)
        share = again / steps if steps else 0.0
        redone = seconds * share
        # Waiting for copies in a step that is done again is lost with the failure, as all of that step.
        waited = min(seconds, self._longest - self._counted) * (1 - share)
        good = seconds - waited - redone
        self._counted = self._longest
        self._waited += waited
        self._redone += redone
        self.steps_redone += again
        self.seconds[Cause.SAVING] += waited
        self.seconds[Cause.REDONE] += redone
        self.seconds[Cause.PRODUCTIVE] += good * self.share
        self.seconds[Cause.DEGRADED] += good * (1 - self.share)
        self._mark += seconds
        self.version += steps
        self.reached = max(self.reached, self.version)

    def _cut(self, wall: float, to: Cause) -> dict[Cause, float]:
        """The epoch ends within a step, or after it: its time has gone `to` that."""
        whole = self.open(wall)
        noticing = min(whole, max(0.0, wall - self._wrong))
        lost = {Cause.UNKNOWN if self._blind else to: whole - noticing, Cause.DETECTION: noticing}
        for cause, seconds in lost.items():
            self.seconds[cause] += seconds
        self._mark = max(self._mark, wall)
        return _rounded(lost)


def _rounded(seconds: Mapping[Cause, float]) -> dict[Cause, float]:
    """Seconds as an event has them: rounded, without the causes that have none."""
    return {cause: round(s, _DIGITS) for cause, s in seconds.items() if s >= 10**-_DIGITS}
