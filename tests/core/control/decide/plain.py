"""The plain way to what the controller finds out by counting: role by role, anew each time. What it is
compared with."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from ft_core.control.decide.holdings import NodeReport
from ft_core.control.decide.records import Operations
from ft_core.control.decide.version_choice import _FEW, SOURCES, Choice, Loss, _explain
from ft_core.errors import Unrecoverable
from ft_core.protocol.groups import GroupId, parse, series_of
from ft_core.protocol.messages import Counts, NodeName


def choose_version(
    reports: Iterable[NodeReport],
    roles: Iterable[int],
    initial: int | None,
    durable: Collection[int],
    placements: Mapping[int, str] | None = None,
    previous: Mapping[int, str] | None = None,
    reached: int | None = None,
    catalogue: Mapping[int, Collection[str]] | None = None,
) -> Choice:
    """Choose the newest version that every role can have.

    `reports` come from all live agents, and only from them. `initial` is the version that start-up yields (0,
    or the iteration of the checkpoint that the job was started from); None if it cannot be repeated.
    `durable` are the complete durable checkpoints. `placements` (role -> node, from `assign`) says where each
    role goes on, `previous` where it was when the failure came: the one serves locality, the other messages.
    `reached` is the newest version that any role is known to have had (step tags): it keeps a job whose
    memory is all gone from starting silently from scratch.

    `catalogue` (role -> ids of its segments) is what the roles themselves have told since the job began;
    a role that is not in it never had a snapshot. Without it, the agents' `segments` together must name
    every segment of every role, also of the dead: the loss of a segment that nobody remembers could not
    be noticed. A role of which nothing is known counts as lost.

    Raises Unrecoverable, with what was lost, when neither memory nor start-up nor a checkpoint helps.
    """
    holdings = _Holdings(reports, catalogue)
    roles = sorted(roles)
    best: tuple[int, tuple[Loss, ...]] | None = None
    for version in sorted(holdings.versions | ({initial} if initial is not None else set()), reverse=True):
        lost = holdings.missing(version, roles)
        computed = {x.role for x in lost if version == initial and x.role in holdings.starting}
        lost = tuple(x for x in lost if x.role not in computed)
        if not lost and version >= max(durable, default=version):
            sources = holdings.sources(version, roles, computed, placements or {})
            return Choice(version, "initial" if computed else "memory", {r: {} for r in computed} | sources)
        if version in holdings.versions and (best is None or len(lost) < len(best[1])):
            best = (version, lost)

    newest = max([*holdings.versions, *durable, *([] if reached is None else [reached])], default=initial)
    if initial is not None and newest is not None and newest <= initial:
        computed = {x.role for x in holdings.missing(initial, roles)}
        sources = holdings.sources(initial, roles, computed, placements or {})
        return Choice(initial, "initial", {r: {} for r in computed} | sources)

    wanted, lost = best or (None, holdings.missing(None, roles))
    if durable:
        return Choice(max(durable), "durable", {r: {} for r in roles}, lost)
    raise Unrecoverable(_explain(wanted, lost, previous or {}))


class _Holdings:
    """The reports, looked at for one version at a time: what all hold is counted, and only what is not there,
    or not where it is needed, is looked for role by role."""

    def __init__(
        self, reports: Iterable[NodeReport], catalogue: Mapping[int, Collection[str]] | None
    ) -> None:
        self._reports = {report.node: report for report in sorted(reports, key=lambda r: r.node)}
        self.versions: set[int] = set()
        self.starting: set[int] = set()
        self._segments: Mapping[int, Collection[str]]
        known: dict[int, set[str]] = {}
        reported: dict[int, Collection[str]] = {}
        for report in self._reports.values():
            for role, own in report.roles.items():
                self.versions.update(own.versions)
                if own.segments:
                    before = reported.get(role)
                    reported[role] = own.segments if before is None else {*before, *own.segments}
                elif not own.versions and own.alive and own.stage == "startup":
                    self.starting.add(role)
            for versions in report.replicas.values():
                self.versions.update(versions)
            if catalogue is None:
                for segment, holders in report.segments.items():
                    for role in holders:
                        known.setdefault(role, set()).add(segment)
        # A role's own word on its segments is newer than what others remember of them.
        self._segments = {**(known if catalogue is None else catalogue), **reported}
        self._there: tuple[int | None, set[str], set[int]] = None, set(), set()

    def _at(self, version: int | None) -> tuple[set[str], set[int]]:
        """The segments that somebody has at `version`, and the roles of which somebody has a snapshot."""
        if version != self._there[0]:
            there: set[str] = set()
            whole: set[int] = set()
            for report in self._reports.values():
                for role, own in report.roles.items():
                    if version in own.versions:
                        there.update(own.segments)
                        if own.segments is self._segments.get(role):  # nobody says that there is more
                            whole.add(role)
                there.update(s for s, versions in report.replicas.items() if version in versions)
            self._there = version, there, whole
        return self._there[1:]

    def missing(self, version: int | None, roles: Iterable[int]) -> tuple[Loss, ...]:
        """What is not held at `version`."""
        lost: list[Loss] = []
        there, whole = self._at(version)
        for role in roles:
            if role in whole:
                continue
            segments = self._segments.get(role)
            if not segments:
                lost.append(Loss(role, None, ()))
                continue
            for segment in sorted(set(segments) - there):
                lost.append(Loss(role, segment, tuple(sorted(self._versions(segment)))))
        return tuple(lost)

    def _versions(self, segment: str) -> set[int]:
        """That are held of it."""
        found: set[int] = set()
        for report in self._reports.values():
            found.update(report.replicas.get(segment, ()))
            for own in report.roles.values():
                if segment in own.segments:
                    found.update(own.versions)
        return found

    def sources(
        self, version: int, roles: Iterable[int], computed: Collection[int], placements: Mapping[int, str]
    ) -> dict[int, dict[str, list[str]]]:
        """For each role and segment the nodes to ask, fetches spread over them; but for roles that are
        `computed`, and those that have a snapshot on their own node."""
        asked: Counter[str] = Counter()
        wanted = []
        for role in roles:
            home = self._reports.get(placements.get(role, ""))
            own = home.roles.get(role) if home is not None else None
            local = own is not None and version in own.versions
            if not local and role not in computed:
                wanted.append(role)
        holders = self._holders(version, {s for role in wanted for s in self._segments[role]})
        sources: dict[int, dict[str, list[str]]] = {}
        turn = 0
        for role in wanted:
            own_node = placements.get(role, "")
            sources[role] = {}
            for segment in sorted(self._segments[role]):
                nodes = some = holders[segment]
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

    def _holders(self, version: int, wanted: set[str]) -> dict[str, list[str]]:
        """Of some segments, the nodes that have them, in order."""
        nodes: dict[str, list[str]] = {segment: [] for segment in wanted}
        if not wanted:
            return nodes
        for name, report in self._reports.items():
            here = {s for s in wanted.intersection(report.replicas) if version in report.replicas[s]}
            for own in report.roles.values():
                if version in own.versions:
                    here.update(wanted.intersection(own.segments))
            for segment in here:
                nodes[segment].append(name)
        return nodes


def completed(counts: Iterable[tuple[int, Counts]]) -> Operations:
    """For each group how many start-up operations are done, and a role that has their record.

    `counts`: what roles have on record, of those that take part: one whose replica group leaves is about to
    lose its worker.
    """
    said = [(role, known) for role, known in counts if known]
    most: dict[str, int] = {}
    uneven = set()
    for name, count in set(chain.from_iterable(known.items() for _, known in said)):
        if name in most:
            uneven.add(name)
        most[name] = max(count, most.get(name, 0))
    holder: dict[str, int] = {}
    for role, known in reversed(said):
        holder.update(dict.fromkeys(known, role))
    for name in uneven:
        holder[name] = next(role for role, known in said if known.get(name) == most[name])
    return {name: (count, holder[name]) for name, count in sorted(most.items()) if count}


def operations_needed(
    done: Operations, counts: Iterable[tuple[int, Counts]], places: Mapping[int, NodeName]
) -> dict[NodeName, Operations]:
    """By node, the start-up operations of `done` in whose groups a role of its is that has not all on record
    (`counts`): nobody else asks for them."""
    own = {role: known for role, known in counts if role in places}
    have = Counter(chain.from_iterable(own.values()))
    said = set(chain.from_iterable(known.items() for known in own.values()))
    behind = {name for name, count in said if count < done.get(name, (0,))[0]}
    series = {name: series_of(parse(name)) for name in done}
    lacking = {
        which.group
        for name, which in series.items()
        if name in behind or have[name] < (2 if which.pair is not None else sum(map(len, which.group.runs)))
    }
    by_group: dict[GroupId, list[str]] = {}
    for name, which in series.items():
        if which.group in lacking:
            by_group.setdefault(which.group, []).append(name)
    needed: dict[NodeName, Operations] = {}
    nothing: Counts = {}
    for group, names in by_group.items():
        for role in (role for run in group.runs for role in run if role in places):
            known = own.get(role, nothing)
            mine = [name for name in names if (pair := series[name].pair) is None or role in pair]
            if any(known.get(name, 0) < done[name][0] for name in mine):
                needed.setdefault(places[role], {}).update((name, done[name]) for name in mine)
    return needed
