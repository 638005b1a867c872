"""A newcomer's loader deals what its predecessor's did, though its random state is another."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, dataloader

from ft_core.state import rng
from ft_deepspeed.draws import DRAWS, Draws


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_epochs_of_a_loader_that_shuffles(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def epochs(count: int, computes: bool) -> list[list[int]]:
        loader = DataLoader(range(12), shuffle=True, batch_size=None, **options)  # type: ignore[arg-type]
        found = []
        for _ in range(count):
            found.append([int(number) for number in loader])
            torch.rand(3 * computes)
        return found

    for kind in (dataloader._BaseDataLoaderIter, dataloader._MultiProcessingDataLoaderIter):
        for name in ("__init__", "_reset"):  # which `Draws` replaces
            monkeypatch.setattr(kind, name, getattr(kind, name))
    torch.manual_seed(1)
    predecessors = Draws(lambda: 0)
    *_, last = epochs(4, computes=True)
    noted = predecessors.state()
    torch.manual_seed(2)
    newcomers = Draws(lambda: 0)
    newcomers.follow(noted)
    assert epochs(4, computes=False)[-1] == last


def _seeded(kind: str, seed: int) -> Callable[[int], Any]:
    """Draws an order of so many."""
    if kind in ("PCG64", "MT19937"):
        generator = np.random.Generator(getattr(np.random, kind)(seed))
        rng.find([("script", {"own": generator})])
        return generator.permutation
    for seeds in (torch.manual_seed, np.random.seed, random.seed):
        seeds(seed)
    draws = {
        "torch": torch.randperm,
        "numpy": np.random.permutation,
        "python": lambda many: random.sample(range(many), many),
    }
    return draws[kind]


@pytest.mark.parametrize("kind", ["torch", "numpy", "python", "PCG64", "MT19937"])
@pytest.mark.parametrize(("steps", "varies"), [(95, False), (145, False), (145, True)])
def test_an_order_of_an_epoch_is_known_however_much_is_drawn_since(
    kind: str, steps: int, varies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of each step is drawn from the same generator."""
    monkeypatch.setattr(rng, "_own", {})

    def order(seed: int, noted: Any) -> tuple[list[int], Any]:
        """Of the last epoch."""
        draw, position, found = _seeded(kind, seed), -1, []
        draws = Draws(lambda: position)
        if noted is not None:
            draws.follow(noted)
        for step in range(steps):
            if step % 50 == 0:
                found = [int(number) for number in draw(400)]
            draw(5 + step * 7 % 40 * varies)
            draws.calls()
            position = step
            draw(5 * (noted is None))  # the model computes
            draws.returns()
            draws.calls()
            position = step + 1
            draws.returns()
        return found, draws.state()

    expected, noted = order(1, None)
    assert len(noted[1]) <= 2 * DRAWS
    assert order(2, noted)[0] == expected
