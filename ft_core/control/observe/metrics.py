"""What the controller serves: metrics as Prometheus reads them, and how it is; made of `Numbers`, outside of
its event loop.

How many lines there are depends on what there is to tell apart, never on the number of roles.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric

from ft_core.control.decide.ladder import Rung
from ft_core.control.observe.job_metrics import SECONDS, Numbers
from ft_core.control.phases import Done, Forming, Quiescing, Rebuilding, Running, Saving, Waiting
from ft_core.protocol.exposition import metrics, version
from ft_core.protocol.goodput import Cause
from ft_core.protocol.http import OK, Answer

PHASES = tuple(each.name for each in (Forming, Rebuilding, Running, Quiescing, Waiting, Saving, Done))
TIER = "durable"
"""Storage that outlives the job, the one tier below the nodes' memory."""
_BOUNDS = [*map(str, SECONDS), "+Inf"]


def families(found: Numbers) -> Iterator[Metric]:
    """All metrics, each with what it means."""
    yield InfoMetricFamily("ft_job", "The job, as it was started.", {"version": version(), **found.job})
    phase = GaugeMetricFamily(
        "ft_phase", "What the job is doing: 1 for that phase, else 0.", labels=["phase"]
    )
    for name in PHASES:
        phase.add_metric([name], float(name == found.phase))
    yield phase
    yield GaugeMetricFamily("ft_epoch", "The newest epoch; each recovery begins another.", found.epoch)
    yield GaugeMetricFamily("ft_step", "Steps that are done, in the epoch under way.", found.step)
    since = GaugeMetricFamily(
        "ft_since_step_seconds", "Since a step was done last; while steps are to be done, once one was."
    )
    limit = GaugeMetricFamily(
        "ft_since_step_limit_seconds", "Of them, as many as are usual for this job; learned."
    )
    if found.standing.since is not None:
        since.add_metric([], found.standing.since)
        limit.add_metric([], found.standing.limit)
    yield since
    yield limit
    yield GaugeMetricFamily(
        "ft_protected", "1; 0 if nothing of what the script does is kept.", not found.unprotected
    )
    yield GaugeMetricFamily("ft_spares", "Nodes without a role that have idle workers.", found.spares)
    groups = GaugeMetricFamily("ft_replica_groups", "Replica groups: there, or away.", labels=["state"])
    for state, count in zip(("there", "away"), found.groups or (), strict=False):
        groups.add_metric([state], count)
    yield groups
    failures = CounterMetricFamily(
        "ft_failures", "What has failed, of which class and where.", labels=["class", "node", "domain"]
    )
    for labels, count in found.failures.items():
        failures.add_metric(labels, count)
    yield failures
    recoveries = CounterMetricFamily(
        "ft_recoveries", "Recoveries, by where the state came from.", labels=["origin"]
    )
    for origin in ("memory", "durable", "initial"):
        recoveries.add_metric([origin], found.recoveries.get(origin, 0))
    yield recoveries
    rungs = CounterMetricFamily(
        "ft_begun_anew",
        "How often going on in place did not help: some roles or all began anew from memory, or all scripts "
        "were started again from storage.",
        labels=["rung"],
    )
    for rung in Rung:
        rungs.add_metric([rung], found.rungs.get(rung, 0))
    yield rungs
    recovery = HistogramMetricFamily(
        "ft_recovery_seconds", "What recoveries took, by phase; total: with the first step.", labels=["phase"]
    )
    for name, (counts, total) in found.recovery.items():
        recovery.add_metric([name], _buckets(counts), total)
    yield recovery
    steps = HistogramMetricFamily("ft_step_seconds", "What steps took, those that are done again too.")
    steps.add_metric([], _buckets(found.steps[0]), found.steps[1])
    yield steps
    yield CounterMetricFamily("ft_steps_redone", "Steps that were done again.", found.steps_redone)
    yield CounterMetricFamily(
        "ft_productive_seconds",
        "Of the wall clock, what went to steps that count.",
        found.seconds[Cause.PRODUCTIVE],
    )
    lost = CounterMetricFamily(
        "ft_lost_seconds", "Of the wall clock, what went to anything else.", labels=["cause"]
    )
    for cause, seconds in found.seconds.items():
        if cause is not Cause.PRODUCTIVE:
            lost.add_metric([cause], seconds)
    yield lost
    yield GaugeMetricFamily(
        "ft_protected_every_steps",
        "Steps from a protected version to the next; at most twice as many, less one, are done again.",
        found.every,
    )
    yield CounterMetricFamily(
        "ft_commit_wait_seconds", "Seconds that steps waited for copies, of all roles.", found.waited
    )
    yield CounterMetricFamily("ft_h2h_bytes", "Bytes of copies that nodes sent each other.", found.sent)
    durable = GaugeMetricFamily(
        "ft_durable_last_success_timestamp_seconds",
        "When a durable checkpoint was complete last.",
        labels=["tier"],
    )
    if found.durable is not None:
        durable.add_metric([TIER], found.durable)
    yield durable
    writes = HistogramMetricFamily(
        "ft_durable_write_seconds",
        "What writing a role's part of a durable checkpoint took.",
        labels=["tier"],
    )
    writes.add_metric([TIER], _buckets(found.writes[0]), found.writes[1])
    yield writes
    below = GaugeMetricFamily(
        "ft_segments_below_k",
        "Parts of the state whose whole copies are in fewer failure domains than --ft-replicas asks for.",
    )
    if found.held is not None:
        below.add_metric([], found.held.below)
    yield below
    devices = GaugeMetricFamily(
        "ft_device_health",
        "0 for a device that has failed of late, or reports that it may; of the others nothing is said.",
        labels=["node", "device"],
    )
    for device in sorted(found.broken):
        devices.add_metric([device.place, str(device.number)], 0)
    yield devices
    xids = CounterMetricFamily(
        "ft_xid",
        "Errors of GPUs by NVIDIA's numbers, where agents may read the kernel's log.",
        labels=["xid"],
    )
    for xid, count in sorted(found.xids.items()):
        xids.add_metric([str(xid)], count)
    yield xids
    slow = GaugeMetricFamily(
        "ft_straggler_score",
        "Of a role whose own part of a step takes notably longer than that of its like, how many times as "
        "long, and what of it: compute, or data.",
        labels=["role", "part"],
    )
    for each in found.stragglers:
        slow.add_metric([str(each.role), each.part], each.score)
    yield slow
    yield GaugeMetricFamily(
        "ft_hang_suspects", "Roles that others wait for longer than usual.", found.suspects
    )


def _ready(found: Numbers) -> Answer:
    if found.phase != Running.name:
        return Answer(503, f"{found.phase}\n".encode())
    complaint = found.standing.complaint
    return Answer(503, f"{complaint}\n".encode()) if complaint else OK


PAGES = {"/metrics": lambda found: metrics(families(found)), "/healthz": lambda _: OK, "/readyz": _ready}
"""The pages, by path."""


def _buckets(counts: list[int]) -> list[tuple[str, float]]:
    return list(zip(_BOUNDS, map(float, counts), strict=True))
