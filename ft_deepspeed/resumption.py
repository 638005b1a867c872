"""Which of the script's own checkpoints a newcomer's script goes on from, as far as that can be known.

A script that has called `engine.load_checkpoint(directory)` without a tag before its first step does so again
as a newcomer, and DeepSpeed gives it what the file `latest` there names. Nothing is known of one that gives
a tag, that loads weights only, or that looked for checkpoints when there were none and did not call at all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft_core.worker.session import Session
from ft_deepspeed import patched


class Resumption:
    """What the script has loaded, and saves: stands before the engine's `save_checkpoint`."""

    def __init__(self, engine: Any, session: Session) -> None:
        self._engine = engine
        self._directory: Path | None = None
        self._steps: dict[str, int] = {}
        """Checkpoints saved by this process: tag -> step."""

        def noting(save: Callable[..., Any]) -> Callable[..., Any]:
            def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
                session.secure()  # or a newcomer's script could begin beyond what all go back to
                result = save(*args, **kwargs)
                if (step := self._saved(_given(save, args, kwargs))) is not None:
                    session.in_place.newcomers_begin_at(step)
                return result

            return save_checkpoint

        patched.RESUMPTION.wrap(noting, of=engine)

    def loaded(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """`load`, which is the engine's `load_checkpoint`, was called so."""
        given = _given(load, args, kwargs)
        known = given["tag"] is None and not given["load_module_only"]
        if self._engine.load_universal_checkpoint() or self._engine.use_node_local_storage():
            known = False  # it reads another file; another node has other files
        self._directory = Path(given["load_dir"]).resolve() if known else None

    def _saved(self, given: dict[str, Any]) -> int | None:
        """A checkpoint is complete. Returns the step of the one that `latest` names now: newcomers' scripts
        begin there, or later. None where that is not known."""
        step = self._engine.global_steps
        if self._directory is None or Path(given["save_dir"]).resolve() != self._directory:
            return None
        tag = given["tag"]
        self._steps[f"global_step{step}" if tag is None else str(tag)] = step
        try:
            named = self._steps.get((self._directory / "latest").read_text().strip())
        except OSError:  # not a directory that all nodes see
            return None
        if named is not None:
            self._steps = {tag: step for tag, step in self._steps.items() if step >= named}
        return named


def _given(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
