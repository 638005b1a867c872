"""What the controller says to the person who has to do something."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide.durable_names import Checkpoints
from ft_core.control.decide.ladder import Escalation, Rung
from ft_core.control.decide.outcomes import NextEpoch, NoStateLeft, NotEnoughWorkers, Outcome
from ft_core.control.liveness.strikes import TRIES
from ft_core.protocol.messages import FailureRecord, Fault, WorkerLost
from ft_core.settings import SAVED, Settings

_FRAMES = re.compile(r'^  File ".*\n(?:    .*\n)*', re.M)
"""The frames of a traceback."""


_SHOWN = 16
"""How many roles or nodes are named, of many."""


def some(names: Sequence[object]) -> str:
    """All, or the first of very many and how many there are besides."""
    shown = ", ".join(map(str, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


A_PROGRAM = "it is a program of its own (--no-python)"


def unprotected(why: str) -> str:
    """Nothing of what the script does is kept."""
    return f"this job is not protected: {why}; a failure costs all that its script has not saved itself"


def script_error(lost: WorkerLost, job_dir: str) -> str:
    """What a worker has raised. The traceback is in its log, and shown from there."""
    short = _FRAMES.split(lost.traceback)[-1].rstrip()
    if short != lost.traceback.rstrip():
        short += f"\nIts traceback is in {job_dir}/logs/role-{lost.role}/stderr.log"
    return short


def avoided(place: str, strikes: int, last: FailureRecord, settings: Settings) -> str:
    """A node has failed as often as makes it one to be avoided, or has a device that is condemned."""
    why = f"has failed {strikes} times within {settings.strike_minutes:g} min"
    if last.fault is Fault.DEVICE_CONDEMNED:
        why = f"has a device{f' ({last.device})' * (last.device >= 0)} to be repaired, {last.signature}"
    if last.fault is Fault.SLOW:
        why = f"is taken out, as role {last.role} was slow there"
    return (
        f"node {place} {why}: it is not used "
        f"while there is another. Look at it (ftctl nodes), then: ftctl nodes forgive {place}"
    )


def in_vain(cluster: ClusterState, reason: str, roles: Iterable[int]) -> str:
    """Recoveries that lead nowhere. `reason`: of the last failure; `roles`: those that were lost in it."""
    mark = cluster.setbacks.progress_mark
    text = f"{TRIES} recoveries in a row without a new step after step {mark}; the last failure: {reason}"
    for role in roles:
        places = cluster.strikes.everywhere(role, mark)
        if len(places) > 1:
            text += (
                f"\nRole {role} has failed in this step on each of the nodes {', '.join(places)}: that is "
                "not the nodes' fault, but that of its data, or of the code for what it plays."
            )
    return text


def begins_anew(escalation: Escalation, reason: str, settings: Settings) -> str:
    """Which rung of the ladder is next, and why."""
    what = reason.splitlines()[0]
    if escalation.rung is Rung.SOME:
        return f"roles {sorted(escalation.roles)} begin anew, from memory, as they never meet again: {what}"
    if escalation.rung is Rung.ALL:
        return f"all roles begin anew, from memory, for to go on in place does not help: {what}"
    return (
        f"all scripts are started again, from the newest checkpoint (restart {escalation.restarts} of "
        f"{settings.max_restarts} without a new step, --max-restarts): {what}"
    )


def shortage(cluster: ClusterState, found: NotEnoughWorkers) -> tuple[str, list[str]]:
    """What to say where there are too few workers; and the lost nodes, if that is why."""
    nodes = sorted({cluster.places[role] for role in found.roles} - set(cluster.nodes))
    what = f"no worker for roles [{some(found.roles)}] (lost nodes: {some(nodes) or 'none'})"
    return what + (f", and the job cannot shrink: {found.reason}" if found.reason else ""), nodes


def loses(outcome: Outcome) -> str:
    """What it would cost to go on without the nodes that are out of sight."""
    if isinstance(outcome, NextEpoch):
        return f"the job goes back to version {outcome.version}"
    return "the memory of the others does not suffice"


def how_to_join(cluster: ClusterState) -> str:
    """The command for another node."""
    return f"ftrun --join {cluster.settings.meeting} --job-dir {cluster.job_dir}"


def what_is_left(cluster: ClusterState) -> str:
    """What the job has left to go on from, while it waits for nodes."""
    if any(cluster.alive(role, node) for role, node in cluster.places.items()):
        return "survivors hold their state until a node joins"
    left = "no node is left" if not cluster.nodes else "no node with a role is left"
    if cluster.script.resumes or cluster.settings.durable_dir:
        return f"{left}; once nodes join, the job goes on from what others hold, or its newest checkpoint"
    if cluster.versions.initial is None or cluster.versions.newest_seen <= cluster.versions.initial:
        return f"{left}; no step was done yet, and the job begins once nodes join"
    return f"{left}, and no checkpoint: what other nodes hold may suffice, else start the job again"


def missing_at_the_start(ranks: Sequence[int]) -> str:
    """Nodes of these ranks are missing, and there are no spares for them."""
    return f"the job waits to begin: there is no node of rank {some(ranks)}, and no spare for it"


def the_end(cluster: ClusterState, outcome: NoStateLeft, unread: Iterable[str]) -> str:
    """Nothing helps. `unread`: why checkpoints cannot be read."""
    if not outcome.unrecoverable:
        return outcome.reason
    advice = (
        "it goes on from the newest checkpoint of the script's own."
        if cluster.script.resumes or cluster.script.start_version
        else "with checkpoints of its script's own that it resumes from (Megatron-LM's --save), or else with "
        "--ft-durable-interval, it will have something to fall back to."
    )
    problems = [f"\nCheckpoints cannot be read: {why}" for why in unread]
    return "".join([outcome.reason, *problems, f"\nStart the job again; {advice}"])


def lacking(cluster: ClusterState, checkpoints: Checkpoints, nodes: Collection[str]) -> str:
    """These nodes do not see the newest durable checkpoint that others see."""
    newest, where = checkpoints.newest, cluster.settings.durable_dir
    others = sorted(node for node, names in checkpoints.names.items() if newest in names)
    return (
        f"durable checkpoint {newest} in {where} is seen by nodes {some(others)}, and not by nodes "
        f"{some(sorted(nodes))}: mount there what {where} lies on, or, to go on without that checkpoint, "
        "move it elsewhere"
    )


def storage_hangs(cluster: ClusterState, nodes: Sequence[str]) -> str:
    """These nodes do not say which durable checkpoints there are."""
    return (
        f"the job waits for nodes {some(nodes)} to read {cluster.settings.durable_dir}, which does not "
        "answer there: see to its storage, or end those nodes"
    )


def of_other_sizes(cluster: ClusterState, sizes: Collection[int]) -> str:
    """There are durable checkpoints, and none that this job can read."""
    return (
        f"the durable checkpoints in {cluster.settings.durable_dir} are of {some(sorted(sizes))} roles, and "
        f"this job has {cluster.settings.world_size}: none of them is used. To go on from them start it with "
        "as many"
    )


def place_of_last_version(cluster: ClusterState) -> str:
    """Where the newest version of a job that ends is written."""
    return cluster.settings.durable_dir or f"{cluster.job_dir}/{SAVED}"


def saved(cluster: ClusterState, version: int, name: str) -> str:
    """Where the newest version is, and how to go on from it."""
    where = f"step {version:,} is saved, in {place_of_last_version(cluster)}/{name}"
    if cluster.settings.durable_dir:
        return (
            f"{where}. To go on from there, start the same command again (in a new --job-dir, if it has one)"
        )
    return (
        f"{where}, as there is no --ft-durable-dir. To go on from there, start the same command again with "
        f"--ft-durable-dir {place_of_last_version(cluster)} (in a new --job-dir, if it has one)"
    )


def not_saved(cluster: ClusterState, why: str) -> str:
    """What to say where the newest version could not be saved."""
    before = "the one before" if cluster.redone == 1 else f"one up to {cluster.redone:,} before"
    text = f"the newest version, of step {cluster.versions.newest_seen:,} or {before}, is not saved: {why}"
    if where := cluster.settings.durable_dir:
        text += f". What was complete in {where} before is as it was: the same command goes on from there"
    return text
