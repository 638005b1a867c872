"""Whether a worker that takes over goes on with the W&B run of the one before: `wandb` is a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ft_core.worker import tracking


class Run:
    """What a script has of one."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.id = about.get("id") or f"drawn-{id(self)}"
        self.about = about
        self.logged: list[Any] = []

    def log(self, data: Any, step: int | None = None) -> None:
        self.logged.append((data, step))

    def log_artifact(self, artifact_or_path: Any) -> Any:
        self.logged.append(artifact_or_path)
        return "made of it"


class RefusedError(Exception):
    """The newcomer begins anew."""


def worker(
    monkeypatch: pytest.MonkeyPatch, logs: Path, predecessors: list[Path], passing: bool = False
) -> tuple[Any, Any]:
    """The module as its script sees it, and the session."""
    logs.mkdir()
    wandb: Any = ModuleType("wandb")
    wandb.Run = type("Run", (Run,), dict(vars(Run)))
    wandb.init = lambda *args, **kwargs: wandb.Run(kwargs)
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    def cannot_pass(what: str) -> None:
        raise RefusedError(what)

    overlay, in_place = SimpleNamespace(is_passing=passing), SimpleNamespace(cannot_pass=cannot_pass)
    session = SimpleNamespace(overlay=overlay, in_place=in_place)
    tracking.install(session, logs, lambda: predecessors)  # type: ignore[arg-type]
    return wandb, session


def test_a_successor_goes_on_with_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    monkeypatch.delenv("WANDB_RESUME", raising=False)
    known = [tmp_path / "first", tmp_path / "on a node that is gone", tmp_path / "second"]
    first, _ = worker(monkeypatch, tmp_path / "first", known)
    one, two = first.init(project="p"), first.init(id="mine")
    assert one.about == {"project": "p"} and two.about == {"id": "mine"}
    second, _ = worker(monkeypatch, tmp_path / "second", known)
    assert second.init(project="p").about == {"project": "p", "id": one.id, "resume": "allow"}
    assert second.init(id="mine").about == {"id": "mine", "resume": "allow"}
    assert second.init().about == {}, "one that nobody has begun"
    third, _ = worker(monkeypatch, tmp_path / "third", known)
    assert third.init(id="another").about == {"id": "another"}
    assert third.init(id="mine", resume="must").about == {"id": "mine", "resume": "must"}
    monkeypatch.setenv("WANDB_RESUME", "never")
    fourth, _ = worker(monkeypatch, tmp_path / "fourth", known)
    assert fourth.init().about == {}


def test_what_is_passed_is_not_logged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, session = worker(monkeypatch, tmp_path / "newcomer", [], passing=True)
    run, artifact = wandb.init(), object()
    run.log({"loss": 0.0}, step=3)
    assert run.log_artifact(artifact) is artifact and run.logged == []
    with pytest.raises(RefusedError, match="what log_artifact makes"):
        run.log_artifact("model.pt")
    session.overlay.is_passing = False
    run.log({"loss": 1.0}, step=9)
    assert run.log_artifact("model.pt") == "made of it"
    assert run.logged == [({"loss": 1.0}, 9), "model.pt"]
