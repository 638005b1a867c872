"""What a model keeps in attributes, on a survivor whose pass is made again and on a newcomer."""

from __future__ import annotations

import copy
import enum
import importlib.util
import re
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ft_core.state import envelope
from ft_deepspeed import schedule, values
from ft_deepspeed.module_state import _DEEPSPEED, ModuleState, set_modes


def carried(changed: dict[str, Any]) -> dict[str, Any]:
    """As a newcomer has it."""
    found: dict[str, Any] = envelope.decode(envelope.encode(changed))
    return found


def undisturbed_survivor_newcomer(make: Callable[[], Any]) -> tuple[Any, Any, Any]:
    """Models after five passes; the third was interrupted. A newcomer's has made the last two alone."""
    undisturbed, survivor, newcomer = make(), make(), make()
    state, theirs = ModuleState(survivor), ModuleState(newcomer)
    for _ in range(5):
        undisturbed()
    for _ in range(2):
        survivor()
    before = state.capture()
    survivor()  # interrupted
    state.restore(before)
    survivor()
    theirs.restore(carried(state.capture()))
    for _ in range(2):
        survivor(), newcomer()
    return undisturbed, survivor, newcomer


class Reader(torch.nn.Module):
    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.shared = shared


class Model(torch.nn.Module):
    """Shares an object with one of its layers, and changes it in each pass."""

    def __init__(self, kept: Any, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.kept, self.change = kept, change
        self.reader = Reader(kept)

    def forward(self) -> None:
        self.change(self.kept)


@dataclass
class Seen:
    tokens: int = 0
    losses: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Slots:
    tokens: int = 0


class Meter:
    """No dataclass, and with another in it."""

    def __init__(self, below: bool = True) -> None:
        self.tokens, self.losses = 0, [0.0]
        self.mean = torch.zeros(2)
        self.below = Meter(False) if below else None

    def __repr__(self) -> str:
        return f"{self.tokens} {self.losses} {self.mean} {self.below}"


def measured(kept: Meter) -> None:
    assert kept.below is not None
    kept.tokens += 4
    kept.losses.append(kept.losses[-1] + kept.tokens)
    kept.mean.mul_(0.5).add_(kept.tokens)
    kept.below.tokens -= 1
    kept.below.mean = kept.below.mean + 1


class Slotted:
    __slots__ = "tokens"

    def __init__(self) -> None:
        self.tokens = 0

    def __repr__(self) -> str:
        return f"{self.tokens}"


class Phase(enum.Enum):
    WARM = 1


class Lines(list[int]):
    most = 3


class Space(dict[str, Any]):
    """Entries are attributes as well."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self[name] = value


def space() -> Space:
    found = Space()
    found.step = 0
    return found


def more(kept: Any) -> None:
    kept.tokens += 4


def appended(kept: Seen) -> None:
    kept.tokens += 4
    kept.losses.append(0.5 * kept.tokens)


def three() -> int:
    return 3


def step(kept: Any) -> None:
    kept["step"] += 1


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: {"step": 0}, step),
        (lambda: [0], lambda kept: kept.append(len(kept))),
        (Counter, lambda kept: kept.update({"tokens": 1, len(kept): 2})),
        (lambda: defaultdict(int), lambda kept: kept.__setitem__(len(kept), kept["new"] + 1)),
        (lambda: defaultdict(three), lambda kept: kept.__setitem__(len(kept), kept["new"] + 1)),
        (lambda: OrderedDict(a=1, b=2), lambda kept: kept.move_to_end(next(iter(kept)))),
        (lambda: deque([0], 3), lambda kept: kept.append(kept[-1] + 1)),
        (set, lambda kept: kept.add(len(kept))),
        (Lines, lambda kept: kept.append(len(kept))),
        (space, lambda kept: setattr(kept, "step", kept.step + 1)),
        (Seen, appended),
        (Slots, more),
        (Slotted, more),
        (Meter, measured),
        (lambda: SimpleNamespace(tokens=np.float32(0.1)), more),
        (
            lambda: {"all": [defaultdict(list), (torch.zeros(2), deque([1]))]},
            lambda kept: (
                kept["all"][0]["new"].append(1),
                kept["all"][1][0].add_(1),
                kept["all"][1][1].append(2),
            ),
        ),
    ],
)
def test_containers_are_what_they_were_and_those_that_share_one_still_do(make: Any, change: Any) -> None:
    undisturbed, survivor, newcomer = undisturbed_survivor_newcomer(lambda: Model(make(), change))
    for model in (survivor, newcomer):
        assert type(model.kept) is type(undisturbed.kept)
        assert repr(model.kept) == repr(undisturbed.kept)
        assert model.reader.shared is model.kept
        assert repr(getattr(model.kept, "__dict__", None)) == repr(
            getattr(undisturbed.kept, "__dict__", None)
        )


def test_what_the_script_holds_itself_is_the_models_still() -> None:
    shared = {"step": 0, "own": [1]}
    own = shared["own"]
    model = Model(shared, step)
    state = ModuleState(model)
    before = state.capture()
    model()
    own.append(2)
    state.restore(carried(before))
    assert model.kept is shared and shared == {"step": 0, "own": [1]} and shared["own"] is own


class Point(NamedTuple):
    at: int
    loss: torch.Tensor


@dataclass(frozen=True)
class Best:
    at: int


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ({"at": 0}, lambda kept: {"at": kept["at"] + 1}),
        ([0], lambda kept: [kept[0] + 1]),
        (torch.zeros(1), lambda kept: kept + 1),
        (Point(0, torch.zeros(1)), lambda kept: Point(kept.at + 1, kept.loss + 1)),
        (Best(0), lambda kept: replace(kept, at=kept.at + 1)),
    ],
)
def test_what_a_pass_makes_anew_leaves_the_older_ones_as_they_were(first: Any, change: Any) -> None:
    """The script has a list of them: what is put back is put back into none that it was not in."""
    model = Model(copy.deepcopy(first), change)
    state, found = ModuleState(model), [model.kept]
    captured = [state.capture()]
    for _ in range(3):
        model.kept = change(model.kept)
        found.append(model.kept)
        captured.append(state.capture())
    texts = [repr(kept) for kept in found]
    state.restore(carried(captured[1]))  # a version
    assert repr(model.kept) == texts[1] and type(model.kept) is type(first)
    for at in (1, 2, 3):  # the calls since then
        state.restore(captured[at])
        assert model.kept is found[at]
    assert [repr(kept) for kept in found] == texts


class Later(torch.nn.Module):
    """Its first pass makes what it keeps, and gives it to its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(None)

    def forward(self) -> None:
        if not hasattr(self, "seen"):
            self.seen = self.reader.shared = defaultdict(int)
            self.count = 0
        self.count += 1
        self.seen[self.count] += 1


def test_a_rate_of_torchs_modules_that_the_script_sets() -> None:
    """Where a pass is made again it is that of the pass."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0), torch.nn.BatchNorm1d(2))
    state = ModuleState(model)
    model[1].p, model[2].momentum = 0.1, 0.5
    before = state.capture()
    assert before == {"1.p": 0.1, "2.momentum": 0.5}
    model[1].p = 0.2
    for changed in (before, carried(before)):
        state.restore(changed)
        assert (model[1].p, model[2].momentum, model[2].eps) == (0.1, 0.5, 1e-5)
    state.restore({})
    assert (model[1].p, model[2].momentum) == (0.0, 0.1)


def test_parts_that_do_not_train() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = ModuleState(model)
    model[1].eval(), model[0].weight.requires_grad_(False)
    found = state.modes()
    for training in (False, True):
        model.train(training).requires_grad_(training)
        set_modes(found)
        assert [part.training for part in model.modules()] == [True, True, False]
        assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]


def test_what_the_first_pass_makes() -> None:
    undisturbed, survivor, newcomer = undisturbed_survivor_newcomer(Later)
    for model in (survivor, newcomer):
        assert (model.count, model.seen) == (undisturbed.count, undisturbed.seen)
        assert model.reader.shared is model.seen and model.seen["new"] == 0


def test_a_first_pass_that_is_made_again() -> None:
    model = Later()
    state = ModuleState(model)
    before = state.capture()
    model()
    state.restore(before)
    assert not hasattr(model, "count")
    model()
    assert model.count == 1


class Optimizer(torch.optim.SGD):
    def __init__(self, params: Any, shared: dict[str, int]) -> None:
        super().__init__(params, lr=0.1)
        self.shared = shared


class Schedule(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, shared: dict[str, int]) -> None:
        self.shared = shared
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [0.1 / (1 + self.shared["step"])]


def test_what_a_model_shares_with_its_optimizer_and_schedule() -> None:
    def made() -> tuple[Model, Optimizer, Schedule, ModuleState]:
        shared = {"step": 0}
        model = Model(shared, step)
        optimizer = Optimizer([torch.nn.Parameter(torch.zeros(1))], shared)
        follows = Schedule(optimizer, shared)
        return model, optimizer, follows, ModuleState(model, optimizer, follows)

    model, _, follows, state = made()
    model()
    saved = carried({"module": state.capture(), "schedule": schedule.capture(follows)})
    for each, optimizer, theirs, found in ((model, _, follows, state), made()):
        schedule.restore(theirs, saved["schedule"])
        found.restore(saved["module"])
        each()
        assert theirs.shared is optimizer.shared is each.kept is each.reader.shared
        assert theirs.get_lr() == [0.1 / 3]


class Named(torch.nn.Module):
    """Counts by names that begin as those of torch and DeepSpeed do."""

    def __init__(self) -> None:
        super().__init__()
        self.training_steps = self.applied_noise = self.ds_calls = self._dsa = 0

    def forward(self) -> None:
        self.training_steps += 1
        self.applied_noise += 2
        self.ds_calls += 3
        self._dsa += 4


def test_names_that_begin_as_others_do_are_the_models_own() -> None:
    for model in undisturbed_survivor_newcomer(Named):
        assert (model.training_steps, model.applied_noise, model.ds_calls, model._dsa) == (5, 10, 15, 20)


class Counting(torch.optim.SGD):
    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        self._step = self.state_changes = 0

    def step(self, closure: Any = None) -> None:
        self._step += 1
        self.state_changes += 2
        super().step()


def test_names_of_an_optimizer_of_the_scripts_own_that_begin_as_torchs_do() -> None:
    optimizer, other = Counting(), Counting()
    state = ModuleState(torch.nn.Linear(1, 1), optimizer)
    theirs = ModuleState(torch.nn.Linear(1, 1), other)
    optimizer.step()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.9**at)
    before = state.capture()
    assert before == {"optimizer._step": 1, "optimizer.state_changes": 2}
    optimizer.step()
    for found, each in ((state, optimizer), (theirs, other)):
        found.restore(carried(before))
        assert (each._step, each.state_changes) == (1, 2)


def test_all_that_the_installed_deepspeed_gives_modules_is_known() -> None:
    package = importlib.util.find_spec("deepspeed")
    if package is None or package.origin is None:
        pytest.skip("DeepSpeed is not installed")
    sets = re.compile(r"\b(?:sub_?)?module\.(\w+) *[-+]?= ")
    found: set[str] = set()
    for name in ("parameter_offload.py", "partition_parameters.py", "partitioned_param_coordinator.py"):
        found |= {*sets.findall((Path(package.origin).parent / "runtime" / "zero" / name).read_text())}
    assert "ds_id" in found
    assert found - {"_parameters"} <= _DEEPSPEED


def test_what_cannot_be_taken_any_more_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """A list that has grown, or has what a pass computes: it is not what it was in the beginning."""
    kept: list[Any] = [0]
    model = Model(kept, lambda kept: kept.append(len(kept)))
    state = ModuleState(model)
    for _ in range(1100):
        model()
    before = state.capture()
    state.restore(before)
    assert not caplog.text
    for changed in (before, carried(before)):
        state.restore(changed)
        assert model.kept is kept and kept == list(range(1101))
    assert "a newcomer's kept is not what its peers have: it has become too large" in caplog.text


@pytest.mark.parametrize("value", [Phase.WARM, Meter, measured, torch.nn.Linear(2, 2), threading.Lock()])
def test_what_is_no_plain_data(value: Any) -> None:
    meter = Meter()
    assert values.is_plain(meter)
    meter.losses.append(value)
    assert not values.is_plain(value) and not values.is_plain(meter)


def test_what_many_modules_have_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Seen()
    model = torch.nn.ModuleList(Reader(shared) for _ in range(50))
    state = ModuleState(model)
    looked, is_plain = [], values.is_plain
    monkeypatch.setattr(values, "is_plain", lambda *args: looked.append(args) or is_plain(*args))
    shared.tokens = 1
    assert [*state.capture()] == ["0.shared"]
    assert len([value for value, *_ in looked if value is shared]) == 1


def test_what_does_not_change_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is equal, but something else, has changed."""
    shared = {"r": 1}
    model = torch.nn.ModuleList(Reader(kept) for kept in ({"r": 1}, [1, "a"], {}, shared, shared))
    state = ModuleState(model)
    looked, is_plain = [], values.is_plain
    monkeypatch.setattr(values, "is_plain", lambda *args: looked.append(args) or is_plain(*args))
    assert state.capture() == {} and looked == []
    changes: list[Callable[[], Any]] = [
        lambda: model[0].shared.update(r=True),
        lambda: model[1].shared.reverse(),
        lambda: model[2].shared.update(a=1),
        lambda: model[3].shared.update(r=1.0),
        lambda: setattr(model[3], "shared", model[0].shared),
    ]
    for at, change in enumerate(changes):
        change()
        assert f"{min(at, 3)}.shared" in state.capture()
        state.capture()
        assert looked
        looked.clear()
    captured = state.capture()
    assert captured["3.shared"] == {"ft/same": ["0.shared"]} and captured["4.shared"] == {"r": 1.0}
    model[0].shared["r"] = 7
    state.restore(captured)
    assert model[0].shared is model[3].shared and model[0].shared == {"r": True}


def test_what_an_envelope_cannot_have_or_is_too_much_is_left_alone() -> None:
    assert values.is_plain({1: 0, "a": 0, (1, "b"): 0, np.int64(3): 0, None: 0})
    assert not values.is_plain({Phase.WARM: 0}) and not values.is_plain({Meter(): 0})
    assert values.is_plain([[0.0] * 60] * 60) and not values.is_plain([[0.0] * 70] * 70)


def test_attributes_that_a_class_looks_after() -> None:
    class Guarded:
        __slots__ = ("__dict__", "__hidden")

        def __init__(self) -> None:
            vars(self)["x"], self.__hidden = 0, 0

        @property
        def x(self) -> int:
            found: int = vars(self)["x"] + self.__hidden
            return found

        def more(self) -> None:
            vars(self)["x"] += 1
            self.__hidden += 10

    undisturbed, survivor, newcomer = undisturbed_survivor_newcomer(
        lambda: Model(Guarded(), lambda kept: kept.more())
    )
    assert undisturbed.kept.x == survivor.kept.x == newcomer.kept.x == 55


def test_a_container_of_large_tensors_is_left_alone() -> None:
    """Each version would have them as text."""
    half = torch.zeros(20 << 10, dtype=torch.uint8)
    assert values.is_plain([half, {"more": (half, half)}]) and values.is_plain(torch.zeros(1 << 18))
    assert not values.is_plain([half, {"more": (half, half)}, half])
