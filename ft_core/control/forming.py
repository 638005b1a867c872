"""The first epoch: node rank i plays roles i*n .. i*n+n-1; a spare, if that node does not come."""

from __future__ import annotations

from ft_core.control.facts import Facts
from ft_core.control.groups import Places

GRACE = 120.0
"""Seconds without a new node after which one that is missing at the start is replaced by a spare: images are
pulled and imports are done at each machine's own pace."""


def first_places(facts: Facts, quiet: float) -> tuple[Places | None, list[int]]:
    """The places to begin with, once there are workers for all; and the ranks of nodes that are waited for
    in vain. `quiet`: seconds without a new node."""
    settings = facts.settings
    wanted, n = settings.first_nodes, settings.nproc_per_node
    ranked = {node.hello.node_rank: node for node in facts.nodes.values()}
    missing = [rank for rank in range(wanted) if rank not in ranked]
    in_vain: list[int] = []
    if missing and quiet > GRACE:
        spares = [node for node in facts.nodes.values() if node.hello.node_rank not in range(wanted)]
        ranked |= dict(zip(missing, spares, strict=False))
        in_vain = missing[len(spares) :]
    first = [ranked[rank] for rank in range(wanted) if rank in ranked]
    if len(first) < wanted or any(node.idle < n for node in first):
        return None, in_vain
    places = (node.name for node in first for _ in range(n))
    return dict(zip(settings.start.present, places, strict=True)), in_vain
