"""Plans: the controller's truth about an epoch, and what of it one agent and one role must know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from ft_core.control.deciding import Start
from ft_core.control.facts import Facts, Operations
from ft_core.protocol import codec
from ft_core.protocol.messages import (
    BeganWith,
    JobState,
    KeptState,
    NodeAddress,
    NodePlan,
    NodesChanged,
    Prepare,
    WorkerPlan,
)
from ft_core.settings import Settings


def state(facts: Facts, start: Start, done: Operations, name: str, job: str) -> JobState:
    """The next epoch's. `done`: the start-up operations of those who take part; `name`: the plan's id."""
    lead = facts.nodes[start.roles[min(start.roles)]].holdings
    return JobState(
        id=name,
        epoch=facts.epoch,
        job=job,
        roles=dict(sorted(start.roles.items())),
        nodes={node.name: node.address for node in facts.nodes.values()},
        store=lead.store,
        master=lead.master,
        version=start.version,
        origin=start.origin,
        durable=start.durable,
        sources=start.sources,
        completed=dict(done),
        parts=facts.parts,
        resumes=facts.resumes,
        started_over=facts.started_over,
        absent=facts.groups.absent(start.roles),
        adopted=facts.groups.adopted(start.roles),
        newcomers=sorted(start.lost),
        groups=facts.groups.value(),
        catalogue=dict(facts.catalogue),
        initial=facts.initial,
        reached=facts.reached,
        futile=facts.futile,
        goal=facts.goal,
        start=facts.start,
    )


def worker_plan(state: JobState, settings: Settings) -> WorkerPlan:
    """What each role must know that takes part."""
    start = settings.start
    return WorkerPlan(
        epoch=state.epoch,
        store=state.store,
        version=state.version,
        origin=state.origin,
        completed=state.completed,
        parts=state.parts,
        started_over=state.started_over,
        absent=state.absent,
        adopted=state.adopted,
        newcomers=state.newcomers,
        membership=state.groups.membership,
        policy=settings.policy,
        lr_intervention=settings.lr_intervention,
        began_with=BeganWith(roles=start.roles, stages=start.stages, there=start.there),
    )


def node_plan(state: JobState, roles: Iterable[int], settings: Settings, encoded: msgspec.Raw) -> NodePlan:
    """What the agent of a node with these roles must know. `encoded`: the state, as it was when its epoch
    began."""
    here = set(roles)
    here |= {role for role, adopter in state.adopted.items() if adopter in here}
    away = {role for role, other in state.absent.items() if other in here}
    return NodePlan(
        id=state.id,
        epoch=state.epoch,
        job=state.job,
        roles=state.roles,
        nodes=state.nodes,
        master=state.master,
        durable=state.durable,
        sources={role: held for role in sorted(here) if (held := state.sources.get(role)) is not None},
        away={role: list(state.catalogue.get(role, ())) for role in sorted(away)},
        worker=worker_plan(state, settings),
        state=encoded,
    )


def encode(state: JobState) -> msgspec.Raw:
    """A plan's state as JSON, made once for all nodes."""
    return msgspec.Raw(codec.encode(state))


def kept(message: KeptState) -> JobState:
    """The state that an agent has kept, with the nodes that are there now."""
    return replace(message.state, nodes=message.nodes)


def prepare(
    state: JobState, settings: Settings, roles: Mapping[int, str], done: Operations
) -> dict[str, Prepare]:
    """What the nodes are told where `roles` (role -> node) start, to come back while others train.

    `done`: the start-up operations of those who train.
    """
    worker = replace(
        worker_plan(state, settings),
        origin="memory",
        ahead={role: state.absent[role] for role in roles},
        completed=done,
        absent={role: other for role, other in state.absent.items() if role not in roles},
    )
    return {
        name: Prepare(epoch=state.epoch, roles=sorted(r for r in roles if roles[r] == name), worker=worker)
        for name in set(roles.values())
    }


def nodes_changed(facts: Facts) -> tuple[JobState, NodesChanged] | None:
    """Whether nodes without a role have come or gone since the plan: it as it is now, and what to tell."""
    state, hosts = facts.begun, facts.hosts
    here = {node.name: node.address for node in facts.nodes.values()}
    changes: dict[str, NodeAddress | None] = {
        name: about for name, about in here.items() if state.nodes.get(name) != about
    }
    changes |= dict.fromkeys(set(state.nodes) - set(here) - hosts.keys())
    if not changes:
        return None
    merged = {**state.nodes, **changes}
    nodes = {name: about for name, about in merged.items() if about is not None}
    return replace(state, nodes=nodes), NodesChanged(id=state.id, nodes=changes)
