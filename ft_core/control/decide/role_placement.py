"""Who plays the roles that were lost: pure functions on what the agents reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ft_core.protocol.domains import within


@dataclass(frozen=True)
class Assignment:
    """`roles`: role -> node for every role that has a place. `unplaced`: lost roles without one."""

    roles: dict[int, str]
    unplaced: tuple[int, ...] = ()


def assign(
    placements: Mapping[int, str],
    idle: Mapping[str, int],
    lost: Collection[int],
    capacity: int,
    copies: Mapping[int, Collection[str]] | None = None,
    avoided: Collection[str] = (),
    domains: Mapping[str, str] | None = None,
) -> Assignment:
    """Find workers for the `lost` roles: on other nodes than the `avoided` ones, and there if need be.

    As `_assign`.
    """
    willing, domains = idle, domains or {}
    if avoided:
        willing = {node: count for node, count in idle.items() if node not in avoided}
    first = _assign(placements, willing, lost, capacity, copies, domains)
    if not avoided or not first.unplaced:
        return first
    taken = Counter(first.roles[role] for role in lost if role in first.roles)
    left = {node: count - taken[node] for node, count in idle.items()}
    return _assign({**placements, **first.roles}, left, first.unplaced, capacity, copies, domains)


def _assign(
    placements: Mapping[int, str],
    idle: Mapping[str, int],
    lost: Collection[int],
    capacity: int,
    copies: Mapping[int, Collection[str]] | None,
    domains: Mapping[str, str],
) -> Assignment:
    """Find workers for the `lost` roles.

    `placements`: role -> node before the failure. `idle`: workers without a role on each live node.
    `capacity`: roles that a node has devices for; an idle worker beyond it only stands in for one that
    crashed on its own node. A role goes back to its node while that has idle workers, for its state is in
    memory there. The roles of a dead node go together to one node if one has enough idle workers, else
    they are spread. Nodes that play no role come first, then those that play few; of equals, the one that
    has most `copies` (role -> nodes, one for each of its segments that a node holds), then the one whose rack
    has fewest roles (`domains`), then the one that fits most tightly.
    """
    free = {node: count for node, count in idle.items() if count > 0}
    roles = dict(placements)  # in its order
    load = Counter(placements.values())
    load.subtract(placements[role] for role in lost if role in placements)
    groups: dict[str | None, list[int]] = {}
    for role in sorted(lost):
        home = placements.get(role)
        if home is not None and free.get(home, 0) > 0:
            free[home] -= 1
            load[home] += 1
        else:
            groups.setdefault(home, []).append(role)
    free = {n: left for n, count in free.items() if (left := min(count, capacity - load[n])) > 0}
    crowds = _Crowds(load, domains)

    unplaced: list[int] = []
    for group in sorted(groups.values(), key=lambda g: (-len(g), g)):
        pending = group
        while pending:
            near = Counter(node for role in pending for node in (copies or {}).get(role, ()))
            order = sorted(free, key=lambda n: (load[n], -near[n], crowds.around(n), free[n], n))
            whole = [n for n in order if free[n] >= len(pending)]
            if not order:
                break
            # Split over as few nodes as possible: those with most idle workers among the least loaded.
            node = whole[0] if whole else min(order, key=lambda n: (load[n], -free[n], -near[n], n))
            count = min(free[node], len(pending))
            roles |= dict.fromkeys(pending[:count], node)
            load[node] += count
            crowds.add(node, count)
            free[node] -= count
            if not free[node]:
                del free[node]
            pending = pending[count:]
        unplaced += pending
    for role in unplaced:
        roles.pop(role, None)
    return Assignment(roles, tuple(sorted(unplaced)))


class _Crowds:
    """How many roles there are in each failure domain that has others in it: a rack, not a node. Copies need
    racks of like size."""

    def __init__(self, load: Mapping[str, int], domains: Mapping[str, str]) -> None:
        """`load`: nodes with their numbers of roles. `domains`: of nodes that are in others."""
        self._around = {node: within(domain)[:-1] for node, domain in domains.items()}
        self._roles = Counter[str]()
        for node in self._around.keys() & load.keys():
            self.add(node, load[node])

    def add(self, node: str, count: int) -> None:
        """A node is given so many roles."""
        for domain in self._around.get(node, ()):
            self._roles[domain] += count

    def around(self, node: str) -> tuple[int, ...]:
        """The numbers of those that it is in, the widest first."""
        return tuple(self._roles[domain] for domain in self._around.get(node, ()))


class PlacementCapacity:
    """Idle workers, for one set of roles after the other that begins without a node: with places as from
    `assign`, and nodes looked at only where they are taken."""

    def __init__(
        self,
        placements: Mapping[int, str],
        idle: Mapping[str, int],
        capacity: int,
        avoided: Collection[str] = (),
    ) -> None:
        """Takes what `assign` does."""
        load = Counter(placements.values())
        self._free: dict[tuple[bool, int, int], list[str]] = {}
        """Nodes with room, each list a heap, by whether they are avoided, how many roles they have, and how
        many idle workers."""
        self.left = 0
        """Roles for which there is a worker."""
        for node, count in sorted(idle.items()):
            if (free := min(count, capacity - load[node])) > 0:
                self._free.setdefault((node in avoided, load[node], free), []).append(node)
                self.left += free

    def take(self, roles: Sequence[int]) -> dict[int, str]:
        """Places for these, of which there are not more than `left`. They are taken then."""
        found, at = {}, 0
        while at < len(roles):
            lacking = len(roles) - at
            # Together, if possible; else over as few nodes as possible.
            key = min(
                self._free, key=lambda k: (k[0], k[2] < lacking, k[1], k[2] if k[2] >= lacking else -k[2])
            )
            node = heappop(self._free[key])
            if not self._free[key]:
                del self._free[key]
            avoided, load, free = key
            count = min(free, lacking)
            found.update(dict.fromkeys(roles[at : at + count], node))
            if free > count:
                heappush(self._free.setdefault((avoided, load + count, free - count), []), node)
            at, self.left = at + count, self.left - count
        return found
