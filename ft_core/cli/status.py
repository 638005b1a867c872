"""`ftctl status`: what a job is doing, in a screenful however large it is, and of each role on request."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

import msgspec

from ft_core.cli.ask import Line, finished, line
from ft_core.protocol.messages import JobStatus, RoleNamed, RoleStatus, SpareStatus

FEW = 64
"""Roles or nodes that are listed without being asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--all", action="store_true", help=f"each role, though there are more than {FEW}")
    parser.add_argument("--json", action="store_true", help="for programs: one object, a line for each role")


def main(args: argparse.Namespace) -> int:
    """Print it. Raises as `ask.line`."""
    with line(args.job_dir, args.controller) as found:
        status = found.status()
        if args.json:
            _stream(found, status)
        elif args.all or max(status.roles, status.spares) <= FEW:
            _table(found, status)
        else:
            print(summary(status))
    return 0


def _stream(found: Line, status: JobStatus) -> None:
    """One object, written as it comes."""
    about: dict[str, Any] = {
        "epoch": status.epoch,
        "phase": status.phase,
        "controller_pid": status.controller_pid,
    }
    about |= {"complaint": status.complaint, "unprotected": status.unprotected, "seconds": status.seconds}
    about |= {"every": status.every, "slow": msgspec.to_builtins(status.slow)}
    print(json.dumps({**about, "finished": finished(status)})[:-1], end="")
    for name, rows in (("roles", found.roles()), ("spares", found.spares())):
        print(f', "{name}": ', end="")
        print_rows(msgspec.to_builtins(row) for row in rows)
    print("}")


def print_rows(rows: Iterable[dict[str, Any]]) -> None:
    """A list, one row on each line."""
    between = "["
    for row in rows:
        print(between, json.dumps(row), sep="\n", end="")
        between = ","
    print("[]" if between == "[" else "\n]", end="")


def first_line(status: JobStatus) -> str:
    """The first line of whatever is printed."""
    return f"epoch {status.epoch}  {status.phase}  controller pid {status.controller_pid}"


def warnings(status: JobStatus) -> list[str]:
    """What is not as it should be with the job itself."""
    found = [f"it does not get on: {status.complaint}"] if status.complaint else []
    if status.every > 1:
        most = 2 * status.every - 1
        found.append(f"a version is protected every {status.every} steps: at most {most} are done again")
    found += [
        f"role {each.role} on {each.node} is slow ({each.part}): its own part of a step takes {each.score:g} "
        "times its like's"
        for each in status.slow
    ]
    return found + ([f"not protected: {status.unprotected}"] if status.unprotected else [])


def _table(found: Line, status: JobStatus) -> None:
    print("\n".join([first_line(status), *warnings(status)]))
    print(f"{'role':>4}  {'node':<16} {'worker':>8} {'agent':>8} {'step':>7} {'tag':>7}  held  replicas")
    for row in found.roles():
        print(_role(row))
    for spare in found.spares():
        print(_spare(spare))
    for name in status.draining:
        print(f"draining {name}")


def _role(row: RoleStatus) -> str:
    copies = ", ".join(f"{n}:{v}" for found in row.replicas.values() for n, v in found.items())
    return (
        f"{row.role:>4}  {row.node:<16} {row.worker_pid or '-':>8} {row.agent_pid or '-':>8} "
        f"{_or_dash(row.step):>7} {_or_dash(row.tag):>7}  {row.held}  {copies}"
    )


def _spare(spare: SpareStatus) -> str:
    ready = f"  ready for roles {', '.join(map(str, spare.guarding))}" if spare.guarding else ""
    return f"spare {spare.node}  agent {spare.agent_pid}  idle workers {spare.idle}{ready}"


def summary(status: JobStatus) -> str:
    """What is so, in a screenful."""
    lines = [first_line(status), *warnings(status), ""]

    def say(what: str, *parts: str) -> None:
        lines.append(f"{what:<10}{parts[0]}")
        lines.extend(f"{'':<10}{part}" for part in parts[1:])

    steps = "none known" if status.oldest is None else f"{status.oldest} to {status.newest}"
    say("steps", steps)
    there, away = status.roles - status.missing, status.world_size - status.roles
    about = f", {away:,} away" * bool(away and status.roles)
    say("roles", f"{there:,} of {status.world_size:,} have a worker that is heard of{about}")
    if status.missing:
        say("missing", *(f"role {each.role} on {each.node}" for each in status.missing_roles))
        if (more := status.missing - len(status.missing_roles)) > 0:
            lines.append(f"{'':<10}and {more:,} others")
    say("nodes", f"{status.nodes:,} of {status.nodes_expected:,} with roles")
    ready = f"{status.spares_ready:,} of {status.spares:,} with their workers up"
    say("spares", f"{ready}, in {status.spare_domains:,} failure domains" if status.spares else "none")
    if status.spare_domains < status.spares:
        most = ", ".join(f"{each.domain} {each.spares}" for each in status.most_spares)
        more = status.spare_domains - len(status.most_spares)
        lines.append(f"{'':<10}{most}" + f", and {more:,} other domains" * (more > 0))
    if status.draining:
        say("draining", *status.draining)
    if status.slowest:
        say("slowest", *map(_pace, status.slowest))
    if status.strikes:
        say("strikes", f"{status.strikes} against {status.struck} nodes")
        for each in status.most_struck:
            about = ": avoided while there is another" * each.avoided
            lines.append(f"{'':<10}{each.node}  {each.strikes}/{status.limit}{about}")
    done = len(finished(status))
    if done:
        say("finished", f"{done:,} roles")
    lines += ["", "each role: ftctl status --all, or --json; nodes: ftctl nodes; what happened: ftctl events"]
    return "\n".join(lines)


def _pace(each: RoleNamed) -> str:
    long = "" if each.step_s is None else f", {each.step_s:.3g} s a step"
    return f"role {each.role} on {each.node}: step {_or_dash(each.step)}{long}"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
