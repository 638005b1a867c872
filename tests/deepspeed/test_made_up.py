"""What a newcomer's script has of steps that it passed over: what is kept is refused, by name."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import pickle
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ft_deepspeed import floats, made_up
from ft_deepspeed.made_up import YOUNG, MadeUp
from ft_deepspeed.unknown import Unknown, UnknownFloat, UnknownNumber


class Refused(Exception):  # noqa: N818 - said of what is wanted
    """With what was said."""


class Newcomer:
    """A script that passes over steps."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 3)
        self.position = 0
        self.state: list[torch.Tensor] = []
        self.made_up = MadeUp(self.model, lambda: self.position, self._refuse)
        self.made_up.passes([])
        self.made_up.returns()

    def _refuse(self, what: str) -> NoReturn:
        raise Refused(what)

    def outputs(self, *shape: int) -> torch.Tensor:
        """Of a pass that is answered."""
        self.made_up.calls()
        found = torch.zeros(shape or (2, 3), requires_grad=True).clone()
        self.made_up.answered({"logits": found})
        self.made_up.returns()
        return found

    def step(self, steps: int = 1) -> None:
        """Passed, or made."""
        for _ in range(steps):
            self.made_up.calls()
            self.position += 1
            self.made_up.returns()

    def arrives(self) -> None:
        """Where the others are."""
        self.made_up.calls()
        self.position += 1
        self.made_up.puts_back()
        self.made_up.arrives()
        self.made_up.returns()


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    found = Newcomer()
    yield found
    found.made_up.calls()
    found.made_up._patches.close()
    assert not _get_current_dispatch_mode_stack()


KEEPS = [
    lambda n: copy.deepcopy(n.model.state_dict()),
    lambda n: {name: value.clone() for name, value in n.model.state_dict().items()},
    lambda n: copy.deepcopy(n.model),
    lambda n: [torch.cat([p.detach().flatten() for p in n.model.parameters()])],
    lambda n: SimpleNamespace(logits=n.outputs().detach().cpu()),
    lambda n: {"of": [n.outputs().argmax(-1).float().mean()]},
    lambda n: [n.outputs().sum().item()],
]


@pytest.mark.parametrize("keeps", KEEPS)
def test_what_was_kept_of_a_passed_step_is_named(newcomer: Newcomer, keeps: Any) -> None:
    newcomer.step(3)
    best = keeps(newcomer)
    newcomer.step(5)
    with pytest.raises(Refused, match=r"^best[.\[].*keep\(best=\.\.\.\)"):
        newcomer.arrives()
    del best


@pytest.mark.parametrize("keeps", KEEPS)
def test_so_is_what_was_kept_of_the_last_one_once_it_is_not_replaced(newcomer: Newcomer, keeps: Any) -> None:
    newcomer.step(3)
    best = keeps(newcomer)
    newcomer.arrives()
    newcomer.step()
    with pytest.raises(Refused, match=r"^best[.\[]"):
        newcomer.step()
    del best


def test_what_was_added_to_from_step_to_step(newcomer: Newcomer) -> None:
    correct = torch.zeros(())
    for _ in range(5):
        correct += (newcomer.outputs().argmax(-1) == 0).sum()
        newcomer.step()
    with pytest.raises(Refused, match=r"^correct was made .* keep\(correct=\.\.\.\)"):
        newcomer.arrives()


@pytest.mark.parametrize(
    "begin_anew",
    [lambda t: t.zero_(), lambda t: t.copy_(torch.ones(3)), lambda t: [t[:2].fill_(1), t[2:].fill_(2)]],
)
def test_what_has_been_overwritten_is_known(newcomer: Newcomer, begin_anew: Any) -> None:
    running = {"mean": torch.zeros(3)}
    for _ in range(5):
        running["mean"].mul_(0.9).add_(newcomer.outputs().mean(0).detach(), alpha=0.1)
        newcomer.step()
    begin_anew(running["mean"])
    newcomer.arrives()
    newcomer.step(3)
    assert running["mean"].tolist() and not math.isnan(running["mean"].sum().item())


