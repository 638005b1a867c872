"""`python -m tests.simulation --schedules N [--seed S]`: many schedules, and the seeds of those that fail."""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator

from .invariants import Violation
from .job import SHORT, Outcome
from .schedules import repeat, simulate, simulate_leaders

_GARBAGE = 50_000
"""Objects made before those are looked for that nobody has any more: what is imported is none."""


def outcome(seed: int, leaders: bool = False) -> Outcome | str:
    """What becomes of a schedule, or what is wrong with it. `leaders`: of one that is about them alone."""
    try:
        return simulate_leaders(seed) if leaders else simulate(seed)
    except Violation as violation:
        return str(violation)
    except Exception:
        return traceback.format_exc(limit=-6)


def failure(seed: int, leaders: bool = False) -> str | None:
    """What is wrong with a schedule, or None."""
    found = outcome(seed, leaders)
    return found if isinstance(found, str) else None


def outcomes(
    seeds: Iterable[int], processes: int, mutation: Callable[[], None] | None = None, leaders: bool = False
) -> Iterator[tuple[int, Outcome | str]]:
    """By seed, as they come."""
    with multiprocessing.get_context("fork").Pool(processes, _begin, (mutation,)) as pool:
        yield from pool.imap_unordered(functools.partial(_outcome, leaders), seeds)  # one takes long enough


def failures(
    seeds: Iterable[int], processes: int, mutation: Callable[[], None] | None = None, leaders: bool = False
) -> Iterator[tuple[int, str]]:
    """(seed, reason) of those that fail."""
    for seed, found in outcomes(seeds, processes, mutation, leaders):
        if isinstance(found, str):
            yield seed, found


def _begin(mutation: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else nothing ends who was forked from a handler
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    if mutation is not None:
        mutation()


def _outcome(leaders: bool, seed: int) -> tuple[int, Outcome | str]:
    return seed, outcome(seed, leaders)


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--repeat", type=int, metavar="SEED", help="one schedule, and what happens in it")
    parser.add_argument("--leaders", action="store_true", help="short ones, about who leads")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.repeat is not None:
        return repeat(args.repeat, args.leaders)
    failed, total = 0, Outcome()
    seeds = range(args.seed, args.seed + args.schedules)
    for seed, found in outcomes(seeds, args.processes, leaders=args.leaders):
        if isinstance(found, str):
            failed += 1
            print(f"seed {seed}: {found}", flush=True)
        else:
            total.pauses += found.pauses
            total.evictions += found.evictions
            total.short += found.short
            total.terms += found.terms
    if total.terms:
        print(f"{total.terms} leaders")
    print(
        f"{total.pauses} pauses of nodes; {total.evictions} evictions of nodes that live, {total.short} of "
        f"them for the silence of one that was stopped for less than {SHORT:g} s"
    )
    print(f"{args.schedules} schedules, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
