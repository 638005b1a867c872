"""Does `ftctl plan` reckon as the papers do, and as chance does?

The papers' own figures, worked out again and printed beside; and some 1,000 weeks of a job of 10,000 devices,
failure by failure, beside the shares of time that `ftctl plan` expects (`ft_core.cli.planner.economics`). The
weeks know nothing of its formulas: nodes fail and are repaired, versions are made, safe and lost.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.common import finish, parser, table
from ft_core.cli.planner import economics
from ft_core.cli.planner.economics import HOUR, Failures, Protection, Shares
from ft_core.cli.planner.survival import failure_probability, loss_bound

WEEK = 168 * HOUR
POINT = 0.01
ERRORS = 2.0
"""Standard errors that an expectation may be away from the mean of the weeks."""


@dataclass(frozen=True)
class Figure:
    """One of a paper's, and what is worked out here. `unit`: what is within it counts as equal."""

    source: str
    what: str
    printed: float
    found: float
    unit: float = POINT

    @property
    def equal(self) -> bool:
        """Whether they are, as far as the paper prints it."""
        return abs(self.found - self.printed) <= self.unit


def figures() -> Iterator[Figure]:
    """Of all papers."""
    minute = 60.0
    of = "FT-HSDP, 6.1"
    yield Figure(of, "10 min in 18: effective", 0.44, economics.at_regular_times(18 * minute, 10 * minute))
    found = economics.at_regular_times(18 * minute, 3 * minute, 7 * minute, 12)
    yield Figure(of, "3 min, then 11 of 12 replicas for 7: effective", 0.80, found)
    of, devices, mtbf = "FFTrainer, table 2", (16_384, 65_536), 80_000
    printed = {3: (0.46, 0.91, 0.19), 6: (0.71, 0.99, 0.10), 9: (0.84, 0.99, 0.06), 12: (0.91, 0.99, 0.05)}
    for hours, (few, many, loss) in printed.items():
        for count, chance in zip(devices, (few, many), strict=True):
            found = failure_probability(count, mtbf, hours * HOUR)
            yield Figure(of, f"{count:,} devices, a failure within {hours} h", chance, found)
        # A version every 30 min that costs nothing; its table holds for one recovery of 19 min.
        found = 1 - economics.at_regular_times(hours * HOUR, 15 * minute + 19 * minute)
        yield Figure(of, f"a failure every {hours} h: MFU lost", loss, found)
    of = "DeadPool, V-C"
    for replicas, odds in ((1, 1.28e-5), (2, 1.28e-11)):
        found = 1e5 * loss_bound({replicas + 1: 128}, 1e-6)
        yield Figure(of, f"128 shards, k = {replicas}, 100,000 steps: loss", odds, found, odds * POINT)
    of, month = "FlashRecovery, eq. 3, 4", economics.MONTH
    interval, least = economics.flash_recovery(month, 100, 600, 30)
    cost = 100 * (600 + interval / 2) + month / interval * 30
    yield Figure(of, "what 100 failures cost at t*, of eq. 1", cost / month, least / month)
    worse = min(100 * (600 + x * interval / 2) + month / (x * interval) * 30 for x in (0.9, 1.1))
    yield Figure(of, "more, 10 % beside t* (0: no minimum)", 1.0, float(worse > cost))
    failures, job = (
        Failures(1000, 100 / month / 1000, 0),
        replace(PLAIN, pause=30, write=0, spares=9),
    )
    found = economics.best_interval(failures, job) / interval
    yield Figure(of, "our best interval, of t*", 1.0, found, 0.05)
    yield from _free_checkpointing()


