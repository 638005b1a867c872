"""What a newcomer's script is told of steps that are done; what is put back before a call is made again."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from ft_core.errors import CorruptSnapshot
from ft_core.state import envelope, rng
from ft_deepspeed import counters, history, schedule
from ft_deepspeed.calls import Backward, CannotRepeat, Forward
from ft_deepspeed.gradients import Gradients, Weights
from ft_deepspeed.history import History
from ft_deepspeed.module_state import ModuleState
from ft_deepspeed.results import RECENT, NotOnRecord, Results

HOST = torch.device("cpu")


def carried(results: Results) -> Results:
    """As a newcomer has it."""
    state = envelope.decode(envelope.encode(results.state()))
    tensors = {t.name: t.tensor for t in results.history.tensors((0,))}
    return Results(state, tensors.get(history.NAME))


def step(results: Results, version: int, losses: list[float]) -> None:
    for loss in losses:
        results.record("forward", version, {"loss": torch.tensor(loss), "logits": torch.ones(2, 3)})
        results.record("backward", version, torch.tensor(loss))
    results.step_done()


def test_numbers_of_every_step_are_known() -> None:
    results, steps = Results(), RECENT
    for version in range(steps):
        step(results, version, [version + 0.1, version + 0.2])
    found = carried(results)
    assert found.history and len(found.state()["calls"]) < steps
    for version in [0, 1, steps // 2, 5, steps - 1]:  # in any order
        answer = found.answer("forward", version, 1, HOST)
        assert answer["loss"] == torch.tensor(version + 0.2) and answer["logits"].shape == (2, 3)
    step(found, steps, [1.0])
    assert carried(found).answer("backward", steps, 0, HOST) == 1.0
    assert found.covers(0)
    newest = Results.newest(found.state())  # the tensor of older ones is not there
    assert newest.covers(steps) and not newest.covers(0) and newest.state()["calls"] == found.state()["calls"]


def test_what_is_not_known_is_not_made_up() -> None:
    results = Results()
    step(results, 0, [1.0])
    with pytest.raises(NotOnRecord, match="result of forward 2 of step 1"):
        results.answer("forward", 0, 1, HOST)
    with pytest.raises(NotOnRecord, match="result of evaluation 1 of step 1"):
        results.answer("evaluation", 0, 0, HOST)
    assert results.answer("step", 0, 0, HOST) is None


def test_what_a_model_returns_beside_tensors() -> None:
    results = Results()
    for version in range(RECENT + 3):
        about = {
            "accuracy": np.float32(version / 7),
            "many": np.int64(version),
            "done": np.bool_(version % 2),
        }
        kept = {
            "cache": {version},
            "rows": np.ones((2, 3)),
            "huge": np.int64(2**53 + 1),
            "name": "x",
            "none": None,
        }
        results.record("forward", version, about | kept)
        results.step_done()
    found = carried(results)
    assert len(found.state()["shapes"]) == 1
    for version in (0, 7, RECENT + 2):
        answer = found.answer("forward", version, 0, HOST)
        for name, value in {
            "accuracy": np.float32(version / 7),
            "many": np.int64(version),
            "done": np.bool_(version % 2),
        }.items():
            assert answer[name] == value and type(answer[name]) is type(value)
        assert (answer["name"], answer["none"]) == ("x", None)
        assert answer["rows"].shape == (2, 3) and "set" in f"{answer['cache']}"
        for uses in (
            lambda a: len(a["cache"]),
            lambda a: a["cache"].update,
            lambda a: bool(a["huge"]),
            lambda a: a["huge"] + 1,
            lambda a: a["rows"].mean() > 1 or None,
        ):
            with pytest.raises(NotOnRecord):
                uses(answer)
    assert found.counted(7) == {"forward": 1}


def test_of_a_record_that_is_full_the_older_half_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LARGEST", 4096)
    found = History()
    for version in range(500):
        found.append(version, {"forward": [[0, float(version)]]})
    known = [version for version in range(500) if found.read(version) is not None]
    assert known == list(range(known[0], 500)) and 0 < known[0] < 450
    assert found.read(499) == {"forward": [[0, 499.0]]}


def test_a_record_without_its_tensor_is_corrupt() -> None:
    found = History()
    found.append(0, {"forward": [[0, 1.0]]})
    with pytest.raises(CorruptSnapshot):
        History(found.state(), None)


def engine(**values: Any) -> Any:
    more = {"train_batch_size": lambda: 8, "gradient_accumulation_steps": lambda: 1}
    scaler = SimpleNamespace(cur_scale=4.0, cur_iter=0)
    optimizer = SimpleNamespace(overflow=False, loss_scaler=scaler)
    numbers = {
        "global_steps": 0,
        "global_samples": 0,
        "micro_steps": 0,
        "skipped_steps": 0,
        "_step_applied": False,
    }
    return SimpleNamespace(optimizer=optimizer, **(numbers | values | more))


def test_a_step_that_was_skipped() -> None:
    results, theirs, own = Results(), engine(), engine()
    for version, skipped in enumerate([True, False, False]):
        before = counters.read(theirs)
        counters.write(theirs, counters.expected(before, theirs, True))
        if skipped:
            theirs.skipped_steps, theirs._step_applied, theirs.optimizer.overflow = 1, False, True
            theirs.optimizer.loss_scaler.cur_scale = 2.0
        else:
            theirs.optimizer.overflow = False
        left = counters.other(counters.expected(before, theirs, True), counters.read(theirs))
        results.record_after(version, "step", 0, left)
        found = counters.expected(counters.read(own), own, True)
        counters.write(own, found | carried(results).answer_after(version, "step", 0))
        assert counters.read(own) == counters.read(theirs)
        assert own._step_applied is not skipped and type(own.skipped_steps) is int


class Warmup(LRScheduler):
    """With all that a schedule may have in it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after, self.milestones, self.device = (
            CosineAnnealingLR(optimizer, 9),
            {3, 5},
            torch.device("cpu"),
        )
        self.rule, self.nested = SimpleNamespace(seen=0, of=torch.device("cpu")), (1, [2, {3}])
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.after.step()
        self.rule.seen += 1
        return self.after.get_last_lr()


