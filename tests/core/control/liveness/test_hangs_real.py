"""Hangs of real processes with process groups over gloo: what their records say, and who is to blame.

A handful; `python -m benchmarks.hangs --real N` draws more.
"""

from __future__ import annotations

import pytest

from benchmarks.hangs_real import run
from benchmarks.hangs_simulated import Fault, Layout
from ft_core.control.liveness.hangs.finding import Case

TP_DP = Layout(tp=2, dp=2, overlap=True)


@pytest.mark.parametrize(
    ("kind", "layout", "at", "found"),
    [
        ("stop", TP_DP, 3, "stopped"),
        ("lock", Layout(pp=2, dp=2), 5, "absent"),
        ("loader", Layout(dp=2), 0, "absent"),
        ("skipped", Layout(tp=2, dp=2), 3, "circle"),
        ("doubled", Layout(pp=4), 2, "circle"),
    ],
)
def test_who_hangs_is_found(kind: str, layout: Layout, at: int, found: str) -> None:
    fault = Fault(kind, 1, 3, at)
    outcome = run(layout, fault)
    assert outcome.what == "hung", outcome
    finding = Case(outcome.logs, dict.fromkeys(range(layout.roles), "node")).explain()
    assert finding is not None and finding.culprits == (1,), finding
    assert finding.kind == found and finding.waited >= 1, finding
