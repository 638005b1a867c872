"""`ftctl events`: what has happened in a job, out of `events.jsonl` in its directory.

The file is read line by line, however long it is, and of a job that is over as well. Where any node may lead
the job, each leader has written its own, on its machine. `-f` goes on with what comes, until the job is over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from ft_core.errors import ConfigError
from ft_core.history.lines import Tail, parsed
from ft_core.protocol.domains import place
from ft_core.protocol.groups import runs_of, text_of

LAST = 20
_NAMED = 8
"""Runs of roles that are shown."""
_POLL = 0.2
"""Seconds after which it is looked for more."""
_WIDTH = 160
"""Characters of a reason, of which the first line is shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--last", type=_count, default=LAST, metavar="N", help=f"so many, the newest last; {LAST}"
    )
    parser.add_argument("--all", action="store_true", help="from the first on, as they are read")
    parser.add_argument(
        "--event", action="append", metavar="NAME", help="of this kind; may be given several times"
    )
    parser.add_argument("--role", type=int, metavar="N", help="that are about this role")
    parser.add_argument("--node", metavar="NAME", help="that name this node, as NAME or NAME+hex")
    parser.add_argument("--epoch", type=int, metavar="N", help="of this epoch")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="and those that come, until the job is over"
    )
    parser.add_argument("--json", action="store_true", help="the lines as they are in the file")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of events")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Print them; returns 1 if there is none. Raises ConfigError where there is no such file, and OSError."""
    if args.job_dir is None:
        raise ConfigError("events are in the job's directory: give --job-dir, before the word events")
    with Tail(args.job_dir / "events.jsonl") as tail:
        found: Iterable[tuple[str, dict[str, Any]]] = _chosen(tail, args)
        if not args.all:
            found = _newest(found, args.last)
        none = _print(found, args) == 0
        try:
            while args.follow and not tail.over:
                time.sleep(_POLL)
                none = _print(_chosen(tail, args), args) == 0 and none
        except KeyboardInterrupt:
            return 130
    if none:
        print("ftctl: no event is like that", file=sys.stderr)
    return int(none)


def _print(found: Iterable[tuple[str, dict[str, Any]]], args: argparse.Namespace) -> int:
    """How many there were."""
    count = 0
    for line, event in found:
        count += 1
        print(line if args.json else text(event), flush=args.follow)
    return count


def _newest(found: Iterable[tuple[str, dict[str, Any]]], count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The newest, as lines until the last is known: an event of all roles takes ten times as much."""
    for line in deque((line for line, _ in found), maxlen=count):
        yield line, json.loads(line)


def _chosen(tail: Tail, args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that are asked for, with their lines."""
    # Most lines of a long file are read no further than it takes to see that they are of another kind.
    names = [f'"event": {json.dumps(name)}' for name in args.event or ()]
    for line in tail.lines():
        if names and not any(name in line for name in names):
            continue
        if (event := parsed(line)) is None:
            print(f"ftctl: line {tail.number} of {tail.path} is no event", file=sys.stderr)
        elif _fits(event, args):
            yield line.rstrip("\n"), event


def _fits(event: dict[str, Any], args: argparse.Namespace) -> bool:
    if args.event and event["event"] not in args.event:
        return False
    if args.epoch is not None and event["epoch"] != args.epoch:
        return False
    if args.role is not None and args.role not in event["roles"]:
        moved = event.get("moved") or {}
        if str(args.role) not in moved:
            return False
    return args.node is None or _names(event, args.node)


def _names(event: dict[str, Any], node: str) -> bool:
    moved = event.get("moved") or {}
    named = [event.get("node"), event.get("replaced"), *(event.get("nodes") or ()), *moved.values()]
    if any(isinstance(name, str) and node in (name, place(name)) for name in named):
        return True
    words = event["reason"].replace(",", " ").replace(":", " ").split()
    return any(node in (word, place(word)) for word in words)


def text(event: dict[str, Any]) -> str:
    """One line of a person's size, whatever the event has."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
    runs = runs_of(set(event["roles"]))
    roles = text_of(runs[:_NAMED]) + f" and {sum(map(len, runs[_NAMED:])):,} more" * (len(runs) > _NAMED)
    parts = [f"role {roles}"] if roles else []
    if (version := event.get("version")) is not None and not event["reason"]:
        parts.append(f"version {version}")
    reason = event["reason"].partition("\n")[0]
    if (node := event.get("node")) and str(node) not in reason:
        parts.append(str(node))
    if reason:
        parts.append(reason if len(reason) <= _WIDTH else f"{reason[:_WIDTH]} ...")
    return printable(f"{at}  epoch {event['epoch']:<4} {event['event']:<20} {', '.join(parts)}".rstrip())


def printable(text: str) -> str:
    """What comes from a job, such as an exception's words, does nothing to a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)