@pytest.mark.parametrize("kind", [Warmup, lambda o: LambdaLR(o, lambda n: 0.9**n)])
def test_schedules_with_whatever_in_them(kind: Any) -> None:
    def made() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        optimizer.step()
        return optimizer, kind(optimizer)

    optimizer, one = made()
    for _ in range(4):
        one.step()
    state = envelope.decode(envelope.encode(schedule.capture(one)))
    others, other = made()
    for _ in range(7):
        other.step()
    schedule.restore(other, state)
    others.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]  # which a version has, too
    assert repr(schedule.capture(other)) == repr(schedule.capture(one))
    one.step(), other.step()
    assert one.get_last_lr() == other.get_last_lr()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.calls, self.seen, self.best, self.text = 0, [1.5], {"a": None}, "x"
        self.register_buffer("mean", torch.zeros(2), persistent=False)
        self.kept = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(0.5)
        self.mean.add_(1), self.kept.mul_(0).add_(self.calls)
        self.best = {"a": 1.0}
        self.later = "new"
        self.aux = self.inner(x).sum()
        return self.aux


def test_attributes_of_the_model() -> None:
    model, other = Model(), Model()
    found, theirs = ModuleState(model), ModuleState(other)
    assert found.capture() == {}
    model(torch.ones(1, 2))
    after_one = envelope.decode(envelope.encode(found.capture()))
    model(torch.ones(1, 2))
    assert set(after_one) == {"calls", "seen", "best", "mean", "kept", "later"}
    mean = model.mean
    for state, part in ((found, model), (theirs, other)):
        state.restore(after_one)
        assert (part.calls, part.seen, part.best) == (1, [1.5, 0.5], {"a": 1.0})
        assert part.mean.tolist() == [1, 1] and part.kept.tolist() == [1, 1, 1]
    assert model.mean is mean
    found.restore({})
    assert (model.calls, model.seen, model.best, model.kept.tolist()) == (0, [1.5], {"a": None}, [0, 0, 0])