def _free_checkpointing() -> Iterator[Figure]:
    """FFTrainer's figure 9: which jobs' copies are hidden behind their steps, over sequence length, batch,
    network and device. A step computes 6 operations per parameter and token; Adam's moments and main
    weights, 12 bytes per parameter, are divided over the data-parallel group, and each role sends its
    part."""
    sequences, batches = (512, 1024, 2048, 4096, 8192, 16384), (1, 2, 4, 8, 16)
    gbps, tflops, group = (10, 25, 50, 100, 200, 400), (80, 160, 300, 500), 16

    def ratio(sequence: int, batch: int, network: float, device: float) -> float:
        return 6 * sequence * batch / (device * 1e12) * group * network * 1e9 / 8 / 12

    below = [each for each in itertools.product(sequences, batches, gbps, tflops) if ratio(*each) < 1]
    of = "FFTrainer, figure 9"
    yield Figure(of, "H100, 400 Gbit/s, 4,096 tokens: hidden", 1.0, float(ratio(4096, 1, 400, 500) >= 1))
    yield Figure(of, "4090, 100 Gbit/s, 4,096 tokens: hidden", 1.0, float(ratio(4096, 1, 100, 80) >= 1))
    small = [each for each in below if each[0] * each[1] <= 4096 or each[2] <= 25]
    what = f"of {len(below)} not hidden: short sequences, or up to 25 Gbit/s"
    yield Figure(of, what, 1.0, len(small) / len(below), 0.06)


# -- chance ----------------------------------------------------------------------------------------

TRAINED = Failures(nodes=1250, of_node=8 / (50_000 * HOUR), repair=24 * HOUR)
"""10,000 devices in nodes of 8, each of which fails once in 50,000 hours: a failure every 5 hours."""
OURS = Protection(
    step=10.0,
    wait=0.1,
    every=1,
    lag=4.0,
    copies=1,
    recovery=20.0,
    restart=600.0,
    interval=2 * HOUR,
    pause=0.0,
    write=120.0,
    spares=8,
)
PLAIN = replace(OURS, copies=0, wait=0.0, interval=HOUR / 2, pause=30.0)
"""A job that starts again from its checkpoints."""
CASES = {
    "10,000 devices, in memory": (TRAINED, OURS),
    "10,000 devices, from checkpoints": (TRAINED, PLAIN),
    "two copies, every 4th step": (TRAINED, replace(OURS, copies=2, every=4, lag=35.0)),
    "98,000 devices, in memory": (
        Failures(12_250, 1 / (18 * 60 * 12_250), HOUR),
        replace(OURS, recovery=180.0),
    ),
    "98,000 devices, from checkpoints": (
        Failures(12_250, 1 / (18 * 60 * 12_250), HOUR),
        replace(PLAIN, interval=300.0),
    ),
    "16 nodes, a failure every hour": (Failures(16, 1 / (16 * HOUR), HOUR), replace(OURS, recovery=120.0)),
}


