"""What a script's own objects have in them is carried to another process, or named."""

from __future__ import annotations

import fractions
import importlib
import random
import sys
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ft_core import kept
from ft_core.state.envelope import decode, encode
from ft_deepspeed.own_code import scripts
from ft_deepspeed.script_state import Opaque, ScriptState, variables


class Pair(NamedTuple):
    """As scripts return them."""

    first: int
    second: float


class Meter:
    """Of a script's own."""

    def __init__(self) -> None:
        self.count, self.values, self.inner = 0, [0.5], {"max": 1.0}


class _State(ScriptState):
    """This module stands for the script."""

    def __init__(self, spaces: Any) -> None:
        super().__init__(spaces, torch.nn.Linear(1, 1))
        self._own.add(__name__)
        self._looks = True
        self._first = {place: self._mark(value) for place, _, _, value, _ in self._places()}
        self._looks = False


def _made() -> dict[str, Any]:
    return {
        "number": 1,
        "text": "a",
        "growing": [1, 2],
        "newest": deque([1, 2], maxlen=3),
        "by_name": OrderedDict(a=[1], b=2),
        "stored": defaultdict(lambda: defaultdict(list)),
        "seen": {1, 2},
        "pair": Pair(1, 2.0),
        "nested": {3: {"x": (1, [2])}},
        "average": torch.zeros(3),
        "array": np.zeros(2),
        "scalar": np.float32(1),
        "generator": random.Random(1),
        "numpy_generator": np.random.default_rng(1),
        "torch_generator": torch.Generator().manual_seed(1),
        "meter": Meter(),
        "meters": [Meter(), Meter()],
        "nothing": None,
    }


def _change(space: dict[str, Any]) -> None:
    space["number"] += 1
    space["text"] = "b"
    space["growing"].append(3)
    space["newest"].extend([3, 4])
    space["by_name"]["a"].append(2)
    space["stored"]["train"]["loss"].append(0.25)
    space["seen"].add(5)
    space["pair"] = Pair(2, 3.0)
    space["nested"][4] = {"y": 1}
    space["average"].add_(1)
    space["array"][0] = 7
    space["scalar"] = np.float32(2)
    for name in ("generator", "numpy_generator"):
        space[name].random()
    torch.rand((), generator=space["torch_generator"])
    space["meter"].count += 1
    space["meter"].values.append(1.5)
    space["meter"].inner["max"] = 2.0
    space["meters"][1].count += 1
    space["nothing"] = 3


def _shown(space: dict[str, Any]) -> dict[str, Any]:
    shown = {
        name: repr(value) for name, value in space.items() if "generator" not in name and "meter" not in name
    }
    shown["draws"] = [space["generator"].random(), space["numpy_generator"].random()]
    shown["draws"].append(torch.rand((), generator=space["torch_generator"]).item())
    return shown | {"meters": [vars(meter) for meter in (space["meter"], *space["meters"])]}


def test_plain_data_of_all_kinds_is_carried():
    one, other = _made(), _made()
    before, after = _State([("s", one, False)]), _State([("s", other, False)])
    meter, growing, stored = other["meter"], other["growing"], other["stored"]
    _change(one)
    after.restore(decode(encode(before.capture())))
    one["stored"].default_factory = other["stored"].default_factory  # which is shown by its address
    one["stored"]["train"].default_factory = other["stored"]["train"].default_factory
    assert _shown(other) == _shown(one)
    # Others may have them, so they are changed and not replaced.
    assert other["meter"] is meter and other["growing"] is growing and other["stored"] is stored
    assert other["newest"].maxlen == 3
    other["stored"]["eval"]["loss"].append(1)


def test_what_is_beside_what_has_changed_stays():
    def made() -> dict[str, Any]:
        return {
            "callbacks": [Meter(), torch.nn.Linear(2, 2), print, fractions.Fraction(1), torch.zeros(1 << 20)]
        }

    one, other = made(), made()
    before, after = _State([("s", one, False)]), _State([("s", other, False)])
    objects = list(other["callbacks"])
    one["callbacks"][0].count = 3
    after.restore(decode(encode(before.capture())))
    assert other["callbacks"] == objects and objects[0].count == 3


