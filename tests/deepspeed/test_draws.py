"""A newcomer's loader deals what its predecessor's did, though its random state is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, dataloader

from ft_deepspeed.draws import Draws


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
