"""`python -m tests.simulation --schedules N [--seed S]`: many schedules, and the seeds of those that fail."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator

from .job import SHORT, Outcome
from .schedules import repeat, simulate
from .world import Violation

_CHUNK = 50


def outcome(seed: int) -> Outcome | str:
    """What becomes of a schedule, or what is wrong with it."""
    try:
        return simulate(seed)
    except Violation as violation:
        return str(violation)
    except Exception:
        return traceback.format_exc(limit=-6)


def failure(seed: int) -> str | None:
    """What is wrong with a schedule, or None."""
    found = outcome(seed)
    return found if isinstance(found, str) else None


def outcomes(
    seeds: Iterable[int], processes: int, mutation: Callable[[], None] | None = None
) -> Iterator[tuple[int, Outcome | str]]:
    """By seed, as they come."""
    with multiprocessing.get_context("fork").Pool(processes, _begin, (mutation,)) as pool:
        yield from pool.imap_unordered(_outcome, seeds, _CHUNK)


def failures(
    seeds: Iterable[int], processes: int, mutation: Callable[[], None] | None = None
) -> Iterator[tuple[int, str]]:
    """(seed, reason) of those that fail."""
    for seed, found in outcomes(seeds, processes, mutation):
        if isinstance(found, str):
            yield seed, found


def _begin(mutation: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # else nothing ends who was forked from a handler
    logging.disable(logging.CRITICAL)
    if mutation is not None:
        mutation()


def _outcome(seed: int) -> tuple[int, Outcome | str]:
    return seed, outcome(seed)


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--repeat", type=int, metavar="SEED", help="one schedule, and what happens in it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.repeat is not None:
        return repeat(args.repeat)
    failed, total = 0, Outcome()
    for seed, found in outcomes(range(args.seed, args.seed + args.schedules), args.processes):
        if isinstance(found, str):
            failed += 1
            print(f"seed {seed}: {found}", flush=True)
        else:
            total.pauses += found.pauses
            total.evictions += found.evictions
            total.short += found.short
    print(
        f"{total.pauses} pauses of nodes; {total.evictions} evictions of nodes that live, {total.short} of "
        f"them for the silence of one that was stopped for less than {SHORT:g} s"
    )
    print(f"{args.schedules} schedules, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
