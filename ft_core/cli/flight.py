"""`ftctl flight`: what a role's process groups have done last, for people; or of all roles, for PyTorch's own
analyser (`torchfrtrace`)."""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ft_core.cli.ask import line, role_number
from ft_core.control.liveness.hangs.waiting import does
from ft_core.errors import FtError
from ft_core.protocol.flight import POINT_TO_POINT, FlightGroup, FlightLog, FlightRecord, Kind
from ft_core.protocol.groups import GroupId, Series, runs_of, text_of
from ft_core.protocol.messages import Denied, DescribeFlight, RoleFlight

PREFIX = "rank_"
"""How the names of a dump's files begin; the number of the rank follows."""
VERSION = "2.10"
"""The version of PyTorch's format."""
_BELOW = 8
"""Processes of a worker's that are shown."""
_STATES = {"R": "running", "S": "waiting", "D": "waiting", "T": "stopped", "t": "stopped by a debugger"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--role", type=role_number, metavar="N", help="show what this role has done, the newest last"
    )
    what.add_argument(
        "--dump", type=Path, metavar="DIR", help="write a file for each role, for PyTorch's torchfrtrace DIR"
    )
    parser.add_argument("--json", action="store_true", help="of one role, for programs")


def main(args: argparse.Namespace) -> int:
    """Returns 0, or 1 where a record is missing. Raises as `ask.line`, and FtError for a wrong DIR."""
    if args.dump is None:
        with line(args.job_dir, args.controller) as found:
            return _show(found.ask(DescribeFlight(args.role)), args.role, args.json)
    if args.dump.is_dir() and any(args.dump.iterdir()):
        raise FtError(f"{args.dump} is not empty: the analyser takes all files of a directory for one dump")
    with line(args.job_dir, args.controller) as found:
        roles = [row.role for row in found.roles()]
        answers = found.ask_all(DescribeFlight(role) for role in roles)
        logs = {a.role: a.log for a in answers if isinstance(a, RoleFlight) and a.log is not None}
    write(dump(list(logs.values()), time.time_ns()), args.dump)
    print(f"{args.dump}: flight records of {len(logs)} roles; torchfrtrace {args.dump} compares them")
    if missing := sorted(set(roles) - set(logs)):
        those = text_of(runs_of(missing))
        print(f"ftctl: no flight record of roles {those}: use --allow-incomplete-ranks", file=sys.stderr)
    return 1 if missing else 0


def write(found: Mapping[int, dict[str, Any]], directory: Path) -> None:
    """A `dump`."""
    directory.mkdir(parents=True, exist_ok=True)
    for role, content in found.items():
        (directory / f"{PREFIX}{role}").write_bytes(pickle.dumps(content))


def _show(answer: object, role: int, as_json: bool) -> int:
    match answer:
        case RoleFlight(_, None):
            print(f"ftctl: no worker of role {role} has begun on its node", file=sys.stderr)
            return 1
        case RoleFlight(_, log):
            assert log is not None
            print(json.dumps(to_json(log)) if as_json else table(log))
            return 0
        case Denied(error):
            print(f"ftctl: {error}", file=sys.stderr)
    return 1


# -- for people ------------------------------------------------------------------------------------


def to_json(log: FlightLog) -> dict[str, Any]:
    """With names: what is sent leaves them out."""
    groups = [
        {"id": g.id, "name": g.name, "label": g.label, "backend": g.backend, "members": g.members}
        for g in log.groups
    ]
    fields = FlightRecord.__struct_fields__
    records = [{name: getattr(record, name) for name in fields} for record in log.records]
    return {**msgspec.to_builtins(log), "groups": groups, "records": records}


def table(log: FlightLog) -> str:
    """One line for each operation."""
    state = _STATES.get(log.state, "ended")
    lines = [
        f"role {log.role}  epoch {log.epoch}  version {log.version}  main thread: {state}"
        + ("  (waits for others at the end of its script)" if log.at_end else "")
        + ("  (its state is being fetched)" if log.fetches else "")
    ]
    if log.look is not None:
        seen = [log.look.main, *log.look.below[:_BELOW]]
        lines += [f"process {each.pid} ({each.name}) {does(each)}" for each in seen]
    names = {group.id: f"{group.label} {group.name}".strip() for group in log.groups}
    width = max([5, *(len(names[record.group]) for record in log.records)])
    lines.append(
        f"{'group':<{width}}  {'number':>8}  {'kind':<14}  {'size':>9}  {'peer':>6}  {'began':>13}  took"
    )
    for r in log.records:
        peer = str(r.peer) if r.peer >= 0 else "any" if r.kind in POINT_TO_POINT else "-"
        size = _size(r.nbytes) if r.dtype else "-"
        ago = f"{_seconds(log.now - r.started)} ago"
        took = "UNDER WAY" if r.under_way else _seconds(r.ended - r.started)
        lines.append(
            f"{names[r.group]:<{width}}  {r.number:>8}  {r.kind:<14}  {size:>9}  {peer:>6}  {ago:>13}  {took}"
        )
    return "\n".join(lines)


