"""What to do about a failure: the version everyone goes on from, and who plays the roles that were lost.

Pure functions on what the agents reported. `docs/recovery_rule.md` says why the rule is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ft_core.errors import Unrecoverable


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

    `origin` "memory": `sources[role][segment]` lists nodes that hold it, the one to ask first at the front
    (the role's own node where it has a copy: restore locally). "initial": start-up computes the version;
    a role with sources restores, one with an empty mapping runs its script. "durable": everyone loads the
    durable checkpoint of that version; `lost` says why memory did not suffice.
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
    playing = Counter(roles.values())
    free = {node: min(count, capacity - playing[node]) for node, count in free.items()}

    unplaced: list[int] = []
    for group in sorted(groups.values(), key=lambda g: (-len(g), g)):
        pending = group
        while pending:
            load = Counter(roles.values())
            near = Counter(node for role in pending for node in (copies or {}).get(role, ()))
            order = sorted((n for n in free if free[n] > 0), key=lambda n: (load[n], -near[n], free[n], n))
            whole = [n for n in order if free[n] >= len(pending)]
            if not order:
                break
            # Split over as few nodes as possible: those with most idle workers among the least loaded.
            node = whole[0] if whole else min(order, key=lambda n: (load[n], -free[n], -near[n], n))
            count = min(free[node], len(pending))
            roles |= dict.fromkeys(pending[:count], node)
            free[node] -= count
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
        self._nodes: dict[tuple[str, int], list[str]] = {}
        self._held: dict[str, set[int]] = {}
        self._segments: dict[int, set[str]] = {}
        reported: dict[int, set[str]] = {}
        for report in sorted(reports, key=lambda r: r.node):
            copies: dict[str, set[int]] = {s: set(v) for s, v in report.replicas.items()}
            for segment, holders in report.segments.items():
                for role in holders:
                    self._segments.setdefault(role, set()).add(segment)
            for role_report in report.roles.values():
                if role_report.alive and role_report.stage == "startup" and not role_report.versions:
                    self.starting.add(role_report.role)
                if role_report.segments:
                    reported.setdefault(role_report.role, set()).update(role_report.segments)
                for segment in role_report.segments:
                    copies.setdefault(segment, set()).update(role_report.versions)
            for segment, versions in copies.items():
                self.versions |= versions
                self._held.setdefault(segment, set()).update(versions)
                for version in versions:
                    self._nodes.setdefault((segment, version), []).append(report.node)
        # A role's own word on its segments is newer than what others remember of them.
        if catalogue is not None:
            self._segments = {role: set(names) for role, names in catalogue.items()}
        self._segments |= reported

    def missing(self, version: int | None, roles: Iterable[int]) -> tuple[Loss, ...]:
        """What is not held at `version`."""
        lost = []
        for role in roles:
            segments = self._segments.get(role)
            if not segments:
                lost.append(Loss(role, None, ()))
                continue
            for segment in sorted(segments):
                if version is None or (segment, version) not in self._nodes:
                    lost.append(Loss(role, segment, tuple(sorted(self._held.get(segment, ())))))
        return tuple(lost)

    def sources(
        self, version: int, roles: Iterable[int], placements: Mapping[int, str]
    ) -> dict[int, dict[str, list[str]]]:
        """For each role and segment the nodes to ask, fetches spread over them."""
        asked: Counter[str] = Counter()
        sources: dict[int, dict[str, list[str]]] = {}
        for role in roles:
            home = placements.get(role)
            sources[role] = {}
            for segment in sorted(self._segments[role]):
                nodes = self._nodes[segment, version]
                order = sorted(nodes, key=lambda n: (n != home, asked[n], n))
                if order[0] != home:
                    asked[order[0]] += 1
                sources[role][segment] = order
        return sources


def _explain(version: int | None, lost: Iterable[Loss], previous: Mapping[int, str]) -> str:
    goal = "no agent holds any version" if version is None else f"version {version} is not complete"
    lines = [
        f"  {loss}" + (f" (the role ran on {previous[loss.role]})" if loss.role in previous else "")
        for loss in lost
    ]
    return (
        f"No state that every role could go on from is left in memory ({goal}), and there is no durable "
        "checkpoint. More failure domains were lost at once than --ft-replicas covers. Lost:\n"
        + "\n".join(lines)
    )
