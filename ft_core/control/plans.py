"""Plans: the controller's truth about an epoch, and what of it one agent and one role must know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

from msgspec.structs import replace

from ft_core.control.deciding import Start
from ft_core.control.facts import Facts, Operations
from ft_core.protocol.groups import GroupId, parse, series_of
from ft_core.protocol.messages import (
    BeganWith,
    Counts,
    Host,
    JobState,
    NodeAddress,
    NodeName,
    NodesChanged,
    OwnPlan,
    Plan,
    PlanId,
    Prepare,
    SharedPlan,
    WorkerPlan,
)
from ft_core.protocol.table import placed
from ft_core.settings import Settings


def make(facts: Facts, start: Start, done: Operations, name: str, job: str) -> Plan:
    """The next epoch's. `done`: the start-up operations of those who take part; `name`: the plan's id."""
    lead = facts.nodes[start.roles[min(start.roles)]].holdings
    return Plan(
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
        sources={role: held for role, held in start.sources.items() if held},
        completed=dict(done),
        parts=facts.parts,
        resumes=facts.resumes,
        started_over=facts.started_over,
        absent=facts.groups.absent(start.roles),
        adopted=facts.groups.adopted(start.roles),
        newcomers=sorted(start.lost),
        groups=facts.groups.value(),
        catalogue=facts.compact_catalogue(),
        initial=facts.initial,
        reached=facts.reached,
        futile=facts.futile,
        goal=facts.goal,
        start=facts.start,
    )


def worker_plan(state: JobState, settings: Settings) -> WorkerPlan:
    """What each role must know that takes part, but for what it has not on record."""
    start = settings.start
    return WorkerPlan(
        epoch=state.epoch,
        store=state.store,
        version=state.version,
        origin=state.origin,
        completed={},
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


def own_plans(facts: Facts, plan: Plan, counts: Iterable[tuple[int, Counts]]) -> dict[NodeName, OwnPlan]:
    """What single nodes must know. `counts`: what those who take part have on record."""
    needed = operations_needed(plan.completed, counts, plan.roles)
    hosts: dict[int, NodeName] = {r: plan.roles[by] for r, by in plan.adopted.items()} | plan.roles
    sources: dict[NodeName, dict[int, dict[str, list[str]]]] = {}
    for role, held in plan.sources.items():
        if role in hosts:
            sources.setdefault(hosts[role], {})[role] = held
    away: dict[NodeName, dict[int, list[str]]] = {}
    for role, other in sorted(plan.absent.items()):
        if other in hosts:
            away.setdefault(hosts[other], {})[role] = list(facts.catalogue.get(role, ()))
    return {
        name: OwnPlan(plan.id, sources.get(name, {}), away.get(name, {}), needed.get(name, {}))
        for name in {*sources, *away, *needed}
    }


def shared_plan(
    plan: Plan, settings: Settings, base: PlanId, gone: list[NodeName], changed: list[Host]
) -> SharedPlan:
    """What all nodes must know that have the plan `base`; those that have none, with the plan's own id."""
    kept = JobState(**{name: getattr(plan, name) for name in JobState.__struct_fields__})
    return SharedPlan(base, gone, changed, worker_plan(plan, settings), kept)


def kept(state: JobState, hosts: Iterable[Host]) -> Plan:
    """What an agent has kept, with the nodes that are there now. Of what roles are to do it says nothing."""
    roles, nodes = placed(hosts)
    known = {name: getattr(state, name) for name in JobState.__struct_fields__}
    return Plan(**known, roles=roles, nodes=nodes, sources={}, completed={})


def prepare(
    state: Plan, settings: Settings, roles: Mapping[int, str], done: Operations
) -> dict[str, Prepare]:
    """What the nodes are told where `roles` (role -> node) start, to come back while others train.

    `done`: the start-up operations of those who train.
    """
    worker = replace(
        worker_plan(state, settings),
        origin="memory",
        ahead={role: state.absent[role] for role in roles},
        absent={role: other for role, other in state.absent.items() if role not in roles},
    )
    needed = operations_needed(done, (), roles)
    return {
        name: Prepare(
            epoch=state.epoch,
            roles=sorted(r for r in roles if roles[r] == name),
            worker=replace(worker, completed=needed.get(name, {})),
        )
        for name in set(roles.values())
    }


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


def nodes_changed(facts: Facts) -> tuple[Plan, NodesChanged] | None:
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
