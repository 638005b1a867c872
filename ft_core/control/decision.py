"""What to do about a failure: the version everyone goes on from, and who plays the roles that were lost.

Pure functions on what the agents reported. `docs/recovery_rule.md` says why the rule is right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ft_core.errors import Unrecoverable

SOURCES = 8
"""Nodes that are named of all that have a segment."""
_FEW = 64
"""Of so many, the least asked are chosen; of more, the next ones."""
_SHOWN = 16
"""Lost segments that are named."""


@dataclass(frozen=True)
class RoleReport:
    """What an agent says about a role that is, or was, played on its node, once its worker is quiet or dead.

    `versions` are the complete local snapshots (all `segments` of the role) in the agent's memory; they
    outlive the worker. A worker in stage "startup" has not reached its first train step in this job.
    """

    role: int
    node: str
    alive: bool
    stage: Literal["startup", "training"]
    versions: tuple[int, ...]
    segments: tuple[str, ...]


class Held(Protocol):
    """A `RoleReport`, or a message that says the same."""

    @property
    def alive(self) -> bool:
        """Whether its worker lives."""

    @property
    def stage(self) -> Literal["startup", "training"]:
        """Of its worker."""

    @property
    def versions(self) -> Sequence[int]:
        """Complete local snapshots."""

    @property
    def segments(self) -> Sequence[str]:
        """Of each of them."""


@dataclass(frozen=True)
class NodeReport:
    """What a live agent holds.

    `replicas` maps a segment's id to the verified versions kept for other nodes. `segments` maps the id of
    every segment the agent knows of, its own or not, to the segment's holders.
    """

    node: str
    domain: str
    roles: Mapping[int, Held] = field(default_factory=dict)
    replicas: Mapping[str, Sequence[int]] = field(default_factory=dict)
    segments: Mapping[str, Sequence[int]] = field(default_factory=dict)


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
) -> Assignment:
    """Find workers for the `lost` roles: on other nodes than the `avoided` ones, and there if need be.

    As `_assign`.
    """
    willing = {node: count for node, count in idle.items() if node not in avoided}
    first = _assign(placements, willing, lost, capacity, copies)
    if not avoided or not first.unplaced:
        return first
    taken = Counter(first.roles[role] for role in lost if role in first.roles)
    left = {node: count - taken[node] for node, count in idle.items()}
    return _assign({**placements, **first.roles}, left, first.unplaced, capacity, copies)


def _assign(
    placements: Mapping[int, str],
    idle: Mapping[str, int],
    lost: Collection[int],
    capacity: int,
    copies: Mapping[int, Collection[str]] | None,
) -> Assignment:
    """Find workers for the `lost` roles.

    `placements`: role -> node before the failure. `idle`: workers without a role on each live node.
    `capacity`: roles that a node has devices for; an idle worker beyond it only stands in for one that
    crashed on its own node. A role goes back to its node while that has idle workers, for its state is in
    memory there. The roles of a dead node go together to one node if one has enough idle workers, else
    they are spread. Nodes that play no role come first, then those that play few; of equals, the one that
    has most `copies` (role -> nodes, one for each of its segments that a node holds), then the one that fits
    most tightly.
    """
    free = {node: count for node, count in idle.items() if count > 0}
    roles = dict(placements)
    for role in lost:
        roles.pop(role, None)
    groups: dict[str | None, list[int]] = {}
    for role in sorted(lost):
        home = placements.get(role)
        if home is not None and free.get(home, 0) > 0:
            free[home] -= 1
            roles[role] = home
        else:
            groups.setdefault(home, []).append(role)
    load = Counter(roles.values())
    free = {n: left for n, count in free.items() if (left := min(count, capacity - load[n])) > 0}

    unplaced: list[int] = []
    for group in sorted(groups.values(), key=lambda g: (-len(g), g)):
        pending = group
        while pending:
            near = Counter(node for role in pending for node in (copies or {}).get(role, ()))
            order = sorted(free, key=lambda n: (load[n], -near[n], free[n], n))
            whole = [n for n in order if free[n] >= len(pending)]
            if not order:
                break
            # Split over as few nodes as possible: those with most idle workers among the least loaded.
            node = whole[0] if whole else min(order, key=lambda n: (load[n], -free[n], -near[n], n))
            count = min(free[node], len(pending))
            roles |= dict.fromkeys(pending[:count], node)
            load[node] += count
            free[node] -= count
            if not free[node]:
                del free[node]
            pending = pending[count:]
        unplaced += pending
    return Assignment(roles, tuple(sorted(unplaced)))


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
