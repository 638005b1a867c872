"""The version that everyone goes on from after a failure: pure functions on what the agents reported.

`docs/recovery_rule.md` says why the rule is right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from ft_core.control.decide.holdings import NodeReport, all_have
from ft_core.errors import Unrecoverable
from ft_core.protocol.table import moved_roles

SOURCES = 8
"""Nodes that are named of all that have a segment."""
_FEW = 64
"""Holders among which the least asked is looked for; of more, the next ones are taken."""
_SHOWN = 16
"""Lost segments that are named."""


@dataclass(frozen=True)
class Loss:
    """A segment (None: the role's segments are not even known) of which `role` has no copy it could use."""

    role: int
    segment: str | None
    held: tuple[int, ...]

    def __str__(self) -> str:
        if self.segment is None:
            return f"role {self.role}: nobody knows what it held"
        held = f"only at version {', '.join(map(str, self.held))}" if self.held else "nowhere"
        return f"role {self.role}: segment {self.segment} is held {held}"


@dataclass(frozen=True)
class Choice:
    """The version to go on from.

    `origin` "memory": `sources[role][segment]` lists nodes that hold it, the one to ask first at the front:
    the role's own node where it has a copy. A role is not among them whose own node has a snapshot of it.
    "initial": start-up computes the version; a role with sources restores, one with an empty mapping runs its
    script. "durable": everyone loads the durable checkpoint of that version; `lost` says why memory did not
    suffice.
    """

    version: int
    origin: Literal["memory", "initial", "durable"]
    sources: dict[int, dict[str, list[str]]]
    lost: tuple[Loss, ...] = ()


def choose_version(
    reports: Iterable[NodeReport],
    roles: Iterable[int],
    initial: int | None,
    durable: Collection[int],
    placements: Mapping[int, str] | None = None,
    previous: Mapping[int, str] | None = None,
    reached: int | None = None,
    catalogue: Mapping[int, Collection[str]] | None = None,
    adopters: Mapping[int, str] | None = None,
    newest: int | None = None,
) -> Choice:
    """Choose the newest version that every role can have.

    `reports` come from all live agents, and only from them. `initial` is the version that start-up yields (0,
    or the iteration of the checkpoint that the job was started from); None if it cannot be repeated.
    `durable` are the complete durable checkpoints. `placements` (role -> node, from `assign`) says where each
    role goes on, `previous` where it was when the failure came.
    `reached` is the newest version that any role is known to have had (step tags): it keeps a job whose
    memory is all gone from starting silently from scratch.

    `catalogue` (role -> ids of its segments) is what the roles themselves have told since the job began;
    a role that is not in it never had a snapshot. Without it, the agents' `segments` together must name
    every segment of every role, also of the dead: the loss of a segment that nobody remembers could not
    be noticed. A role of which nothing is known counts as lost.

    `adopters` (role -> node) is where another role holds what one that is away had alone: that needs a copy
    beside its own state, also where the node has a snapshot of the role itself.

    `newest`: what is newer than that is not used, whoever has it. None: everything is.

    Raises Unrecoverable, with what was lost, when neither memory nor start-up nor a checkpoint helps.
    """
    roles = list(roles)
    holdings = _VersionIndex(reports, roles, placements or {}, previous or {}, catalogue)
    if newest is not None:
        holdings.versions = {version for version in holdings.versions if version <= newest}
        durable = [version for version in durable if version <= newest]
    best: tuple[int, list[tuple[int, str | None]]] | None = None
    for version in sorted(holdings.versions | ({initial} if initial is not None else set()), reverse=True):
        lost = holdings.missing(version)
        computed = {role for role, _ in lost if version == initial and role in holdings.starting}
        lost = [each for each in lost if each[0] not in computed]
        if not lost and version >= max(durable, default=version):
            sources = holdings.sources(version, computed, adopters or {})
            return Choice(version, "initial" if computed else "memory", {r: {} for r in computed} | sources)
        if version in holdings.versions and (best is None or len(lost) < len(best[1])):
            best = (version, lost)

    known = max([*holdings.versions, *durable, *([] if reached is None else [reached])], default=initial)
    if initial is not None and known is not None and known <= initial:
        computed = {role for role, _ in holdings.missing(initial)}
        sources = holdings.sources(initial, computed, adopters or {})
        return Choice(initial, "initial", {r: {} for r in computed} | sources)

    wanted, lost = best or (None, holdings.missing(None))
    losses = holdings.losses(lost)
    if durable:
        return Choice(max(durable), "durable", {r: {} for r in sorted(roles)}, losses)
    raise Unrecoverable(_explain(wanted, losses, previous or {}))


class _VersionIndex:
    """The reports, looked at for one version at a time.

    Nearly all nodes have all roles that are placed there, at that version: those are counted node by node,
    and only what is left is looked for role by role.
    """

    def __init__(
        self,
        reports: Iterable[NodeReport],
        roles: Iterable[int],
        placements: Mapping[int, str],
        previous: Mapping[int, str],
        catalogue: Mapping[int, Collection[str]] | None,
    ) -> None:
        found = {report.node: report for report in reports}
        self._reports = {name: found[name] for name in sorted(found)}
        self._roles, self._places = sorted(roles), placements
        self._before, self._moved = previous, moved_roles(previous, placements)
        self._catalogue = self._remembered() if catalogue is None else catalogue
        self.versions: set[int] = set()
        self.starting: set[int] = set()
        self._alike: dict[tuple[int, ...], set[str]] = {}
        """Nodes that have just the roles that were placed there, all at the same versions; by those
        versions."""
        self._others: list[NodeReport] = []
        last: Sequence[Sequence[int]] = ()
        for name, report in self._reports.items():
            if (at := report.at) is not None and report.home and report.ids is not None and len(at) == 1:
                self._alike.setdefault(tuple(at[0]), set()).add(name)
            else:
                self._others.append(report)
            if (at := report.copies_at) is None:
                self.versions.update(*report.replicas.values())
            elif at != last:
                self.versions.update(*at)
                last = at
        self.versions.update(*self._alike)
        self._all_alike = set().union(*self._alike.values())
        self._told: dict[int, int] = {}
        """Roles of which some other node tells, with how many do."""
        for report in self._others:
            for role, own, versions in report.each_role():
                self._told[role] = self._told.get(role, 0) + 1
                self.versions.update(versions)
                if not own.segments and not versions and own.alive and own.stage == "startup":
                    self.starting.add(role)
        self._looked: tuple[int | None, _Availability] | None = None

    def _remembered(self) -> dict[int, set[str]]:
        """Role -> its segments, as all agents together know them."""
        known: dict[int, set[str]] = {}
        for report in self._reports.values():
            for segment, holders in report.segments.items():
                for role in holders:
                    known.setdefault(role, set()).add(segment)
        return known

    def _at(self, version: int | None) -> _Availability:
        """What is there of `version`, and on which nodes."""
        if self._looked is None or self._looked[0] != version:
            self._looked = version, self._look(version)
        return self._looked[1]

    def _look(self, version: int | None) -> _Availability:
        place, before = self._places.get, self._before.get
        sound = {name for at, names in self._alike.items() if version in at for name in names}
        elsewhere = self._moved | self._told.keys()
        at_home = {
            role
            for report in self._others
            for role, own, versions in report.each_role()
            if version in versions and own.segments and place(role) == report.node
            # Of what several tell, one may say that there is more.
            if self._told[role] == 1 and before(role) not in self._all_alike
        }
        rest = [
            role
            for role in self._roles
            if (place(role) not in sound or role in elsewhere) and role not in at_home
        ]
        segments = self._segments(rest)
        return _Availability(segments, self._holders(version, set(chain.from_iterable(segments.values()))))

    def _segments(self, roles: list[int]) -> dict[int, Collection[str]]:
        """The segments of some roles. Their own word on it is newer than what others remember of them."""
        found: dict[int, Collection[str]] = {}
        for role in roles:
            if (name := self._before.get(role)) is not None and name in self._all_alike:
                found[role] = self._reports[name].roles[role].segments
        wanted = self._told.keys() & roles
        for report in self._others if wanted else ():
            for role in wanted.intersection(report.roles):
                if own := report.roles[role].segments:
                    found[role] = {*found[role], *own} if role in found else own
        return {role: found.get(role) or self._catalogue.get(role, ()) for role in roles}

    def _holders(self, version: int | None, wanted: set[str]) -> dict[str, list[str]]:
        """The nodes that have each of some segments, in order."""
        nodes: dict[str, list[str]] = {segment: [] for segment in wanted}
        for name, report in self._reports.items() if wanted else ():
            here = wanted.intersection(report.replicas)
            if here and not all_have(report.copies_at, version):
                here = {segment for segment, at in report.each_copy() if segment in here and version in at}
            if report.has_all(version):
                assert report.ids is not None
                here |= wanted & report.ids
            elif report.ids is None or not wanted.isdisjoint(report.ids):
                for _, own, versions in report.each_role():
                    if version in versions:
                        here.update(wanted.intersection(own.segments))
            for segment in here:
                nodes[segment].append(name)
        return nodes

    def missing(self, version: int | None) -> list[tuple[int, str | None]]:
        """What is not held at `version`: role and segment; None of a role whose segments nobody knows."""
        there = self._at(version)
        lost: list[tuple[int, str | None]] = []
        for role, segments in there.segments.items():
            if not segments:
                lost.append((role, None))
            else:
                lost += ((role, segment) for segment in sorted(segments) if not there.holders[segment])
        return lost

    def losses(self, missing: list[tuple[int, str | None]]) -> tuple[Loss, ...]:
        """What is missing, with the versions that are held of each."""
        found: dict[str, set[int]] = {segment: set() for _, segment in missing if segment is not None}
        for report in self._reports.values() if found else ():
            for segment, versions in report.each_copy():
                if segment in found:
                    found[segment].update(versions)
            for _, own, versions in report.each_role():
                for segment in found.keys() & own.segments:
                    found[segment].update(versions)
        return tuple(
            Loss(role, segment, tuple(sorted(found[segment])) if segment is not None else ())
            for role, segment in missing
        )

    def sources(
        self, version: int, computed: Collection[int], adopters: Mapping[int, str]
    ) -> dict[int, dict[str, list[str]]]:
        """For each role and segment, the nodes to ask, fetches spread over them; but for roles that are
        `computed`, and those that have a snapshot on their own node."""
        asked: Counter[str] = Counter()
        there = self._at(version)
        sources: dict[int, dict[str, list[str]]] = {}
        turn = 0
        for role, segments in there.segments.items():
            own_node = self._places.get(role, "")
            if role in computed or self._has_snapshot(own_node, role, version):
                continue
            own_node = own_node or adopters.get(role, "")
            sources[role] = {}
            for segment in sorted(segments):
                nodes = some = there.holders[segment]
                if len(nodes) > _FEW:
                    some = [nodes[at % len(nodes)] for at in range(turn, turn + SOURCES)]
                    at = bisect_left(nodes, own_node)
                    if nodes[at : at + 1] == [own_node] and own_node not in some:
                        some.append(own_node)
                    turn += SOURCES
                order = sorted(some, key=lambda n: (n != own_node, asked[n], n))[:SOURCES]
                if order[0] != own_node:
                    asked[order[0]] += 1
                sources[role][segment] = order
        return sources

    def _has_snapshot(self, node: str, role: int, version: int) -> bool:
        home = self._reports.get(node)
        if home is None or role not in home.roles:
            return False
        return any(version in versions for each, _, versions in home.each_role() if each == role)


@dataclass(frozen=True)
class _Availability:
    """What is there of one version. `segments`: of the roles that are not known to be whole on their own
    nodes, in order; `holders`: of those segments, the nodes that have them, in order."""

    segments: dict[int, Collection[str]]
    holders: dict[str, list[str]]


def _explain(version: int | None, lost: Sequence[Loss], previous: Mapping[int, str]) -> str:
    goal = "no agent holds any version" if version is None else f"version {version} is not complete"
    lines = [
        f"  {loss}" + (f" (the role ran on {previous[loss.role]})" if loss.role in previous else "")
        for loss in lost[:_SHOWN]
    ]
    if len(lost) > _SHOWN:
        lines.append(f"  and {len(lost) - _SHOWN} more segments")
    return (
        f"No state that every role could go on from is left in memory ({goal}), and there is no durable "
        "checkpoint that can be read (a damaged one is named above). More failure domains were lost at once "
        "than --ft-replicas covers, or one before a step had copied what it had read of a checkpoint. Lost:\n"
        + "\n".join(lines)
    )
