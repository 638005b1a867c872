"""The wait-for graph: roles wait in operations, operations for roles that have not entered them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set

from ft_core.control.liveness.hangs.operations import STOPPED, Flight, Operation

Node = int | Operation


class Waits:
    """Who waits in what, and for whom."""

    def __init__(
        self, waiting: Mapping[Operation, Set[int]], missing: Mapping[Operation, frozenset[int]]
    ) -> None:
        """`waiting`: roles that are in an operation. `missing`: those without which it does not end; nobody:
        all have entered it."""
        self.waiting, self.missing = waiting, missing
        self._of_role: dict[int, list[Operation]] = {}
        for operation, roles in waiting.items():
            for role in roles if missing[operation] else ():
                self._of_role.setdefault(role, []).append(operation)
        self._for_role: dict[int, list[Operation]] = {}
        for operation, absent in missing.items():
            for role in absent:
                self._for_role.setdefault(role, []).append(operation)

    @classmethod
    def of(cls, flights: Mapping[int, Flight], roles: Collection[int]) -> Waits:
        """`roles`: those that take part. One of which there is no record has entered nothing."""
        waiting: dict[Operation, set[int]] = {}
        for role, flight in flights.items():
            if flight.log.state == STOPPED:
                continue  # it waits for nobody: others wait for it
            for operation in flight.waits_in:
                waiting.setdefault(operation, set()).add(role)
        missing = {}
        for operation in waiting:
            others = (role for role in operation.roles if role in roles)
            missing[operation] = frozenset(
                role for role in others if not _contributes(flights.get(role), operation)
            )
        return cls(waiting, missing)

    def after(self, node: Node) -> Iterable[Node]:
        """What a role waits in, and for whom an operation does."""
        return self.missing[node] if isinstance(node, Operation) else self.operations(node)

    def operations(self, role: int) -> list[Operation]:
        """Operations in which a role waits for somebody."""
        return self._of_role.get(role, [])

    def for_(self, role: int) -> list[Operation]:
        """Operations that wait for it."""
        return self._for_role.get(role, [])

    @property
    def stuck(self) -> list[Operation]:
        """Operations that all have entered, and that have not ended for somebody."""
        return [operation for operation, missing in self.missing.items() if not missing]

    def ends(self) -> list[frozenset[int]]:
        """What all waiting leads to: roles that wait for nobody, each alone, and roles that wait for each
        other in a circle."""
        component: dict[Node, int] = {}
        found = components(self._of_role, self)
        for number, nodes in enumerate(found):
            component |= dict.fromkeys(nodes, number)
        ends = []
        for number, nodes in enumerate(found):
            roles = frozenset(node for node in nodes if isinstance(node, int))
            if roles and all(component[other] == number for node in nodes for other in self.after(node)):
                ends.append(roles)
        return ends

    def wait_for(self, role: int) -> set[int]:
        """The roles that wait for it, directly or through others."""
        found: set[int] = set()
        seen: set[Operation] = set()
        new = {role}
        while new:
            operations = {operation for each in new for operation in self.for_(each)} - seen
            seen |= operations
            new = {each for operation in operations for each in self.waiting[operation]} - found - {role}
            found |= new
        return found

    def pivots(self, among: Set[int]) -> list[int]:
        """The roles of a circle without each of which there would be none."""
        candidates = set(self.cycle(among))
        for role in sorted(candidates):
            if role in candidates and (other := self.cycle(among - {role})):
                candidates &= set(other)
        return sorted(candidates)

    def cycle(self, among: Set[int]) -> list[int]:
        """Roles of which each waits for the next, and the last for the first; none if there are none."""
        done: set[Node] = set()
        for root in sorted(among):
            path: dict[Node, Iterator[Node]] = {}
            work: list[Node] = [] if root in done else [root]
            while work:
                node = work[-1]
                if node not in path:
                    path[node] = iter(self.after(node))
                for other in path[node]:
                    if other in path:
                        nodes = list(path)
                        return [each for each in nodes[nodes.index(other) :] if isinstance(each, int)]
                    if other not in done and (isinstance(other, Operation) or other in among):
                        work.append(other)
                        break
                else:
                    done.add(work.pop())
                    path.pop(node)
        return []


def _contributes(flight: Flight | None, operation: Operation) -> bool:
    """Whether a role has done its part in an operation, or is at it."""
    if flight is None or not flight.has_entered(operation):
        return False
    record = flight.records.get(operation)
    return flight.log.state != STOPPED or record is None or not record.under_way


def components(roots: Iterable[Node], graph: Waits) -> list[list[Node]]:
    """Strongly connected ones (Tarjan), without recursion: a pipeline may be long."""
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    path: list[Node] = []
    on_path: set[Node] = set()
    found: list[list[Node]] = []
    for root in roots:
        if root in index:
            continue
        work = [(root, iter(graph.after(root)))]
        index[root] = low[root] = len(index)
        path.append(root)
        on_path.add(root)
        while work:
            node, others = work[-1]
            for other in others:
                if other not in index:
                    index[other] = low[other] = len(index)
                    path.append(other)
                    on_path.add(other)
                    work.append((other, iter(graph.after(other))))
                    break
                if other in on_path:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    nodes: list[Node] = []
                    while not nodes or nodes[-1] != node:
                        nodes.append(path.pop())
                        on_path.discard(nodes[-1])
                    found.append(nodes)
    return found
