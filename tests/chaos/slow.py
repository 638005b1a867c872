"""loading.py with longer steps, on nodes of which one is a fifth slower once a test has said so: it computes
longer, or its samples take longer. Nobody rests any more once the test waits for the job's end.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

import loading
import torch
from whereabouts import node

REST, MORE = 0.2, 0.04
"""Seconds that a role computes, and that a slow one takes besides: it sleeps, whatever else runs here."""
SLOW, AWAITED = "FT_TESTS_SLOW", "FT_TESTS_AWAITED"
"""Environment variables: each names a file. One has a node and `compute` or `data`, one is there once the end
is waited for."""

here = functools.cache(node)


def rest(part: str) -> None:
    """What this part of a step takes."""
    if "--ft" not in sys.argv or Path(os.environ[AWAITED]).exists():
        return
    told = Path(os.environ[SLOW])
    slow = told.exists() and told.read_text().split() == [here(), part]
    time.sleep(REST * (part == "compute") + MORE * slow)


class Samples(loading.Samples):
    """Read by the main process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % loading.BATCH == 0:
            rest("data")
        return super().__getitem__(index)


class Model(loading.Model):
    """Takes its time."""

    def gradient(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rest("compute")
        return super().gradient(batch)


def main() -> None:
    """As loading.py."""
    loading.Samples, loading.Model = Samples, Model  # type: ignore[misc]
    loading.main()


if __name__ == "__main__":
    main()