def test_what_is_left_in_a_variable_is_no_harm_until_it_is_used(newcomer: Newcomer) -> None:
    logits = newcomer.outputs()
    accuracy = (logits.argmax(-1) == 0).float().mean()
    outputs = OrderedDict(logits=newcomer.outputs()), (newcomer.outputs(),)
    alias = newcomer.model.state_dict()
    shadow = {name: torch.zeros_like(value) for name, value in newcomer.model.named_parameters()}
    print(f"{accuracy:.3f} {accuracy.item():.2%} {accuracy}", logits)
    newcomer.step(9)
    newcomer.arrives()
    newcomer.step(5)
    assert alias["weight"].tolist() and shadow["weight"].sum().item() == 0
    more = accuracy * 100
    for use in (
        lambda: more.item(),
        lambda: logits.detach().numpy(),
        lambda: torch.save(logits, io.BytesIO()),
        lambda: newcomer.made_up.given(([logits], {}), "the engine"),
        lambda: newcomer.model.weight.data.copy_(logits.new_zeros(3, 3) + logits.sum()),
        lambda: bool(accuracy > 0.5),
        lambda: torch.equal(logits, logits * 2),
    ):
        with pytest.raises(Refused):
            use()
    assert outputs
    logits = accuracy = more = outputs = use = None
    gc.collect()  # what was refused is on frames
    assert newcomer.made_up._on
    newcomer.step()
    assert not newcomer.made_up._on and not _get_current_dispatch_mode_stack()
    assert "item" not in vars(torch.Tensor)


def test_numbers_that_are_read_go_along(newcomer: Newcomer) -> None:
    number: Any = newcomer.outputs().argmax(-1).sum().item()
    total = sum([number, 1.0, 2]) / 3 + round(number, 2)
    assert isinstance(total, Unknown) and math.isnan(total)
    assert f"{total:.2f} {total}" == "nan nan" and json.dumps([total]) == "[NaN]"
    assert math.isnan(pickle.loads(pickle.dumps(total))) and total != total
    assert math.isnan(np.mean([total, 1.0])) and math.isnan(float(newcomer.outputs(1, 2).sum()))
    assert np.isnan(newcomer.outputs().argmax(-1).numpy()).all()
    assert all(map(math.isnan, newcomer.outputs(2).tolist()))
    for decides in (
        lambda: total > 0.5,
        lambda: total > 0.5,
        lambda: max(0.5, total),
        lambda: total == 1,
        lambda: int(total),
        lambda: range(total),
        lambda: bool(total),
        lambda: newcomer.outputs().sum() > 0 or None,
        lambda: int(newcomer.outputs().argmax()),
        lambda: [1, 2][newcomer.outputs().argmax()],
    ):
        with pytest.raises(Refused, match="decides"):
            decides() and None


def _predictions(newcomer: Newcomer) -> Any:
    return np.argmax(newcomer.outputs(4, 3).detach().cpu().numpy(), -1)


LABELS = np.array([0, 1, 2, 0])
GO_ALONG: list[Any] = [
    lambda n: (_predictions(n) == LABELS).mean(),
    lambda n: ((_predictions(n) == LABELS) & (LABELS > 0)).sum() / 4,
    lambda n: np.mean(np.concatenate([_predictions(n), _predictions(n)])),
    lambda n: n.outputs(4, 3).detach().numpy().argmax(-1).astype(np.int64).std(),
    lambda n: sum(p == label for p, label in zip(_predictions(n), LABELS, strict=True)) / 4,
    lambda n: sum(p == label for p, label in zip(n.outputs(4).tolist(), LABELS, strict=True)) / 4,
    lambda n: np.where(_predictions(n) == 1, 1.0, 0.0).max(),
    lambda n: np.exp(n.outputs(4, 3).detach().numpy() @ np.ones((3, 2)))[1:, 0].sum() + np.float32(1),
    lambda n: np.float32(0.5) * n.outputs().argmax(-1).sum().item(),
    lambda n: (np.zeros(4) + _predictions(n)).tolist()[1],
    lambda n: n.outputs(2, 2).tolist()[0][1] ** 2,
]


@pytest.mark.parametrize("makes", GO_ALONG)
def test_what_is_read_as_an_array_goes_along_and_decides_nothing(newcomer: Newcomer, makes: Any) -> None:
    found = makes(newcomer)
    assert f"{found:.3f} {found}" == "nan nan" and json.dumps({"accuracy": found}) == '{"accuracy": NaN}'
    assert math.isnan(pickle.loads(pickle.dumps(found)))
    best = {"accuracy": 0.0}
    for decides in (
        lambda: found > best["accuracy"],
        lambda: best["accuracy"] >= found,
        lambda: max(found, 0.5),
        lambda: found == 0.25,
        lambda: not found < np.float32(0.5),
        lambda: int(found * 100),
    ):
        with pytest.raises(Refused, match="decides"):
            decides() and None


