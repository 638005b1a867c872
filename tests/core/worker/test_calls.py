"""What is kept by nobody is named in the second step; what trains unprotected says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ft_core import kept
from ft_core.adapter import StateTensor
from ft_core.errors import ConfigError
from ft_core.worker import unprotected
from ft_core.worker.calls import KeepCalls
from ft_core.worker.session import Session


class Adapter:
    """Of one weight, and of what is kept if so."""

    def __init__(self, keeps: bool = False) -> None:
        self.weight, self.keeps = torch.zeros(3), keeps

    def tensors(self) -> Iterator[StateTensor]:
        yield StateTensor("weight", self.weight, (0,))
        if self.keeps:
            yield from kept.Kept.capture().tensors((0,))


def loop(adapter: Adapter) -> None:
    """Three steps."""
    calls = KeepCalls(cast(Any, adapter))
    for _ in range(3):
        calls.step_done()


def test_keep_with_an_adapter_that_lists_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_named", {})
    kept.keep(average=torch.zeros(2))
    with pytest.raises(ConfigError, match=r"^keep\(average=...\) does nothing here: Adapter lists no kept"):
        loop(Adapter())
    loop(Adapter(keeps=True))


def trained(steps: int, clock: Callable[[int], float] = lambda step: 0.0, **about: Any) -> list[str]:
    """What is said of a script that does so many steps of an optimizer, and ends. `clock`: when each is."""
    said: list[str] = []
    about = {
        "role": 0,
        "protecting": False,
        "is_unprotected": False,
        "unprotected_so_far": said.append,
        **about,
    }
    session = SimpleNamespace(**about)
    watch = unprotected.UnprotectedWatch(cast(Session, session))
    try:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 0.1)
        weight.grad = torch.ones(1)
        with pytest.MonkeyPatch.context() as patch:
            for step in range(steps):
                patch.setattr(unprotected.time, "monotonic", partial(float, 1000.0 + clock(step)))
                optimizer.step()
            watch.script_ends()
    finally:
        watch._hook.remove()
    return said


def test_a_script_that_trains_in_start_up_is_told_once() -> None:
    [said] = trained(150)
    assert said.startswith("its script has done 100 optimizer steps, and has neither called Session.protect ")


def test_slow_steps_are_steps_that_train() -> None:
    """What makes an optimizer's state does one, or many at once."""
    [said] = trained(50, lambda step: 20.0 * step)
    assert said.startswith("its script has done 3 optimizer steps, ")
    assert trained(50, lambda step: 0.1 * step, protecting=True) == []
    [said] = trained(50, lambda step: 0.1 * step)
    assert said.startswith("its script has done 50 optimizer steps, "), "as it ends"


@pytest.mark.parametrize("protecting", [False, True])
def test_hooks_of_others_go_on(protecting: bool) -> None:
    """Those that were registered later come after it in each step."""
    seen: list[object] = []
    watch = unprotected.register_optimizer_step_post_hook

    def followed(hook: Any) -> Any:
        handle = watch(hook)
        later.append(watch(lambda *_: seen.append(None)))
        return handle

    later: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unprotected, "register_optimizer_step_post_hook", followed)
        trained(150, protecting=protecting)
    later[0].remove()
    assert len(seen) == 150


def test_so_is_one_that_ends_early() -> None:
    [said] = trained(3)
    assert said.startswith("its script has done 3 optimizer steps, ")


@pytest.mark.parametrize(
    ("steps", "about"),
    [(0, {}), (150, {"role": 1}), (150, {"protecting": True}), (9, {"is_unprotected": True})],
)
def test_others_are_told_nothing(steps: int, about: dict[str, Any]) -> None:
    assert not trained(steps, **about)
