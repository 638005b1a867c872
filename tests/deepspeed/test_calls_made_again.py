"""What a call leaves behind that is abandoned, and what one that is made again finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ft_core.errors import EpochChanged
from ft_deepspeed.calls import Batch, Save
from ft_deepspeed.context import Context
from ft_deepspeed.gradients import CHANGED, WRITTEN, Weights
from ft_deepspeed.live import Live
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


def test_a_save_that_is_made_again_is_of_what_there_was_to_save() -> None:
    saved = list[tuple[Any, ...]]()

    def save(place: str, client_state: dict[str, Any]) -> None:
        saved.append(
            (client_state["samples"], client_state["order"].tolist(), client_state["lists"][0].copy())
        )

    client = {"samples": 4, "order": torch.tensor([1, 2]), "lists": [[1]]}
    call = Save(None, save, ("there",), {"client_state": client})
    call.execute()
    call.given = True  # the script goes on
    client["samples"] = 8
    client["order"].add_(1)
    client["lists"][0].append(2)
    call.repeat()
    assert saved == 2 * [(4, [1, 2], [1])]


def test_a_trainers_save_that_is_made_again_is_of_where_its_loop_was() -> None:
    control = SimpleNamespace(word="saves")
    saved, trainer = list[str](), SimpleNamespace(state=SimpleNamespace(log=["a"]), control=control)
    call = Save(None, lambda self: saved.append(f"{self.state.log} {self.control.word}"), (trainer,), {})
    call.execute()
    call.given = True
    trainer.state.log.append("b")
    control.word = "goes on"
    call.repeat()
    assert saved == 2 * ["['a'] saves"] and trainer.control is control and control.word == "goes on"
    assert trainer.state.log == ["a", "b"]


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
        nothing = SimpleNamespace(capture=dict, restore=lambda changed: None, modes=list)
        self.ft_protection = SimpleNamespace(module=nothing)

    def gradient_accumulation_steps(self) -> int:
        steps: int = self._config.gradient_accumulation_steps
        return steps


def test_what_the_script_sets_between_two_steps_is_as_it_was_for_the_first() -> None:
    """A learning rate that is a tensor, clipping, and how many micro batches a pipeline's step has."""
    engine = Engine()
    rate = engine.optimizer.param_groups[0]["lr"]
    engine.optimizer.clip_grad = engine._config.gradient_clipping = 0.5
    context = Context.capture(engine)
    rate.fill_(1.0)
    engine.optimizer.clip_grad = engine._config.gradient_clipping = 0.0
    engine._config.gradient_accumulation_steps = engine.micro_batches = 3
    context.apply(engine)
    assert engine.optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.5
    assert engine.micro_batches == engine.gradient_accumulation_steps() == 1
    assert engine.optimizer.clip_grad == engine._config.gradient_clipping == 0.5


def test_a_pass_is_made_again_with_the_kernels_that_it_was_made_with() -> None:
    engine, all_there = Engine(), Context.capture(Engine()).attention
    with sdpa_kernel(SDPBackend.MATH):
        context = Context.capture(engine)
    after = Context.capture(engine)
    assert after.attention == all_there != context.attention
    context.apply(engine)
    assert [name for name, on in Context.capture(engine).attention.items() if on] == ["math_sdp"]
    after.apply(engine)
    assert Context.capture(engine).attention == all_there


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


class Refused(Exception):  # noqa: N818 - said of what is wanted
    """With what was said."""


