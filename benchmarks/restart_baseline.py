"""Recovery without this project: the recipe under `torchrun --max-restarts`, all state saved every step.

Kind to the baseline: state goes to memory (tmpfs), and the trap that keeps gloo jobs from restarting is
taken out (torchrun's store outlives an attempt, so ranks meet keys of the attempt before: each attempt gets
a prefix of its own, which plain torchrun does not do; without it 0 of 6 restarts worked). State is collected
and put back by the same adapter as under ftrun, so the training resumes bit-identically.

FT_BENCH names a directory: checkpoints go there, and to `steps-RANK` lines "MONOTONIC EVENT STEP PID".
"""

from __future__ import annotations

# isort: off
import ft_megatron.cpu_shadow_auto  # noqa: F401  (before megatron, which keeps references to torch.cuda)

# isort: on
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_megatron.state import MegatronAdapter
from recipes.megatron.pretrain_gpt_core import Trainer, initialize, parse_args


class Checkpoints:
    """This rank's last two states, one file each, replaced whole."""

    def __init__(self, directory: Path, trainer: Trainer) -> None:
        self._directory, self._rank = directory, dist.get_rank()
        self._adapter = MegatronAdapter(trainer.model, trainer.optimizer, trainer.scheduler)

    def _path(self, step: int) -> Path:
        return self._directory / f"rank-{self._rank}-step-{step}.pt"

    def save(self, step: int) -> None:
        """Write the state after `step` steps; drop the one of two steps before."""
        tensors = {t.name: t.tensor for t in self._adapter.tensors()}
        partial = self._path(step).with_suffix(".partial")
        torch.save({"tensors": tensors, "envelope": self._adapter.envelope()}, partial)
        partial.rename(self._path(step))
        self._path(step - 2).unlink(missing_ok=True)

    def load(self) -> int:
        """Put back the newest state that every rank has; returns its step, 0 if there is none."""
        found = [int(p.stem.rpartition("-")[2]) for p in self._directory.glob(f"rank-{self._rank}-step-*.pt")]
        newest = torch.tensor(max(found, default=0))
        dist.all_reduce(newest, op=dist.ReduceOp.MIN)
        step = int(newest)
        if step:
            state = torch.load(self._path(step), weights_only=False)
            self._adapter.restore(state["tensors"], state["envelope"])
            for newer in (s for s in found if s > step):
                self._path(newer).unlink()
        return step


def prefix_store_per_attempt() -> None:
    """Make `init_process_group` use keys that no earlier attempt has used."""
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True":
        return  # each attempt has a store of its own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE)
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Any = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    dist.init_process_group = functools.partial(
        dist.init_process_group,
        store=dist.PrefixStore(f"attempt-{attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


def main() -> None:
    """Train as the recipe's flags say, from the newest checkpoint."""
    directory = Path(os.environ["FT_BENCH"])
    log = (directory / f"steps-{os.environ['RANK']}").open("a", buffering=1)

    def note(event: str, step: int) -> None:
        log.write(f"{time.monotonic()} {event} {step} {os.getpid()}\n")

    note("imported", 0)
    args = parse_args(sys.argv[1:])
    prefix_store_per_attempt()
    initialize(args)
    trainer = Trainer(args)
    checkpoints = Checkpoints(directory, trainer)
    note("built", 0)
    step = checkpoints.load()
    note("loaded", step)
    while step < args.train_iters:
        trainer.train_step(step)
        step += 1
        note("finished", step)
        checkpoints.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