def weeks(failures: Failures, job: Protection, count: int, seed: int) -> list[Shares]:
    """The shares of so many weeks, one after the other, failure by failure."""
    dice = random.Random(seed)
    period = job.every * job.step if job.copies else job.interval + job.pause
    lag = job.lag if job.copies else job.write
    stored = job.interval + job.pause
    now, end, done, safe = 0.0, count * WEEK, 0.0, 0.0
    found = [defaultdict[str, float](float) for _ in range(count)]
    out: list[float] = []
    """When nodes that are out come back."""
    failed: dict[int, float] = {}
    """When each node's place did last, while its copies may not be there."""
    next_failure = dice.expovariate(failures.rate)
    stall = 0.0
    while now < end:
        week = found[min(count - 1, int(now / WEEK))]
        # Recovering, until the next failure at most: then all of it begins anew.
        recovering = min(stall, next_failure - now)
        week["recovery"] += recovering
        ran = next_failure - now - recovering
        if recovering == stall:
            whole = max(0.0, (ran - lag) // period) if ran >= lag else 0.0
            # `safe` is on storage for good; a version there is of work that was done, be it lost in memory.
            at = done + ran
            if job.copies:
                safe = max(safe, (at - job.write) // stored * stored)
            done += whole * period
            week["run"] += ran
            week["new"] += whole * period
        now = next_failure
        place = dice.randrange(failures.nodes)
        window = job.recovery + job.lag
        failed = {node: when for node, when in failed.items() if now - when < window}
        lost = not job.copies or _gone(place, failed, failures.nodes, job.copies)
        failed[place] = now
        if job.copies and lost:
            back = min(done, safe)
            week["new"] -= done - back
            done = back
        stall = job.restart if lost else job.recovery
        heapq.heappush(out, now + dice.expovariate(1 / failures.repair))
        while out and out[0] <= now:
            heapq.heappop(out)
        if len(out) > job.spares:
            back_at = heapq.heappop(out)
            week["nodes"] += back_at - now
            failed = {node: when + back_at - now for node, when in failed.items()}
            now = back_at
        next_failure = now + dice.expovariate(failures.rate)
    return [_shares(each, job) for each in found]


def _gone(place: int, failed: dict[int, float], nodes: int, copies: int) -> bool:
    """Whether a run of copies + 1 neighbours of a ring, `place` among them, has failed."""
    for first in range(place - copies, place + 1):
        run = {(first + each) % nodes for each in range(copies + 1)} - {place}
        if all(each in failed for each in run):
            return True
    return False


def _shares(spent: Mapping[str, float], job: Protection) -> Shares:
    whole = sum(spent.get(each, 0.0) for each in ("run", "recovery", "nodes"))
    if not whole:
        return Shares(0, 0, 0, 0, 0, 1)
    pause = job.pause / (job.interval + job.pause)
    waits = (1 - pause) * job.wait / job.step
    new = spent.get("new", 0.0) / whole
    return Shares(
        productive=new * (1 - pause - waits),
        copies=new * waits,
        storage=new * pause,
        redone=spent.get("run", 0.0) / whole - new,
        recovery=spent.get("recovery", 0.0) / whole,
        nodes=spent.get("nodes", 0.0) / whole,
    )


def compared(count: int, seed: int) -> list[dict[str, Any]]:
    """For each case the expected shares beside the means of the weeks."""
    rows = []
    for name, (failures, job) in CASES.items():
        expected, seen = economics.shares(failures, job), weeks(failures, job, count, seed)
        productive = [each.productive for each in seen]
        error = statistics.stdev(productive) / math.sqrt(count)
        mean = statistics.fmean(productive)
        rows.append(
            {
                "case": name,
                "expected": asdict(expected),
                "seen": {
                    cause: statistics.fmean(asdict(each)[cause] for each in seen)
                    for cause in asdict(expected)
                },
                "standard_error": error,
                "errors_apart": abs(mean - expected.productive) / error,
            }
        )
    return rows


def main() -> int:
    """Returns 1 with `--check` if a paper's figure is more than a point away, or an expectation two standard
    errors."""
    p = parser(__doc__)
    p.add_argument("--check", action="store_true", help="exit code 1 where anything differs")
    p.add_argument("--weeks", type=int, default=1000)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    count = min(args.weeks, 100) if args.quick else args.weeks
    papers, chance = list(figures()), compared(count, args.seed)
    result = {"papers": [asdict(each) | {"equal": each.equal} for each in papers], "chance": chance}
    finish("economics", args, result, report(papers, chance, count))
    well = all(each.equal for each in papers) and all(row["errors_apart"] <= ERRORS for row in chance)
    return 0 if well or not args.check else 1


def report(papers: list[Figure], chance: list[dict[str, Any]], count: int) -> str:
    """Two tables."""
    shown = [
        [f.source, f.what, f"{f.printed:.3g}", f"{f.found:.3g}", "yes" if f.equal else "NO"] for f in papers
    ]
    first = table(["source", "figure", "printed", "here", "equal"], shown)
    rows = [
        [
            row["case"],
            *(f"{row['expected'][cause]:.2%} {row['seen'][cause]:.2%}" for cause in row["expected"]),
            f"{row['errors_apart']:.1f}",
        ]
        for row in chance
    ]
    heads = [f"{cause}: expected, seen" for cause in asdict(economics.shares(*CASES[next(iter(CASES))]))]
    second = table([f"{count:,} weeks", *heads, "standard errors apart"], rows)
    return f"{first}\n\n{second}"


if __name__ == "__main__":
    sys.exit(main())
