"""What `ftctl plan` says of time and money: the shares of a planned job, beside those of a restarted one.

The figures are `economics`' of the job that `razor` has laid out. What is not known is asked for by the flag
that gives it.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ft_core.cli.durations import time_text
from ft_core.cli.planner import economics, terms
from ft_core.cli.planner.economics import HOUR, MONTH, Failures, Protection
from ft_core.cli.planner.razor import Plan, plan
from ft_core.cli.planner.shape import PlannedJob
from ft_core.errors import ConfigError
from ft_core.history import job as history
from ft_core.protocol.goodput import Cause

WAITING = 0.001
"""The share of time that a job may wait for nodes, of which is said how many spares it takes."""
MOST_SPARES = 4096
_CURVE = 40
_OFTEN, _SELDOM = 600.0, 30 * 24 * HOUR
"""Seconds between failures at the ends of the curve."""


@dataclass(frozen=True)
class Point:
    """Productive shares of time where so many seconds are `between` two failures of the job."""

    between: float
    expected: float
    restarted: float


@dataclass(frozen=True)
class Measured:
    """What a job's own directory says of it."""

    step: float
    wait: float
    """Seconds of a step that it waited for copies."""
    recovery: float | None
    """The median; None: it has had none."""
    failures: int
    seconds: float


