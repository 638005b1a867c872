"""How to go on after an epoch has ended and all have reported: pure, from what is known.

`version_choice` and `role_placement` have the rules; here it is said to what they are applied.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ft_core.control.cluster.node import Node
from ft_core.control.cluster.state import ALL_IS_LOST, ClusterState
from ft_core.control.decide import role_placement, version_choice
from ft_core.control.decide.compact import contains
from ft_core.control.decide.groups import Places
from ft_core.control.decide.holdings import NodeReport, RoleHoldings
from ft_core.control.decide.ladder import Escalation, Rung
from ft_core.control.decide.outcomes import (
    AwaitStandby,
    ListCheckpoints,
    NextEpoch,
    NoStateLeft,
    NotEnoughWorkers,
    Outcome,
    RestartScripts,
    Sources,
)
from ft_core.errors import Unrecoverable
from ft_core.protocol.domains import SEPARATOR
from ft_core.protocol.messages import Origin, Redundancy, RoleHeld

Durable = Callable[[Collection[str]], Mapping[int, str] | None]
"""The durable checkpoints that these nodes can read, by version; None where that is not known yet."""


def decide(
    cluster: ClusterState,
    starting: Places,
    durable: Durable,
    standby_overdue: bool,
    avoided: Collection[str] = (),
    clears: bool = False,
    escalation: Escalation | None = None,
    faulted: Mapping[str, int] | None = None,
) -> Outcome:
    """What follows the epoch that has ended, once all have reported: the next one, what it has to wait for,
    or that nothing helps.

    `starting`: places of newcomers that are ready, of replica groups that come back or of roles that move.
    `durable`: the checkpoints that nodes can read. `standby_overdue`: the node of a worker that has crashed
    has had its time to bring up another. `avoided`: nodes that are used only where there is no other.
    `clears`: there will be more idle workers. `escalation`: why roles begin anew, if they do. `faulted`:
    nodes, and how many of their devices are used only where there is no other."""
    withdrawn = cluster.groups.withdrawn
    places = cluster.places
    if withdrawn:
        places = {role: node for role, node in places.items() if role not in withdrawn}
    moved = {role: node for role, node in starting.items() if role in places}
    lost = [role for role in cluster.lost() if role in places and role not in moved]
    idle = {name: node.idle for name, node in cluster.nodes.items()}
    near = cluster.catalogue.copies(_takers(cluster, places, lost), lost)
    placed = {**places, **starting} if starting else places  # all of them take room
    racks = {
        name: node.hello.domain for name, node in cluster.nodes.items() if SEPARATOR in node.hello.domain
    }
    capacity = cluster.settings.nproc_per_node
    assign = partial(role_placement.assign, placed, lost=lost, capacity=capacity, copies=near, domains=racks)
    others = {name: count for name, count in idle.items() if name not in cluster.draining}
    sound = _on_sound_devices(cluster, placed, lost, faulted or {})
    avoided = {*avoided, *(name for name, left in sound.items() if not left)}
    limited = {name: min(count, sound.get(name) or count) for name, count in others.items()}
    assignment = assign(idle=limited, avoided=avoided)
    if assignment.unplaced and limited != others:
        assignment = assign(idle=others, avoided=avoided)
    if assignment.unplaced and cluster.draining:  # none of those is given a role, but for its own
        own = Counter(places[role] for role in lost)
        idle = others | {name: min(idle[name], own[name]) for name in cluster.draining}
        avoided = set(avoided) - set(cluster.draining)
        assignment = assign(idle=idle, avoided=avoided)
    elif cluster.draining:
        avoided = {*avoided, *cluster.draining}
    roles = assignment.roles
    if joining := starting.keys() - places.keys():
        roles = {role: node for role, node in roles.items() if role not in joining}
    stay = (role for role in lost if places[role] not in avoided or role in assignment.unplaced)
    crashed = Counter(places[role] for role in stay if places[role] in idle)
    if any(idle[node] < count for node, count in crashed.items()) and not standby_overdue:
        return AwaitStandby()
    if assignment.unplaced and clears and not standby_overdue:
        return AwaitStandby()
    if assignment.unplaced:
        left = _without(cluster, roles, assignment.unplaced)
        if isinstance(left, NotEnoughWorkers):
            return left
        roles = left
    elif cluster.settings.policy == "shrink":
        roles = {**roles, **starting}

    def from_the_scripts_checkpoint(reason: str, *, there_is_one: bool) -> RestartScripts | NoStateLeft:
        if there_is_one and not cluster.groups.adopted(roles):
            return RestartScripts(reason, roles, lost)
        return NoStateLeft(reason, unrecoverable=True)

    try:
        if escalation is not None and escalation.rung is Rung.RESTART:
            stored = _from_storage(cluster, frozenset(roles.values()), durable, escalation)
            if stored is None:
                return from_the_scripts_checkpoint("To go on in place did not help.", there_is_one=True)
            chosen = stored
        else:
            chosen = _choose(cluster, roles, places, durable)
    except Unrecoverable as error:
        return from_the_scripts_checkpoint(str(error), there_is_one=cluster.script.resumes)
    if isinstance(chosen, ListCheckpoints):
        return chosen
    if chosen.version is not None and chosen.version < cluster.script.start_version:
        reason = (
            "The script, started again, begins with its own checkpoint of step "
            f"{cluster.script.start_version}, and the newest state that every role could go on from is of "
            f"step {chosen.version}."
        )
        return from_the_scripts_checkpoint(reason, there_is_one=True)
    if chosen.origin == "initial" and (bare := _never_copied(cluster, roles, chosen.sources)):
        if bare <= set(assignment.unplaced):
            return NotEnoughWorkers(sorted(bare), "what they have alone has not been copied yet")
        return NoStateLeft(f"what roles {sorted(bare)} had alone is lost; start the job again")
    joined = roles.keys() - places.keys()
    newcomers = sorted({role for role in (*lost, *moved) if role in roles} | joined)
    found = durable(set(roles.values())) or {} if chosen.origin == "durable" else {}
    name = found.get(chosen.version, "") if chosen.version is not None else ""
    return NextEpoch(roles, chosen.version, chosen.origin, chosen.sources, newcomers, name)


def _on_sound_devices(
    cluster: ClusterState, places: Places, lost: Collection[int], faulted: Mapping[str, int]
) -> dict[str, int]:
    """How many roles there is room for on the sound devices of each node that has failed ones."""
    stay = Counter(places[role] for role in places.keys() - set(lost)) if faulted else Counter[str]()
    capacity = cluster.settings.nproc_per_node
    return {name: max(0, capacity - devices - stay[name]) for name, devices in faulted.items()}


def _takers(cluster: ClusterState, places: Places, lost: Collection[int]) -> Iterator[Node]:
    """The nodes that have room for roles."""
    capacity, hosts, homes = (
        cluster.settings.nproc_per_node,
        cluster.roles_by_node,
        {places[role] for role in lost},
    )
    for name, node in cluster.nodes.items():
        if name in homes or len(hosts.get(name, ())) < capacity or cluster.groups.withdrawn:
            yield node


def can_be_spared(cluster: ClusterState, name: str) -> bool:
    """Whether the other nodes hold what the job would go on from, or nobody does: by their heartbeats."""

    def suffice(nodes: Iterable[Node]) -> bool:
        reports = [_as_of_beats(node, cluster) for node in nodes]
        try:
            choice = version_choice.choose_version(
                reports,
                cluster.places,
                cluster.versions.initial,
                durable=(),
                reached=cluster.versions.newest_seen,
                catalogue=cluster.catalogue.by_role,
            )
        except Unrecoverable:
            return False
        return not older_than_promised(cluster, choice.version)

    nodes = cluster.nodes.values()
    return suffice(node for node in nodes if node.name != name) or not suffice(nodes)


def _as_of_beats(node: Node, cluster: ClusterState) -> NodeReport:
    """What it holds now: it has reported when the epoch before ended."""
    known = node.holdings.report
    roles: dict[int, RoleHoldings] = {
        role: RoleHeld(own.alive, own.stage, list(versions), list(own.segments))
        for role, own, versions in known.each_role()
    }
    for role, beat in node.beats.items():
        segments = list(cluster.catalogue.of(role))
        roles[role] = RoleHeld(alive=True, stage="training", versions=beat.held, segments=segments)
    copies = {**dict(known.each_copy()), **node.replicas}
    return NodeReport(node.name, node.hello.domain, roles, copies)


def older_than_promised(cluster: ClusterState, version: int | None) -> bool:
    """Whether more finished steps would be done again than copies allow for."""
    return (
        cluster.versions.initial is not None
        and (version or 0) < cluster.versions.newest_seen - cluster.redone
    )


@dataclass(frozen=True)
class _Choice:
    version: int | None
    origin: Origin
    sources: Sources


def _choose(
    cluster: ClusterState, roles: Places, places: Places, durable: Durable
) -> _Choice | ListCheckpoints:
    """What to go on from. Raises Unrecoverable."""
    nodes = frozenset(roles.values())
    if cluster.versions.initial is None:
        return _as_begun(cluster, nodes, durable)
    known, adopted = _segments(cluster, roles, places), cluster.groups.adopted(roles)
    choose = partial(
        version_choice.choose_version,
        [node.holdings.report for node in cluster.nodes.values()],
        [*roles, *adopted],
        cluster.versions.initial,
        placements=roles,
        previous=cluster.places,
        reached=cluster.versions.newest_seen,
        catalogue=known,
        adopters={role: roles[by] for role, by in adopted.items()},
    )
    right = None if cluster.versions.tainted is None else cluster.versions.tainted - 1  # nothing newer is
    known_alike = (version for version in (cluster.versions.verified, right) if version is not None)
    choice, newest = None, min(known_alike, default=None)
    with contextlib.suppress(Unrecoverable):
        choice = choose(durable=(), newest=newest)
    if choice is None and newest != right:  # what was not compared is better than nothing
        newest = right
        with contextlib.suppress(Unrecoverable):
            choice = choose(durable=(), newest=newest)
    # Storage is asked only where memory does not suffice, or may have less than was promised: of copies that
    # are left over from former places, where perhaps nobody is left who knows how far others have come.
    if (
        choice is None
        or choice.origin != "memory"
        or older_than_promised(cluster, choice.version)
        or cluster.nodes.keys().isdisjoint(cluster.roles_by_node)
    ):
        if (found := _durable(cluster, nodes, durable)) is None:
            return ListCheckpoints(nodes)
        choice = choose(durable=found, newest=newest)
        script = cluster.script
        if choice.origin == "initial" and script.started_from[1] == "durable" and script.resumes:
            # Scripts that were to go on from it have left out what they would have loaded by themselves.
            raise Unrecoverable(_all_are_damaged(cluster))
    sources = dict(choice.sources)
    for role in adopted:  # without what its adopter has anyway
        sources[role] = {s: where for s, where in sources[role].items() if s in known[role]}
    return _Choice(choice.version, choice.origin, sources)


def _as_begun(cluster: ClusterState, nodes: frozenset[str], durable: Durable) -> _Choice | ListCheckpoints:
    """Nobody who is left has ever reached training: start-up goes on towards what it was begun with."""
    version, origin = cluster.script.started_from
    if cluster.all_is_lost:
        if (found := _durable(cluster, nodes, durable)) is None:
            return ListCheckpoints(nodes)
        if not found:
            raise Unrecoverable(ALL_IS_LOST)
        return _Choice(max(found), "durable", {})
    if origin == "initial" and cluster.nodes.keys().isdisjoint(
        cluster.roles_by_node
    ):  # they may have trained, unheard
        if (found := _durable(cluster, nodes, durable)) is None:
            return ListCheckpoints(nodes)
        if found:
            return _Choice(max(found), "durable", {})
    if origin == "durable":
        # Unless the newest has turned out to be damaged, the same again.
        if (found := _durable(cluster, nodes, durable)) is None:
            return ListCheckpoints(nodes)
        if not found:
            raise Unrecoverable(_all_are_damaged(cluster))
        version = max(found)
    return _Choice(version, origin, {})


def _from_storage(
    cluster: ClusterState, nodes: frozenset[str], durable: Durable, escalation: Escalation
) -> _Choice | ListCheckpoints | None:
    """The newest durable checkpoint, if one is to be used; None: what scripts begin with by themselves."""
    if escalation.skip_durable:
        return None
    if (found := _durable(cluster, nodes, durable)) is None:
        return ListCheckpoints(nodes)
    if not found and cluster.begins_with_durable:
        raise Unrecoverable(_all_are_damaged(cluster))
    return _Choice(max(found), "durable", {}) if found else None


def _all_are_damaged(cluster: ClusterState) -> str:
    return (
        f"Every durable checkpoint in {cluster.settings.durable_dir} is damaged (see the errors above), or "
        "no longer there: is the directory mounted on every node? Nothing has been trained since. To start "
        "without a checkpoint, give another directory."
    )


def _durable(cluster: ClusterState, nodes: frozenset[str], durable: Durable) -> Mapping[int, str] | None:
    return durable(nodes) if cluster.settings.durable_dir else {}


def _segments(cluster: ClusterState, roles: Places, places: Places) -> Mapping[int, Collection[str]]:
    """What each role's state consists of; of those that are away, what they had alone."""
    joining, away = roles.keys() - places.keys(), cluster.groups.adopted(roles)
    if not joining and not away:
        return cluster.catalogue.by_role
    known: dict[int, Collection[str]] = dict(cluster.catalogue.by_role)
    # Of a group that comes back, or takes part for the first time.
    for role, counterpart in cluster.groups.counterparts(joining, places).items():
        if cluster.groups.redundancy is Redundancy.REPLICATED:
            known[role] = known[counterpart]
        else:
            common = cluster.catalogue.by_role[counterpart].items()
            known[role] = {*known.get(role, ()), *(name for name, held in common if contains(held, role))}
    for role in away:
        known[role] = cluster.groups.held_alone(role, cluster.catalogue.of(role), roles)
    return known


