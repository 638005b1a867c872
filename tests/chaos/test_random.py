"""Random failures, one after the other: the job ends bit-identically all the same."""

from __future__ import annotations

import pytest
from harness import Layout, check_random_kills

KINDS = ("node", "agent", "worker", "worker")


@pytest.mark.timeout(300)  # a minute, where the machine has nothing else to do
@pytest.mark.parametrize(
    ("layout", "nproc", "seed"),
    [
        (Layout(1, 2, 2, distributed=True, bf16=True), 2, 1),
        pytest.param(Layout(2, 1, 2), 2, 2, marks=pytest.mark.exhaustive),
        pytest.param(Layout(1, 1, 2, distributed=True), 1, 3, marks=pytest.mark.exhaustive),
        pytest.param(Layout(2, 2, 1, bf16=True), 2, 4, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: str(value) if isinstance(value, Layout) else None,
)
def test_random_kills(layout: Layout, nproc: int, seed: int, tmp_path):
    check_random_kills(tmp_path / "job", layout, nproc, seed, kills=10, kinds=KINDS)