def measured(directory: Path) -> Measured:
    """Return what a job that has run, or runs, has seen. Raises ConfigError where it has not made a step."""
    found = history.read(directory)
    steps = [line["spent"]["step"] for line in found.lines if line.get("spent", {}).get("step")]
    if not steps:
        raise ConfigError(f"--from-job {directory}: of no step it is known how long it took")
    recovered = [each.seconds for each in found.recoveries if each.seconds is not None]
    trained = found.seconds[Cause.PRODUCTIVE] + found.seconds[Cause.SAVING]
    step = statistics.median(steps)
    return Measured(
        step=step,
        wait=step * found.seconds[Cause.SAVING] / trained if trained else 0.0,
        recovery=statistics.median(recovered) if recovered else None,
        failures=found.counts["detected"],
        seconds=sum(found.seconds.values()),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags about what failures cost."""
    worth = parser.add_argument_group(
        "economics", "With --mtbf-gpu, or --from-job: what time goes to, here and in a job that is restarted."
    )
    worth.add_argument(
        "--mtbf-hours", "--mtbf-gpu", type=float, default=0, metavar="X", help="of one device, in hours"
    )
    worth.add_argument(
        "--from-job",
        type=Path,
        metavar="DIR",
        help="the directory of a job: its steps, recoveries and failures, where no flag says otherwise",
    )
    worth.add_argument("--recovery-seconds", type=float, default=0, metavar="X", help="measured")
    worth.add_argument(
        "--repair-hours",
        type=float,
        default=24,
        metavar="X",
        help="until another node is there (default: 24)",
    )
    worth.add_argument(
        "--restart-seconds",
        type=float,
        default=600,
        metavar="X",
        help="of a whole job, until its first step (default: 600, as of 98,000 GPUs in FT-HSDP)",
    )
    worth.add_argument(
        "--save-seconds",
        type=float,
        default=30,
        metavar="X",
        help="that a checkpoint stops a job without this plugin (default: 30)",
    )
    worth.add_argument(
        "--write-seconds", type=float, default=120, metavar="X", help="until it is on storage (default: 120)"
    )
    worth.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the productive share by failures, as SVG"
    )
    worth.add_argument("--price-gpu-hour", type=float, default=0, metavar="X", help="in any currency")


def figures_of(
    args: argparse.Namespace, job: PlannedJob, found: Plan, figures: dict[str, Any]
) -> dict[str, Any]:
    """What is expected, with `missing`, the flags that it takes; empty where nobody asks."""
    seen = measured(args.from_job) if args.from_job is not None else None
    hosts = job.hosts
    mtbf = args.mtbf_hours
    if not mtbf and seen is not None and seen.failures:
        mtbf = hosts.world_size * seen.seconds / HOUR / seen.failures
    if not mtbf:
        return {} if seen is None else {"missing": ["--mtbf-gpu (the job has had no failure)"]}
    step = figures.get("step_seconds") or (seen.step if seen is not None else 0.0)
    recovery = args.recovery_seconds or (seen.recovery if seen is not None else None)
    if not recovery and figures["recovery"]["complete"]:
        recovery = figures["recovery"]["seconds"]
    missing = ["--step-seconds"] * (not step) + ["--recovery-seconds or --start-up-seconds"] * (not recovery)
    if not step or not recovery:
        return {"missing": missing}
    failures = Failures(hosts.nodes, hosts.nproc_per_node / (mtbf * HOUR), args.repair_hours * HOUR)
    ours = _protection(args, job, found, step, recovery, seen)
    ours = replace(ours, interval=economics.best_interval(failures, ours))
    plain = replace(ours, copies=0, wait=0.0, pause=args.save_seconds)
    plain = replace(plain, interval=economics.best_interval(failures, plain))
    expected = economics.shares(failures, ours)
    more: dict[str, Any] = {"spare": replace(ours, spares=ours.spares + 1)}
    if found.survives >= hosts.replicas and hosts.failure_domains > hosts.replicas + 1:
        wider = replace(job, hosts=replace(hosts, replicas=hosts.replicas + 1))
        more["copy"] = replace(
            _protection(args, wider, plan(wider), step, recovery, seen), interval=ours.interval
        )
    nodes = hosts.nodes + hosts.spares
    return {
        "missing": [],
        "mtbf_hours": mtbf,
        "hours_between_failures": 1 / failures.rate / HOUR,
        "expected": asdict(expected),
        "restarted": asdict(economics.shares(failures, plain)),
        "durable_interval_seconds": ours.interval,
        "restarted_interval_seconds": plain.interval,
        "curve": [asdict(each) for each in _curve(failures, ours, plain)],
        "one_more": {
            what: economics.shares(failures, other).productive - expected.productive
            for what, other in more.items()
        },
        "spares_for_little_waiting": _spares(failures),
        "years_between_losses": economics.years_between_losses(failures, ours),
        "cost_a_month": args.price_gpu_hour * nodes * hosts.nproc_per_node * MONTH / HOUR,
    }


def _protection(
    args: argparse.Namespace,
    job: PlannedJob,
    found: Plan,
    step: float,
    recovery: float,
    seen: Measured | None,
) -> Protection:
    """Storage is written from the agents' memory, which stops nobody."""
    network = terms.network_rate(args.measured, args.interfaces, args.network_gbps)
    sent = max(found.sent_per_node, found.received_per_node)
    lag = network.seconds(sent) if network is not None else 0.0
    return Protection(
        step=step,
        wait=seen.wait * step / seen.step if seen is not None else 0.0,
        every=terms.versions_apart(sent, network, step) if network is not None and sent else 1,
        lag=lag,
        copies=min(job.hosts.replicas, found.survives),
        recovery=recovery,
        restart=args.restart_seconds,
        interval=HOUR,
        pause=0.0,
        write=args.write_seconds,
        spares=job.hosts.spares,
    )


def _curve(failures: Failures, ours: Protection, plain: Protection) -> list[Point]:
    """The shares by how often something fails, with as many spares and the best intervals for that."""
    found = []
    for number in range(_CURVE + 1):
        between = _OFTEN * (_SELDOM / _OFTEN) ** (number / _CURVE)
        other = replace(failures, of_node=1 / between / failures.nodes)
        best = (replace(job, interval=economics.best_interval(other, job)) for job in (ours, plain))
        found.append(Point(between, *(economics.shares(other, job).productive for job in best)))
    return found


def _spares(failures: Failures) -> int | None:
    """The least that leave little waiting."""
    enough = (
        n for n in range(MOST_SPARES) if economics.waiting(failures.rate, failures.repair, n) <= WAITING
    )
    return next(enough, None)


def lines(worth: dict[str, Any], price: float) -> list[str]:
    """For people."""
    if not worth:
        return []
    if worth["missing"]:
        return ["", f"what failures cost: give {', '.join(worth['missing'])}"]
    ours, plain = worth["expected"], worth["restarted"]
    words = {
        "productive": "productive",
        "copies": "waiting for copies",
        "storage": "standing still while a checkpoint is written",
        "redone": "steps done again",
        "recovery": "recovering",
        "nodes": "waiting for a node",
    }
    every = worth["hours_between_failures"]
    head = f"what time goes to, with a failure every {time_text(every * HOUR)}"
    found = ["", f"{head:<52}{'here':>12}{'restarted':>12}"]
    found += [f"  {words[cause]:<50}{ours[cause]:>12.2%}{plain[cause]:>12.2%}" for cause in words]
    best = worth["durable_interval_seconds"], worth["restarted_interval_seconds"]
    found.append(
        f"  {'best interval of durable checkpoints':<50}" + "".join(f"{time_text(x):>12}" for x in best)
    )
    if price:
        cost = worth["cost_a_month"]
        found.append(f"  {'cost a month':<50}{cost:>12,.0f}{cost:>12,.0f}")
        found.append(
            f"  {'of it not productive':<50}{cost * (1 - ours['productive']):>12,.0f}"
            f"{cost * (1 - plain['productive']):>12,.0f}"
        )
    years = worth["years_between_losses"]
    found.append(f"  {'memory does not suffice once in':<50}{time_text(years * 12 * MONTH):>12}")
    for what, gain in worth["one_more"].items():
        found.append(f"  {f'one more {what} would bring, in points':<50}{gain * 100:>+12.2f}")
    spares = worth["spares_for_little_waiting"]
    enough = f"{spares}" if spares is not None else f"over {MOST_SPARES}"
    found.append(f"  {f'spares for at most {WAITING:.1%} of waiting':<50}{enough:>12}")
    return [*found, "  (docs/economics.md has the formulas)"]
