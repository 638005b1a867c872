"""The script's own checkpoints while replica groups are away (policy `shrink`).

The first data-parallel rank writes what all have, so another does it when that one is away. Which samples
wait to be dealt again is known to no framework: it goes into the checkpoint as client state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed import comm
from deepspeed.runtime import engine as runtime_engine

from ft_core.worker.session import Session

KEY = "fault_tolerance"
"""In the client state."""


def complete(engine: Any, session: Session, ring: tuple[int, ...], deal: Callable[[], Any]) -> None:
    """Make this engine's `save_checkpoint` and `save_16bit_model` write whole ones, whoever is there.

    `ring`: this role's data-parallel peers. `deal`: what the checkpoint is to say of the samples.
    """
    save = engine.save_checkpoint

    def save_checkpoint(
        save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        state = {**(client_state or {}), KEY: deal()}
        with _standing_in(engine, session, ring):
            return save(save_dir, tag, state, *args, **kwargs)

    save_checkpoint.__doc__ = save.__doc__
    engine.save_checkpoint = save_checkpoint
    save_16bit_model = engine.save_16bit_model

    @functools.wraps(save_16bit_model)
    def saved(*args: Any, **kwargs: Any) -> Any:
        with _standing_in(engine, session, ring):
            return save_16bit_model(*args, **kwargs)

    engine.save_16bit_model = saved


class _As:
    """`deepspeed.comm`, where this is another rank of all."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(comm, name)

    def get_rank(self, group: Any = None) -> int:
        """That one; in any group but the whole, this one's."""
        return self._rank if group is None else int(comm.get_rank(group))


@contextmanager
def _standing_in(engine: Any, session: Session, ring: tuple[int, ...]) -> Iterator[None]:
    """Be the first of this role's peers, if that one is away and this role comes next."""
    changes: list[tuple[Any, str, Any]] = []
    grid = getattr(engine, "grid", None)
    if grid is not None and session.absent.intersection(ring):
        # Each peer would write some of the stage's layers.
        changes.append((engine.module, "checkpoint_parallel_write_pipeline", False))
    if ring[0] in session.absent and session.role == next(r for r in ring if r not in session.absent):
        changes += [(engine, "save_non_zero_checkpoint", True), (engine, "global_rank", ring[0])]
        changes.append((runtime_engine, "dist", _As(ring[0])))  # it asks that one, too
        if grid is not None:
            changes.append((grid, "data_parallel_id", 0))
    before = [(part, name, getattr(part, name)) for part, name, _ in changes]
    try:
        for part, name, value in changes:
            setattr(part, name, value)
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)
