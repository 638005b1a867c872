"""Who writes the script's own checkpoints while replica groups are away, and what they say of the samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ft_deepspeed import checkpoints, patched


class Engine:
    """As much of DeepSpeed's as a save looks at."""

    def __init__(self, role: int) -> None:
        self.global_rank, self.save_non_zero_checkpoint = role, False
        self.module = SimpleNamespace(checkpoint_parallel_write_pipeline=True)
        self.grid = SimpleNamespace(data_parallel_id=1)
        self.saved: list[Any] = []

    def state(self) -> list[Any]:
        comm = patched.SAVING_COMM.original()
        writes = self.save_non_zero_checkpoint, self.module.checkpoint_parallel_write_pipeline
        return [self.global_rank, *writes, self.grid.data_parallel_id, type(comm).__name__]

    def save_checkpoint(self, save_dir: str, tag: str | None = None, client_state: Any = None) -> None:
        self.saved += [self.state(), client_state]

    def save_16bit_model(self, save_dir: str) -> None:
        self.saved.append(self.state())


@pytest.mark.parametrize(
    ("role", "absent", "seen"),
    [
        (3, frozenset(), [3, False, True, 1]),
        (3, {1}, [1, True, False, 0]),
        (5, {1}, [5, False, False, 1]),
        (3, {5}, [3, False, False, 1]),
        (3, {0}, [3, False, True, 1]),
    ],
    ids=["all there", "stands in", "another does", "the first is there", "not a peer"],
)
def test_the_next_peer_writes_for_the_first(role: int, absent: Any, seen: list[Any]) -> None:
    engine: Any = Engine(role)
    before = engine.state()
    session: Any = SimpleNamespace(role=role, groups=SimpleNamespace(absent=frozenset(absent)))
    checkpoints.complete(engine, session, (1, 3, 5), lambda: "dealt")
    engine.save_checkpoint("there", client_state={"epoch": 2})
    engine.save_16bit_model("there")
    comm = "Comm" if seen[1] else before[-1]
    assert engine.saved == [[*seen, comm], {"epoch": 2, checkpoints.KEY: "dealt"}, [*seen, comm]]
    assert engine.state() == before
