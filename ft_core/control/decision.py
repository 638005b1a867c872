"""What to do about a failure: the version everyone goes on from, and who plays the roles that were lost.

Pure functions on what the agents reported. `docs/recovery_rule.md` says why the rule is right.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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


@dataclass(frozen=True)
class NodeReport:
    """What a live agent holds.

    `replicas` maps a segment's id to the verified versions kept for other nodes. `segments` maps the id of
    every segment the agent knows of, its own or not, to the segment's holders.
    """

    node: str
    domain: str
    roles: Mapping[int, RoleReport] = field(default_factory=dict)
    replicas: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
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
    the role's own node where it has a copy, and no other where it has a snapshot of the role. "initial":
    start-up computes the version; a role with sources restores, one with an empty mapping runs its script.
    "durable": everyone loads the durable checkpoint of that version; `lost` says why memory did not suffice.
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
            sources = holdings.sources(version, [r for r in roles if r not in computed], placements or {})
            return Choice(version, "initial" if computed else "memory", {r: {} for r in computed} | sources)
        if version in holdings.versions and (best is None or len(lost) < len(best[1])):
            best = (version, lost)

    newest = max([*holdings.versions, *durable, *([] if reached is None else [reached])], default=initial)
    if initial is not None and newest is not None and newest <= initial:
        computed = {x.role for x in holdings.missing(initial, roles)}
        sources = holdings.sources(initial, [r for r in roles if r not in computed], placements or {})
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
    roles = {r: n for r, n in placements.items() if r not in lost}
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
    """The reports, indexed by what is asked of them."""

    def __init__(
        self, reports: Iterable[NodeReport], catalogue: Mapping[int, Collection[str]] | None
    ) -> None:
        self.versions: set[int] = set()
        self.starting: set[int] = set()
        self._nodes: dict[int, dict[str, list[str]]] = {}
        """Version -> segment -> nodes that hold it, each once."""
        self._snapshots: dict[tuple[int, str], Collection[int]] = {}
        """Role and node -> its versions there."""
        self._segments: dict[int, Collection[str]]
        known: dict[int, set[str]] = {}
        reported: dict[int, Collection[str]] = {}
        for report in sorted(reports, key=lambda r: r.node):
            node = report.node
            for role, own in report.roles.items():
                if own.alive and own.stage == "startup" and not own.versions:
                    self.starting.add(role)
                if own.segments:
                    reported[role] = {*reported.get(role, ()), *own.segments}
                self._snapshots[role, node] = own.versions
                for version in own.versions:
                    self._hold(version, own.segments, node)
            for segment, versions in report.replicas.items():
                for version in versions:
                    self._hold(version, (segment,), node)
            if catalogue is None:
                for segment, holders in report.segments.items():
                    for role in holders:
                        known.setdefault(role, set()).add(segment)
        # A role's own word on its segments is newer than what others remember of them.
        self._segments = {**(known if catalogue is None else catalogue), **reported}

    def _hold(self, version: int, segments: Iterable[str], node: str) -> None:
        if (there := self._nodes.get(version)) is None:
            there = self._nodes[version] = {}
            self.versions.add(version)
        for segment in segments:
            nodes = there.get(segment)
            if nodes is None:
                there[segment] = [node]
            elif nodes[-1] != node:
                nodes.append(node)

    def missing(self, version: int | None, roles: Iterable[int]) -> tuple[Loss, ...]:
        """What is not held at `version`."""
        lost: list[Loss] = []
        there = {} if version is None else self._nodes.get(version, {})
        for role in roles:
            segments = self._segments.get(role)
            if not segments:
                lost.append(Loss(role, None, ()))
            elif not all(segment in there for segment in segments):
                for segment in sorted(set(segments) - there.keys()):
                    held = sorted(v for v, found in self._nodes.items() if segment in found)
                    lost.append(Loss(role, segment, tuple(held)))
        return tuple(lost)

    def sources(
        self, version: int, roles: Iterable[int], placements: Mapping[int, str]
    ) -> dict[int, dict[str, list[str]]]:
        """For each role and segment the nodes to ask, fetches spread over them."""
        asked: Counter[str] = Counter()
        sources: dict[int, dict[str, list[str]]] = {}
        turn = 0
        for role in roles:
            home = placements.get(role, "")
            if version in self._snapshots.get((role, home), ()):
                sources[role] = {segment: [home] for segment in sorted(self._segments[role])}
                continue
            sources[role] = {}
            for segment in sorted(self._segments[role]):
                nodes = some = self._nodes[version][segment]
                if len(nodes) > _FEW:
                    some = [nodes[at % len(nodes)] for at in range(turn, turn + SOURCES)]
                    at = bisect_left(nodes, home)
                    if nodes[at : at + 1] == [home] and home not in some:
                        some.append(home)
                    turn += SOURCES
                order = sorted(some, key=lambda n: (n != home, asked[n], n))[:SOURCES]
                if order[0] != home:
                    asked[order[0]] += 1
                sources[role][segment] = order
        return sources


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
        "checkpoint. More failure domains were lost at once than --ft-replicas covers. Lost:\n"
        + "\n".join(lines)
    )
