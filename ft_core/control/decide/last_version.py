"""What a job that ends leaves on storage: the newest version that is whole in memory, and who writes what.

Pure, from what the nodes have reported. A role whose node is lost has its part written where most of it is.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from dataclasses import dataclass

from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide.groups import Places, by_node
from ft_core.control.decide.next_epoch import newest_in_memory
from ft_core.control.decide.outcomes import Sources
from ft_core.errors import Unrecoverable
from ft_core.protocol.messages import NodeName, Redundancy, SaveVersion


@dataclass(frozen=True)
class LastVersion:
    """The version, for each role the node that writes its part, and what those nodes have to fetch."""

    version: int
    places: Places
    sources: Sources


def choose(cluster: ClusterState) -> LastVersion | None:
    """The newest version that the nodes hold together; None where that is what a script, started again,
    begins with anyway. Raises Unrecoverable if they hold none."""
    if not cluster.nodes:
        raise Unrecoverable("no node is left")
    places = _writers(cluster)
    found = newest_in_memory(cluster, places)
    if found is None or found[0] <= (cluster.versions.initial or 0):
        return None
    return LastVersion(found[0], places, found[1])


def _writers(cluster: ClusterState) -> Places:
    """Each role's own node if it can, else the one that has most of it, and least to write. Who has not begun
    the newest plan writes nothing: it does not know who has what."""
    begun = {n: node for n, node in cluster.nodes.items() if node.holdings.begun == cluster.plan_id}
    nodes = begun or cluster.nodes
    places = {role: node for role, node in cluster.places.items() if node in nodes}
    homeless = [role for role in cluster.places if role not in places]
    near = cluster.catalogue.copies(nodes.values(), homeless)
    load = Counter(places.values())
    for role in homeless:
        held = Counter(near[role])
        places[role] = min(nodes, key=lambda name: (-held[name], load[name], name))
        load[places[role]] += 1
    return dict(sorted(places.items()))


def orders(cluster: ClusterState, last: LastVersion) -> dict[NodeName, SaveVersion]:
    """What each node is told that has to write something."""
    plan = cluster.current_plan
    hosts = ChainMap(last.places, {role: last.places[by] for role, by in plan.adopted.items()})
    sources: dict[NodeName, Sources] = {}
    for role, held in last.sources.items():
        sources.setdefault(hosts[role], {})[role] = held
    away: dict[NodeName, dict[int, list[str]]] = {}
    for role, other in plan.absent.items():
        away.setdefault(last.places[other], {})[role] = list(cluster.catalogue.of(role))
    replicated = cluster.groups.redundancy is Redundancy.REPLICATED
    return {
        name: SaveVersion(
            *(plan.id, cluster.epoch, last.version, roles),
            sources.get(name, {}),
            away.get(name, {}),
            replicated,
        )
        for name, roles in by_node(last.places).items()
    }
