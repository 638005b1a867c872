"""State that a script has named goes into a snapshot and comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ft_core import kept
from ft_core.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_named", {})


class Average:
    """Has tensors of its own, that it makes anew, and numbers."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"steps": 0, "shadow": {}, "past": (1.5, [torch.zeros(2)])}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def travelled(found: kept.Kept) -> kept.Kept:
    """As a newcomer reads it in a snapshot: bytes that are overwritten later."""
    tensors = {t.name: t.tensor.clone() for t in found.tensors((3,))}
    arrived = kept.Kept(tensors | {"flat.0": torch.ones(1)})
    for tensor in tensors.values():
        tensor.fill_(99)
    return arrived


def test_everything_that_has_state_comes_back() -> None:
    def named() -> tuple[Average, torch.nn.Module, Any, torch.Tensor]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.AdamW(module.parameters())
        found = Average(), module, optimizer, torch.zeros(3)
        kept.keep(average=found[0], module=module, optimizer=optimizer, highest=found[3])
        return found

    def change(average: Average, module: torch.nn.Module, optimizer: Any, highest: torch.Tensor) -> None:
        average.state = {
            1: torch.arange(4),
            "steps": 7,
            "shadow": {"a.b": torch.ones(2), "a": {"b": torch.zeros(1)}},
        }
        module(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        highest.copy_(torch.tensor([1.0, -0.0, float("nan")]))

    old = named()
    change(*old)
    then = kept.Kept.capture()
    change(*old)  # what was captured is what it was
    assert {t.holders for t in then.tensors((3,))} == {(3,)}
    new = named()
    travelled(then).apply()
    average, module, optimizer, highest = new
    assert list(average.state) == [1, "steps", "shadow"] and average.state["steps"] == 7
    assert average.state[1].equal(torch.arange(4)) and average.state["shadow"]["a.b"].equal(torch.ones(2))
    assert average.state["shadow"]["a"]["b"].equal(torch.zeros(1))
    assert highest.numpy().tobytes() == old[3].numpy().tobytes()
    torch.manual_seed(0)
    expected = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    stepped = torch.optim.AdamW(expected.parameters())
    change(Average(), expected, stepped, torch.zeros(3))
    assert all(
        a.equal(b) for a, b in zip(module.state_dict().values(), expected.state_dict().values(), strict=True)
    )
    moments = [s["exp_avg"] for s in optimizer.state.values()]
    assert moments and all(
        a.equal(s["exp_avg"]) for a, s in zip(moments, stepped.state.values(), strict=True)
    )


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"keep\(ema=...\): a list has no state_dict"):
        kept.keep(ema=[torch.ones(1)])
    average = Average()
    average.state = {"shadow": {"when": object()}}
    kept.keep(ema=average)
    with pytest.raises(ConfigError, match=r"keep\(ema=...\): ema\['shadow'\]\['when'\] is a object"):
        kept.Kept.capture()


def test_a_worker_that_has_not_named_it_is_told() -> None:
    kept.keep(ema=Average())
    then = kept.Kept.capture()
    kept._named.clear()
    assert not list(kept.Kept.capture().tensors((0,)))
    with pytest.raises(ConfigError, match=r"keep\(ema=...\) was called by the worker that played this role"):
        then.apply()
