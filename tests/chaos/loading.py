"""The smallest script that is protected: data-parallel, its samples come from a loader with processes."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.utils.data import DataLoader, Dataset

from ft_core.adapter import Adapter, Redundancy, ReplicaGroup, StateTensor
from ft_core.state import rng
from ft_core.worker import session
from ft_core.worker.session import Session

WIDTH, BATCH = 64, 4
PACE = 0.005
"""Seconds of a step at least: the loader gets ahead, and failures fit in."""


STALLED = "FT_TESTS_STALLED"
"""The environment variable that names a file: while it is there, the last role's samples cannot be had."""


class Samples(Dataset[torch.Tensor]):
    """Each a function of its number alone."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        while STALLED in os.environ and dist.get_rank() == dist.get_world_size() - 1:
            if not Path(os.environ[STALLED]).exists():
                break
            time.sleep(0.1)
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Model(Adapter):
    """Weights and momentum, the same on all roles; the engine's adapter for them as well."""

    def __init__(self, rank: int, world: int) -> None:
        self.ring = tuple(range(world))
        self.replica_group = ReplicaGroup(rank, world, Redundancy.REPLICATED)
        torch.manual_seed(7)
        self.weight, self.momentum = torch.randn(WIDTH), torch.zeros(WIDTH)
        self.loss = 0.0
        """Of the newest step: its worker may die before it has logged it."""

    def tensors(self) -> Iterator[StateTensor]:
        yield StateTensor("weight", self.weight, self.ring)
        yield StateTensor("momentum", self.momentum, self.ring)

    def envelope(self) -> Any:
        return {"rng": rng.capture(), "loss": self.loss}

    def envelope_holders(self) -> tuple[int, ...]:
        return self.ring

    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        self.weight.copy_(tensors["weight"])
        self.momentum.copy_(tensors["momentum"])
        rng.restore(envelope["rng"])
        self.loss = envelope["loss"]

    def reset(self) -> None:
        pass

    def gradient(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a loss with dropout in it: the default generator's state counts."""
        kept = batch * (torch.rand_like(batch) > 0.2)
        error = kept @ self.weight - 1.0
        return (error**2).mean(), 2 * kept.T @ error / len(batch)

    def step(self, gradient: torch.Tensor) -> None:
        self.momentum.mul_(0.9).add_(gradient)
        self.weight.sub_(self.momentum, alpha=1e-3)


class Plain:
    """What a script without fault tolerance has in the session's place."""

    version = 0

    def commit_wait(self) -> None: ...

    def optimizer_begins(self) -> None: ...

    def point(self, name: str) -> None: ...

    def tell_loss(self, loss: float) -> None: ...

    def step_done(self) -> None:
        self.version += 1


class Batches:
    """The numbers of this role's samples, from the step that is next."""

    def __init__(self, steps: int, rank: int, world: int, job: Session | Plain) -> None:
        self._steps, self._rank, self._world, self._job = steps, rank, world, job

    def __iter__(self) -> Iterator[range]:
        for step in range(self._job.version, self._steps):
            start = (step * self._world + self._rank) * BATCH
            yield range(start, start + BATCH)


def leave(where: str, rank: int, step: int) -> None:
    """If it is time: by `sys.exit`, with an error code, or as no script should."""
    role, _, rest = where.partition(":")
    if where and role in (str(rank), "all") and rest.startswith(f"{step}:"):
        how = rest.partition(":")[2]
        if how == "_exit":
            os._exit(0)
        sys.exit({"exit": 0, "fail": 3}[how])


def main() -> None:
    """Train, and print losses and digest as the recipes do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, default=10)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--persistent-workers", action="store_true")
    parser.add_argument("--leave", default="", help="ROLE:STEP:exit, fail or _exit; ROLE may be `all`")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds a step more, of the last role")
    parser.add_argument("--ft", action="store_true")
    args = parser.parse_args()
    warnings.warn(f"told by rank {os.environ['RANK']}", stacklevel=1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model(rank, world)
    job: Session | Plain = session.current() if args.ft else Plain()
    loader = DataLoader(
        Samples(),
        batch_sampler=Batches(args.train_iters, rank, world, job),
        num_workers=args.num_workers,
        persistent_workers=args.persistent_workers,
        generator=torch.Generator(),  # what a loader draws from the default one is not drawn when it goes on
    )
    printed = 0

    def log() -> None:
        nonlocal printed
        if rank == 0 and job.version > printed:
            printed = job.version
            print(f"iteration {printed}/{args.train_iters} | loss {model.loss!r}", flush=True)

    def train() -> None:
        """Goes on from the version that is there, with a new iterator."""
        log()
        for batch in loader:
            job.point("forward")
            time.sleep(PACE + args.slow * (rank == world - 1))
            leave(args.leave, rank, job.version)
            loss, gradient = model.gradient(batch)
            dist.all_reduce(gradient)
            job.commit_wait()
            dist.all_reduce(loss)  # the barrier: all have committed
            job.optimizer_begins()
            model.step(gradient / world)
            model.loss = loss.item()
            job.tell_loss(model.loss)
            job.step_done()
            log()

    if isinstance(job, Session):
        job.protect(model, train, 0)
    else:
        train()
    if rank == 0:
        state = model.weight.numpy().tobytes() + model.momentum.numpy().tobytes()
        print(f"digest sha256:{hashlib.sha256(state).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
