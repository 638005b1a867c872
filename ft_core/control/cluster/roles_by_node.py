"""The nodes that have roles, and which."""

from __future__ import annotations

from collections.abc import Mapping

from ft_core.protocol.table import moved_roles


class RolesByNode:
    """The places of a plan by node, made anew only for what another plan has elsewhere."""

    def __init__(self) -> None:
        self._places: Mapping[int, str] = {}
        self._roles: dict[str, list[int]] = {}

    def of(self, places: Mapping[int, str]) -> dict[str, list[int]]:
        """The nodes that have roles, and which, ascending. `places`: role -> node, which never changes."""
        if self._places is not places:
            self._places, self._roles = places, hosts_now(self._places, self._roles, places)
        return self._roles


def hosts_now(
    before: Mapping[int, str], by_node: Mapping[str, list[int]], now: Mapping[int, str]
) -> dict[str, list[int]]:
    """The roles of each node, ascending. `before`, `by_node`: what was so; little has changed as a rule."""
    hosts: dict[str, list[int]] = {}
    if list(before) != list(now):
        for role, name in sorted(now.items()):
            hosts.setdefault(name, []).append(role)
        return hosts
    moved = moved_roles(before, now)
    names = {before[role] for role in moved} | {now[role] for role in moved}
    for name in sorted(names):
        stay = (role for role in by_node.get(name, ()) if role not in moved)
        hosts[name] = sorted([*stay, *(role for role in moved if now[role] == name)])
    return {name: roles for name, roles in {**by_node, **hosts}.items() if roles}
