"""The reference has all that there is: events, flags, exit codes, metrics."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from core.control.test_controller_machine import ControlPlane
from harness import ROOT

import mkdocs_reference
from ft_core.cli import flags
from ft_core.control.observe.metrics import PAGES
from ft_core.control.observe.recorded import ACCOUNT, ALWAYS, EVENTS
from ft_core.node.metrics import PAGES as OF_NODE
from ft_core.node.metrics import NodeNumbers

RECORDERS = {"record", "record_once", "Record", "end_epoch"}
"""Functions of the controller whose first argument is an event."""


def recorded() -> Iterator[tuple[str, str]]:
    """(event, where) of all that the controller's code records by name."""
    for path in sorted((ROOT / "ft_core" / "control").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in RECORDERS:
                for name in ast.walk(node.args[0]):
                    if isinstance(name, ast.Constant) and isinstance(name.value, str):
                        yield name.value, f"{path.name}:{node.lineno}"


BY_VARIABLE = {
    "state_restored": "cluster/progress.py",
    "communicators_ready": "cluster/progress.py",
    "resumed": "cluster/progress.py",
    "left": "recovery.py",
    "returned": "recovery.py",
    "not_moving": "prestart/attempts.py",
}
"""Events whose names come out of a variable, and where that gets them."""


def test_every_event_that_is_recorded_is_described() -> None:
    missing = {name: where for name, where in recorded() if name not in EVENTS}
    assert not missing


def test_every_event_that_is_described_is_recorded() -> None:
    control = ROOT / "ft_core" / "control"
    found = {name for name, _ in recorded()} | {
        name for name, module in BY_VARIABLE.items() if f'"{name}"' in (control / module).read_text()
    }
    assert set(EVENTS) == found


def test_a_jobs_events_have_no_more_than_is_described() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    job.wait(70.0)
    job["node1"].hangs_up()
    job.wait(1.0)
    assert len(job.records) > 5
    for record in job.records:
        assert record.more.keys() <= {*EVENTS[record.event].fields, *ACCOUNT}, record


def test_all_flags_are_described() -> None:
    page = mkdocs_reference.flags()
    found = {name for action in flags.parser()._actions for name in action.option_strings}
    assert {"--ft-http", "--nnodes", "-h"} <= found
    assert all(f"`{name}`" in page for name in found)
    without = [action.dest for action in flags.parser()._actions if not action.help]
    assert not without, f"flags without a word of help: {without}"


def test_all_metrics_are_described() -> None:
    page = mkdocs_reference.metrics() + mkdocs_reference.metrics_of_agents()
    job, node = ControlPlane(nodes=2), NodeNumbers("a", "b", True, 1, {}, {}, 0)
    of_both = PAGES["/metrics"](job.controller.view.numbers(0.0, 0.0)).body + OF_NODE["/metrics"](node).body
    names = re.findall(r"^# TYPE (\w+) ", of_both.decode(), re.M)
    assert names and all(f"`{name}`" in page for name in names)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return Path(built / "reference.html").read_text()


def test_the_page_has_the_tables(page: str) -> None:
    assert "<!-- reference" not in page and page.count("<table>") >= 6 + 2
    for name in [*EVENTS, *ALWAYS, *ACCOUNT, "ft_lost_seconds_total", "--ft-replicas", "143"]:
        assert f"<code>{name}</code>" in page, name
