"""A job without a framework: each role counts its steps, protected by settings that the script brings itself.

`--settings` is a list: each is brought in turn, and `refused ROLE: ...` printed for those that cannot be had.
`--after` is a file that must be there first.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft_core.adapter import Adapter, Redundancy, ReplicaGroup, StateTensor
from ft_core.errors import FtError
from ft_core.worker import session

REST = 0.02
"""Seconds in every step, so that a test has time to do something to the job."""


class Counter(Adapter):
    """The adapter: one tensor, which nobody else has."""

    def __init__(self, role: int, world: int) -> None:
        self.role, self.ring = role, tuple(range(world))
        self.replica_group = ReplicaGroup(role, world, Redundancy.SHARDED)
        self.count = torch.zeros(4, dtype=torch.int64)

    def tensors(self) -> Iterable[StateTensor]:
        return [StateTensor("count", self.count, (self.role,))]

    def envelope(self) -> Any:
        return {}

    def envelope_holders(self) -> tuple[int, ...]:
        return (self.role,)

    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        self.count.copy_(tensors["count"])

    def reset(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads)
    parser.add_argument("--after", type=Path)
    parser.add_argument("--train-iters", type=int)
    args, _ = parser.parse_known_args()
    job = session.current()
    assert job is not None
    dist.init_process_group("gloo")
    while args.after and not args.after.exists():
        time.sleep(REST)
    for settings in args.settings:
        dist.barrier()  # all bring the same at a time
        print(f"asking {job.role}")
        try:
            job.configure(settings)
        except FtError as error:
            print(f"refused {job.role}: {error}")
    state = Counter(job.role, job.world_size)

    def train() -> None:
        while job.version < args.train_iters:
            time.sleep(REST)
            total = state.count.sum()
            job.commit_wait()
            dist.all_reduce(total)
            job.optimizer_begins()
            state.count += 1
            job.step_done()
            print(f"iteration {job.version}/{args.train_iters} | loss {total.item()}")

    job.protect(state, train, 0)


if __name__ == "__main__":
    main()
