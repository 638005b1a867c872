"""The recipe, stopped or killed where no drill of `--ft-inject` gets to, as the environment says.

FT_TEST_GATE=ITERATION:FILE      waits in that iteration's forward pass until the file is there;
                                 meanwhile there is one named after it and the role
FT_TEST_KILL=ROLE:PLACE:FILE,... SIGKILL to the worker there, unless the file is there already; PLACE:
                                 exit (in `sys.exit`), left (after it), again:ITERATION (when run once
                                 more, to compare), or of that iteration's checkpoint: writing:ITERATION
                                 (when a first tensor of the role's is written, by whatever process),
                                 written:ITERATION (when its last is), finished:ITERATION (when all
                                 roles' are, and nothing says so)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

# isort: off
import ft_megatron.cpu_shadow_auto  # noqa: F401  (before megatron)

# isort: on
import pretrain_gpt as recipe
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.training import async_utils, get_args

GATE, KILL = "FT_TEST_GATE", "FT_TEST_KILL"
WORKER = 0


def die(place: str) -> None:
    """If this is the place, and the first time."""
    for kill in filter(None, os.environ.get(KILL, "").split(",")):
        role, _, rest = kill.partition(":")
        wanted, _, marker = rest.rpartition(":")
        if role == os.environ["RANK"] and wanted == place and not Path(marker).exists():
            Path(marker).touch()
            os.kill(WORKER, signal.SIGKILL)
            signal.pause()  # a writer of the worker's: it is not to outlive it


def dying(writer: type) -> None:
    """Have the class that writes and finishes checkpoints come by the places there.

    AssertionError where it finds results of a save that was given up.
    """
    write, finish = writer.write_preloaded_data, writer.finish  # type: ignore[attr-defined]
    retrieve = writer.retrieve_write_results  # type: ignore[attr-defined]

    def written(transforms: Any, *args: Any, **kwargs: Any) -> Any:
        file, _, (_, tensors) = kwargs["write_bucket"]
        iteration = int(Path(file).parent.name.removeprefix("iter_"))
        if tensors:
            Path(file).write_bytes(b"torn")
            die(f"writing:{iteration}")
        found = write(transforms, *args, **kwargs)
        die(f"written:{iteration}")
        return found

    def finished(self: Any, *args: Any, **kwargs: Any) -> Any:
        die(f"finished:{int(Path(self.checkpoint_dir).name.removeprefix('iter_'))}")
        return finish(self, *args, **kwargs)

    def retrieved(self: Any) -> Any:
        found = retrieve(self)
        later = async_utils._async_calls_queue.get_num_unfinalized_calls() if get_args().async_save else 0
        left = 0 if self.results_queue is None else self.results_queue.qsize()
        assert left <= later, f"{left} results, and {later} saves after {self.checkpoint_dir}"
        return found

    writer.retrieve_write_results = retrieved  # type: ignore[attr-defined]
    writer.write_preloaded_data = staticmethod(written)  # type: ignore[attr-defined]
    writer.finish = finished  # type: ignore[attr-defined]


def forward_step(*args: Any) -> Any:
    """As the recipe's."""
    iteration, _, gate = os.environ.get(GATE, "").partition(":")
    while gate and get_args().curr_iteration + 1 == int(iteration) and not Path(gate).exists():
        Path(f"{gate}-{os.environ['RANK']}").touch()
        time.sleep(0.02)
    if get_rerun_state_machine().state is RerunState.RERUNNING_IN_PLACE:
        die(f"again:{get_args().curr_iteration + 1}")
    return forward(*args)


def leave(code: Any = 0) -> None:
    """As `sys.exit`."""
    die("exit")
    raise SystemExit(code)


def main() -> None:
    """As the recipe's."""
    recipe.forward_step = forward_step
    sys.exit = leave  # type: ignore[assignment]
    # `--rerun-mode report_stats` cannot be had: Megatron's parser calls it so, and its enumeration otherwise.
    RerunMode._missing_ = lambda _: RerunMode.REPORT_DETERMINISM_STATS  # type: ignore[assignment]
    global WORKER
    WORKER = os.getpid()
    dying(FileSystemWriterAsync)
    try:
        recipe.main()
    finally:
        die("left")


forward = recipe.forward_step
if __name__ == "__main__":
    main()
