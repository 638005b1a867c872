"""What Megatron keeps in each rank's process about its checkpoints, and what a recovery makes of it.

All ranks must have it alike: they count the asynchronous saves together, wait together for those under way,
and leave out parts of the planning that they remember. A newcomer remembers nothing, so survivors forget.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_WRITERS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)
_PLANS = ("save_strategy", "load_strategy")
"""In Megatron's `checkpointing_context`: what is known from earlier checkpoints about the next one's plan."""


def forget(training: ModuleType) -> bool:
    """Have it as if nothing had been saved yet. Returns whether a save was under way, which is given up.

    Its writer is ended: the checkpoint may be written again, and must not be written twice at once.
    """
    under_way = False
    saves = sys.modules.get("megatron.training.async_utils")
    queue = getattr(saves, "_async_calls_queue", None)
    if saves is not None and queue is not None:
        under_way = bool(queue.async_calls)
        if under_way:
            _end_writers(saves, queue, training.get_args())
        saves._async_calls_queue.call_idx = -1
    for name in _WRITERS:
        # It may hold what a writer has said of a save that was given up. Emptied, it might yet get more.
        if (results := getattr(module := sys.modules.get(name), "_results_queue", None)) is not None:
            module._results_queue = results._manager.Queue()  # type: ignore[union-attr]
    return under_way


def remove_torn(args: Any) -> None:
    """Remove what there is of non-persistent checkpoints that were given up. No save may be under way.

    Of these Megatron keeps the newest directory, complete or not, and removes the complete one before it.
    """
    if getattr(args, "non_persistent_ckpt_type", None) != "global" or args.ckpt_format != "torch_dist":
        return
    directory = args.non_persistent_global_ckpt_dir or Path(args.save) / "non_persistent"
    for checkpoint in Path(directory).glob("iter_*"):
        if not (checkpoint / ".metadata").exists():
            shutil.rmtree(checkpoint, ignore_errors=True)


def forget_plans(context: dict[str, Any] | None) -> None:
    """Have the next save plan as the first does. `context`: Megatron's `checkpointing_context`."""
    for name in _PLANS if context else ():
        context.pop(name, None)  # type: ignore[union-attr]


def _end_writers(saves: ModuleType, queue: Any, args: Any) -> None:
    for call in queue.async_calls:
        call.async_caller.close(abort=True)
    queue.async_calls.clear()
    queue.close(abort=True)
    if queue.persistent:
        # As in the script's beginning, so that the next save need not wait for its imports.
        with contextlib.redirect_stdout(io.StringIO()):  # it was said there
            saves.init_persistent_async_worker(args.rank, "forkserver")
