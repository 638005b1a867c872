"""What a call leaves behind that is abandoned, and what one that is made again finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft_core.errors import EpochChanged
from ft_deepspeed.calls import Batch
from ft_deepspeed.context import Context
from ft_deepspeed.module_state import ModuleState


class Pipeline:
    """As much of a pipeline engine as has to do with where its batches come from."""

    def __init__(self) -> None:
        self.data_iterator = self.training = iter([1, 2, 3])
        self.fails = False

    def eval_batch(self, data_iter: Any) -> int:
        before, self.data_iterator = self.data_iterator, data_iter
        first: int = next(self.data_iterator)
        if self.fails:
            raise EpochChanged
        self.data_iterator = before
        return first

    def train_batch(self, data_iter: Any = None) -> int:
        if data_iter is not None:
            self.data_iterator = data_iter
        first: int = next(self.data_iterator)
        if self.fails:
            raise EpochChanged
        return first


def test_an_evaluation_that_is_abandoned_leaves_the_training_data_in_their_place() -> None:
    engine = Pipeline()
    call = Batch(engine, engine.eval_batch, (iter([10, 20]),), {})
    engine.fails = True
    with pytest.raises(EpochChanged):
        call.execute()
    assert engine.data_iterator is engine.training
    engine.fails = False
    assert call.execute() == 10 and engine.data_iterator is engine.training


def test_a_training_batch_that_is_abandoned_is_made_of_the_same_data() -> None:
    engine = Pipeline()
    call = Batch(engine, engine.train_batch, (), {})
    engine.fails = True
    with pytest.raises(EpochChanged):
        call.execute()
    assert engine.data_iterator is engine.training
    engine.fails = False
    assert call.execute() == 1 and engine.data_iterator is engine.training
    assert Batch(engine, engine.train_batch, (), {}).execute() == 2


class Engine:
    """As much of a pipeline engine as a context is made of."""

    def __init__(self) -> None:
        self.device, self.module = torch.device("cpu"), torch.nn.Linear(1, 1)
        rate = torch.tensor(0.5)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=rate)
        self._config = SimpleNamespace(gradient_accumulation_steps=1)
        self.micro_batches = 1
        nothing = SimpleNamespace(capture=dict, restore=lambda changed: None)
        self.ft_protection = SimpleNamespace(module=nothing)

    def gradient_accumulation_steps(self) -> int:
        steps: int = self._config.gradient_accumulation_steps
        return steps


def test_what_the_script_sets_between_two_steps_is_as_it_was_for_the_first() -> None:
    """A learning rate that is a tensor, and how many micro batches a pipeline's step has."""
    engine = Engine()
    rate = engine.optimizer.param_groups[0]["lr"]
    context = Context.capture(engine)
    rate.fill_(1.0)
    engine._config.gradient_accumulation_steps = engine.micro_batches = 3
    context.apply(engine)
    assert engine.optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.5
    assert engine.micro_batches == engine.gradient_accumulation_steps() == 1


class Late(torch.nn.Module):
    """Its running mean is there from its first pass on."""

    mean: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.mean() if self.mean is None else 0.5 * (self.mean + x.mean())
        return x - self.mean


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_buffer_that_a_pass_makes_is_kept(wrapped: bool) -> None:
    late = Late()
    state = ModuleState(torch.nn.Sequential(late) if wrapped else late)
    before = state.capture()
    late(torch.ones(2))
    after = state.capture()
    late(torch.zeros(2))
    assert late.mean is not None and late.mean.item() == 0.5
    state.restore(after)
    assert late.mean.item() == 1.0
    state.restore(before)
    assert late.mean is None
    other = Late()
    ModuleState(torch.nn.Sequential(other) if wrapped else other).restore(after)
    assert other.mean is not None and other.mean.item() == 1.0


def test_the_passes_by_which_a_pipeline_seeds_its_layers_are_kept() -> None:
    from deepspeed.runtime.pipe.module import PipelineModule

    pipeline = PipelineModule.__new__(PipelineModule)
    torch.nn.Module.__init__(pipeline)
    pipeline.micro_offset = 0
    state = ModuleState(pipeline)
    pipeline.micro_offset = 4
    after = state.capture()
    pipeline.micro_offset = 5
    state.restore(after)
    assert pipeline.micro_offset == 4
