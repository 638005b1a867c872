"""Who holds the others up: roles whose own part of a step takes longer than that of most."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ft_core.protocol.messages import RoleBeat

STANDS_OUT = 1.33
"""Times the median. NVIDIA's resiliency extension calls slow who has 0.75 of the others' speed."""
NOTICED = 0.02
"""Seconds that it must be besides: of short steps a little is much."""
MOST = 16
"""That are named, the slowest."""


def scores(nodes: Iterable[Mapping[int, RoleBeat]]) -> dict[int, float]:
    """By role, how many times the median it takes, of those that stand out; the slowest first."""
    own = {role: beat.own_s for roles in nodes for role, beat in roles.items() if beat.own_s > 0}
    if not own:
        return {}
    median = sorted(own.values())[(len(own) - 1) // 2]
    least = max(STANDS_OUT * median, median + NOTICED)
    slow = sorted((-seconds, role) for role, seconds in own.items() if seconds >= least)
    return {role: round(-seconds / median, 2) for seconds, role in slow[:MOST]}
