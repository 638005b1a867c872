"""A script's calls where its engine is, and again after a failure: engine and session are stand-ins."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft_deepspeed.calls import Backward, Direct, Forward, ScriptPart
from ft_deepspeed.live import Live
from ft_deepspeed.module_state import ModuleState
from ft_deepspeed.results import Results
from ft_deepspeed.script import Script


class ReplacedError(Exception):
    """This worker gives up."""


class Engine:
    """As much of one as is asked for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.device = torch.device("cpu")
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.lr_scheduler = None
        self._config = SimpleNamespace()
        self.monitor = SimpleNamespace(enabled=True)
        self.ft_protection = SimpleNamespace(module=ModuleState(self.module), point=ignored)

    def zero_optimization_stage(self) -> int:
        return 0

    def gradient_accumulation_steps(self) -> int:
        return 1

    def _report_progress(self, step: int) -> None:
        raise AssertionError("it is quiet in a recovery")

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        return loss

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.module.parameters() if p.grad is not None]


def ignored(*_: Any, **__: Any) -> None:
    pass


class Job:
    """A script's calls, and a failure."""

    def __init__(self) -> None:
        def replace_worker(why: str) -> None:
            raise ReplacedError(why)

        in_place = SimpleNamespace(
            issued=0,
            inside=contextlib.nullcontext,
            interrupted=lambda error: False,
            replace_worker=replace_worker,
        )
        overlay = SimpleNamespace(complete=ignored, end=ignored, real=contextlib.nullcontext)
        session: Any = SimpleNamespace(
            version=0,
            oldest_version=0,
            between_steps=False,
            in_place=in_place,
            overlay=overlay,
            check_epoch=ignored,
            exchanged=ignored,
            role=0,
            point=ignored,
        )
        self.engine = Engine()
        self.script: Any = object.__new__(Script)
        self.script.engine, self.script.session = self.engine, session
        self.script.position = self.script.began_at = self.script.first = 0
        self.script.whole, self.script._counted, self.script.results = True, Counter(), Results()
        self.script.made_up = SimpleNamespace(given=ignored)
        state: Any = SimpleNamespace()
        self.live = Live(self.script, state)
        self.live.begin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.live.make(Forward(self.engine, self.engine.forward, (x,), {}))
        return found

    def backward(self, loss: torch.Tensor) -> None:
        call = Backward(self.engine, self.engine.backward, (loss,), {}, self.script.forwards)
        self.script.forwards = []
        self.live.make(call)

    def direct(self, loss: torch.Tensor) -> None:
        part = ScriptPart([loss], self.script.forwards, self.engine)
        kwargs = {"retain_graph": None, "create_graph": False}
        self.live.make(Direct(self.engine, torch.autograd.backward, loss, part, (None,), kwargs))

    def fails(self) -> None:
        """Between two calls: gradients are dropped, and the calls of the step made again."""
        self.live.interrupted()
        self.engine.module.zero_grad()
        self.live.redo(0)


@pytest.mark.parametrize("evaluating", [True, False])
@pytest.mark.parametrize("back", [Job.backward, Job.direct])
def test_a_step_that_trains_in_evaluation_mode_is_made_again(
    back: Callable[[Job, torch.Tensor], None], evaluating: bool
) -> None:
    job = Job()
    job.engine.module.train(not evaluating)
    for x in (1.0, 2.0):
        out = job.forward(torch.full((2, 4), x))
        back(job, out.square().sum())
    del out
    expected = job.engine.gradients()
    job.fails()
    assert expected
    for one, other in zip(job.engine.gradients(), expected, strict=True):
        assert torch.equal(one, other)


def test_a_pass_in_evaluation_mode_that_the_script_has_yet_to_go_back_through_is_made_again() -> None:
    def made(fails: bool) -> list[torch.Tensor]:
        job = Job()
        job.engine.module.eval()
        loss = job.forward(torch.ones(2, 4)).square().sum()
        if fails:
            job.fails()
        job.backward(loss)
        if fails:
            job.fails()
        return job.engine.gradients()

    for one, other in zip(made(True), made(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_that_the_script_has_dropped_is_gone(training: bool) -> None:
    """A validation without `torch.no_grad()`. No collection of garbage, which would come too late."""
    job = Job()
    job.engine.module.train(training)
    found: list[weakref.ref[Any]] = []
    job.engine.module[1].register_forward_hook(lambda module, x, y: found.append(weakref.ref(y)))
    gc.disable()
    try:
        for x in (1.0, 2.0, 3.0):
            total = job.forward(torch.full((2, 4), x)).sum().item()
        assert total and len(found) == 3
        assert not any(activation() is not None for activation in found)
        assert not job.script.forwards
        out = job.forward(torch.ones(2, 4))
        assert found[-1]() is not None and len(job.script.forwards) == 1
        job.backward(out.sum())
        assert found[-1]() is None
    finally:
        gc.enable()
    expected = job.engine.gradients()
    found.clear()
    job.fails()
    assert len(found) == (4 if training else 1)  # passes, made again
    for one, other in zip(job.engine.gradients(), expected, strict=True):
        assert torch.equal(one, other)


def test_a_backward_pass_whose_forward_pass_is_not_known_any_more_replaces_the_worker() -> None:
    job = Job()
    loss = job.forward(torch.ones(2, 4)).sum()
    job.live.go_on()
    job.backward(loss)
    del loss
    with pytest.raises(ReplacedError, match="not there any more"):
        job.fails()
