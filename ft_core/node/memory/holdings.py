"""What a node could give to a recovery, and where its workers are: read from memory, put into messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from ft_core.node.memory.view import View
from ft_core.node.workers.worker_table import WorkerTable
from ft_core.protocol import messages as m
from ft_core.protocol.groups import runs_of, text_of

K = TypeVar("K")


def roles_held(here: Iterable[int], crew: WorkerTable, view: View) -> dict[int, m.RoleHeld]:
    """What is held of the roles that are `here`, by the plan."""
    found = {}
    for role in here:
        worker = crew.of_role(role)
        found[role] = m.RoleHeld(
            alive=worker is not None,
            stage=worker.stage if worker else "startup",
            versions=view.versions(role),
            segments=[segment.id for segment in view.segments(role)],
            counts=worker.counts if worker else {},
        )
    return found


def copies_held(
    here: Iterable[int], view: View
) -> tuple[dict[m.SegmentId, list[m.Version]], dict[m.SegmentId, m.Holders]]:
    """Segment -> the versions that this node has of what is not its own roles'; and all holders known here.

    What it has kept for others, what it holds of roles that were here, and what its roles have adopted.
    """
    holders = {segment.id: segment.held_by for role in here for segment in view.segments(role)}
    replicas = view.replicas()
    for name in replicas:
        if found := view.holders(name):
            holders[name] = text_of(runs_of(found))
    elsewhere = sorted(set(view.roles(adopted=False)) - set(here))
    memories = [(role, False) for role in elsewhere] + [(role, True) for role in view.roles(adopted=True)]
    for role, adopted in memories:
        for segment in view.segments(role, adopted):
            kept = {*replicas.get(segment.id, []), *view.versions(role, adopted)}
            replicas[segment.id] = sorted(kept)
            holders[segment.id] = segment.held_by
    return replicas, holders


def changed(before: m.Holdings | None, now: m.Holdings, number: int) -> m.HoldingsChanged:
    """What is otherwise than it was said last, `before`: everything, where that is None. `number`: of such
    reports over this connection."""
    roles: dict[m.Role, m.RoleHeld] | list[tuple[m.Version, ...]] = now.roles
    replicas: dict[m.SegmentId, list[m.Version]] | list[tuple[m.Version, ...]] = now.replicas
    if before is not None and _but_for_versions(before.roles) == _but_for_versions(now.roles):
        roles = _versions({role: held.versions for role, held in now.roles.items()})
    if before is not None and list(before.replicas) == list(now.replicas):
        replicas = _versions(now.replicas)
    return m.HoldingsChanged(
        number=number,
        epoch=now.epoch,
        begun=now.begun,
        reported=now.reported,
        parts=now.parts,
        idle=now.idle,
        roles=roles,
        replicas=replicas,
        segments=None if before is not None and before.segments == now.segments else now.segments,
    )


def more_than_versions(report: m.HoldingsChanged) -> bool:
    """Whether it says what a node holds of other roles or segments than before."""
    return isinstance(report.roles, dict) or isinstance(report.replicas, dict) or report.segments is not None


def _but_for_versions(roles: Mapping[m.Role, m.RoleHeld]) -> list[tuple[object, ...]]:
    return [(role, h.alive, h.stage, h.segments, h.counts) for role, h in roles.items()]


def _versions(held: Mapping[K, list[m.Version]]) -> list[tuple[m.Version, ...]]:
    each = list(map(tuple, held.values()))
    return each[:1] if all(one == each[0] for one in each) else each


def beats(crew: WorkerTable, view: View) -> dict[m.Role, m.RoleBeat]:
    """How far the workers that have roles have come."""
    found = {}
    ready = {worker.target_role: worker.pid for worker in crew.ahead() if worker.is_ready}
    for worker in crew.playing():
        words, (sent, snapshots) = view.words(worker.number), view.sent(worker.role)
        found[worker.role] = m.RoleBeat(
            pid=worker.pid,
            step=words.version,
            tag=words.tag,
            held=view.versions(worker.role),
            committed=worker.committed,
            step_s=words.step_s,
            waited_s=words.waited_s,
            h2h_bytes=sent,
            h2h_snapshots=snapshots,
            own_s=words.own_s,
            data_s=words.data_s,
            loss=words.loss,
            ready=ready.get(worker.role, 0),
            passed=words.passed,
            copy_s=worker.copy_s,
        )
    return found


def role_state(role: int, crew: WorkerTable, view: View) -> m.RoleState:
    """A role's segments and what protecting them has taken so far, for `ftctl plan`."""
    worker = crew.of_role(role)
    return m.RoleState(
        role=role,
        segments=[segment.layout for segment in view.segments(role)],
        ring=worker.ring if worker else [],
        step_seconds=view.words(worker.number).step_s if worker else 0.0,
        bytes_per_second=view.bandwidth(),
    )
