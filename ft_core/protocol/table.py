"""Who is where: a plan's nodes with their roles, as messages say it and as both ends have it.

A few bytes a node, and for all nodes the one thing that grows with the job. So it is said once, in compressed
pieces, and from plan to plan what has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from ft_core.protocol.groups import roles_in, runs_of, text_of
from ft_core.protocol.messages import (
    Host,
    Hosts,
    NodeAddress,
    NodeName,
    NodePlan,
    NodesChanged,
    OwnPlan,
    Plan,
    PlanId,
    SharedPlan,
)

PIECE = 8192
"""Nodes in one message."""

Places = Mapping[int, NodeName]
Nodes = Mapping[NodeName, NodeAddress]


def hosts_of(places: Places, nodes: Nodes) -> dict[NodeName, Host]:
    """Each of `nodes` with its roles."""
    roles: dict[NodeName, list[int]] = {}
    for role, name in places.items():
        roles.setdefault(name, []).append(role)
    texts = {name: text_of(runs_of(found)) for name, found in roles.items()}
    return {
        name: Host(name, at.data, "" if at.domain == name else at.domain, texts.get(name, ""))
        for name, at in nodes.items()
    }


def placed(hosts: Iterable[Host]) -> tuple[dict[int, NodeName], dict[NodeName, NodeAddress]]:
    """Roles and nodes, from the hosts that `hosts_of` has made of them."""
    nodes, places = {}, {}
    for host in hosts:
        nodes[host.name] = NodeAddress(host.data, host.domain or host.name)
        for run in roles_in(host.roles) if host.roles else ():
            places.update(dict.fromkeys(run, host.name))
    return dict(sorted(places.items())), nodes


def pieces(plan: Plan) -> list[Hosts]:
    """All nodes of a plan, as messages."""
    rows = list(hosts_of(plan.roles, plan.nodes).values())
    return [Hosts(plan.id, rows[at : at + PIECE], at) for at in range(0, len(rows), PIECE)]


def with_news(plan: NodePlan, news: NodesChanged) -> NodePlan:
    """The plan, once nodes without a role have come or gone since it was made; itself where that is said of
    another one."""
    if plan.id != news.id:
        return plan
    known = plan.nodes
    if news.all:
        known = {name: known[name] for name in dict.fromkeys(plan.roles.values()) if name in known}
    now = {name: where for name, where in {**known, **news.nodes}.items() if where is not None}
    return replace(plan, nodes=now)


def changes(before: Plan, now: Plan) -> tuple[list[NodeName], list[Host]]:
    """The nodes that are there no more, and those that are new, or whose roles or address have changed."""
    old, new = before.roles, now.roles
    moved = moved_roles(old, new)
    names = {places[role] for places in (old, new) for role in moved if role in places}
    known = before.nodes.get
    names |= {name for name, at in now.nodes.items() if (old_at := known(name)) is not at and old_at != at}
    places = {role: name for role, name in new.items() if name in names}
    nodes = {name: at for name, at in now.nodes.items() if name in names}
    return [name for name in before.nodes if name not in now.nodes], list(hosts_of(places, nodes).values())


def moved_roles(before: Places, now: Places) -> set[int]:
    """Roles that are elsewhere, there no more, or new."""
    if list(before) == list(now):
        pairs = zip(now, before.values(), now.values(), strict=True)
        return {role for role, old, new in pairs if old is not new and old != new}
    return {role for role in before.keys() | now.keys() if before.get(role) != now.get(role)}


class Received:
    """What one has heard of plans, put together."""

    def __init__(self) -> None:
        self._hosts: tuple[PlanId, list[Host]] = "", []
        self._own: OwnPlan | None = None

    def hear(self, message: Hosts | OwnPlan) -> None:
        """A part."""
        if isinstance(message, OwnPlan):
            self._own = message
        elif not message.first:  # said again, it may be without who has gone since
            self._hosts = message.id, list(message.hosts)
        elif (message.id, message.first) == (self._hosts[0], len(self._hosts[1])):
            self._hosts[1].extend(message.hosts)
        else:
            self._hosts = "", []

    def all_hosts(self, plan: PlanId) -> list[Host] | None:
        """What was heard of the nodes of that plan. It is forgotten."""
        (name, hosts), self._hosts = self._hosts, ("", [])
        return hosts if name == plan else None

    def plan(self, shared: SharedPlan, before: NodePlan | None) -> NodePlan | None:
        """The plan, or None where what it differs from is not known: then it will be sent again. `before`:
        the one known so far."""
        state = shared.state
        own = self._own if self._own is not None and self._own.id == state.id else None
        if shared.base == state.id:
            if (hosts := self.all_hosts(state.id)) is None:
                return None
            roles, nodes = placed(hosts)
        elif before is not None and before.id == shared.base:
            roles, nodes = _changed(before, shared)
        else:
            return None
        return NodePlan(
            **{name: getattr(state, name) for name in state.__struct_fields__},
            roles=roles,
            nodes=nodes,
            sources=own.sources if own is not None else {},
            away=own.away if own is not None else {},
            completed=own.completed if own is not None else {},
        )


def _changed(before: NodePlan, shared: SharedPlan) -> tuple[dict[int, NodeName], dict[NodeName, NodeAddress]]:
    roles, nodes = placed(shared.changed)
    other = {*shared.gone, *nodes}
    left = {role: name for role, name in before.roles.items() if name not in other}
    stay = {name: at for name, at in before.nodes.items() if name not in other}
    return dict(sorted({**left, **roles}.items())), {**stay, **nodes}
