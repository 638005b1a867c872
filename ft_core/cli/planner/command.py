"""`ftctl plan`: what protecting a job costs and what it survives, from its flags, without running it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ft_core.cli.planner.razor import Plan, plan, summarise
from ft_core.cli.planner.shape import DataParallel, Framework, Hosts, PlannedJob, Storage
from ft_core.cli.planner.survival import failure_probability, loss_bound, recovery_probability
from ft_core.errors import ConfigError
from ft_core.protocol.messages import Host, RoleDescribed
from ft_core.protocol.table import placed
from ft_core.settings import SNAPSHOTS
from ft_core.state.manifest import Segment
from ft_core.state.placement import Places, replica_nodes, sender, spares_of

HOURS = 12
"""The time for which FFTrainer gives its recovery probability."""


def add_arguments(parser: argparse.ArgumentParser, frameworks: Iterable[Framework]) -> None:
    """Flags of frameworks have the names that they have there, so that a job's command line can be pasted."""
    job = parser.add_argument_group("job")
    job.add_argument("--world-size", type=int, default=0, metavar="N")
    job.add_argument("--nproc-per-node", type=int, default=8, metavar="N")
    job.add_argument(
        "--parameters", type=int, default=0, metavar="N", help="of a model that every role has whole"
    )
    job.add_argument("--global-batch-size", type=int, default=0, metavar="N", help="sequences a step")
    job.add_argument("--seq-length", type=int, default=0, metavar="N", help="tokens of a sequence")
    job.add_argument("--optimizer", choices=["adam", "sgd"], default="adam")
    precision = job.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true")
    precision.add_argument("--fp16", action="store_true")
    for framework in frameworks:
        framework.add_arguments(parser)

    ours = parser.add_argument_group("fault tolerance")
    ours.add_argument("--role", type=int, default=0, metavar="R", help="of a running job (with --job-dir)")
    ours.add_argument(
        "--ft-replicas", type=int, default=1, metavar="K", help="domains that may be lost at once"
    )
    ours.add_argument("--spares", type=int, default=0, metavar="N", help="nodes that stand by")
    ours.add_argument("--ft-snapshot", choices=SNAPSHOTS, default=SNAPSHOTS[0], help="as of ftrun")
    ours.add_argument("--nodes-per-domain", type=int, default=1, metavar="N", help="nodes behind one switch")
    ours.add_argument("--network-gbps", type=float, default=0, metavar="X", help="Gbit/s per device")
    ours.add_argument(
        "--device-tflops", type=float, default=0, metavar="X", help="sustained, with --global-batch-size"
    )
    ours.add_argument(
        "--step-seconds", type=float, default=0, metavar="X", help="measured, in place of those two"
    )
    ours.add_argument("--mtbf-hours", type=float, default=0, metavar="X", help="of one device")
    ours.add_argument("--json", action="store_true", help="the same, for programs")


def of_running(described: RoleDescribed, hosts: Iterable[Host], as_json: bool) -> int:
    """Print the plan of a role of a running job, from what its agent says of it. `hosts`: all of the job."""
    state, replicas = described.state, described.replicas
    roles, nodes = placed(hosts)
    segments = [Segment.of(layout) for layout in state.segments]
    domains = {node: about.domain for node, about in nodes.items()}
    where = Places(roles, domains, spares_of(domains, roles))
    ring = where.ring(state.ring)
    rows = summarise(segments, where, replicas, state.role, ring)
    unique = sum(s.nbytes for s in segments if len(s.holders) == 1)
    sent = sum(
        s.nbytes * len(replica_nodes(s, where, replicas, ring))
        for s in segments
        if sender(s, roles) == state.role
    )
    step, rate = state.step_seconds, state.bytes_per_second
    figures = {
        "role": state.role,
        "tensors": [asdict(row) for row in rows],
        "state_bytes": sum(s.nbytes for s in segments),
        "unique_bytes": unique,
        "h2h_bytes_per_step": sent,
        "host_memory_bytes": 2 * sum(s.nbytes for s in segments) + 2 * sent,
        "step_seconds": step,
        "bytes_per_second": rate,
        "free_checkpointing_ratio": step * rate / sent if sent and rate else None,
        "survives": min((row.domains for row in rows), default=1) - 1,
    }
    if as_json:
        print(json.dumps(figures))
        return 0
    for row in rows:
        kind = "unique" if row.unique else f"{row.holders} holders"
        print(f"{row.tensor:<70} {_size(row.nbytes):>10}  {kind:<10}  {', '.join(row.sent_to)}")
    whole = sum(s.nbytes for s in segments)
    print(f"\nstate {_size(whole)}, unique {_size(unique)}, sent per step {_size(sent)}")
    print(
        f"a ready standby (--ft-ready-standbys) takes {_size(whole)} more, gradients, and weights that "
        "copies leave out, as its worker does"
    )
    print(f"memory suffices for the loss of any {figures['survives']} failure domain(s)")
    if figures["free_checkpointing_ratio"] is not None:
        print(
            f"free-checkpointing ratio {figures['free_checkpointing_ratio']:.3g} "
            f"(step {_seconds(step)}, {_size(rate)}/s measured; 1 or more: hidden)"
        )
    return 0


