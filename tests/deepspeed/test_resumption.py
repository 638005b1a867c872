"""Where a newcomer's script begins: the engine and the session are stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from ft_deepspeed.resumption import Resumption


class Engine:
    def __init__(self, universal: bool = False, local: bool = False) -> None:
        self.global_steps = 0
        self.load_universal_checkpoint = lambda: universal
        self.use_node_local_storage = lambda: local
        self.said: list[str] = []

    def save_checkpoint(
        self, save_dir: Any, tag: Any = None, client_state: Any = None, save_latest: Any = True
    ):
        self.said.append(f"save {self.global_steps}")
        Path(save_dir).mkdir(exist_ok=True)
        if save_latest:
            (Path(save_dir) / "latest").write_text(tag or f"global_step{self.global_steps}")
        return True

    def load_checkpoint(self, load_dir: Any, tag: Any = None, load_module_only: bool = False) -> Any:
        return None, None

    # as a session
    def secure(self) -> None:
        self.said.append("committed")

    def newcomers_begin_at(self, step: int) -> None:
        self.said.append(f"begin {step}")

    @property
    def in_place(self) -> Any:
        return self

    def after(self, step: int, *args: Any, **kwargs: Any) -> list[str]:
        """What saving says after that step."""
        self.said, self.global_steps = [], step
        assert self.save_checkpoint(*args, **kwargs)
        return self.said


def resuming(engine: Engine, *args: Any, **kwargs: Any) -> Engine:
    """Its script has called `load_checkpoint` like this."""
    Resumption(engine, cast(Any, engine)).loaded(engine.load_checkpoint, *args, **kwargs)
    return engine


def test_the_newest_checkpoint_where_it_was_loaded_from(tmp_path: Path) -> None:
    engine = resuming(Engine(), f"{tmp_path}/../{tmp_path.name}")
    assert engine.after(5, tmp_path) == ["committed", "save 5", "begin 5"]
    assert engine.after(10, tmp_path, "last") == ["committed", "save 10", "begin 10"]
    assert engine.after(15, str(tmp_path), "last") == ["committed", "save 15", "begin 15"]
    assert engine.after(20, tmp_path, save_latest=False)[2:] == ["begin 15"], "what `latest` names counts"
    assert engine.after(25, tmp_path / "best") == ["committed", "save 25"]
    (tmp_path / "latest").unlink()  # another node's own
    assert engine.after(30, tmp_path, save_latest=False)[2:] == []


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        (Engine(), {"tag": "base"}),
        (Engine(), {"load_module_only": True}),
        (Engine(universal=True), {}),
        (Engine(local=True), {}),
    ],
)
def test_where_nothing_is_known(engine: Engine, arguments: dict[str, Any], tmp_path: Path) -> None:
    assert resuming(engine, tmp_path, **arguments).after(5, tmp_path) == ["committed", "save 5"]


def test_a_script_that_has_loaded_nothing(tmp_path: Path) -> None:
    engine = Engine()
    Resumption(engine, cast(Any, engine))
    assert engine.after(5, tmp_path) == ["committed", "save 5"]
