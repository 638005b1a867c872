"""Weights & Biases knows a run by its id: a worker that takes a role over goes on with its predecessor's run.

What a newcomer's script logs of steps that it passes was logged before.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ft_core import import_hook
from ft_core.worker.session import Session

log = logging.getLogger(__name__)

_RUNS = "wandb-runs"
"""In a worker's log directory: the ids of its script's runs in their order, one a line."""
_LOGGING = ("log", "alert", "log_artifact", "log_model", "link_artifact", "link_model", "upsert_artifact")
"""Methods of a run."""
Predecessors = Callable[[], list[Path]]
"""Log directories of all that played this role, the newest last."""


def install(session: Session, logs: Path, predecessors: Predecessors) -> None:
    """`logs`: this worker's. `predecessors` is asked once a run begins."""
    import_hook.after_import("wandb", functools.partial(_turn, session, logs, predecessors))


def _turn(session: Session, logs: Path, predecessors: Predecessors, wandb: ModuleType) -> None:
    vars(wandb)["init"] = _continuing(wandb.init, logs, predecessors)
    for name in _LOGGING:
        if (method := getattr(wandb.Run, name, None)) is not None:
            setattr(wandb.Run, name, _once(session, method))


def _continuing(original: Callable[..., Any], logs: Path, predecessors: Predecessors) -> Callable[..., Any]:
    number = 0

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        settings = kwargs.get("settings")
        named = kwargs.get("id") or os.environ.get("WANDB_RUN_ID") or getattr(settings, "run_id", None)
        decided = kwargs.get("resume") or kwargs.get("resume_from") or kwargs.get("fork_from")
        before = _known(predecessors, number)
        if before is not None and named in (None, before) and not (decided or os.environ.get("WANDB_RESUME")):
            kwargs |= {"id": before, "resume": "allow"}
        run = original(*args, **kwargs)
        try:
            with (logs / _RUNS).open("a") as file:
                file.write(f"{getattr(run, 'id', None) or ''}\n")
        except OSError as error:
            log.warning("a worker that takes over begins another run of W&B than %s: %s", run.id, error)
        return run

    return init


def _known(predecessors: Predecessors, number: int) -> str | None:
    """The run that the script has begun as its `number`-th, if anybody has."""
    try:
        directories = predecessors()
    except (OSError, ValueError):
        return None
    for directory in reversed(directories):
        try:
            ids = (directory / _RUNS).read_text().split("\n")
        except OSError:
            continue  # it has begun none, or is on a node that is gone
        if number < len(ids) and ids[number - 1]:
            return ids[number - 1]
    return None


def _once(session: Session, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(run: Any, *args: Any, **kwargs: Any) -> Any:
        if not session.overlay.is_passing:
            return method(run, *args, **kwargs)
        if method.__name__ in ("log", "alert"):
            return None
        what = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(what, (str, os.PathLike)):
            session.in_place.cannot_pass(f"it asks W&B for what {method.__name__} makes of {what}")
        return what

    return call
