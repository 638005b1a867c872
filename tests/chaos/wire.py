"""What a script's process puts on the wire: every collective that a real process group is given.

Counted where torch itself (and, under `ftrun`, the repairable group's inner communicator) hands an operation
to the backends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ft_core.comm.collectives import COLLECTIVES

counts: Counter[str] = Counter()
"""Collective -> how often, since whoever reads it has cleared it."""


def count() -> None:
    """From now on."""
    for method in [*COLLECTIVES, "_start_coalescing", "_end_coalescing"]:
        if hasattr(dist.ProcessGroup, method):
            setattr(dist.ProcessGroup, method, _counting(method, getattr(dist.ProcessGroup, method)))


def _counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return original(*args, **kwargs)

    return method