def _never_copied(cluster: ClusterState, roles: Places, sources: Sources) -> set[int]:
    """Roles that are away, and began with the job, of whose state nobody has a copy.

    Those that were missing from the start have theirs made by the roles that adopt it.
    """
    began = set(cluster.settings.start.present)
    return {role for role in cluster.groups.adopted(roles) if role in began and not sources.get(role)}


def _without(cluster: ClusterState, placed: Places, unplaced: Sequence[int]) -> Places | NotEnoughWorkers:
    """Policy `shrink`: the roles that go on without the groups of those that have no place."""
    lacking = list(unplaced)
    if cluster.settings.policy != "shrink":
        return NotEnoughWorkers(lacking)
    left, reason = cluster.groups.without(placed, unplaced)
    if left:
        return left
    combine = {role: placed[role] for role in cluster.groups.to_combine(placed, unplaced)}
    return NotEnoughWorkers(lacking, reason, combine)


def newest_in_memory(cluster: ClusterState, places: Places) -> tuple[int, Sources] | None:
    """The newest version that the nodes hold together, and what those at `places` (role -> node) would have
    to fetch; None where scripts begin with it anyway. Raises Unrecoverable if they hold none."""
    chosen = _choose(cluster, places, cluster.places, lambda _: {})
    if isinstance(chosen, ListCheckpoints) or chosen.origin != "memory" or chosen.version is None:
        return None
    return chosen.version, chosen.sources