def test_arrays_go_to_files_and_into_the_log(newcomer: Newcomer) -> None:
    found = _predictions(newcomer)
    file = io.BytesIO()
    np.save(file, found)
    assert np.isnan(np.load(io.BytesIO(file.getvalue()))).all()
    assert (
        str(found) == repr(found.tolist()).replace(",", "")
        and type(pickle.loads(pickle.dumps(found))) is np.ndarray
    )
    assert copy.deepcopy(found).shape == found.shape == (4,) and len(found) == 4
    total = np.zeros(4)
    total += found
    for decides in (
        lambda: list(LABELS[int(p)] for p in found),
        lambda: [1, 2, 3][found[0]],
        lambda: found.any(),
        lambda: total.max() > 1,
        lambda: found[found > 0],
        lambda: np.array_equal(found, LABELS),
        lambda: np.unique(found),
        lambda: 1 in found,
        lambda: sorted(found),
        lambda: newcomer.outputs(2).tolist() == [0, 1],
    ):
        with pytest.raises(Refused, match="decides"):
            decides() and None


_SCRIPT = """
def epoch(outputs, best):
    accuracy = float((outputs.argmax(-1) == 0).float().mean())
    line = f"{accuracy:.2f} {float('1.5')} {float()}"
    return line, (lambda: accuracy > best)

def other(outputs):
    return float(outputs.sum()), isinstance(1.5, float)
"""


def test_tensors_of_what_is_read_are_of_the_type_that_torch_makes_of_pythons_own() -> None:
    """A mean over the ranks is answered from the record, which has its type."""
    number = UnknownFloat.made(math.nan, 1, pytest.fail)
    for made in (torch.tensor([number, 3]), torch.tensor(number), torch.tensor([number + 1.0, number / 2])):
        assert made.dtype == torch.float32
    assert torch.tensor(UnknownNumber.made(math.nan, 1, pytest.fail)).dtype == torch.float64


def test_a_script_that_makes_a_float_of_it_decides_nothing_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    script, mixed = ({"__name__": f"script{number}"} for number in range(2))
    exec(_SCRIPT.partition("def other")[0], script)
    exec(_SCRIPT, mixed)
    monkeypatch.setattr(made_up, "scripts", lambda module: [("script", script), ("mixed", mixed)])
    newcomer = Newcomer()
    line, decides = script["epoch"](newcomer.outputs(), 0.0)
    assert line == "nan 1.5 0.0"
    with pytest.raises(Refused, match="decides"):
        decides() and None
    assert pickle.loads(pickle.dumps(script["float"])) is float
    assert mixed["other"](newcomer.outputs())[1] and "float" not in mixed
    newcomer.arrives()
    newcomer.step(4)
    assert "float" not in script and type(script["epoch"](torch.zeros(2, 2), 0.0)) is tuple


def test_a_module_of_which_a_loop_uses_the_name_otherwise_has_its_own_float() -> None:
    seen: list[bool] = []

    def at() -> None:
        frame: Any = sys._getframe(1)
        with floats.replaced([frame.f_globals], lambda value: value):
            seen.append("float" in frame.f_globals)

    lines = "def f(x: float = 1): pass\nfor _ in range(1):\n    at(); float('1'){}\n"
    for more in ("", "; isinstance(1, float)"):
        exec(compile(lines.format(more), "script", "exec"), {"__name__": "script", "at": at})
    assert seen == [True, False]


def test_a_loss_before_and_after_its_backward_pass(newcomer: Newcomer) -> None:
    loss = torch.nn.functional.cross_entropy(newcomer.outputs(), torch.zeros(2, dtype=torch.long))
    assert math.isfinite(loss.item()) and not torch.isnan(loss) and torch.isfinite(loss).all()
    assert not torch.isinf(loss).any() and math.isnan(loss.item() + 1.0)
    newcomer.made_up.calls()
    loss.detach().copy_(torch.tensor(4.0))
    newcomer.made_up.known([loss])
    newcomer.made_up.returns()
    total = loss.item() + 1
    assert total == 5 and not isinstance(total, Unknown)
    losses = [loss.detach() * 2]
    newcomer.step(5)
    newcomer.arrives()
    assert losses[0].item() == 8


