"""Which nodes keep copies of a segment, so that it survives the loss of failure domains.

Redundancy counts only across failure domains. With Megatron's rank order (tensor, then data, then pipeline
parallel) all data-parallel peers of a pipeline stage can share one node: what they hold in common is
redundant, yet dies with that node, so it needs replicas like unique state does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ft_core.state.manifest import Segment


def domain_of(node: str, domains: Mapping[str, str]) -> str:
    """The failure domain of `node`: its label, or the node itself where it has none."""
    return domains.get(node) or node


def sender(segment: Segment, role_nodes: Mapping[int, str]) -> int:
    """The role whose agent sends the segment's replicas: the lowest holder that is placed on a node.

    Raises ValueError where no holder is placed.
    """
    return min(h for h in segment.holders if h in role_nodes)


def replica_nodes(
    segment: Segment,
    role_nodes: Mapping[int, str],
    domains: Mapping[str, str],
    replicas: int,
    ring: Sequence[int] | None = None,
    spares: Iterable[str] = (),
) -> list[str]:
    """Nodes that must keep a copy, beyond the holders' own, for `replicas` lost domains to be survived.

    The copies (the holders' included) are in `replicas + 1` distinct domains, or in as many as there are:
    `survives` tells. Nodes that host roles of `ring` (the sender's data-parallel peers in order:
    FFTrainer's neighbouring redundancy, section 4.2) come first, starting after the sender, then those of
    all other roles in cyclic order. In a domain of several nodes the one is taken that stands where the
    sender's node stands in its own domain, so that racks of equal size mirror each other instead of loading
    their first node.

    Where these are in too few domains, `spares` (nodes without a role) keep copies as well: all that a node
    sends goes to the same ones, so that one of them has what its roles need to go on there.
    """
    source = sender(segment, role_nodes)
    covered = _domains(segment, role_nodes, domains)
    chosen: list[str] = []
    if len(covered) <= replicas and ring:
        chosen += _choose(source, ring, role_nodes, domains, covered, replicas + 1)
    if len(covered) <= replicas:
        chosen += _choose(source, sorted(role_nodes), role_nodes, domains, covered, replicas + 1)
    if len(covered) <= replicas and (others := sorted(spares)):
        at = sorted(set(role_nodes.values())).index(role_nodes[source]) % len(others)
        for node in others[at:] + others[:at]:
            if len(covered) <= replicas and domain_of(node, domains) not in covered:
                covered.add(domain_of(node, domains))
                chosen.append(node)
    return chosen


def spares_of(nodes: Iterable[str], role_nodes: Mapping[int, str]) -> list[str]:
    """Those of `nodes` that play no role."""
    return sorted(set(nodes) - set(role_nodes.values()))


def survives(
    segment: Segment, role_nodes: Mapping[int, str], domains: Mapping[str, str], nodes: Iterable[str]
) -> int:
    """How many failure domains, whichever, may be lost while a holder or replica remains."""
    covered = _domains(segment, role_nodes, domains) | {domain_of(n, domains) for n in nodes}
    return len(covered) - 1


def _domains(segment: Segment, role_nodes: Mapping[int, str], domains: Mapping[str, str]) -> set[str]:
    return {domain_of(role_nodes[h], domains) for h in segment.holders if h in role_nodes}


def _choose(
    source: int,
    tier: Sequence[int],
    role_nodes: Mapping[int, str],
    domains: Mapping[str, str],
    covered: set[str],
    wanted: int,
) -> Iterator[str]:
    """Yield one node per domain not yet in `covered`, adding the domain to it, until `wanted` are covered."""
    for role in _after(source, tier):
        if len(covered) >= wanted:
            return
        if (node := role_nodes.get(role)) is None:
            continue
        domain = domain_of(node, domains)
        if domain in covered:
            continue
        covered.add(domain)
        if domain == node:
            yield node
            continue
        members = _members(domain, tier, role_nodes, domains)
        home = role_nodes[source]
        own = _members(domain_of(home, domains), tier, role_nodes, domains)
        yield members[own.index(home) % len(members)] if home in own else node


def _after(source: int, roles: Sequence[int]) -> Iterator[int]:
    """The roles in cyclic order, beginning with the one that follows `source`."""
    if source in roles:
        start = roles.index(source) + 1
    else:
        start = next((i for i, r in enumerate(roles) if r > source), 0)
    for at in range(len(roles)):
        yield roles[(start + at) % len(roles)]


def _members(
    domain: str, roles: Sequence[int], role_nodes: Mapping[int, str], domains: Mapping[str, str]
) -> list[str]:
    """The domain's nodes that host any of `roles`, each once, in the order of `roles`."""
    nodes = dict.fromkeys(role_nodes[r] for r in roles if r in role_nodes)
    return [node for node in nodes if domain_of(node, domains) == domain]
