"""`ftctl nodes`: what counts against each, and `forgive`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable

import msgspec

from ft_core.cli.ask import DeniedError, Line, line
from ft_core.cli.status import FEW, print_rows
from ft_core.protocol.domains import place
from ft_core.protocol.groups import runs_of, text_of
from ft_core.protocol.messages import Forgive, Forgiven, NodesStatus, NodeStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--all", action="store_true", help=f"each node, though there are more than {FEW}")
    parser.add_argument("--json", action="store_true", help="for programs: one object, a line for each node")
    forgive = parser.add_subparsers(dest="action").add_parser(
        "forgive", help="forget what counts against one"
    )
    forgive.add_argument("node", help="its name, or its number")


def main(args: argparse.Namespace) -> int:
    """Print them, or forgive one. Raises as `ask.line`."""
    with line(args.job_dir, args.controller) as found:
        if args.action == "forgive":
            forgiven = found.expect(Forgive(node_named(found, args.node, gone=True)), Forgiven)
            print(f"forgiven {forgiven.node}: {forgiven.strikes} strikes")
        elif args.json:
            _stream(found.nodes("nodes"))
        else:
            _table(found, args.all)
    return 0


def node_named(found: Line, text: str, gone: bool = False) -> str:
    """The name of the node that a person means by its name, by that without what makes it unique, or by its
    number. `gone`: those count that are not there. Raises DeniedError, which says what nodes there are."""
    rows = [row for piece in found.nodes("nodes") for row in piece.nodes]
    names = [row.node for row in rows if gone or row.alive]
    if text in names:
        return text
    number = int(text) if text.isdecimal() else -1
    meant = [name for name in names if text == place(name) or number == _number(name)]
    if len(meant) == 1:
        return meant[0]
    which = "is no node" if not meant else "may be any of several nodes"
    shown = meant or names
    some = ", ".join(shown[:FEW]) + f" and {len(shown) - FEW} others" * (len(shown) > FEW)
    raise DeniedError(f"{text} {which}: there {'is' if len(shown) == 1 else 'are'} {some or 'none'}")


def _number(node: str) -> int | None:
    """That at the end of its name."""
    found = re.search(r"\d+$", place(node))
    return int(found[0]) if found else None


def _stream(pieces: Iterable[NodesStatus]) -> None:
    """One object, written as it comes."""
    pieces = iter(pieces)
    first = next(pieces)
    print(json.dumps({"limit": first.limit, "seconds": first.seconds})[:-1], end=', "nodes": ')
    print_rows(msgspec.to_builtins(row) for piece in (first, *pieces) for row in piece.nodes)
    print("}")


def _table(found: Line, everyone: bool) -> None:
    status = found.status()
    count = status.nodes + status.spares
    what = "nodes" if everyone or count <= FEW else "struck"
    print(f"{'node':<24} {'domain':<16} {'idle':>4}  {'strikes':>7}  roles")
    for piece in found.nodes("nodes" if what == "nodes" else "struck"):
        for row in piece.nodes:
            _print_node(row, piece.limit)
        seconds = piece.seconds
    if what == "struck":
        print(
            f"{count - status.struck:,} nodes of {count:,} without a strike are not shown: --all, or --json"
        )
    print(f"a strike counts for {seconds / 60:g} min")


def _print_node(row: NodeStatus, limit: int) -> None:
    count = f"{len(row.strikes)}/{limit}"
    if len(row.roles) > FEW:
        what = text_of(runs_of(row.roles))
    else:
        what = " ".join(map(str, row.roles)) if row.roles else "spare" if row.alive else "gone"
    about = "  avoided while there is another" * row.avoided + "  draining" * row.draining
    print(f"{row.node:<24} {row.domain or '-':<16} {row.idle:>4}  {count:>7}  {what}{about}")
    for strike in row.strikes:
        of = f"role {strike.role}" if strike.role >= 0 else "the node"
        device = f", device {strike.device}" if strike.device >= 0 else ""
        what = f" ({strike.signature})" if strike.role < 0 and strike.signature else ""
        print(f"    {strike.age / 60:.1f} min ago: {of}{device}: {strike.fault.value}{what}")
