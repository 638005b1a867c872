"""Fills tables and pictures of the pages in from the code, as a hook of mkdocs."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from prometheus_client.metrics_core import Metric

from ft_core.cli.flags import parser
from ft_core.control import phases
from ft_core.control.liveness.device_health import CONDITIONS, DRIVER_ADVICE, Verdict
from ft_core.control.liveness.xid_table import UNKNOWN, XIDS
from ft_core.control.observe.goodput import Standing
from ft_core.control.observe.job_metrics import SECONDS, Numbers
from ft_core.control.observe.metrics import families
from ft_core.control.observe.recorded import ACCOUNT, ALWAYS, EVENTS
from ft_core.errors import EXIT_CODES
from ft_core.node import phases as of_agent
from ft_core.node.metrics import NodeNumbers
from ft_core.node.metrics import families as node_families
from ft_core.process.transitions import Transitions
from ft_core.protocol.goodput import Cause
from ft_core.protocol.messages import DeviceAction
from ft_core.worker import states
from tests.simulation.invariants import Invariant


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """In Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def flags() -> str:
    """All of `ftrun`, by group."""
    found = []
    for group in parser()._action_groups:
        rows = [_flag(action) for action in group._group_actions if action.option_strings]
        if rows:
            found.append(f"### {(group.title or '').capitalize()}\n\n{table(('flag', ''), rows)}")
    return "\n\n".join(found)


def _flag(action: argparse.Action) -> tuple[str, str]:
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    if not value and action.nargs != 0:
        value = action.dest.upper()
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    said = (action.help or "").replace("%%", "%")
    if action.nargs != 0 and action.default not in (None, "") and "default" not in said:
        said += f"{'; ' if said else ''}default: {action.default}"
    return f"{names} {f'`{value}`' if value else ''}".strip(), said


def events() -> str:
    """All, with what belongs to each."""
    rows = (
        (f"`{name}`", event.when, "; ".join(f"`{name}`: {said}" for name, said in event.fields.items()))
        for name, event in EVENTS.items()
    )
    return table(("event", "when", "also"), rows)


def metrics() -> str:
    """All of the controller."""
    none: Any = [0] * (len(SECONDS) + 1), 0.0
    lost = dict.fromkeys(Cause, 0.0)
    found = Numbers(
        *({}, "", 0, 0, 0, None, {}, {}, {}, {}, none, 0, lost, 0.0, 0, None, 0, {}, None, none, set(), None),
        *(Standing(Cause.START_UP, None, 0.0), "", 1),
    )
    return _metrics(families(found))


def metrics_of_agents() -> str:
    """All of an agent."""
    return _metrics(node_families(NodeNumbers("", "", False, 0, {}, {}, 0)))


def _metrics(families: Iterable[Metric]) -> str:
    rows = []
    for metric in families:
        suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
        labels = ", ".join(f"`{name}`" for name in getattr(metric, "_labelnames", ()))
        rows.append((f"`{metric.name}{suffix}`", metric.type, labels, metric.documentation))
    return table(("metric", "type", "labels", ""), rows)


def picture(table: Transitions[Any]) -> str:
    """What leads from each phase of a machine to others."""
    names = [phase.__name__ for phase in table]
    width = max(map(len, names)) + 1
    lines = []
    for before, rows in table.items():
        for number, (after, reason) in enumerate(rows.items()):
            come_from = "" if number else before.__name__
            lines.append(f"{come_from:{width}}-> {after.__name__:{width}}{reason}")
    return "\n".join(["```text", *lines, "```"])


def invariants() -> str:
    """All that the simulator checks."""
    return table(("", "", ""), ((each.number, each.label, each.sentence) for each in Invariant))


def causes() -> str:
    """All that a job's time goes to, by what stands below each member."""
    return _said(_members(Cause))


def xids() -> str:
    """All, those that are alike in one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for number, row in XIDS.items():
        alike.setdefault((row.what, row.advice, f"`{row.action}`", row.why), []).append(str(number))
    rows = [(", ".join(numbers), *row) for row, numbers in alike.items()]
    others = "others", UNKNOWN.what, UNKNOWN.advice, f"`{UNKNOWN.action}`", UNKNOWN.why
    return table(("XID", "what", "NVIDIA's advice", "here", "why"), [*rows, others])


def verdicts(rows: Iterable[tuple[str, Verdict]]) -> str:
    """What devices report, and what is done."""
    return table(("", "what", "here"), ((name, row.what, f"`{row.action}`") for name, row in rows))


def device_actions() -> str:
    """All, by what stands below each member."""
    return _said(_members(DeviceAction))


def _members(enum: type[StrEnum]) -> Iterable[tuple[str, str]]:
    """Each, with what stands below it."""
    found = ast.walk(ast.parse(inspect.getsource(enum)))
    said = [ast.literal_eval(node.value) for node in found if isinstance(node, ast.Expr)]
    return zip(enum, (" ".join(text.split()) for text in said[1:]), strict=True)


def _said(about: Iterable[tuple[str, str]]) -> str:
    return table(("", ""), ((f"`{name}`", said) for name, said in about))


TABLES: dict[str, Callable[[], str]] = {
    "flags": flags,
    "exit codes": lambda: _said(EXIT_CODES.items()),
    "fields": lambda: _said(ALWAYS.items()),
    "account": lambda: _said(ACCOUNT.items()),
    "events": events,
    "metrics": metrics,
    "metrics of agents": metrics_of_agents,
    "phases of the controller": lambda: picture(phases.TRANSITIONS),
    "phases of an agent": lambda: picture(of_agent.TRANSITIONS),
    "states of a worker": lambda: picture(states.TRANSITIONS),
    "invariants": invariants,
    "causes": causes,
    "device actions": device_actions,
    "device conditions": lambda: verdicts((f"`{name}`", row) for name, row in CONDITIONS.items()),
    "driver advice": lambda: verdicts((str(number), row) for number, row in DRIVER_ADVICE.items()),
    "xids": xids,
}
"""By what the pages call them."""


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the tables where a page wants them. Raises KeyError where it wants one that is not there."""
    return re.sub(r"<!-- reference: ([\w ]+) -->", lambda wanted: TABLES[wanted[1]](), markdown)
