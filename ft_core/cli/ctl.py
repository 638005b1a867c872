"""`ftctl`: looks at a job, injects failures into it, plans one, and finds what would harm one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from ft_core import plugins
from ft_core.cli import events, flight, ledger_check, nodes, report, status, timeline, top
from ft_core.cli.ask import DeniedError, line, role_number
from ft_core.cli.doctor import command as doctor
from ft_core.cli.nodes import node_named
from ft_core.cli.parser import Parser
from ft_core.cli.planner import command as planner
from ft_core.cli.planner.shape import Framework
from ft_core.errors import FtError
from ft_core.protocol.messages import DescribeRole, DrainNode, Drains, Inject, Injected, RoleDescribed


def main(argv: list[str] | None = None) -> int:
    """Entry of `ftctl`. Returns 0, or 1 when the job said no or a check failed, or 2 for a wrong call."""
    try:
        code = _main(argv)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def parser(frameworks: Iterable[Framework]) -> argparse.ArgumentParser:
    """The command line of `ftctl`. `frameworks`: that `plan` knows."""
    parser = Parser(prog="ftctl", description=__doc__)
    parser.add_version()
    parser.add_argument("--job-dir", type=Path, default=None, help="the job's directory (see ftrun)")
    parser.add_argument(
        "--controller", default="", metavar="HOST:PORT", help="its controller, if the directory is elsewhere"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    status.add_arguments(
        commands.add_parser("status", help="what the job does; roles, workers, versions held, spares")
    )
    kill = commands.add_parser("kill", help="inject a failure: SIGKILL a role's worker, or a whole node")
    victim = kill.add_mutually_exclusive_group(required=True)
    victim.add_argument("--role", type=role_number)
    victim.add_argument("--node", help="its name, or its number")
    drain = commands.add_parser(
        "drain", help="take a node out, without a failure: its roles move between two steps, then it ends"
    )
    drain.add_argument("node", help="its name, or its number")
    flight.add_arguments(
        commands.add_parser("flight", help="what the process groups of a role, or of all, have done last")
    )
    nodes.add_arguments(commands.add_parser("nodes", help="nodes, and what counts against each"))
    events.add_arguments(commands.add_parser("events", help="what has happened, out of events.jsonl"))
    top.add_arguments(commands.add_parser("top", help="the job on a screen, again and again"))
    report.add_arguments(commands.add_parser("report", help="what happened in a job, and what it cost"))
    timeline.add_arguments(
        commands.add_parser("timeline", help="where the time of a start or a recovery went, role by role")
    )
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
    return parser


def _main(argv: list[str] | None) -> int:
    frameworks = plugins.load(plugins.PLANNER)
    args = parser(frameworks).parse_args(argv)
    if args.command == "data":
        return ledger_check.main(args)
    if args.command == "doctor":
        return doctor.main(args)
    if args.command == "plan" and args.job_dir is None and not args.controller:
        return planner.main(args, frameworks)
    try:
        match args.command:
            case "flight":
                return flight.main(args)
            case "status":
                return status.main(args)
            case "nodes":
                return nodes.main(args)
            case "events":
                return events.main(args)
            case "top":
                return top.main(args)
            case "report":
                return report.main(args)
            case "timeline":
                return timeline.main(args)
            case "plan":
                with line(args.job_dir, args.controller) as found:
                    described = found.expect(DescribeRole(args.role), RoleDescribed)
                    hosts = found.hosts()
                return planner.of_running(described, hosts, args.json)
            case "drain":
                with line(args.job_dir, args.controller) as found:
                    print(_drains(found.expect(DrainNode(node_named(found, args.node)), Drains)))
                return 0
            case _:
                with line(args.job_dir, args.controller) as found:
                    node = args.node and node_named(found, args.node)
                    print(f"killed {found.expect(Inject(args.role, node), Injected).killed}")
                return 0
    except DeniedError as error:
        print(f"ftctl: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # of the console: a controller that goes is another error
        raise
    except (FtError, OSError) as error:
        print(f"ftctl: {error}", file=sys.stderr)
        return 2


def _drains(found: Drains) -> str:
    after = f", after those of {', '.join(found.before)}" if found.before else ""
    return f"draining {found.node}: {found.roles} roles move{after}; `ftctl events` says when it is out"


if __name__ == "__main__":
    sys.exit(main())
