"""The invariants are a table: each is checked, and what cites one in the product cites one that there is."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from harness import ROOT

from .invariants import Invariant

BY_ITSELF = {Invariant.PHASES}
"""Those that the product raises."""


def test_each_invariant_has_a_number_of_its_own() -> None:
    assert [each.value[0] for each in Invariant] == list(range(1, len(Invariant) + 1))


def test_each_invariant_is_checked() -> None:
    here = Path(__file__).parent
    found = Counter(
        name
        for path in here.glob("*.py")
        for name in re.findall(r"Invariant\.(\w+)\.broken", path.read_text())
    )
    assert found.keys() == {each.name for each in set(Invariant) - BY_ITSELF}


def test_what_is_cited_is_there() -> None:
    numbers = {each.number for each in Invariant}
    cited = {
        number
        for path in (ROOT / "ft_core").rglob("*.py")
        for number in re.findall(r"INV-\d+", path.read_text())
    }
    assert len(cited) > 10 and cited <= numbers, cited - numbers
