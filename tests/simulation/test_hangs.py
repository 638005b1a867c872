"""Workers that hang for good: found, replaced, and nobody who is well is taken for one."""

from __future__ import annotations

import multiprocessing
from collections import Counter

import pytest

from .hangs import simulate
from .invariants import Violation
from .test_simulation import processes

SCHEDULES = 400
FAILED_ONCE = {
    5551389: "all who could have told of a step were made to hang before they had, and the oracle missed it "
    "in the ledger",
    5551473: "an error of a script came again so long after the first time that this was forgotten, as all "
    "failures are, and the oracle counted on",
    5551549: "the same",
}
"""Seeds that have failed, and what was wrong."""


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


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_what_failed_once(seed: int) -> None:
    assert not outcome(seed)[1]
