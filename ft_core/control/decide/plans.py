"""Plans: the controller's truth about an epoch, and what of it one agent and one role must know."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable
from itertools import chain, filterfalse

from msgspec.structs import replace

from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide import compact
from ft_core.control.decide.groups import Places, by_node
from ft_core.control.decide.outcomes import NextEpoch
from ft_core.control.decide.records import Records
from ft_core.protocol import messages as m
from ft_core.protocol.table import placed


def make(cluster: ClusterState, start: NextEpoch, name: str, job: str) -> m.Plan:
    """The next epoch's. `name`: the plan's id."""
    ordered = sorted(start.roles)
    lead = cluster.nodes[start.roles[ordered[0]]].holdings
    version = start.version or 0
    return m.Plan(
        id=name,
        epoch=cluster.epoch,
        job=job,
        roles=start.roles if ordered == list(start.roles) else {r: start.roles[r] for r in ordered},
        nodes={name: node.address for name, node in cluster.nodes.items()},
        store=lead.store,
        master=lead.master,
        version=start.version,
        origin=start.origin,
        durable=start.durable,
        sources={role: held for role, held in start.sources.items() if held},
        completed=dict(cluster.records.done()),
        parts=cluster.script.parts,
        script_resumes=cluster.script.resumes,
        restart_epoch=cluster.script.restart_epoch,
        counterparts=compact.counterparts(cluster.groups.absent(start.roles)),
        adopting=cluster.groups.adopting,
        newcomers=sorted(start.newcomers),
        groups=cluster.groups.value(),
        catalogue=cluster.catalogue.packed(),
        initial_version=cluster.versions.initial,
        newest_seen=cluster.versions.newest_seen,
        attempts_without_progress=cluster.setbacks.attempts_without_progress,
        progress_mark=cluster.setbacks.progress_mark,
        escalation_level=cluster.setbacks.escalation_level,
        furthest_step=cluster.setbacks.furthest_step,
        # A job does not tell what was trained before a durable checkpoint: that may be another job's.
        ledger_through=min(cluster.versions.ledger_through, version) if start.origin == "memory" else version,
        started_from=cluster.script.started_from,
        begun_from=cluster.script.begun_from,
        left=cluster.versions.left,
        every=_every(cluster, version),
    )


def _every(cluster: ClusterState, version: int) -> int:
    """Steps from a protected version to the next. As long as steps are done again, no fewer than they were
    done with before: by this number workers know how many of them others may have logged."""
    every, before = cluster.settings.period(cluster.every), cluster.plan
    if before is not None and version < cluster.versions.newest_seen:
        every = max(every, cluster.settings.period(before.every))
    return every


def own_plans(cluster: ClusterState, plan: m.Plan) -> dict[m.NodeName, m.OwnPlan]:
    """What single nodes must know."""
    known, without = cluster.records.roles, set(plan.newcomers) - cluster.records.roles
    if len(known) + len(without) < len(plan.roles) + len(plan.absent):
        without = set(filterfalse(known.__contains__, chain(plan.roles, plan.absent)))
    needed = cluster.records.needed(plan.roles, without)
    hosts = ChainMap(plan.roles, {r: plan.roles[by] for r, by in plan.adopted.items()})
    sources: dict[m.NodeName, dict[int, dict[str, list[str]]]] = {}
    for role, held in plan.sources.items():
        if role in hosts:
            sources.setdefault(hosts[role], {})[role] = held
    away: dict[m.NodeName, dict[int, list[str]]] = {}
    for role, other in sorted(plan.absent.items()):
        if other in hosts:
            away.setdefault(hosts[other], {})[role] = list(cluster.catalogue.of(role))
    return {
        name: m.OwnPlan(plan.id, sources.get(name, {}), away.get(name, {}), needed.get(name, {}))
        for name in dict.fromkeys(chain(sources, away, needed))
    }


def kept(state: m.JobState, hosts: Iterable[m.Host]) -> m.Plan:
    """What an agent has kept, with the nodes that are there now. Of what roles are to do it says nothing."""
    roles, nodes = placed(hosts)
    known = {name: getattr(state, name) for name in m.JobState.__struct_fields__}
    return m.Plan(**known, roles=roles, nodes=nodes, sources={}, completed={})


def prepare(plan: m.Plan, roles: Places, records: Records) -> dict[str, m.Prepare]:
    """What the nodes are told where `roles` (role -> node) start while all train: to come back, or to move.

    `records`: of those who train.
    """
    surrogates = compact.counterparts({role: plan.absent.get(role, role) for role in roles})
    others = compact.counterparts({role: other for role, other in plan.absent.items() if role not in roles})
    needed = records.needed(roles, plan.absent.keys())
    for role in roles.keys() - plan.absent.keys():  # its worker of now has all on record, the next nothing
        needed.setdefault(roles[role], {}).update(records.of_groups_with(role))
    return {
        name: m.Prepare(plan.epoch, starting, others, surrogates, needed.get(name, {}))
        for name, starting in by_node(roles).items()
    }


def nodes_changed(cluster: ClusterState) -> tuple[m.Plan, m.NodesChanged] | None:
    """Whether nodes without a role have come or gone since the plan: it as it is now, and what to tell."""
    plan, hosts = cluster.current_plan, cluster.roles_by_node
    here = {node.name: node.address for node in cluster.nodes.values() if node.name != cluster.departing}
    changes: dict[str, m.NodeAddress | None] = {
        name: about for name, about in here.items() if plan.nodes.get(name) != about
    }
    changes |= dict.fromkeys(set(plan.nodes) - set(here) - hosts.keys())
    if not changes:
        return None
    merged = {**plan.nodes, **changes}
    nodes = {name: about for name, about in merged.items() if about is not None}
    return replace(plan, nodes=nodes), m.NodesChanged(id=plan.id, nodes=changes)
