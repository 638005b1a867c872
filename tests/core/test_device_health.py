"""What GPUs report, and what is done about it."""

from __future__ import annotations

import re

import pytest
from harness import ROOT

import mkdocs_reference
from ft_core.control.liveness.xid_table import UNKNOWN, XIDS, Advice, DeviceAction

NEWEST = 172
"""The last number of NVIDIA's catalogue."""
ADVISED = {
    Advice.RESTART_APP: (8, 11, 13, 31, 32, *range(39, 42), *range(69, 73), 94),
    Advice.RESET_GPU: (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 162),
    Advice.RESTART_BM: (79, 160),
    Advice.WORKFLOW: (45, 48, 74, *range(144, 151), 154),
    Advice.IGNORE: (43, 44, 63, 92, 93, 121, 137, 157),
}
"""What NVIDIA's monitor does."""


def test_every_xid_has_a_row() -> None:
    assert list(XIDS) == list(range(1, NEWEST + 1))
    assert UNKNOWN.action is DeviceAction.COUNT


@pytest.mark.parametrize("advice", ADVISED)
def test_the_advice_is_nvidias(advice: Advice) -> None:
    assert {number: XIDS[number].advice for number in ADVISED[advice]} == dict.fromkeys(
        ADVISED[advice], advice
    )


def test_who_does_not_follow_the_advice_says_why() -> None:
    """What has an advice has its action, or a reason; nothing is never done about what needs a reset."""
    usual = {row.advice: row.action for row in XIDS.values() if not row.why}
    assert set(usual) == set(Advice)
    for number, row in XIDS.items():
        assert row.why or row.action is usual[row.advice], number
        if row.advice in (Advice.RESET_GPU, Advice.RESTART_BM):
            assert row.action is not DeviceAction.NOTHING, number


def test_the_page_shows_each() -> None:
    page = (ROOT / "docs" / "device_health.md").read_text()
    shown = mkdocs_reference.on_page_markdown(page)
    rows = [re.split(r" \| ", line.strip("| ")) for line in shown.splitlines() if re.match(r"\| \d", line)]
    found = {int(number): row[1:4] for row in rows for number in row[0].split(", ")}
    assert found == {n: [row.what, row.advice, f"`{row.action}`"] for n, row in XIDS.items()}
    assert all(f"`{action}`" in shown for action in DeviceAction)