def main(args: argparse.Namespace, frameworks: Sequence[Framework]) -> int:
    """Print the plan. Returns 2 if the flags cannot work, 1 if the job would survive less than asked for."""
    try:
        job = described(args, frameworks)
        found = plan(job)
    except ConfigError as error:
        print(f"ftctl plan: {error}", file=sys.stderr)
        return 2
    figures = _figures(args, job, found)
    print(json.dumps(figures, indent=1) if args.json else _text(job, found, figures))
    return 0 if found.survives >= job.hosts.replicas else 1


def described(args: argparse.Namespace, frameworks: Sequence[Framework]) -> PlannedJob:
    """The job that the flags describe. Raises ConfigError for those that clash, or are too few."""
    models = [found for framework in frameworks if (found := framework.model(args)) is not None]
    if args.parameters > 0:
        models.append(DataParallel(args.world_size, args.parameters))
    if not models or args.world_size < 1:
        raise ConfigError(
            "give --world-size and what describes a model (--parameters, or a framework's flags: ftctl plan "
            "--help), or --job-dir of a running job (before the word plan)"
        )
    if len(models) > 1:
        raise ConfigError("the flags describe more than one model: give --parameters, or one framework's")
    _check_hosts(args)
    usual = Storage.usual("bf16" if args.bf16 else "fp16" if args.fp16 else "fp32", args.optimizer)
    storages = {f.name: kept for f in frameworks if (kept := f.storage(args, usual)) is not None}
    if len(storages) > 1:
        raise ConfigError(f"flags of {' and '.join(storages)} say who keeps which state: give those of one")
    return PlannedJob(
        Hosts(
            args.world_size,
            nproc_per_node=args.nproc_per_node,
            nodes_per_domain=args.nodes_per_domain,
            spares=args.spares,
            replicas=args.ft_replicas,
        ),
        models[0],
        next(iter(storages.values()), usual),
        tokens=args.global_batch_size * args.seq_length,
    )


def _check_hosts(args: argparse.Namespace) -> None:
    """Raise ConfigError for numbers of nodes that there cannot be."""
    for flag, least in (("nproc_per_node", 1), ("nodes_per_domain", 1), ("ft_replicas", 0), ("spares", 0)):
        if (value := getattr(args, flag)) < least:
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: give a number of {least} or more")
    nodes = args.world_size / args.nproc_per_node
    if nodes > 1 and not nodes.is_integer():
        raise ConfigError(
            f"--world-size {args.world_size} would be {nodes:g} nodes of --nproc-per-node "
            f"{args.nproc_per_node}: each has as many roles as another"
        )


def _figures(args: argparse.Namespace, job: PlannedJob, found: Plan) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "pipeline_stage": found.stage,
        "tensors": [asdict(row) for row in found.rows],
        "state_bytes_per_rank": found.nbytes,
        "unique_bytes_per_rank": found.unique,
        "sent_bytes_per_rank_and_step": found.sent_per_rank,
        "received_bytes_per_node_and_step": found.received_per_node,
        "snapshot_bytes_per_rank": found.snapshots_per_rank,
        "host_memory_bytes_per_node": found.memory_per_node,
        "replicas": job.hosts.replicas,
        "survives": found.survives,
        "segments_by_domains": {str(k): v for k, v in found.copies.items()},
        "segments_redundant_in_one_domain_only": found.same_domain,
    }
    step = args.step_seconds
    if not step and args.device_tflops and found.tokens:
        step = found.compute_seconds(args.device_tflops * 1e12)
    if step:
        figures["step_seconds"] = step
    if args.network_gbps:
        bandwidth = args.network_gbps * 1e9 / 8
        figures["transfer_seconds"] = found.transfer_seconds(bandwidth)
        if step:
            ratio = found.free_checkpointing_ratio(step, bandwidth)
            figures["free_checkpointing_ratio"] = None if math.isinf(ratio) else ratio
    if args.mtbf_hours:
        if found.sent_per_rank and found.survives >= job.hosts.replicas:
            nodes = len(set(job.hosts.role_nodes.values()))
            figures["recovery_probability_12h"] = recovery_probability(
                nodes, job.hosts.nproc_per_node, args.mtbf_hours, HOURS, job.hosts.replicas
            )
        if step:
            devices = job.hosts.nproc_per_node * job.hosts.nodes_per_domain
            lost = failure_probability(devices, args.mtbf_hours, step)
            figures["loss_probability_bound_per_step"] = loss_bound(found.copies, lost)
    return figures


