"""Docstrings are sentences that stand alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from harness import ROOT

LEANS = re.compile(r'"""(?:Of|See|Likewise|Ditto)\b.*')
"""How a docstring begins that goes on from something else."""
POINTS = re.compile(r'"""(?:It|They|Those|As|The same|Also|Though|So|Inverse|Until|He)\b.*')
"""How one begins that means something which stands elsewhere; in the rooms of control and node none does."""


def test_no_docstring_leans_on_another() -> None:
    files = [
        path for room in ("ft_core", "ft_megatron", "ft_deepspeed") for path in (ROOT / room).rglob("*.py")
    ]
    assert len(files) > 100
    assert not _found(LEANS, files)
    rooms = [path for room in ("control", "node") for path in (ROOT / "ft_core" / room).rglob("*.py")]
    assert len(rooms) > 100
    assert not _found(POINTS, rooms)


def _found(words: re.Pattern[str], files: Iterable[Path]) -> list[str]:
    return [f"{path.relative_to(ROOT)}: {line}" for path in files for line in words.findall(path.read_text())]
