"""What a node could contribute to a recovery, as it has said it: a greeting, and by difference since.

All that a decision asks of a node is ready here once the node has reported. Hardly anything of it changes
from one recovery to the next but versions, and those are the same for all roles of a node, as a rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain

from msgspec.structs import replace

from ft_core.control.decide.holdings import NodeReport
from ft_core.protocol.messages import (
    AgentHello,
    Counts,
    HoldingsChanged,
    Role,
    RoleHeld,
    Setting,
    Version,
)


class NodeInventory:
    """What one node holds, as it has said over one connection."""

    def __init__(self, hello: AgentHello) -> None:
        said = hello.holdings
        self.epoch, self.begun, self.reported = said.epoch, said.begun, said.reported
        self.parts, self.idle = said.parts, said.idle
        self.store, self.master, self.segments = said.store, said.master, said.segments
        self.configured: Mapping[str, Setting] | None = said.configured
        self.dead: set[Role] = set()
        """Roles whose workers have died since."""
        self.recount = False
        """Whether a role here has another worker, of which nothing was said yet."""
        self._number = 0
        """The number of reports since the greeting."""
        self.report = NodeReport(hello.node, hello.domain)
        """The report that the decision reads: the same object, which is kept up to date."""
        self.roles: Mapping[Role, RoleHeld]
        """The roles as they were said last in full: what is so now says `report`."""
        self._alive = True
        """Whether all roles have live workers, but for the `dead`."""
        self._take_roles(said.roles)
        self._take_replicas(said.replicas)

    @property
    def replicas(self) -> Collection[str]:
        """Segments of which it keeps copies for others."""
        return self.report.replicas

    def versions(self) -> Iterator[Version]:
        """All versions that the node holds of anything; some more than once."""
        return chain.from_iterable(chain(self.report.at or (), self.report.copies_at or ()))

    @property
    def newest(self) -> Version:
        """The newest version that the node holds of anything; -1: none."""
        found = -1
        for each in (self.report.at or (), self.report.copies_at or ()):
            for versions in each:
                found = max(found, *versions) if versions else found
        return found

    def copied_versions(self) -> set[Version]:
        """The versions of the copies that the node keeps for others."""
        return set(chain.from_iterable(self.report.copies_at or ()))

    def worker_died(self, role: Role) -> None:
        """Note that a role's worker has died, also where it was reported to live."""
        if (held := self.roles.get(role)) is not None:
            self.dead.add(role)
            self.report.roles = {**self.report.roles, role: replace(held, alive=False)}

    def alive(self, role: Role) -> bool:
        """Whether a role has a live worker on this node."""
        held = self.roles.get(role)
        return held is not None and held.alive and role not in self.dead

    @property
    def all_alive(self) -> bool:
        """Whether all roles of the node have live workers."""
        return self._alive and not self.dead

    def counts(self) -> dict[Role, Counts]:
        """What live workers have on record of the start-up phase."""
        return {role: h.counts for role, h in self.roles.items() if h.alive and role not in self.dead}

    def change(self, news: HoldingsChanged) -> bool:
        """Take in a report. Returns whether it could be understood: whether this is what it differs from.

        That a worker had died was news of before.
        """
        roles, replicas = news.roles, news.replicas
        if news.number != self._number:
            return False
        if not (_fits(roles, self.roles) and _fits(replicas, self.replicas)):
            return False
        self._number += 1
        self.epoch, self.begun, self.reported = news.epoch, news.begun, news.reported
        self.parts, self.idle = news.parts, news.idle
        if self.dead:
            self.dead, self.report.roles = set(), self.roles
        self.recount = False
        if isinstance(roles, dict):
            self._take_roles(roles)
        else:
            self.report.at = roles
        if isinstance(replicas, dict):
            self._take_replicas(replicas)
        else:
            self.report.copies_at = replicas
        if news.segments is not None:
            self.segments = news.segments
        return True

    def _take_roles(self, roles: Mapping[Role, RoleHeld]) -> None:
        self._alive = all(held.alive for held in roles.values())
        self.roles = self.report.roles = roles
        self.report.at = _together([held.versions for held in roles.values()])
        known = [held.segments for held in roles.values()]
        self.report.ids = frozenset(chain.from_iterable(known)) if all(known) else None

    def _take_replicas(self, replicas: Mapping[str, list[Version]]) -> None:
        self.report.replicas = replicas
        self.report.copies_at = _together(list(replicas.values()))


def _fits(news: Collection[object], known: Collection[object]) -> bool:
    """Whether `news` fits `known`: everything anew, one thing for all, or one for each."""
    return isinstance(news, dict) or len(news) == len(known) or len(news) == 1 <= len(known)


def _together(each: list[list[Version]]) -> list[list[Version]]:
    """The lists of versions, as one where all are the same."""
    return each[:1] if all(one == each[0] for one in each) else each
