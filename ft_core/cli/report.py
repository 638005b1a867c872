"""`ftctl report`: what happened in a job and what it cost, of one that runs or has ended, from its directory.

It reads `events.jsonl` alone. Where any node may lead the job, each leader has written its own, on its
machine: give the other directories as well.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ft_core.cli import report_html
from ft_core.cli.events import printable
from ft_core.cli.report_html import when
from ft_core.errors import ConfigError
from ft_core.history import job as history
from ft_core.history.job import History
from ft_core.protocol.goodput import in_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "others", nargs="*", type=Path, metavar="DIR", help="directories of others that have led the job"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="a page with plots, which needs no other file; - for the output",
    )


def main(args: argparse.Namespace) -> int:
    """Print it, or write the page. Raises ConfigError where there are no events, and OSError."""
    if args.job_dir is None:
        raise ConfigError("events are in the job's directory: give --job-dir, before the word report")
    found = history.read(args.job_dir, args.others)
    if args.html is None:
        print("\n".join(map(printable, in_lines(found))))
    elif str(args.html) == "-":
        print(report_html.page(found), end="")
    elif args.html.is_symlink() or (args.html.exists() and not args.html.is_file()):
        args.html.write_text(report_html.page(found), encoding="utf-8")  # /dev/null is to stay what it is
    else:
        beside = args.html.with_name(f".{args.html.name}-{os.getpid()}")
        beside.write_text(report_html.page(found), encoding="utf-8")
        beside.replace(args.html)
    return 0


def in_lines(found: History) -> list[str]:
    """For a terminal."""
    lines = [
        f"job in {found.directory}",
        f"began     {when(found.began)}",
        f"until     {when(found.ended)}  {found.end or 'it goes on, as far as is known'}",
        f"goodput   {in_words(found.seconds)}",
        "",
        f"recoveries: {len(found.recoveries)}",
    ]
    for each in found.recoveries:
        took = "not done" if each.seconds is None else f"{each.seconds:.1f} s"
        parts = ", ".join(f"{cause} {seconds:.1f}" for cause, seconds in each.parts.items())
        lines += [f"  {when(each.began)}  epoch {each.epoch:<4} {took:>9}  {first_line(each.reason)}"]
        lines += [f"{'':32}from {each.origin or '?'}: {parts}"]
    if found.longest:
        lines += ["", "the longest times without progress:"]
        lines += [
            f"  {each.seconds:>9.1f} s  {each.cause:<10} from {when(each.began)}  {first_line(each.reason)}"
            for each in found.longest
        ]
    if found.failures:
        lines += ["", "failures by node:"]
        for node, kinds in found.by_node:
            what = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
            lines.append(f"  {node:<24} {kinds.total():>4}  {what}{'  avoided' * (node in found.avoided)}")
    counts = ", ".join(f"{name} {count}" for name, count in sorted(found.counts.items()))
    return [*lines, "", f"events: {counts}"]


def first_line(reason: str) -> str:
    """The first line of a reason, as much of it as fits."""
    line = reason.partition("\n")[0]
    return line if len(line) <= 100 else f"{line[:100]} ..."