@pytest.mark.parametrize(
    "criterion",
    [
        lambda outputs: torch.nn.functional.cross_entropy(outputs, torch.tensor([0, 1])),
        lambda outputs: torch.nn.functional.mse_loss(outputs, torch.zeros(2, 3)),  # in memory of more bytes
    ],
)
def test_what_was_made_of_a_loss_before_its_backward_pass_is_known_after_it(
    newcomer: Newcomer, criterion: Any
) -> None:
    total, last, lists, mixed = 0, torch.zeros(()), [], torch.zeros(())
    for value in (1.5, 2.0, 4.0):
        outputs = newcomer.outputs()
        loss = criterion(outputs)
        total += loss.detach().float()
        last.copy_(loss.detach() / 2)
        lists.append((loss.detach() + total) * 10)
        mixed += loss.detach()
        mixed += outputs.sum().detach()
        scaled = loss / 2
        newcomer.made_up.calls()
        loss.detach().copy_(torch.tensor(value))
        newcomer.made_up.known([loss])
        newcomer.made_up.returns()
        assert math.isnan(mixed.item()) and not math.isnan(scaled.item())
        newcomer.step()
    assert (total.item(), last.item()) == (7.5, 2.0)
    assert [number.item() for number in lists] == [30.0, 55.0, 115.0]
    del mixed
    newcomer.arrives()
    newcomer.step(YOUNG + 1)


def _in_a_vector(loss: torch.Tensor) -> torch.Tensor:
    meters = torch.zeros(2)
    meters[0] += loss.detach()
    meters[1] += 1
    return meters


def _divided_since(loss: torch.Tensor) -> torch.Tensor:
    read = loss.detach() * 1
    loss.detach().div_(4)
    return read


@pytest.mark.parametrize("makes", [_in_a_vector, _divided_since])
def test_what_cannot_be_made_again_is_not_known(newcomer: Newcomer, makes: Any) -> None:
    loss = newcomer.outputs().mean()
    made = makes(loss)
    newcomer.made_up.calls()
    loss.detach().copy_(torch.tensor(1.0))
    newcomer.made_up.known([loss])
    newcomer.made_up.returns()
    assert math.isnan(made.reshape(-1)[0].item()) and loss.item() == 1.0


def test_a_loss_that_lies_in_an_output_makes_nothing_else_known(newcomer: Newcomer) -> None:
    outputs = newcomer.outputs(3)
    newcomer.made_up.calls()
    outputs[0].detach().copy_(torch.tensor(1.0))
    newcomer.made_up.known([outputs[0]])
    newcomer.made_up.returns()
    assert math.isnan(outputs[1].detach().item())


def test_what_was_overwritten_since_is_not_made_again(newcomer: Newcomer) -> None:
    total = torch.full((), 3.0)
    loss = newcomer.outputs().mean()
    added = loss.detach() + total
    total.zero_()
    newcomer.made_up.calls()
    loss.detach().copy_(torch.tensor(1.0))
    newcomer.made_up.known([loss])
    newcomer.made_up.returns()
    assert math.isnan(added.item())


def test_what_is_kept_is_put_back_when_it_arrives(newcomer: Newcomer) -> None:
    average = copy.deepcopy(newcomer.model)
    newcomer.step(3)
    newcomer.made_up.calls()
    newcomer.position += 1
    kept = {name: torch.ones_like(value) for name, value in average.state_dict().items()}
    newcomer.made_up.seen(lambda: average.load_state_dict(kept))
    newcomer.made_up.arrives()
    newcomer.made_up.returns()
    newcomer.step(YOUNG + 1)
    assert average.weight.sum().item() == 9


def test_weights_that_the_script_reads_where_the_others_are_are_those(newcomer: Newcomer) -> None:
    newcomer.step(3)
    newcomer.arrives()
    best = copy.deepcopy(newcomer.model.state_dict())
    newcomer.step(4)
    assert best["weight"].numpy().shape == (3, 3) and not newcomer.made_up._on


def _merged(model: torch.nn.Linear, sign: float = 1.0) -> None:
    model.weight.data = model.weight.data.clone() + sign * torch.ones(3, 3)