def _seconds(ns: int) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if ns >= size:
            return f"{ns / size:.1f} {unit}"
    return f"{ns / 1e3:.0f} us"


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"


# -- for PyTorch -----------------------------------------------------------------------------------

_NAMES: dict[Kind, str] = {"barrier": "all_reduce_barrier"}
"""In PyTorch's format, where it calls a kind otherwise."""


def dump(logs: Sequence[FlightLog], now: int) -> dict[int, dict[str, Any]]:
    """By role, what goes into its file. `now`: nanoseconds since 1970, when the logs were read.

    The analyser compares what has the same number in the same group. It knows no pairs: sends and receives of
    a pair are in a group of the two, and what is received from any source is left out. It wants all records
    to go back equally far: what some member does not have any more, as its ring has gone round, is left out.
    """
    taken = {log.role: _series(log) for log in logs}
    began: dict[Series, int] = {}
    for of_role in taken.values():
        for series, records in of_role.items():
            began[series] = max(began.get(series, 0), _first(records))
    labels: dict[str, str] = {}
    for log in logs:
        for group in log.groups:
            labels.setdefault(group.name, group.label)
    return {log.role: _file(log, taken[log.role], began, labels, now) for log in logs}


def _series(log: FlightLog) -> dict[Series, dict[int, FlightRecord]]:
    """What is compared, by number."""
    groups = {group.id: GroupId.parse(group.name) for group in log.groups}
    found: dict[Series, dict[int, FlightRecord]] = {}
    for record in log.records:
        if record.kind in POINT_TO_POINT and record.peer < 0:
            continue
        pair = None
        if record.kind in POINT_TO_POINT:
            pair = (log.role, record.peer) if record.kind == "send" else (record.peer, log.role)
        found.setdefault(Series(groups[record.group], pair), {})[record.number] = record
    return found


def _first(records: Mapping[int, FlightRecord]) -> int:
    """The number from which on all are there."""
    first = max(records)
    while first - 1 in records:
        first -= 1
    return first


def _file(
    log: FlightLog,
    taken: Mapping[Series, Mapping[int, FlightRecord]],
    began: Mapping[Series, int],
    labels: Mapping[str, str],
    now: int,
) -> dict[str, Any]:
    groups = {group.id: group for group in log.groups}
    config = {group.name: _config(group.name, labels[group.name], group.members) for group in log.groups}
    rows: list[tuple[int, dict[str, Any]]] = []
    for series, records in taken.items():
        for number, record in records.items():
            if number < began[series]:
                continue
            group = groups[record.group]
            members: tuple[int, ...] = group.members
            label = labels[group.name]
            if series.pair is not None:
                members = tuple(sorted(series.pair))
                config[str(series)] = _config(str(series), label, members)
            about = {"process_group": (str(series), label), "collective_seq_id": number}
            rows.append((record.started, about | _entry(record, group, series, members, now - log.now)))
    rows.sort(key=lambda row: row[0])
    entries = [{"record_id": place, "op_id": place, **entry} for place, (_, entry) in enumerate(rows)]
    return {"version": VERSION, "pg_config": config, "pg_status": {}, "entries": entries}


def _config(name: str, label: str, members: Iterable[int]) -> dict[str, str]:
    return {"name": name, "desc": label, "ranks": str(list(members))}


def _entry(
    record: FlightRecord, group: FlightGroup, series: Series, members: tuple[int, ...], since_1970: int
) -> dict[str, Any]:
    name = _NAMES.get(record.kind, record.kind)
    if series.pair is not None:
        source, target = map(members.index, series.pair)
        name += f" {source}->{target}" if record.kind == "send" else f" {target}<-{source}"
    whole = record.nbytes // _item(record.dtype)
    given = got = whole
    if record.kind == "all_gather":
        given = whole // len(members)
    elif record.kind == "reduce_scatter":
        got = whole // len(members)
    return {
        "pg_id": group.id,
        "p2p_seq_id": record.number if series.pair is not None else 0,
        "is_p2p": series.pair is not None,
        "profiling_name": f"{group.backend}:{name}",
        "time_created_ns": record.started + since_1970,
        "input_sizes": [[given]],
        "input_dtypes": [record.dtype],
        "output_sizes": [[got]],
        "output_dtypes": [record.dtype],
        "state": "started" if record.under_way else "completed",
        "time_discovered_started_ns": record.started + since_1970,
        "time_discovered_completed_ns": None if record.under_way else record.ended + since_1970,
        "retired": not record.under_way,
        "frames": [],
    }


def _item(dtype: str) -> int:
    """Bytes of one number."""
    import torch  # which other commands have no use for, and would wait for

    found = getattr(torch, dtype, None)
    return found.itemsize if isinstance(found, torch.dtype) else 1
