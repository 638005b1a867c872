"""Metrics, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from ft_core.protocol.http import Answer

KIND = "text/plain; version=0.0.4; charset=utf-8"


def metrics(families: Iterable[Metric]) -> Answer:
    """All of these."""

    class All(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(All())
    return Answer(200, generate_latest(registry), KIND)


@cache
def version() -> str:
    """The version of this software; empty where it was not installed."""
    try:
        return metadata.version("ft-training")
    except metadata.PackageNotFoundError:
        return ""
