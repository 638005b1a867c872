"""What is kept by nobody is named in the second step; what trains unprotected says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ft_core import kept
from ft_core.adapter import StateTensor
from ft_core.errors import ConfigError
from ft_core.worker import unprotected
from ft_core.worker.calls import Calls
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
    calls = Calls(cast(Any, adapter))
    for _ in range(3):
        calls.step_done()


def test_keep_with_an_adapter_that_lists_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_named", {})
    kept.keep(average=torch.zeros(2))
    with pytest.raises(ConfigError, match=r"^keep\(average=...\) does nothing here: Adapter lists no kept"):
        loop(Adapter())
    loop(Adapter(keeps=True))


def trained(steps: int, caplog: pytest.LogCaptureFixture, **about: Any) -> list[str]:
    """What is said of a script that does so many steps of an optimizer, and ends."""
    session = SimpleNamespace(**{"role": 0, "protecting": False, "is_unprotected": False, **about})
    watch = unprotected.Watch(cast(Session, session))
    try:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 0.1)
        weight.grad = torch.ones(1)
        with caplog.at_level(logging.WARNING):
            for _ in range(steps):
                optimizer.step()
            watch.script_ends()
    finally:
        watch._hook.remove()
    return [record.getMessage() for record in caplog.records]


def test_a_script_that_trains_in_start_up_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    [said] = trained(150, caplog)
    assert said.startswith("100 optimizer steps, and this job is not protected: ")
    assert "Session.protect" in said and "a failure makes it begin anew" in said


@pytest.mark.parametrize("protecting", [False, True])
def test_hooks_of_others_go_on(protecting: bool, caplog: pytest.LogCaptureFixture) -> None:
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
        trained(150, caplog, protecting=protecting)
    later[0].remove()
    assert len(seen) == 150


def test_so_is_one_that_ends_early(caplog: pytest.LogCaptureFixture) -> None:
    [said] = trained(3, caplog)
    assert said.startswith("3 optimizer steps, and this job is not protected: ")


@pytest.mark.parametrize(
    ("steps", "about"),
    [(0, {}), (150, {"role": 1}), (150, {"protecting": True}), (9, {"is_unprotected": True})],
)
def test_others_are_told_nothing(steps: int, about: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert not trained(steps, caplog, **about)