def _text(job: PlannedJob, found: Plan, figures: dict[str, Any]) -> str:
    stage = f"pipeline stage {found.stage}, the heaviest (data parallel {job.data_parallel})"
    lines = [
        f"State of a role of {stage}:",
        "",
    ]
    columns = ("parameters", "weights", "main params", "optimizer", "unique")
    lines.append(f"{'':<20}" + "".join(f"{c:>13}" for c in columns))
    for row in found.rows:
        sizes = (row.weights, row.main, row.optimizer, row.unique)
        lines.append(f"{row.tensor:<20}{row.parameters:>13,}" + "".join(f"{_size(s):>13}" for s in sizes))
    total = [sum(getattr(r, a) for r in found.rows) for a in ("weights", "main", "optimizer", "unique")]
    parameters = sum(r.parameters for r in found.rows)
    lines += [f"{'total':<20}{parameters:>13,}" + "".join(f"{_size(s):>13}" for s in total), ""]

    def say(what: str, value: str) -> None:
        lines.append(f"{what:<52}{value}")

    share = f"{_size(found.unique)} of {_size(found.nbytes)} ({found.unique / found.nbytes:.0%})"
    say("unique state per role", share)
    what = f"for {job.hosts.replicas} lost domain{_s(job.hosts.replicas)}"
    say(f"sent per step {what}, busiest role", _size(found.sent_per_rank))
    say(f"received per step {what}, busiest node", _size(found.received_per_node))
    say("host memory: two snapshots per role", _size(found.snapshots_per_rank))
    say("host memory: per node, with two replica slots", _size(found.memory_per_node))
    say(
        "memory: each --ft-ready-standbys, as a worker",
        f"{_size(found.nbytes)}, gradients, weights if left out",
    )
    if "transfer_seconds" in figures:
        say("time to send", _seconds(figures["transfer_seconds"]))
    if "step_seconds" in figures:
        say("time of a step", _seconds(figures["step_seconds"]))
    if "free_checkpointing_ratio" in figures:
        ratio = figures["free_checkpointing_ratio"]
        verdict = (
            "nothing is sent"
            if ratio is None
            else f"{ratio:.2f}: "
            + ("hidden behind the step" if ratio >= 1 else "longer than the step, which will wait for it")
        )
        say("free-checkpointing ratio (FFTrainer, eq. 2)", verdict)
    what = "node" if job.hosts.nodes_per_domain == 1 else f"group of {job.hosts.nodes_per_domain} nodes"
    say("survives, from memory", f"any {found.survives} lost {what}{_s(found.survives)} at once")
    if "recovery_probability_12h" in figures:
        value = figures["recovery_probability_12h"]
        say(f"memory suffices for {HOURS} h without repair", f"{value:.6f} (FFTrainer, eq. 3-5)")
    if "loss_probability_bound_per_step" in figures:
        value = figures["loss_probability_bound_per_step"]
        say("chance of loss per step, at most", f"{value:.2g} (DeadPool, eq. 1)")
    return "\n".join(lines + _warnings(job, found))


def _warnings(job: PlannedJob, found: Plan) -> list[str]:
    lines = []
    replicas = job.hosts.replicas
    if found.survives < replicas:
        lines.append(
            f"\nWARNING: {replicas} lost domains cannot be survived: there are {job.hosts.failure_domains}, "
            f"each segment needs {replicas + 1}. Use more nodes or spares, or a smaller --ft-replicas."
        )
    if found.same_domain:
        lines.append(
            f"\nNote: {found.same_domain} segments are held by several roles, but in too few failure domains "
            "to count as redundant; they are replicated like unique state. Spreading data-parallel peers "
            "over more nodes saves that traffic."
        )
    return lines


def _size(nbytes: float) -> str:
    """Decimal units, as networks and memory vendors count."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
