"""What an agent serves: metrics of its node as Prometheus reads them, and how it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from ft_core.protocol.exposition import metrics, version
from ft_core.protocol.http import OK, Answer
from ft_core.protocol.messages import RoleBeat


@dataclass(frozen=True)
class NodeNumbers:
    """What is known at a moment."""

    node: str
    domain: str
    connected: bool
    epoch: int
    workers: Mapping[str, int]
    """How many workers do what."""
    roles: Mapping[int, RoleBeat]
    copies: int
    """Segments of others that are kept here."""


def families(found: NodeNumbers) -> Iterator[Metric]:
    """All metrics, each with what it means."""
    about = {"version": version(), "node": found.node, "domain": found.domain}
    yield InfoMetricFamily("ft_node", "The node.", about)
    yield GaugeMetricFamily("ft_node_connected", "1 if its agent has a controller.", float(found.connected))
    yield GaugeMetricFamily("ft_node_epoch", "The newest epoch that the agent has heard of.", found.epoch)
    workers = GaugeMetricFamily("ft_node_workers", "Its workers, by what they do.", labels=["state"])
    for state, count in found.workers.items():
        workers.add_metric([state], count)
    yield workers
    yield GaugeMetricFamily(
        "ft_node_copies", "Parts of the state of other nodes' roles that are kept here.", found.copies
    )
    steps = GaugeMetricFamily("ft_role_step", "Steps that a role here has done.", labels=["role"])
    safe = GaugeMetricFamily(
        "ft_role_replicated_step",
        "The newest step of which there are all copies; -1: none yet in this epoch.",
        labels=["role"],
    )
    seconds = GaugeMetricFamily(
        "ft_role_step_seconds", "What its last step took, the waiting for others in it.", labels=["role"]
    )
    waited = CounterMetricFamily(
        "ft_role_commit_wait_seconds", "Seconds that its steps waited for copies.", labels=["role"]
    )
    sent = CounterMetricFamily("ft_role_h2h_bytes", "Bytes of its copies that were sent.", labels=["role"])
    for role, beat in found.roles.items():
        steps.add_metric([str(role)], beat.step)
        safe.add_metric([str(role)], beat.committed)
        seconds.add_metric([str(role)], beat.step_s)
        waited.add_metric([str(role)], beat.waited_s)
        sent.add_metric([str(role)], beat.h2h_bytes)
    yield from (steps, safe, seconds, waited, sent)


def _ready(found: NodeNumbers) -> Answer:
    return OK if found.connected else Answer(503, b"no controller\n")


PAGES = {"/metrics": lambda found: metrics(families(found)), "/healthz": lambda _: OK, "/readyz": _ready}
"""The pages, by path."""
