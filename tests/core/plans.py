"""Plans as a controller might send them, of jobs that are only said to be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ft_core.control.decide import compact
from ft_core.control.decide.groups import Groups
from ft_core.protocol import messages as m
from ft_core.protocol.table import pieces
from ft_core.settings import Settings


def worker_plan(epoch: int = 1, **more: Any) -> m.WorkerPlan:
    """Of a job of two nodes with a role each, at its start."""
    found = m.WorkerPlan(
        epoch=epoch,
        store="127.0.0.1:3",
        version=None,
        origin="initial",
        completed={},
        parts=[],
        restart_epoch=0,
        counterparts=m.Counterparts(()),
        adopting=False,
        newcomers=[],
        membership=m.MembershipChanges(0),
        policy="wait",
        lr_intervention="sqrt",
        snapshot="lean",
        began_with=m.BeganWith(2, 1, 2),
        ledger_through=0,
        every=1,
    )
    if "absent" in more:
        more["counterparts"] = compact.counterparts(more.pop("absent"))
    return msgspec.structs.replace(found, **more)


def job_plan(roles: dict[int, str], epoch: int = 1, **more: Any) -> m.Plan:
    """Of a job with these roles on these nodes, at its start."""
    found = m.Plan(
        id=f"{epoch}-x",
        epoch=epoch,
        job="job",
        roles=roles,
        nodes={name: m.NodeAddress(data="127.0.0.1:1", domain=name) for name in roles.values()},
        store="127.0.0.1:3",
        master="127.0.0.1:4",
        version=None,
        origin="initial",
        durable="",
        sources={},
        completed={},
        parts=[],
        script_resumes=False,
        restart_epoch=0,
        counterparts=m.Counterparts(()),
        adopting=False,
        newcomers=[],
        groups=m.ReplicaGroups([], m.Redundancy.SHARDED, m.MembershipChanges(0)),
        catalogue=m.Catalogue([], {}),
        initial_version=None,
        newest_seen=0,
        attempts_without_progress=0,
        progress_mark=0,
        escalation_level=0,
        furthest_step=0,
        ledger_through=0,
        every=1,
        started_from=(None, "initial"),
        begun_from="",
        left=[],
    )
    return msgspec.structs.replace(found, **more)


def plan(epoch: int = 1, **more: Any) -> m.NodePlan:
    """What `node0` must know of a job of two roles, one a node."""
    roles = more.pop("roles", {0: "node0", 1: "node1"})
    nodes = {f"node{n}": m.NodeAddress(f"127.0.0.1:{20 + n}", f"node{n}") for n in range(3)}
    if "absent" in more:
        more["counterparts"] = compact.counterparts(more.pop("absent"))
    return msgspec.structs.replace(node_plan(job_plan(roles, epoch, nodes=nodes)), **more)


def node_plan(plan: m.Plan) -> m.NodePlan:
    """What each node must know of it, but for what is its own."""
    state = {name: getattr(plan, name) for name in m.JobState.__struct_fields__}
    return m.NodePlan(**state, roles=plan.roles, nodes=plan.nodes, sources={}, away={}, completed={})


def messages_of(plan: m.NodePlan) -> list[m.ToAgent]:
    """How it is sent to a node that knows of no plan."""
    own = m.OwnPlan(plan.id, plan.sources, plan.away, plan.completed)
    shared = m.SharedPlan(plan.id, [], [], plan.state)
    return [*pieces(plan), own, shared]


def plan_of(
    settings: Settings, roles: dict[int, str], segment: Callable[[int], str], master: str
) -> m.NodePlan:
    """A plan that a job with these settings may have begun with; `segment`: what a role holds alone."""
    found = job_plan(
        roles,
        id="1-1",
        job="1",
        master=master,
        groups=Groups(settings.start).value(),
        catalogue=compact.catalogue({role: {segment(role): str(role)} for role in roles}),
        initial_version=0,
    )
    return node_plan(found)