WRITES = [
    lambda n: n.model.weight.mul_(0.9),
    lambda n: n.model.weight.data.add_(torch.randn(3, 3)),
    lambda n: n.model.weight.data.copy_(torch.ones(3, 3)),
    lambda n: torch.nn.init.zeros_(n.model.weight[1:]),
    lambda n: n.model.load_state_dict({"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}, strict=False),
    lambda n: torch.add(n.model.bias, 1, out=n.model.bias.data),
    lambda n: torch._foreach_mul_(list(n.model.parameters()), 0.5),
    lambda n: _merged(n.model),
    lambda n: n.state[0].zero_(),
]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("ends", ["arrives", "rests"])
def test_what_the_script_writes_to_the_engines_memory_in_steps_that_are_done(
    newcomer: Newcomer, write: Any, ends: str
) -> None:
    """The state that is loaded there has it."""
    model, newcomer.state = newcomer.model, [torch.randn(4)]
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("mask", torch.zeros(2), persistent=False)
    newcomer.made_up.calls()
    newcomer.made_up.passes(newcomer.state)
    newcomer.made_up.returns()
    kept = [*model.parameters(), model.mean, *newcomer.state]
    with torch._C._DisableTorchDispatch():
        loaded = [tensor.detach().clone() for tensor in kept]
    memory = [tensor.data_ptr() for tensor in kept]
    for _ in range(5):
        with torch.no_grad():
            write(newcomer)
            model.mean.add_(1), model.mask.add_(1)
        newcomer.step()
    if ends == "rests":
        newcomer.made_up.rests()
    newcomer.arrives()
    assert all(torch.equal(one, other) for one, other in zip(kept, loaded, strict=True))
    assert [tensor.data_ptr() for tensor in kept] == memory
    assert model.mask.tolist() == [5, 5]  # which no version has
    with torch.no_grad():
        write(newcomer)  # where the others do it, too
    assert not all(torch.equal(one, other) for one, other in zip(kept, loaded, strict=True))


@pytest.mark.parametrize("ends", ["arrives", "rests"])
def test_a_buffer_that_the_script_replaces_in_steps_that_are_done(newcomer: Newcomer, ends: str) -> None:
    model, loaded = newcomer.model, torch.ones(2)
    model.register_buffer("mean", loaded)
    newcomer.made_up.calls()
    newcomer.made_up.passes([])
    newcomer.made_up.returns()
    for _ in range(5):
        model.mean = model.mean * 2
        newcomer.step()
    if ends == "rests":
        newcomer.made_up.rests()
    newcomer.arrives()
    assert model.mean is loaded and loaded.tolist() == [1, 1]
    model.mean = model.mean * 2  # where the others do it, too
    newcomer.step(YOUNG + 1)
    assert model.mean.tolist() == [2, 2]


REPLACES = [
    lambda optimizer, weight: optimizer.state[weight].update(momentum_buffer=torch.zeros(3, 3), more=1),
    lambda optimizer, weight: optimizer.state.update({weight: {"momentum_buffer": torch.ones(3, 3)}}),
    lambda optimizer, weight: optimizer.state.clear(),
    lambda optimizer, weight: setattr(optimizer, "state", defaultdict(dict)),
]


@pytest.mark.parametrize("replace", REPLACES)
@pytest.mark.parametrize("ends", ["arrives", "rests"])
def test_what_the_script_has_an_optimizer_keep_in_steps_that_are_done(
    newcomer: Newcomer, replace: Any, ends: str
) -> None:
    weight = newcomer.model.weight
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    state, kept = optimizer.state, {"momentum_buffer": torch.randn(3, 3)}
    state[weight] = kept
    buffer = kept["momentum_buffer"]
    newcomer.made_up.passes([], [optimizer])
    newcomer.made_up.returns()
    for _ in range(3):
        replace(optimizer, weight)
        newcomer.step()
    if ends == "rests":
        newcomer.made_up.rests()
    newcomer.arrives()
    assert optimizer.state is state and state[weight] is kept and kept["momentum_buffer"] is buffer
    replace(optimizer, weight)  # where the others do it, too
    newcomer.step()
    newcomer.made_up.rests()
    assert optimizer.state.get(weight, {}).get("momentum_buffer") is not buffer
