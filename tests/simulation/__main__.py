"""`python -m tests.simulation --schedules N [--seed S]`: many schedules, and the seeds of those that fail."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator

from .schedules import repeat, simulate
from .world import Violation

_CHUNK = 50


def failure(seed: int) -> str | None:
    """What is wrong with a schedule, or None."""
    try:
        simulate(seed)
    except Violation as violation:
        return str(violation)
    except Exception:
        return traceback.format_exc(limit=-6)
    return None


def failures(
    seeds: Iterable[int], processes: int, mutation: Callable[[], None] | None = None
) -> Iterator[tuple[int, str]]:
    """(seed, reason) of those that fail."""
    with multiprocessing.get_context("fork").Pool(processes, _begin, (mutation,)) as pool:
        for seed, reason in pool.imap_unordered(_failure, seeds, _CHUNK):
            if reason is not None:
                yield seed, reason


def _begin(mutation: Callable[[], None] | None) -> None:
    logging.disable(logging.CRITICAL)
    if mutation is not None:
        mutation()


def _failure(seed: int) -> tuple[int, str | None]:
    return seed, failure(seed)


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
    failed = 0
    for seed, reason in failures(range(args.seed, args.seed + args.schedules), args.processes):
        failed += 1
        print(f"seed {seed}: {reason}", flush=True)
    print(f"{args.schedules} schedules, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
