"""Docstrings are sentences that stand alone."""

from __future__ import annotations

import re

from harness import ROOT

LEANS = re.compile(r'"""(?:Of|See|Likewise|Ditto)\b.*')
"""How a docstring begins that goes on from something else."""


def test_no_docstring_leans_on_another() -> None:
    files = [
        path for room in ("ft_core", "ft_megatron", "ft_deepspeed") for path in (ROOT / room).rglob("*.py")
    ]
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}: {line}" for path in files for line in LEANS.findall(path.read_text())
    ]
    assert not found