def test_only_what_has_changed_is_carried():
    space = _made() | {"large": torch.zeros(1 << 20), "many": list(range(100_000))}
    state = _State([("s", space, False)])
    assert state.capture() == {}
    space["number"] = 5
    assert set(state.capture()) == {"s/number"}
    whole = _State([("s", space, True)])
    assert {"s/number", "s/text", "s/nothing"} == set(whole.capture())


@pytest.mark.parametrize("name", ["large", "unseen", "many", "model", "file", "library", "new"])
def test_what_changes_and_cannot_be_carried_is_named(name: str, tmp_path):
    class Library:
        """Not the script's."""

        def __init__(self) -> None:
            self.count = 0

    Library.__module__ = "some.library"
    space: dict[str, Any] = {
        "large": torch.zeros(1 << 20),
        "unseen": torch.zeros(1 << 20),
        "many": [object()] * 600,
        "model": torch.nn.Linear(2, 2),
        "file": [fractions.Fraction(1)],
        "library": Library(),
        "new": [Meter()],
    }
    state = _State([("s", space, False)])
    assert state.capture() == {}
    if name == "large":
        space[name].add_(1)
    elif name == "unseen":
        space[name].data.copy_(torch.ones(1 << 20))
    elif name == "many":
        space[name].append(object())
    elif name == "model":
        with torch.no_grad():
            space[name].weight.mul_(0.5)
    elif name == "file":
        space[name].append(fractions.Fraction(2))
    elif name == "new":
        space[name].append(Meter())
    else:
        space[name].count += 1
    with pytest.raises(Opaque, match=f"s/{name}"):
        state.capture()


def test_what_is_kept_is_left_to_that(monkeypatch):
    monkeypatch.setattr(kept, "_named", {})
    average = torch.zeros(1 << 20)
    space: dict[str, Any] = {"averages": {"ema": average}, "number": 1}
    state = _State([("s", space, False)])
    average.add_(1)
    with pytest.raises(Opaque):
        state.capture()
    kept.keep(ema=average)
    state.restore(decode(encode(state.capture())))
    average.add_(1)
    state.restore(decode(encode(state.capture())))
    assert space["averages"]["ema"] is average and average[0] == 2


def test_what_grows_without_end_is_named():
    space: dict[str, Any] = {"history": []}
    state = _State([("s", space, False)])
    space["history"] = ["x" * 400] * 500
    with pytest.raises(Opaque, match="history, which has grown large"):
        state.capture()


def test_variables_that_functions_share():
    count, losses = 0, [0.0]

    def step() -> None:
        nonlocal count
        count += 1
        losses.append(count * 0.5)

    state = _State(list(variables([("callback", step)])))
    step()
    step()
    found = decode(encode(state.capture()))
    count = 0
    losses.clear()
    state.restore(found)
    assert count == 2 and losses == [0.0, 0.5, 1.0]


def test_the_trained_model_is_not_the_scripts():
    model = torch.nn.Linear(2, 2)
    state = ScriptState([("s", {"model": model}, True)], model)
    with torch.no_grad():
        model.weight.add_(1)
    assert state.capture() == {}


def test_what_pip_has_put_anywhere_is_no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `--target`, or in an image."""
    for directory in ("target/installed", "checkout/own"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "__init__.py").write_text("found = 1")
        (tmp_path / directory / "below.py").write_text("found = 2")
    (tmp_path / "target/installed-1.0.dist-info").mkdir()
    (tmp_path / "checkout/own.egg-info").mkdir()
    for directory in ("target", "checkout"):
        monkeypatch.syspath_prepend(str(tmp_path / directory))
    names = ["installed", "installed.below", "own", "own.below"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    found = [name for name, _ in scripts(torch.nn.Module())]
    assert [name for name in names if name in found] == ["own", "own.below"]
