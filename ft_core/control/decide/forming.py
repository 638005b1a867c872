"""The first epoch: node rank i plays roles i*n .. i*n+n-1; a spare, if that node does not come. Nodes without
a rank take the places that nobody has, in the order in which they come."""

from __future__ import annotations

from collections.abc import Collection

from ft_core.control.cluster.node import Node
from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide.groups import Places
from ft_core.settings import ANY_RANK

GRACE = 120.0
"""Seconds without a new node after which one that is missing at the start is replaced by a spare: images are
pulled and imports are done at each machine's own pace."""


def ranked(cluster: ClusterState, left_out: Collection[str] = ()) -> dict[int, Node]:
    """The nodes that the job is to begin with, of those that are there, by their ranks. `left_out`: those
    that it does not begin with."""
    wanted = range(cluster.settings.first_nodes)
    nodes = [node for node in cluster.nodes.values() if node.name not in left_out]
    found = {node.hello.node_rank: node for node in nodes if node.hello.node_rank in wanted}
    anywhere = [node for node in nodes if node.hello.node_rank == ANY_RANK]
    return found | dict(zip([rank for rank in wanted if rank not in found], anywhere, strict=False))


def first_places(
    cluster: ClusterState, quiet: float, left_out: Collection[str] = ()
) -> tuple[Places | None, list[int]]:
    """The places to begin with, once there are workers for all; and the ranks of nodes that are waited for
    in vain. `quiet`: seconds without a new node. `left_out`: nodes that are there and are not begun with;
    their places go to spares at once."""
    settings = cluster.settings
    wanted, n = settings.first_nodes, settings.nproc_per_node
    by_rank = ranked(cluster, left_out)
    missing = [rank for rank in range(wanted) if rank not in by_rank]
    in_vain: list[int] = []
    if left_out and quiet <= GRACE:
        ranks = [cluster.nodes[name].hello.node_rank for name in left_out]
        anywhere = [rank for rank in missing if rank not in ranks][: ranks.count(ANY_RANK)]
        missing = sorted({*anywhere, *(rank for rank in missing if rank in ranks)})
    if missing and (left_out or quiet > GRACE):
        begin = {node.name for node in by_rank.values()}
        spares = [
            node
            for node in cluster.nodes.values()
            if node.hello.node_rank not in range(wanted) and node.name not in {*begin, *left_out}
        ]
        by_rank |= dict(zip(missing, spares, strict=False))
        in_vain = missing[len(spares) :] if quiet > GRACE else []
    first = [by_rank[rank] for rank in range(wanted) if rank in by_rank]
    if len(first) < wanted or any(node.idle < n for node in first):
        return None, in_vain
    places = (node.name for node in first for _ in range(n))
    return dict(zip(settings.start.present, places, strict=True)), in_vain
