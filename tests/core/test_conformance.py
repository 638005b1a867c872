"""The trial of adapters (`ft_core.conformance`), with the smallest one there is, and with mistakes in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases import run_cases

MISTAKES = {
    "ForgetsRandomStates": "the steps tell",
    "KeepsWhatItIsGiven": r"optimizer\.0\.\w+ differs",
    "LeavesGradients": "interrupted in the step's operation 0 of 6",
    "LeavesLaterMoments": "restored to the beginning: there is",
    "SaysThatOthersHaveTheSame": r"buffer\.mean: \d has another",
    "ForgetsBuffers": "undisturbed",
}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, int | str]]]:
    """What two ranks printed, and their results."""
    worker, out = Path(__file__).with_name("conformance_worker.py"), tmp_path_factory.mktemp("tried") / "out"
    return run_cases(worker, 2, " ".join(["LoopAdapter", *MISTAKES]), out)


def test_the_smallest_adapter(tried: tuple[str, list[dict[str, int | str]]]) -> None:
    """Its step has five all-reduces, of which one is waited for."""
    output, results = tried
    assert [found.get("LoopAdapter") for found in results] == [6, 6], output[-3000:]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, tried: tuple[str, list[dict[str, int | str]]]) -> None:
    output, results = tried
    assert [found.get(mistake) for found in results] == [1, 1], output[-3000:]
    for rank in range(2):
        assert re.search(rf"rank {rank} {mistake}: .*{MISTAKES[mistake]}", output), output[-3000:]
