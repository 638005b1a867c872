"""`ftctl`: looks at a job, injects failures into it, plans one, and finds what would harm one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from ft_core import plugins
from ft_core.cli import flight, ledger_check
from ft_core.cli.ask import ask
from ft_core.cli.doctor import command as doctor
from ft_core.cli.planner import command as planner
from ft_core.errors import FtError
from ft_core.protocol.messages import (
    AskNodes,
    AskStatus,
    Denied,
    DescribeRole,
    Forgive,
    Forgiven,
    FromCtl,
    Inject,
    Injected,
    JobStatus,
    NodesStatus,
    RoleDescribed,
)


def to_json(status: JobStatus | NodesStatus) -> dict[str, Any]:
    """What `ftctl status --json`, or `ftctl nodes --json`, prints."""
    found: dict[str, Any] = msgspec.to_builtins(status)
    del found["type"]
    return found


def _table(status: JobStatus) -> str:
    lines = [f"epoch {status.epoch}  {status.phase}  controller pid {status.controller_pid}"]
    lines.append(
        f"{'role':>4}  {'node':<16} {'worker':>8} {'agent':>8} {'step':>7} {'tag':>7}  held  replicas"
    )
    for row in status.roles:
        copies = ", ".join(f"{n}:{v}" for found in row.replicas.values() for n, v in found.items())
        lines.append(
            f"{row.role:>4}  {row.node:<16} {row.worker_pid or '-':>8} {row.agent_pid or '-':>8} "
            f"{_or_dash(row.step):>7} {_or_dash(row.tag):>7}  {row.held}  {copies}"
        )
    lines += [f"spare {s.node}  agent {s.agent_pid}  idle workers {s.idle}" for s in status.spares]
    return "\n".join(lines)


def _nodes(status: NodesStatus) -> str:
    lines = [f"{'node':<24} {'domain':<16} {'idle':>4}  {'strikes':>7}  roles"]
    for row in status.nodes:
        count = f"{len(row.strikes)}/{status.limit}"
        what = " ".join(map(str, row.roles)) if row.roles else "spare" if row.alive else "gone"
        about = "  avoided while there is another" * row.avoided
        lines.append(f"{row.node:<24} {row.domain or '-':<16} {row.idle:>4}  {count:>7}  {what}{about}")
        for strike in row.strikes:
            of = f"role {strike.role}" if strike.role >= 0 else "the node"
            device = f", device {strike.device}" if strike.device >= 0 else ""
            lines.append(f"    {strike.age / 60:.1f} min ago: {of}{device}: {strike.fault.value}")
    lines.append(f"a strike counts for {status.seconds / 60:g} min")
    return "\n".join(lines)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def main(argv: list[str] | None = None) -> int:
    """Entry of `ftctl`. Returns 0, or 1 when the job said no or a check failed, or 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="ftctl", description=__doc__)
    parser.add_argument("--job-dir", type=Path, default=None, help="the job's directory (see ftrun)")
    parser.add_argument(
        "--controller", default="", metavar="HOST:PORT", help="its controller, if the directory is elsewhere"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("status", help="roles, workers, versions held, replicas, spares")
    shown.add_argument("--json", action="store_true")
    kill = commands.add_parser("kill", help="inject a failure: SIGKILL a role's worker, or a whole node")
    victim = kill.add_mutually_exclusive_group(required=True)
    victim.add_argument("--role", type=int)
    victim.add_argument("--node")
    flight.add_arguments(
        commands.add_parser("flight", help="what the process groups of a role, or of all, have done last")
    )
    nodes = commands.add_parser("nodes", help="all nodes, and what counts against each")
    nodes.add_argument("--json", action="store_true")
    forgive = nodes.add_subparsers(dest="action").add_parser("forgive", help="forget what counts against one")
    forgive.add_argument("node")
    frameworks = plugins.load(plugins.PLANNER)
    planner.add_arguments(
        commands.add_parser("plan", help="bytes, memory and what is survived, for given flags"), frameworks
    )
    doctor.add_arguments(
        commands.add_parser("doctor", help="what would keep a recovery from working here, before it does")
    )
    data = commands.add_parser("data", help="the samples that a job with elastic replica groups has trained")
    ledger_check.add_arguments(
        data.add_subparsers(dest="action", required=True).add_parser(
            "verify", help="check that each was trained exactly once"
        )
    )
    args = parser.parse_args(argv)
    if args.command == "data":
        return ledger_check.main(args)
    if args.command == "doctor":
        return doctor.main(args)
    if args.command == "plan" and args.job_dir is None and not args.controller:
        return planner.main(args, frameworks)
    try:
        if args.command == "flight":
            return flight.main(args)
        question: FromCtl = AskStatus()
        if args.command == "plan":
            question = DescribeRole(args.role)
        elif args.command == "kill":
            question = Inject(args.role, args.node)
        elif args.command == "nodes":
            question = Forgive(args.node) if args.action == "forgive" else AskNodes()
        answer = ask(question, args.job_dir, args.controller)
    except (FtError, OSError) as error:
        print(f"ftctl: {error}", file=sys.stderr)
        return 2
    match answer:
        case JobStatus():
            print(json.dumps(to_json(answer)) if args.json else _table(answer))
        case RoleDescribed():
            return planner.of_running(answer, args.json)
        case NodesStatus():
            print(json.dumps(to_json(answer)) if args.json else _nodes(answer))
        case Forgiven(node, strikes):
            print(f"forgiven {node}: {strikes} strikes")
        case Injected(killed):
            print(f"killed {killed}")
        case Denied(reason):
            print(f"ftctl: {reason}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
