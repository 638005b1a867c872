"""What `ftctl plan` says of a planned job: figures for programs, the same as text, and what will not work."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ft_core.cli.planner import terms, worth
from ft_core.cli.planner.razor import Plan
from ft_core.cli.planner.shape import PlannedJob
from ft_core.cli.planner.survival import failure_probability, loss_bound, recovery_probability
from ft_core.state import exposure

HOURS = 12
"""The time for which FFTrainer gives its recovery probability."""
_BOUND = ", at line rate: a bound, give --measured"


def figures_of(args: argparse.Namespace, job: PlannedJob, found: Plan) -> dict[str, Any]:
    """All that is worked out. Raises ConfigError for a measurement that cannot be read."""
    hosts = job.hosts
    figures: dict[str, Any] = {
        "pipeline_stage": found.stage,
        "tensors": [asdict(row) for row in found.rows],
        "nodes": hosts.nodes,
        "spares": hosts.spares,
        "state_bytes_per_rank": found.nbytes,
        "unique_bytes_per_rank": found.unique,
        "sent_bytes_per_rank_and_step": found.sent_per_rank,
        "sent_bytes_per_node_and_step": found.sent_per_node,
        "received_bytes_per_node_and_step": found.received_per_node,
        "snapshot_bytes_per_rank": found.snapshots_per_rank,
        "host_memory_bytes_per_node": found.memory_per_node,
        "replicas": hosts.replicas,
        "survives": found.survives,
        "segments_by_domains": {str(k): v for k, v in found.copies.items()},
        "segments_redundant_in_one_domain_only": found.same_domain,
    }
    step = args.step_seconds
    if not step and args.device_tflops and found.tokens:
        step = found.compute_seconds(args.device_tflops * 1e12)
    if step:
        figures["step_seconds"] = step
    network = terms.network_rate(args.measured, args.interfaces, args.network_gbps)
    if network is not None:
        figures["network_bytes_per_second"] = network.value
        figures["network_rate_is_a_bound"] = network.bound
        figures["transfer_seconds"] = found.transfer_seconds(network.value)
        if step:
            figures |= _pace(args, job, found, network, step)
    rates = terms.Rates(
        network,
        terms.Rate(args.device_rate * terms.GB or terms.PCIE, bound=not args.device_rate),
        terms.Rate(args.host_rate * terms.GB or terms.CHECKSUM, bound=not args.host_rate),
    )
    figures["snapshot_seconds"] = rates.device.seconds(found.nbytes)
    figures["device_rate_is_a_bound"] = rates.device.bound
    start_up: float | None = args.start_up_seconds
    parts = terms.recovery(found.state_per_node, found.nbytes, rates, start_up, step or None)
    figures["recovery"] = _whole(parts)
    if hosts.guarded:
        figures["recovery_of_a_guarded_node"] = _whole(terms.guarded(parts))
    figures["guarded_nodes"] = hosts.guarded
    figures |= _racks(job)
    if args.mtbf_hours:
        if found.sent_per_rank and found.survives >= hosts.replicas:
            figures["recovery_probability_12h"] = recovery_probability(
                hosts.nodes, hosts.nproc_per_node, args.mtbf_hours, HOURS, hosts.replicas
            )
        if step:
            lost = failure_probability(hosts.nproc_per_node, args.mtbf_hours, step)
            figures["loss_probability_bound_per_step"] = loss_bound(found.copies, lost)
    figures["economics"] = worth.figures_of(args, job, found, figures)
    figures["objections"] = _objections(args, job, found, figures)
    return figures


def _whole(parts: list[terms.Term]) -> dict[str, Any]:
    taken, complete = terms.total(parts)
    return {"seconds": taken, "complete": complete, "terms": [asdict(part) for part in parts]}


def _pace(
    args: argparse.Namespace, job: PlannedJob, found: Plan, network: terms.Rate, step: float
) -> dict[str, Any]:
    """Whether copies keep up with the steps."""
    ratio = found.free_checkpointing_ratio(step, network.value)
    sent = max(found.sent_per_node, found.received_per_node)
    pace: dict[str, Any] = {
        "free_checkpointing_ratio": None if math.isinf(ratio) else ratio,
        "steps_per_version": terms.versions_apart(sent, network, step) if sent else 1,
        "every_step_waits_seconds": terms.steps_wait(sent, network, step),
    }
    if sent and job.tokens and not args.step_seconds:  # the step is as long as its tokens take
        pace["least_tokens_per_step"] = math.ceil(job.tokens / ratio)
    return pace


def _racks(job: PlannedJob) -> dict[str, Any]:
    """What the loss of a rack would cost."""
    hosts = job.hosts
    levels = exposure.levels(hosts.places, hosts.replicas)
    if not levels:
        return {}
    rack, nested = levels[-1], hosts.places.nested
    assert nested is not None
    worst = 0
    for name, nodes in nested.domains(nested.levels - 2).items():
        elsewhere = sum(nested.at(spare, nested.levels - 2) != name for spare in hosts.spare_nodes)
        worst = max(worst, len(nodes) - elsewhere)
    return {
        "rack": {
            "racks": len(rack.names),
            "nodes": rack.nodes,
            "roles": rack.roles,
            "at_risk": rack.at_risk,
            "spares_lacking": max(0, worst),
            "found": exposure.sentence(levels, hosts.replicas)[1],
        }
    }


def _objections(args: argparse.Namespace, job: PlannedJob, found: Plan, figures: dict[str, Any]) -> list[str]:
    """Where it will not work, or not well, and what to do about it."""
    lines, replicas, spares = [], job.hosts.replicas, job.hosts.spares
    if found.survives < replicas:
        lines.append(
            f"{replicas} lost domains cannot be survived: there are {job.hosts.failure_domains}, each "
            f"segment needs {replicas + 1}. Use more nodes or spares, or a smaller --ft-replicas."
        )
    room = args.node_memory_gb * terms.GB
    if room and found.memory_per_node > room:
        lines.append(
            f"a node has {size(room)}, and its snapshots and copies alone take "
            f"{size(found.memory_per_node)}: use more nodes, fewer roles on each, or a smaller --ft-replicas."
        )
    if (every := figures.get("steps_per_version", 1)) > 1:
        tokens = figures.get("least_tokens_per_step")
        larger = f"; or steps of {tokens:,} tokens or more" if tokens else ""
        sending, step = seconds(figures["transfer_seconds"]), seconds(figures["step_seconds"])
        lines.append(
            f"copies take {sending} and a step {step}: a version is protected every {every} steps "
            f"(--ft-every auto), and a failure may cost {2 * every - 1}; with --ft-every 1 every step waits "
            f"{seconds(figures['every_step_waits_seconds'])}. Or use a faster network{larger}."
        )
    if not spares:
        lines.append(
            "there is no spare: the job waits for a node in place of a lost one, or goes on with fewer "
            "replica groups (--ft-policy shrink). Give --spares."
        )
    if rack := figures.get("rack"):
        if rack["at_risk"] and replicas:
            lines.append(f"{rack['found']}. Then the newest durable checkpoint counts.")
        if rack["spares_lacking"] and spares:
            lines.append(
                f"the loss of a rack takes {rack['nodes']} nodes with {rack['roles']} roles, and {spares} "
                f"spare{_s(spares)} cannot take them all: {rack['spares_lacking']} more in other racks would."
            )
    return lines


def text(job: PlannedJob, found: Plan, figures: dict[str, Any], price: float = 0.0) -> str:
    """The figures for people. `price`: of a device and hour."""
    hosts = job.hosts
    lines = [
        f"{hosts.nodes} node{_s(hosts.nodes)} of {hosts.nproc_per_node} roles, {hosts.spares} spare"
        f"{_s(hosts.spares)}. State of a role of pipeline stage {found.stage}, the heaviest (data parallel "
        f"{job.data_parallel}):",
        "",
    ]
    columns = ("parameters", "weights", "main params", "optimizer", "unique")
    lines.append(f"{'':<20}" + "".join(f"{c:>13}" for c in columns))
    for row in found.rows:
        sizes = (row.weights, row.main, row.optimizer, row.unique)
        lines.append(f"{row.tensor:<20}{row.parameters:>13,}" + "".join(f"{size(s):>13}" for s in sizes))
    total = [sum(getattr(r, a) for r in found.rows) for a in ("weights", "main", "optimizer", "unique")]
    parameters = sum(r.parameters for r in found.rows)
    lines += [f"{'total':<20}{parameters:>13,}" + "".join(f"{size(s):>13}" for s in total), ""]

    def say(what: str, value: str) -> None:
        lines.append(f"{what:<52}{value}")

    share = f"{size(found.unique)} of {size(found.nbytes)} ({found.unique / found.nbytes:.0%})"
    say("unique state per role", share)
    what = f"for {hosts.replicas} lost domain{_s(hosts.replicas)}"
    say(f"sent per step {what}, busiest role", size(found.sent_per_rank))
    say(f"sent per step {what}, busiest node", size(found.sent_per_node))
    say(f"received per step {what}, busiest node", size(found.received_per_node))
    say("host memory: two snapshots per role", size(found.snapshots_per_rank))
    say("host memory: per node, with two replica slots", size(found.memory_per_node))
    say(
        "memory: each --ft-ready-standbys, as a worker",
        f"{size(found.nbytes)}, gradients, weights if left out",
    )
    bound = _BOUND.replace("--measured", "--device-rate") * figures["device_rate_is_a_bound"]
    say("time to copy a role's state to its host", seconds(figures["snapshot_seconds"]) + bound)
    _say_pace(say, figures)
    say("survives, from memory", f"any {found.survives} lost node{_s(found.survives)} at once")
    if rack := figures.get("rack"):
        say("of racks", rack["found"] or "no copies are kept")
    if "recovery_probability_12h" in figures:
        value = figures["recovery_probability_12h"]
        say(f"memory suffices for {HOURS} h without repair", f"{value:.6f} (FFTrainer, eq. 3-5)")
    if "loss_probability_bound_per_step" in figures:
        value = figures["loss_probability_bound_per_step"]
        say("chance of loss per step, at most", f"{value:.2g} (DeadPool, eq. 1)")
    guarded = hosts.guarded
    if guarded < hosts.nodes:
        which = "" if not guarded else f" ({hosts.nodes - guarded} of {hosts.nodes} nodes)"
        lines += _recovery(f"the recovery from a lost node{which}", figures["recovery"])
    if guarded:
        what = f"the recovery from a lost node that a spare guards ({guarded} of {hosts.nodes})"
        lines += _recovery(what, figures["recovery_of_a_guarded_node"])
    lines += worth.lines(figures["economics"], price)
    lines += [f"\nWARNING: {each}" for each in figures["objections"]]
    if found.same_domain:
        lines.append(
            f"\nNote: {found.same_domain} segments are held by several roles, but in too few failure domains "
            "to count as redundant; they are replicated like unique state. Spreading data-parallel peers "
            "over more nodes saves that traffic."
        )
    return "\n".join(lines)


def _say_pace(say: Callable[[str, str], None], figures: dict[str, Any]) -> None:
    """Lines on whether copies keep up."""
    if "transfer_seconds" not in figures:
        if "step_seconds" in figures:
            say("time of a step", seconds(figures["step_seconds"]))
        return
    bound = _BOUND if figures["network_rate_is_a_bound"] else ", as measured"
    rate = f"at {size(figures['network_bytes_per_second'])}/s a node"
    say("time to send", f"{seconds(figures['transfer_seconds'])} {rate}{bound}")
    if "step_seconds" not in figures:
        return
    say("time of a step", seconds(figures["step_seconds"]))
    ratio, every = figures["free_checkpointing_ratio"], figures["steps_per_version"]
    if ratio is None:
        say("free-checkpointing ratio (FFTrainer, eq. 2)", "nothing is sent")
        return
    at_best = "at best " if figures["network_rate_is_a_bound"] else ""
    verdict = "hidden behind the step" if ratio >= 1 else "longer than the step"
    say("free-checkpointing ratio (FFTrainer, eq. 2)", f"{at_best}{ratio:.2f}: {verdict}")
    often = "in every step" if every == 1 else f"every {every} steps, if steps are not to wait"
    say("a version can be protected", f"{at_best}{often} (N = {every})")


def _recovery(what: str, found: dict[str, Any]) -> list[str]:
    """A line for each term."""
    least = "" if found["complete"] else "at least "
    lines = ["", f"{what + ': ':<52}{least}{seconds(found['seconds'])}"]
    for term in found["terms"]:
        value = "unknown" if term["seconds"] is None else seconds(term["seconds"])
        notes = [term["note"]] * bool(term["note"]) + ["a bound"] * term["bound"]
        lines.append(f"  {term['name']:<50}{value}" + f" ({'; '.join(notes)})" * bool(notes))
    return lines


def size(nbytes: float) -> str:
    """Decimal units, as networks and memory vendors count."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def seconds(value: float) -> str:
    """With three digits."""
    return f"{value:.3g} s" if value >= 1 or not value else f"{value * 1e3:.3g} ms"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
