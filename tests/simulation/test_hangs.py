"""Workers that hang for good: found, replaced, and nobody who is well is taken for one."""

from __future__ import annotations

import multiprocessing
from collections import Counter

from .hangs import simulate
from .test_simulation import processes
from .world import Violation

SCHEDULES = 400


def outcome(seed: int) -> tuple[int, str, Counter[str]]:
    """Of a schedule: what is wrong with it, if anything is."""
    try:
        return seed, "", simulate(seed).events
    except Violation as violation:
        return seed, str(violation), Counter()


def test_hangs_are_found_and_nobody_else_is_blamed() -> None:
    events: Counter[str] = Counter()
    with multiprocessing.get_context("fork").Pool(processes()) as pool:
        for seed, wrong, seen in pool.imap_unordered(outcome, range(SCHEDULES), 10):
            assert not wrong, f"seed {seed}: {wrong}"
            events += seen
    assert events["hang"] > SCHEDULES / 2 and events["stalled"] > SCHEDULES / 8, events
