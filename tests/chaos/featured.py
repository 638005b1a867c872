"""The recipe, stopped or killed where no drill of `--ft-inject` gets to, as the environment says.

FT_TEST_GATE=ITERATION:FILE      waits in that iteration's forward pass until the file is there;
                                 meanwhile there is one named after it and the role
FT_TEST_KILL=ROLE:PLACE:FILE     SIGKILL to the worker there, unless the file is there already; PLACE:
                                 exit (in `sys.exit`), left (after it) or again:ITERATION (when run once
                                 more, to compare)
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
from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine
from megatron.training import get_args

GATE, KILL = "FT_TEST_GATE", "FT_TEST_KILL"


def die(place: str) -> None:
    """If this is the place, and the first time."""
    role, _, rest = os.environ.get(KILL, "").partition(":")
    wanted, _, marker = rest.rpartition(":")
    if role == os.environ["RANK"] and wanted == place and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


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
    try:
        recipe.main()
    finally:
        die("left")


forward = recipe.forward_step
if __name__ == "__main__":
    main()