class Slower(torch.optim.SGD):
    """Of a script's own: it counts, and keeps norms, where torch does not look."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.count, self.norms = 0, [0.0]

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.norms.append(0.5 * self.count)
        super().step()


def test_attributes_of_an_optimizer_of_the_scripts_own() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer, other = Slower(model.parameters()), Slower(model.parameters())
    found, theirs = ModuleState(model, optimizer), ModuleState(model, other)
    optimizer.step()
    after_one = envelope.decode(envelope.encode(found.capture()))
    assert after_one == {"optimizer.count": 1, "optimizer.norms": [0.0, 0.5]}
    optimizer.step()
    for state, each in ((found, optimizer), (theirs, other)):
        state.restore(after_one)
        assert (each.count, each.norms) == (1, [0.0, 0.5])
    found.restore({})
    assert (optimizer.count, optimizer.norms) == (0, [0.0])
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    state = ModuleState(model, plain)
    plain.step()
    assert state.capture() == {}


def test_generators_of_the_scripts_own() -> None:
    space: dict[str, Any] = {
        "numpy": np.random.default_rng(1),
        "old": np.random.RandomState(1),
        "python": random.Random(1),
        "torch": torch.Generator().manual_seed(1),
        "system": random.SystemRandom(),
        "other": 5,
    }

    def drawn() -> list[float]:
        return [
            space["numpy"].random(),
            space["old"].rand(),
            space["python"].random(),
            torch.rand(1, generator=space["torch"]).item(),
            torch.rand(1).item(),
            np.random.rand(),
            random.random(),
        ]

    rng.find([("script", space)])
    try:
        states = envelope.decode(envelope.encode(rng.capture()))
        assert not rng.moved(states, rng.capture())
        first = drawn()
        assert len(rng.moved(states, rng.capture())) == 7
        rng.restore(states)
        assert drawn() == first
        space["numpy"] = None  # it was deleted
        rng.restore(states)
    finally:
        rng._own.clear()


# -- the graph -------------------------------------------------------------------------------------


class Engine:
    """Of DeepSpeed's, what a call needs."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(3, 3)
        self.ft_protection = SimpleNamespace(point=lambda name: None)
        self.optimizer = SimpleNamespace()

    def zero_optimization_stage(self) -> int:
        return 0

    def forward(self, x: torch.Tensor) -> Any:
        return {"out": self.module(x), "other": self.module(x).sum()}

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        (loss * 2).backward()
        return loss

    def calls(self, script: Any) -> tuple[Forward, Backward, list[torch.Tensor]]:
        """A pass, and back; and the gradients that are left."""
        forward = Forward(self, self.forward, (torch.arange(6.0).reshape(2, 3),), {})
        outputs, forward.given = forward.execute(), True
        loss = script(outputs, self)
        backward = Backward(self, self.backward, (loss,), {}, [forward])
        backward.execute()
        return forward, backward, self.taken()

    def taken(self) -> list[torch.Tensor]:
        found = [p.grad.clone() for p in self.module.parameters() if p.grad is not None]
        self.module.zero_grad()
        return found


OWN = torch.nn.Parameter(torch.tensor(2.0))


@pytest.mark.parametrize(
    ("script", "beside"),
    [
        (lambda r, e: r["out"].square().mean(), False),
        (lambda r, e: r["out"].square().mean() + r["other"] * OWN, False),
        (lambda r, e: r["out"].mul_(3).mean(), False),
        (lambda r, e: r["out"].mean() + e.module.weight.square().sum(), True),
        (lambda r, e: (r["out"] @ e.module.weight).mean(), True),
    ],
)
def test_a_backward_pass_is_as_it_is_without_us_and_can_be_made_again(script: Any, beside: bool) -> None:
    torch.manual_seed(0)
    found, plain = Engine(), Engine()
    plain.module.load_state_dict(found.module.state_dict())
    plain.backward(script(plain.forward(torch.arange(6.0).reshape(2, 3)), plain))
    forward, backward, gradients = found.calls(script)
    for one, other in zip(gradients, plain.taken(), strict=True):
        assert torch.equal(one, other)
    assert bool(backward.again) is beside
    if not beside:
        forward.repeat()
        backward.repeat()
        for one, other in zip(found.taken(), gradients, strict=True):
            assert torch.equal(one, other)


def test_a_pass_whose_error_comes_once_it_has_returned() -> None:
    """As NCCL's do: the script is given what was made again, and its backward pass can be, too."""
    found = Engine()
    forward = Forward(found, found.forward, (torch.arange(6.0).reshape(2, 3),), {})
    lost = forward.execute()
    outputs, forward.given = forward.repeat(), True
    assert forward.boundary is outputs["out"].grad_fn is not lost["out"].grad_fn
    backward = Backward(found, found.backward, (outputs["out"].square().mean(),), {}, [forward])
    backward.execute()
    expected = found.taken()
    forward.repeat(), backward.repeat()
    assert all(map(torch.equal, found.taken(), expected))


