"""Who holds the others up: roles whose own part of a step takes longer than that of most."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ft_core.protocol.messages import RoleBeat

STANDS_OUT = 1.33
"""Times the median. NVIDIA's resiliency extension calls slow who has 0.75 of the others' speed."""
NOTICED = 0.02
"""Seconds that it must be besides: of short steps a little is much."""
MOST = 16
"""That are named, the slowest."""


def scores(nodes: Collection[Mapping[int, RoleBeat]]) -> dict[int, float]:
    """By role, how many times the median it takes, of those that stand out; the slowest first."""
    own = sorted([beat.own_s for roles in nodes for beat in roles.values() if beat.own_s > 0])
    if not own:
        return {}
    median = own[(len(own) - 1) // 2]
    least = max(STANDS_OUT * median, median + NOTICED)
    if own[-1] < least:  # as a rule: of many roles it is looked at nothing else
        return {}
    slow = sorted((-b.own_s, role) for roles in nodes for role, b in roles.items() if b.own_s >= least)
    return {role: round(-seconds / median, 2) for seconds, role in slow[:MOST]}
