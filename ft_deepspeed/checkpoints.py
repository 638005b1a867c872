"""The script's own checkpoints: as accelerate names them, and while replica groups are away (`shrink`).

The first data-parallel rank writes what all have, so another does it when that one is away. Which samples
wait to be dealt again is known to no framework: it goes into the checkpoint as client state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ft_core.elastic.rules import stand_in
from ft_core.patching import replaced
from ft_core.worker.session import Session
from ft_deepspeed import patched
from ft_deepspeed.comm import as_rank

KEY = "fault_tolerance"
"""In the client state."""


def complete(engine: Any, session: Session, ring: tuple[int, ...], deal: Callable[[], Any]) -> None:
    """Make this engine's `save_checkpoint` and `save_16bit_model` write whole ones, whoever is there.

    `ring`: this role's data-parallel peers. `deal`: what the checkpoint is to say of the samples.
    """

    def whole(save: Callable[..., Any]) -> Callable[..., Any]:
        def save_checkpoint(
            save_dir: Any, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            state = {**(client_state or {}), KEY: deal()}
            with _standing_in(engine, session, ring):
                return save(save_dir, tag, state, *args, **kwargs)

        return save_checkpoint

    def whole_model(save: Callable[..., Any]) -> Callable[..., Any]:
        def saved(*args: Any, **kwargs: Any) -> Any:
            with _standing_in(engine, session, ring):
                return save(*args, **kwargs)

        return saved

    for patch, wrapper in zip(patched.WHOLE_SAVES, (whole, whole_model), strict=True):
        patch.wrap(wrapper, of=engine)


def saves_again(session: Session) -> None:
    """accelerate numbers what it saves, and refuses to where that is. A newcomer's is: its predecessor or a
    peer has made it."""

    def again(save: Callable[..., Any]) -> Callable[..., Any]:
        def save_state(accelerator: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
            names = accelerator.project_configuration
            if not (session.overlay.repeats and names.automatic_checkpoint_naming):
                return save(accelerator, output_dir, *args, **kwargs)
            place = os.path.join(accelerator.project_dir, "checkpoints", f"checkpoint_{names.iteration}")
            accelerator.wait_for_everyone()  # as all do in between
            with replaced(names, {"automatic_checkpoint_naming": False}):
                return save(accelerator, place, *args, **kwargs)

        return save_state

    patched.ACCELERATE_SAVES.wrap(again)


@contextmanager
def _standing_in(engine: Any, session: Session, ring: tuple[int, ...]) -> Iterator[None]:
    """Be the first of this role's peers, if that one is away and this role comes next."""
    grid = getattr(engine, "grid", None)
    with ExitStack() as undo:
        if grid is not None and session.groups.absent.intersection(ring):
            # Each peer would write some of the stage's layers.
            undo.enter_context(replaced(engine.module, {"checkpoint_parallel_write_pipeline": False}))
        if ring[0] in session.groups.absent and session.role == stand_in(
            ring[0], ring, session.groups.absent
        ):
            first = {"save_non_zero_checkpoint": True, "global_rank": ring[0]}
            undo.enter_context(replaced(engine, first))
            undo.enter_context(patched.SAVING_COMM.replaced(as_rank(ring[0])))  # it asks that one, too
            if grid is not None:
                undo.enter_context(replaced(grid, {"data_parallel_id": 0}))
        yield
