"""Engines without an optimizer, beside the protected one. Whole jobs with them: tests/chaos."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft_deepspeed import hooks
from ft_deepspeed.reference import GRADIENTS, Pass, Reference, References
from ft_deepspeed.tape import Tape


def engine(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Embedding(100, 7), torch.nn.Linear(7, 3), torch.nn.BatchNorm1d(3))
    return SimpleNamespace(module=module, optimizer=None)


@pytest.mark.parametrize(
    ("given", "config", "trains"),
    [
        ({"model": torch.nn.Linear(1, 1)}, {}, False),
        ({}, {"optimizer": {}}, False),
        ({}, {"optimizer": {"type": "Adam"}}, True),
        ({"optimizer": torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1.0)}, {}, True),
        ({}, {"fault_tolerance": {"enabled": True}}, False),
    ],
)
def test_which_engine_trains(given: dict[str, Any], config: dict[str, Any], trains: bool) -> None:
    assert hooks._trains(given, config) is trains


def test_weights_are_compared() -> None:
    one, same, other = (Reference(engine(seed)) for seed in (0, 0, 1))
    assert one.sum() == same.sum() != other.sum()
    changed = engine()
    reference = Reference(changed)
    for weight in changed.module.parameters():
        weight.data.mul_(0.9)  # as TRL does it: no version counts that
    assert reference.sum() != one.sum()
    changed.module.load_state_dict(engine().module.state_dict())
    assert reference.sum() == one.sum()
    for weight in changed.module.parameters():
        weight.data = weight.data.clone()  # elsewhere
        weight.data += 1
    assert reference.sum() != one.sum()


def test_whose_weights_are_other() -> None:
    references = References()
    references._all = [Reference(engine()), Reference(engine(1))]
    state = references.state()
    assert references.objection(state) == references.objection([]) == ""
    found = references.objection([state[0], 0])
    assert found.startswith("engine 2 without an optimizer") and "keep(reference=model)" in found


def test_a_pass_is_made_again_with_its_inputs() -> None:
    found = engine()
    found.module.eval()

    def forward(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        result = found.module[0].weight[x].sum(-1) * scale
        x.zero_()
        return result

    with torch.no_grad():
        made = Pass(found, forward, (torch.tensor([3, 4]),), {"scale": 2.0}, 1)
        first = made.execute()
        assert torch.equal(made.repeat(), first) and torch.equal(made.repeat(), first)
    assert made.kind == "reference 1" and made.evaluates and not made.again
    made = Pass(found, forward, (torch.tensor([3]),), {}, 0)
    made.execute()
    tape = Tape()
    made.version = 0
    tape.record(made)
    assert tape.objection(0, None) == GRADIENTS
