"""What the loss of a whole failure domain would cost: which of them hold all copies of something."""

from __future__ import annotations

from dataclasses import dataclass

from ft_core.state.manifest import Segment
from ft_core.state.placement import Places, replica_nodes


@dataclass(frozen=True)
class Level:
    """The failure domains of one level that have several nodes with roles, or could have."""

    names: list[str]
    nodes: int
    """With roles, in the largest of them."""
    roles: int
    """In the one that has most."""
    at_risk: list[str]
    """Those whose loss would take all copies of what a role there has alone."""


def levels(places: Places, replicas: int) -> list[Level]:
    """All levels wider than a node, the widest first; none where domains are not nested."""
    nested = places.nested
    if nested is None:
        return []
    first = {node: role for role, node in sorted(places.role_nodes.items(), reverse=True)}
    keepers = {node: replica_nodes(Segment((role,), ()), places, replicas) for node, role in first.items()}
    found = []
    for level in range(nested.levels - 1):
        domains = nested.domains(level)
        roles = dict.fromkeys(domains, 0)
        for node in places.role_nodes.values():
            roles[nested.at(node, level)] += 1
        at_risk = {
            nested.at(node, level)
            for node, others in keepers.items()
            if all(nested.at(other, level) == nested.at(node, level) for other in others)
        }
        largest = max(map(len, domains.values()))
        found.append(Level(list(domains), largest, max(roles.values()), sorted(at_risk)))
    return found


def sentence(found: list[Level], replicas: int) -> tuple[bool, str]:
    """The same for people: whether a whole domain with several nodes may be lost, and which; empty where
    there is none, or no copies."""
    if not found or not replicas:
        return True, ""
    safe = next((level for level in found if not level.at_risk), None)
    if safe is not None:
        count, first = len(safe.names), safe.names[0]
        which = first if count == 1 else f"any one of {count} failure domains such as {first}"
        return True, f"{which} may be lost at once, with up to {_nodes(safe.nodes)}: copies go to others"
    last, rest = found[-1], f"Any {'node' if replicas == 1 else f'{replicas} nodes'} may be lost"
    first, others = last.at_risk[0], len(last.at_risk) - 1
    if len(last.names) == 1:
        return False, f"all nodes with roles are in {first}: its loss would take all copies as well. {rest}"
    more = f", or of any of {others} others," if others else ""
    return False, (
        f"the loss of {first}{more} would take all copies of what is there: of {len(last.names)} failure "
        f"domains the largest has {_nodes(last.nodes)}, which is too much for the others to keep. {rest}"
    )


def _nodes(count: int) -> str:
    return f"{count} node" + "s" * (count != 1)
