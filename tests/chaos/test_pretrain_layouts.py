"""Every layout that docs/compatibility.md calls supported loses a role, and ends bit-identically."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import ROOT
from megatron_jobs import LAYOUTS, survives

pytest.importorskip("megatron.training", reason="megatron-core's wheels hold it from 0.17 on, Python 3.12")

ITERATIONS = 5
SAVED = (f"--save-interval={ITERATIONS}", "--ckpt-format=torch")
"""Once, and in the format whose writer starts no other processes: that takes longer than the training."""
PLACES = ("3@forward:3:worker", "0@backward:2", "1@gradients:3:worker", "2@optimizer:3", "0@between:2:worker")


def rows() -> list[str]:
    """The layouts in the table, in its order."""
    text = (ROOT / "docs" / "compatibility.md").read_text()
    section = text.partition("### Megatron's parallelism\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w-]+)` \|", section, re.M)


def test_the_table_is_read() -> None:
    assert len(rows()) > 10 and set(rows()) <= set(LAYOUTS)


@pytest.mark.parametrize(("number", "name"), enumerate(rows()), ids=lambda value: str(value))
def test_layout(number: int, name: str, tmp_path: Path) -> None:
    place = PLACES[number % len(PLACES)]
    survives(LAYOUTS[name], ITERATIONS, (place,), tmp_path, *SAVED)