class Steps:
    """A script's steps in plain training, without what they compute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.fails = False
        """Whether the next call that is not a step's is interrupted."""
        self.objections: list[str] = []
        self.copying = False
        """Whether a version is copied for longer than a step's call takes."""
        self.between_steps = True
        self.version, self.oldest_version, self.in_place = 0, 0, SimpleNamespace(cannot_pass=self._refuse)
        self.overlay = SimpleNamespace(end=lambda whole: None)
        self.position = self.began_at = self.first = 0
        self.whole, self.forwards = True, []
        self.made_up = SimpleNamespace(given=lambda *given: None)
        self.session = self
        self.engine = SimpleNamespace(module=self.model, optimizer=SimpleNamespace())
        monkeypatch.setattr(Context, "capture", lambda engine: None)
        self.live = Live(self, SimpleNamespace())  # type: ignore[arg-type]
        self.clips = False
        """Whether the script has changed gradients since the last call."""
        self.live._gradients = SimpleNamespace(  # type: ignore
            changed=lambda: self.clips, left=lambda: None, differ=lambda: self.clips
        )
        self.live._weights = Weights(self.engine)
        self.live._persist = self._made  # type: ignore[method-assign]
        self.live.go_on()

    def _refuse(self, why: str) -> NoReturn:
        raise Refused(why)

    def _made(self, call: Any) -> None:
        if call.kind == "step":
            self.version += 1
            self.copying = True
            with torch.no_grad():
                self.model.bias.add_(1)
        elif self.fails:
            self.fails = False
            self.recover()

    def end_copying(self) -> None:
        self.copying = False

    def reached(self, step: int) -> None:
        self.position = step

    def point(self, name: str) -> None:
        pass

    def recover(self) -> None:
        """From a failure, to where the script is; and once more, as another comes in the middle."""
        for _ in range(2):
            self.live.interrupted()
            self.objections.append(self.live.objection(self.version))
            self.model.weight.data.copy_(self.weight)  # it is loaded
        self.live._between = None
        self.live.redo(self.version + 1)

    def step(self, kind: str = "step") -> None:
        """One call."""
        self.live.make(SimpleNamespace(args=(), kwargs={}, losses=[], kind=kind, evaluates=False, again=""))
        if kind == "step":
            self.weight = self.model.weight.detach().clone()

    def write(self) -> None:
        """As a script does between two."""
        self.model.weight.data.add_(1)


def test_a_failure_after_the_script_has_changed_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two calls: those that are made again leave other gradients than the script goes on with."""
    steps = Steps(monkeypatch)
    steps.step()
    steps.recover()
    steps.clips = True
    steps.recover()
    steps.fails = True
    steps.step("forward")  # a call that is marked
    assert steps.objections == [""] * 2 + [CHANGED] * 4


def test_weights_that_the_script_writes_are_not_copied_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    for _ in range(40):
        steps.step()
        steps.write()
        assert not steps.copying
    assert not steps.live.objection(steps.version)


def test_a_version_in_which_the_first_of_such_writes_may_be_is_not_gone_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    for _ in range(40):
        steps.step()
    assert steps.copying and not steps.live.objection(steps.version)
    torn = steps.version
    with torch.no_grad():
        steps.model.weight.add_(1)
    steps.step()
    assert not steps.copying
    with pytest.raises(Refused, match="for the first time"):
        steps.live.objection(torn)
    assert not steps.live.objection(steps.version)
    steps.write()
    steps.step()
    with pytest.raises(Refused):
        steps.live.objection(torn)
    assert not steps.live.objection(steps.version)


@pytest.mark.parametrize("during", ["the evaluation", "between two calls"])
@pytest.mark.parametrize(
    "write", [lambda w: w.copy_(w * 0.5), lambda w: w.view(-1)[-1:].add_(1), lambda w: w]
)
def test_a_failure_while_the_script_has_put_other_weights_in_place(
    monkeypatch: pytest.MonkeyPatch, write: Any, during: str
) -> None:
    """By what leaves no trace: what is restored is not what it had there."""
    steps = Steps(monkeypatch)
    for _ in range(30):
        steps.step()
        steps.step("forward")
    raw = steps.model.weight.data.clone()
    for fails in (False, True):
        write(steps.model.weight.data)
        written = not torch.equal(steps.model.weight, raw)
        if during == "the evaluation":
            steps.fails = fails
            steps.step("evaluation")
        elif fails:
            steps.recover()
        steps.model.weight.data.copy_(raw)
    assert steps.objections == [WRITTEN if written else ""] * 2
    steps.recover()
    steps.step()
    steps.recover()
    steps.between_steps = False  # the optimizer has begun to change them
    steps.model.weight.data.mul_(2)
    steps.recover()
    assert steps.objections[2:] == [""] * 6