def test_a_backward_pass_that_is_interrupted_before_the_engines_part_and_in_the_middle() -> None:
    torch.manual_seed(0)
    found = Engine()
    passes = [Forward(found, found.forward, (torch.full((1, 3), x),), {}) for x in (1.0, 2.0)]
    losses = [p.execute()["out"].square().mean() for p in passes]
    for each in passes:
        each.given = True
    backward = Backward(found, found.backward, (sum(losses),), {}, passes)
    for each in passes:
        each.repeat()
    backward.repeat()  # nothing of it had been done
    expected = found.taken()
    for each in passes:
        each.repeat()
    passes[0].gradients = None
    with pytest.raises(CannotRepeat):
        backward.repeat()
    assert expected


@pytest.mark.parametrize(
    "change",
    [
        lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
        lambda m: m.weight.grad.data.clamp_(-1e-3, 1e-3),
        lambda m: setattr(m.weight, "grad", torch.zeros_like(m.weight)),
        lambda m: m.zero_grad(),
    ],
)
def test_gradients_that_the_script_changes(change: Any) -> None:
    found = Engine()
    looked = Gradients(found)
    found.calls(lambda r, e: r["out"].square().mean())
    found.backward(found.forward(torch.ones(2, 3))["out"].sum())
    looked.left()
    assert not looked.changed()
    looked.left()
    float(found.module.weight.grad.norm())
    assert not looked.changed()
    looked.left()
    change(found.module)
    assert looked.changed()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.weight.data.add_(1e-3),
        lambda m: m.load_state_dict({n: v + 1 for n, v in m.state_dict().items()}),
    ],
)
def test_weights_that_the_script_changes(change: Any) -> None:
    found = Engine()
    looked = Weights(found)
    looked.left()
    float(found.module.weight.norm()), copy.deepcopy(found.module), found.module.eval()
    assert not looked.changed()
    looked.left()
    change(found.module)
    assert looked.changed()


@pytest.mark.parametrize("function", ["set_full_hp_param", "set_local_hp_param", "_zero", "_replace"])
def test_optimizer_state_that_the_script_changes(function: str) -> None:
    found = Engine()
    weight = found.module.weight
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.randn(3, 3)
    called: list[int] = []

    def replace() -> None:
        optimizer.state[weight]["momentum_buffer"] = torch.zeros(3, 3)

    for name in ("set_full_hp_param", "set_local_hp_param"):
        setattr(found.optimizer, name, called.append)
    weight.set_full_hp_param = called.append
    looked = Weights(found, [optimizer])
    change: Any = {
        "set_full_hp_param": lambda: weight.set_full_hp_param(1),
        "set_local_hp_param": lambda: found.optimizer.set_local_hp_param(1),
        "_zero": lambda: optimizer.state[weight]["momentum_buffer"].zero_(),
        "_replace": replace,
    }[function]
    optimizer.state[weight]["momentum_buffer"].add_(1)  # the step
    looked.left(changes=True)
    looked.step_ended(7)
    assert not looked.differ(7) and not looked.changed()
    looked.left()
    change()
    assert looked.differ(7) and looked.changed()
    assert called == [1] * ("hp_param" in function)


def test_weights_that_the_script_changes_late_and_unseen_by_torch() -> None:
    """It is known by the time of a failure, in which steps it did."""
    found = Engine()
    looked = Weights(found)
    for version in range(42):
        looked.step_ended(version)
        if version >= 40:
            found.module.weight.data.mul_(0.9)
        assert looked.changed() is (version == 41)
        assert version < 30 or looked.may_be_written is (version == 41)
        found.module.weight.data.add_(1)  # the step
        looked.left(changes=True)
    looked.forget_before(38)
    assert looked.were_written(38) and looked.were_written(41) and not looked.were_written(42)
    looked.forget_before(40)
    looked.step_ended(40)  # done again
    looked.step_ended(41)
    assert not looked.were_written(38) and [*looked._ended] == [40, 41]


