"""A controller that was restarted: what it asks for, and what it finds."""

from __future__ import annotations

from collections.abc import Collection

from ft_core.control.cluster_state import ClusterState, epoch_of
from ft_core.control.events import Effect, Send
from ft_core.control.observe.goodput import Found
from ft_core.control.phases import Missing, Rebuilding
from ft_core.control.progress import Progress
from ft_core.protocol.messages import Plan, SendState
from ft_core.state.placement import Places, all_left, spares_of

GRACE = 1.5
"""Seconds that the nodes of the plan have to come, once the first has told of it."""
QUIET = 1.0
"""Seconds without news that they are waited for in any case; or as long as it took the others to come, which
is longer where there are thousands of them."""
REPEAT = 1.0
"""Seconds after which another is asked for the plan."""


def newest(cluster: ClusterState) -> int:
    """The epoch of the newest plan that a node has begun."""
    return max((epoch_of(node.greeted_with) for node in cluster.nodes.values()), default=0)


def ask(cluster: ClusterState, phase: Rebuilding, now: float) -> list[Effect]:
    """Ask one of those who have begun the newest plan what it is."""
    if now - phase.asked_at < REPEAT:
        return []
    there = [node for node in cluster.nodes.values() if epoch_of(node.greeted_with) == phase.newest]
    asked = there[phase.asked % len(there)]
    phase.asked_at, phase.asked = now, phase.asked + 1
    return [Send(asked.peer, SendState())]


def found(cluster: ClusterState, progress: Progress) -> Found:
    """How far the epoch under way is."""
    plan, nodes = cluster.current_plan, cluster.nodes_with_roles()
    base = (cluster.initial_version or 0) if plan.version is None else plan.version
    versions = [v for node in nodes for held in node.holdings.roles.values() for v in held.versions]
    step = max((beat.step_s for node in nodes for beat in node.beats.values()), default=0.0)
    newest = max([base, *versions])
    return Found(
        epoch=plan.epoch,
        base=base,
        version=newest,
        restored=progress.all_restored,
        share=share(cluster),
        step=step,
        stepped=progress.all_stepped or newest > base,
    )


def share(cluster: ClusterState) -> float:
    """The share of the replica groups that takes part."""
    return len(cluster.places) / cluster.settings.world_size


def complete(cluster: ClusterState, phase: Rebuilding, arriving: int, now: float) -> bool:
    """Whether it has heard from everybody, spares with their copies included, or it is clear who does not
    come."""
    missing = cluster.current_plan.nodes.keys() - cluster.nodes.keys()
    if not missing:
        return True
    quiet, limit = now - phase.heard_at, cluster.settings.silence_limit
    waits = arriving and quiet <= limit
    rest = max(QUIET, min(phase.heard_at - phase.began, limit))
    if waits or now - phase.began <= GRACE or quiet <= min(rest, limit):
        return False
    if phase.missing is None or phase.missing.names != missing:
        phase.missing = Missing(missing, _all_left(cluster, missing))
    return quiet > (rest if phase.missing.covered else limit)


def _all_left(cluster: ClusterState, missing: Collection[str]) -> bool:
    """Whether what these nodes had is on others as well: else something would be lost without them."""
    plan, settings = cluster.current_plan, cluster.settings
    domains = {name: where.domain for name, where in plan.nodes.items()}
    places = Places(plan.roles, domains, spares_of(plan.nodes, plan.roles), settings.guarded)
    return all_left(places, missing, settings.replicas)


def unbegun(cluster: ClusterState, plan: Plan) -> bool:
    """Whether a node has yet to begin the plan: what its roles go on from only the former controller knew."""
    return any(node.applied_plan != plan.id for node in cluster.nodes_with_roles())


def dead(cluster: ClusterState, plan: Plan) -> list[int]:
    """Roles without a worker. Nodes that have not begun the plan are sent it, and give its newcomers some."""
    behind = {node.name for node in cluster.nodes.values() if node.applied_plan != plan.id}
    given = {role for role in plan.newcomers if plan.roles.get(role) in behind}
    return [role for role, node in plan.roles.items() if role not in given and not cluster.alive(role, node)]
