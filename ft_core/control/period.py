"""How many steps there are from a protected version to the next, with `--ft-every auto`: one, as long as
copies keep up, else as few as let no step wait for them.

A change takes an epoch, between two steps. So it is made once as much time has been lost to waiting as it is
worth; and an epoch that begins for another reason brings it along.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from ft_core.control.cluster.state import ClusterState
from ft_core.control.prestart.stop import Stop
from ft_core.settings import AUTO

LOOK = 5.0
"""Seconds between two looks at all roles."""
WINDOW = 1000.0
"""Seconds of training that are looked at together."""
WORTH = 10.0
"""Seconds of waiting in that time for which the period is changed: one percent."""
ROOM = 1.25
"""How many times the usual time of copies they are given."""
RECENT = 32
"""How many looks are remembered with how long copies took: their median is the rule, whatever was slow
once."""
MOST = 64
"""Steps that are chosen at the most."""
SETTLED = 5
"""Steps without which nothing is known of the waiting."""
TRIES = 3
"""Requests to stop, after which the job goes on as it is until it is looked at again."""


class ProtectionPeriod:
    """Measures how long steps wait for copies, and says when the period is to be another."""

    def __init__(self) -> None:
        self.stop: Stop | None = None
        """All who train are asked to stop for a change."""
        self._look_at = 0.0
        self._epoch = 0
        self._since = 0.0
        self._step = 0
        self._waited: dict[int, float] = {}
        self._newest = 0
        self._copying: deque[float] = deque(maxlen=RECENT)

    def begins_anew(self) -> None:
        """What was measured is not what there is now."""
        self.stop, self._epoch = None, 0
        self._copying.clear()

    def wanted(self, cluster: ClusterState, now: float) -> int | None:
        """The period to change to, if it is to be changed; all roles train."""
        settings = cluster.settings
        if settings.every != AUTO or settings.policy == "shrink" or now < self._look_at:
            return None
        self._look_at = now + LOOK
        beats = {role: beat for node in cluster.nodes_with_roles() for role, beat in node.beats.items()}
        if not beats:
            return None
        newest = max(beat.step for beat in beats.values())
        passed, steps = now - self._since, newest - self._step
        if self._epoch != cluster.epoch or steps < 0:
            passed = math.inf
            self._copying.clear()
        elif newest > self._newest:
            self._copying.append(max(beat.copy_s for beat in beats.values()))
        self._newest = newest
        if passed < math.inf and steps >= SETTLED and len(self._copying) >= 3:
            waits = (
                beat.waited_s - self._waited.setdefault(role, beat.waited_s) for role, beat in beats.items()
            )
            waited = max(waits)
            copying = median(self._copying)
            found = self._found(cluster.current_plan.every, passed, steps, waited, copying)
            if found is not None:
                self.begins_anew()
                return found
        if passed >= WINDOW:
            self._epoch, self._since, self._step = cluster.epoch, now, newest
            self._waited = {role: beat.waited_s for role, beat in beats.items()}
        return None

    def _found(self, every: int, passed: float, steps: int, waited: float, copying: float) -> int | None:
        """The period to change to, if another: in `passed` seconds there were so many `steps`, which have
        waited so long, and copies take `copying`."""
        step = max(passed - waited, 1e-3) / steps
        needed = min(max(1, math.ceil(ROOM * copying / step)), MOST)
        if waited >= WORTH:
            return needed if needed > every else None
        if passed >= WINDOW and 2 * needed <= every:
            return needed
        return None
