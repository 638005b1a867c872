"""Alert rules and the dashboard name metrics that there are; each alert fires when it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from core.control.test_controller_machine import ControlPlane
from harness import ROOT

from ft_core.control.observe import metrics as of_controller
from ft_core.node import metrics as of_node

MONITORING = ROOT / "recipes" / "monitoring"
NAME = re.compile(r"\bft_[a-z0-9_]+")
SYMPTOMS = ROOT / "docs" / "symptoms.md"
CONTROL = ControlPlane(nodes=2)
KINDS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "info": ("_info",)}


def rules() -> list[dict[str, Any]]:
    found = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    return [rule for group in found["groups"] for rule in group["rules"]]


ALERTS = [rule for rule in rules() if "alert" in rule]


def known() -> set[str]:
    """Names of series."""
    node = of_node.NodeNumbers("a", "b", True, 1, {}, {}, 0)
    families = [*of_controller.families(CONTROL.controller.view.numbers(0.0, 0.0)), *of_node.families(node)]
    return {f"{family.name}{end}" for family in families for end in KINDS.get(family.type, ("",))}


def expressions() -> list[str]:
    board = json.loads((MONITORING / "dashboard.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [*shown, *(rule["expr"] for rule in rules())]


@pytest.mark.parametrize("expression", expressions())
def test_metrics_are_there(expression: str) -> None:
    names = set(NAME.findall(expression))
    assert names <= known() and (names or "ft:goodput" in expression)


def test_each_alert_is_tried() -> None:
    tried = yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]
    fire = {case["alertname"] for test in tried for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert len(ALERTS) > 10 and fire == {rule["alert"] for rule in ALERTS}


def sections() -> dict[str, str]:
    """What the page of symptoms says of each alert, in its order."""
    _, *parts = re.split(r"^## (Ft\w+)\n", SYMPTOMS.read_text(), flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_each_alert_has_a_section() -> None:
    """And each section an alert; pages first."""
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in ALERTS}
    assert sorted(sections()) == sorted(severities)
    ordered = [severities[name] for name in sections()]
    assert ordered == sorted(ordered)


@pytest.mark.parametrize("rule", ALERTS, ids=[rule["alert"] for rule in ALERTS])
def test_a_section_says_all_that_is_needed(rule: dict[str, Any]) -> None:
    """What it means, what is at risk, what to look at, what to do; with commands that there are."""
    assert rule["annotations"]["runbook_url"] == f"docs/symptoms.md#{rule['alert'].lower()}"
    head, *parts = re.split(r"^\*\*(Means|At risk|Do)\*\*", sections()[rule["alert"]], flags=re.M)
    assert head.startswith(f"\n*{rule['labels']['severity']}*: ")
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(said) == ["Means", "At risk", "Do"]
    assert all(len(text.split()) >= 8 for text in said.values())
    assert "\n    ftctl " in said["At risk"], "what to look at, before what to do"


def test_panels_do_not_overlap() -> None:
    board = json.loads((MONITORING / "dashboard.json").read_text())
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (x, y)
        for at in places
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells)) and all(x < 24 for x, _ in cells)


def test_promtool_tries_the_rules() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool was not found: that alerts fire was left out (Debian: prometheus)")
    checks = ["check", "rules", "alerts.yaml"], ["check", "config", "prometheus.yaml"]
    for command in (*checks, ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [promtool, *command], cwd=MONITORING, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
