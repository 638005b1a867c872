"""Whether a node that joins is far slower than nodes like it. Pure.

Gross outliers only: the best of what a node has measured is longer than several times what the others have
at their worst, and there are others enough. What noise explains is no reason to keep a node out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ft_core.protocol.messages import Timing

GROSS = 3.0
"""Times the median of the others."""
LEAST = 3
"""Others, at least, of like hardware."""


def slower(own: Mapping[str, Timing], others: Sequence[Mapping[str, Timing]]) -> dict[str, float]:
    """What of it stands out, and by how much: times the median of the others' worst."""
    found = {}
    for name, timing in own.items():
        worst = sorted(each[name].worst for each in others if name in each)
        if len(worst) < LEAST:
            continue
        median = worst[len(worst) // 2]
        if median > 0 and timing.best > GROSS * median:
            found[name] = round(timing.best / median, 1)
    return found
