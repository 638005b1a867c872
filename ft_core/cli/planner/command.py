"""`ftctl plan`: what protecting a job costs and what it survives, from its flags, without running it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from ft_core.cli.planner import plot, terms, worth
from ft_core.cli.planner.figures import figures_of, seconds, size, text
from ft_core.cli.planner.razor import plan, summarise
from ft_core.cli.planner.shape import DataParallel, Framework, Hosts, PlannedJob, Storage, check_batch
from ft_core.errors import ConfigError
from ft_core.protocol.messages import Host, RoleDescribed
from ft_core.protocol.table import placed
from ft_core.settings import SNAPSHOTS
from ft_core.state.manifest import Segment
from ft_core.state.placement import Places, replica_nodes, sender, spares_of


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
    ours.add_argument("--ft-ready-standbys", type=int, default=0, metavar="N", help="as of ftrun")
    ours.add_argument("--ft-snapshot", choices=SNAPSHOTS, default=SNAPSHOTS[0], help="as of ftrun")
    ours.add_argument("--nodes-per-domain", type=int, default=1, metavar="N", help="nodes of a rack")
    ours.add_argument("--json", action="store_true", help="the same, for programs")

    rates = parser.add_argument_group("machines", "What is not measured is taken from data sheets: a bound.")
    rates.add_argument(
        "--measured",
        default="",
        metavar="GB/s|FILE",
        help="what a node has been seen to send while it receives as much; or what `ftctl doctor --network "
        "HOST ... --json` has printed on all",
    )
    rates.add_argument(
        "--network-gbps", type=float, default=0, metavar="X", help="line rate of an interface, in Gbit/s"
    )
    rates.add_argument(
        "--interfaces", type=int, default=1, metavar="N", help="of a node, that its state goes over"
    )
    rates.add_argument(
        "--device-rate",
        type=float,
        default=0,
        metavar="GB/s",
        help=f"between a device and its host (default: {terms.PCIE / terms.GB:g}, a line rate)",
    )
    rates.add_argument(
        "--host-rate",
        type=float,
        default=0,
        metavar="GB/s",
        help=f"at which a role's state is verified (default: {terms.CHECKSUM / terms.GB:g})",
    )
    rates.add_argument("--node-memory-gb", type=float, default=0, metavar="X", help="that a node has for it")
    rates.add_argument(
        "--device-tflops", type=float, default=0, metavar="X", help="sustained, with --global-batch-size"
    )
    rates.add_argument(
        "--step-seconds", type=float, default=0, metavar="X", help="measured, in place of those two"
    )
    rates.add_argument(
        "--start-up-seconds",
        type=float,
        default=None,
        metavar="X",
        help="of the script in a recovery, to its first step: `ftctl timeline`",
    )
    worth.add_arguments(parser)


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
        print(f"{row.tensor:<70} {size(row.nbytes):>10}  {kind:<10}  {', '.join(row.sent_to)}")
    whole = sum(s.nbytes for s in segments)
    print(f"\nstate {size(whole)}, unique {size(unique)}, sent per step {size(sent)}")
    print(
        f"a ready standby (--ft-ready-standbys) takes {size(whole)} more, gradients, and weights that "
        "copies leave out, as its worker does"
    )
    print(f"memory suffices for the loss of any {figures['survives']} failure domain(s)")
    if figures["free_checkpointing_ratio"] is not None:
        print(
            f"free-checkpointing ratio {figures['free_checkpointing_ratio']:.3g} "
            f"(step {seconds(step)}, {size(rate)}/s measured; 1 or more: hidden)"
        )
    return 0


def main(args: argparse.Namespace, frameworks: Sequence[Framework]) -> int:
    """Print the plan. Returns 2 if the flags cannot work, 1 if the job would survive less than asked for, or
    does not fit into the nodes."""
    try:
        job = described(args, frameworks)
        found = plan(job)
        figures = figures_of(args, job, found)
    except ConfigError as error:
        print(f"ftctl plan: {error}", file=sys.stderr)
        return 2
    if args.plot is not None:
        if not (worked_out := figures["economics"]).get("curve"):
            missing = ", ".join(worked_out.get("missing", ["--mtbf-gpu"]))
            print(f"ftctl plan: --plot: give {missing}", file=sys.stderr)
            return 2
        points = [worth.Point(**each) for each in worked_out["curve"]]
        args.plot.write_text(plot.svg(points, worked_out["hours_between_failures"] * 3600))
    print(json.dumps(figures, indent=1) if args.json else text(job, found, figures, args.price_gpu_hour))
    fits = not args.node_memory_gb or found.memory_per_node <= args.node_memory_gb * terms.GB
    return 0 if found.survives >= job.hosts.replicas and fits else 1


def described(args: argparse.Namespace, frameworks: Sequence[Framework]) -> PlannedJob:
    """The job that the flags describe. Raises ConfigError for those that clash, or are too few."""
    models = [found for framework in frameworks if (found := framework.model(args)) is not None]
    if args.parameters > 0:
        check_batch(args.global_batch_size, args.world_size)
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
            ready=args.ft_ready_standbys,
        ),
        models[0],
        next(iter(storages.values()), usual),
        tokens=args.global_batch_size * args.seq_length,
    )


def _check_hosts(args: argparse.Namespace) -> None:
    """Raise ConfigError for numbers of nodes that there cannot be."""
    counts = (("nproc_per_node", 1), ("nodes_per_domain", 1), ("interfaces", 1))
    for flag, least in (*counts, ("ft_replicas", 0), ("spares", 0), ("ft_ready_standbys", 0)):
        if (value := getattr(args, flag)) < least:
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: give a number of {least} or more")
    amounts: tuple[str, ...] = (
        "network_gbps",
        "device_rate",
        "host_rate",
        "node_memory_gb",
        "device_tflops",
        "step_seconds",
    )
    worth_of = ("mtbf_hours", "recovery_seconds", "repair_hours", "restart_seconds", "save_seconds")
    amounts += ("start_up_seconds", *worth_of, "write_seconds", "price_gpu_hour")
    for flag in (*amounts, "global_batch_size", "seq_length"):
        if (getattr(args, flag) or 0) < 0:
            raise ConfigError(f"--{flag.replace('_', '-')} {getattr(args, flag):g}: give a number above 0")
    nodes = args.world_size / args.nproc_per_node
    if nodes > 1 and not nodes.is_integer():
        raise ConfigError(
            f"--world-size {args.world_size} would be {nodes:g} nodes of --nproc-per-node "
            f"{args.nproc_per_node}: each has as many roles as another"
        )