@pytest.mark.parametrize("change", [lambda m: m.seen.add_(1), lambda m: setattr(m, "seen", torch.ones(2))])
def test_buffers_that_the_script_changes(change: Any) -> None:
    found = Engine()
    found.module.register_buffer("seen", torch.zeros(2))
    found.module.register_buffer("hidden", torch.zeros(2), persistent=False)  # which calls remember
    found.module.register_buffer("none", None)
    looked = Weights(found)
    change(found.module)  # the pass
    looked.left()
    looked.step_ended(7)
    found.module.hidden.add_(1)
    assert not looked.differ(7) and not looked.changed()
    looked.left()
    change(found.module)  # by a recovery
    looked.restored(7, between=True)
    assert not looked.differ(7) and not looked.changed()
    looked.left()
    change(found.module)
    assert looked.differ(7) and looked.changed()


def test_parts_of_weights_that_the_script_changes() -> None:
    """In stage 3: the whole ones are not there."""
    found = Engine()
    found.module.weight.ds_tensor = part = torch.randn(5)
    found.module.weight.data = torch.empty(0)
    looked = Weights(found)
    looked.left(changes=True)
    looked.step_ended(7)
    found.module.weight.data = torch.ones(3, 3)  # gathered
    found.module.weight.data = torch.empty(0)
    assert not looked.differ(7) and not looked.changed()
    looked.left()
    part.data.mul_(2)
    assert looked.differ(7) and looked.changed()


def test_passes_that_change_weights_are_expected_to_for_a_while() -> None:
    """Unless that was in the first alone; evaluations do not count, and a save writes what was there."""
    found = Engine()
    looked = Weights(found)

    def call(change: Any = lambda: None, saves: bool = False, **about: bool) -> bool:
        assert not looked.changed(saves)
        with torch.no_grad():
            change()
        return looked.left(**about)

    def rewrite() -> None:
        found.module.weight.copy_(found.module.weight.clone())

    for _ in range(30):
        assert not call(evaluates=True)
    assert looked.may_be_written
    assert not call(rewrite, saves=True) and not looked.passes_write
    assert call(lambda: found.module.weight.data.add_(1)) and looked.passes_write
    for _ in range(30):
        call()
    assert not looked.passes_write and not looked.may_be_written
    assert call(rewrite, evaluates=True) and looked.passes_write and looked.may_be_written


def test_main_parameters_and_state_of_whatever_kind() -> None:
    found = Engine()
    main = torch.nn.Parameter(torch.randn(9))
    optimizer = torch.optim.SGD([main], lr=0.1)
    optimizer.state["calls"] = 3  # type: ignore[index, assignment]
    found.module.scripted = torch.jit.script(torch.nn.BatchNorm1d(3))
    looked = Weights(found, [optimizer])
    looked.left()
    assert not looked.changed()
    looked.left()
    with torch.no_grad():
        main.clamp_(-1, 1)
    assert looked.differ(0) and looked.changed()


def test_a_buffer_that_an_inference_has_made() -> None:
    found = Engine()
    found.module.register_buffer("seen", torch.zeros(2))
    looked = Weights(found)
    looked.left()
    with torch.inference_mode():
        found.module.seen = torch.ones(2)
    assert looked.changed()
    looked.left()
    assert not looked.changed()


def test_weights_that_are_others_than_when_the_step_ended() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), torch.nn.Linear(9, 9)
    )
    model.register_parameter("seen", torch.nn.Parameter(torch.zeros(2)))
    model.register_parameter("rounded", torch.nn.Parameter(torch.full((3,), torch.nan, dtype=torch.bfloat16)))
    looked = Weights(SimpleNamespace(module=model, optimizer=SimpleNamespace()))
    looked.left(changes=True)
    assert not looked.changed()
    model.seen.data.add_(1)  # which the model itself does
    looked.left()
    looked.step_ended(7)
    assert not looked.differ(7)
    for weight in (*model[0].parameters(), *model[1].parameters(), model.rounded):
        before = weight.data.clone()
        weight.data.copy_(torch.randn(weight.shape))
        assert looked.differ(7) and not looked.differ(8) and not looked.were_written(7)
        weight.data.copy_(before)
        assert not looked.differ(7)
        weight.data = torch.ones_like(before)  # other memory
        assert looked.differ(7)
        weight.data = before
    model.seen.data.add_(1)
    assert not looked.differ(7)
    looked.step_ended(8)
    assert not looked.differ(8) and not looked.differ(7)
