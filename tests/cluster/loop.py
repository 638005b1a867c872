"""A training of plain PyTorch, protected by an adapter: what whole jobs on a cluster train.

Data parallel, with the optimizer's moments sharded over the roles, so that a role has state that nobody else
has. It imports no framework: many nodes start on few cores. Without `ftrun` it is a plain script. The last
steps take their time until the test waits for the job's end (`tests/chaos/resting.py`).
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ft_core.adapter import Adapter, StateTensor
from ft_core.state import rng
from ft_core.worker import session
from tests.chaos.resting import rest

LAST = 15
"""Steps that take their time until the end is awaited."""


class Trainer(Adapter):
    """The model, the role's shard of the moments, and a step."""

    def __init__(self, width: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.ring = tuple(range(self.world))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1))
        torch.manual_seed(1 + self.rank)
        self.parameters = list(self.model.parameters())
        self.flat = nn.utils.parameters_to_vector(self.parameters).detach()
        self.flat = F.pad(self.flat, (0, -len(self.flat) % self.world))
        self.shards = list(self.flat.chunk(self.world))
        self.first, self.second = (torch.zeros_like(self.shards[self.rank]) for _ in range(2))

    def gradients(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of this rank's samples of a step, and the loss."""
        nn.utils.vector_to_parameters(self.flat, self.parameters)
        numbers = torch.Generator().manual_seed(step * self.world + self.rank)
        x = torch.randn(16, 8, generator=numbers)
        loss = F.mse_loss(self.model(x), x.sin().sum(1, keepdim=True))
        gradient = nn.utils.parameters_to_vector(torch.autograd.grad(loss, self.parameters))
        return F.pad(gradient, (0, len(self.flat) - len(gradient))), loss.detach()

    def update(self, gradient: torch.Tensor) -> None:
        """Adam on this rank's shard; the others' come from the others."""
        mine = gradient.chunk(self.world)[self.rank] / self.world
        self.first.lerp_(mine, 0.1)
        self.second.mul_(0.99).addcmul_(mine, mine, value=0.01)
        own = self.shards[self.rank] - 0.01 * self.first / (self.second.sqrt() + 1e-8)
        dist.all_gather(self.shards, own)

    def digest(self) -> str:
        """Of the state of all ranks."""
        own = hashlib.sha256()
        for tensor in (self.flat, self.first, self.second, torch.get_rng_state()):
            own.update(tensor.numpy().tobytes())
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, own.hexdigest())
        return hashlib.sha256("".join(found).encode()).hexdigest()

    # -- the adapter -------------------------------------------------------------------------------

    def tensors(self) -> Iterator[StateTensor]:
        yield StateTensor("flat", self.flat, self.ring)
        yield StateTensor("first", self.first, (self.rank,))
        yield StateTensor("second", self.second, (self.rank,))

    def envelope(self) -> Any:
        return {"random": rng.capture()}

    def envelope_holders(self) -> tuple[int, ...]:
        return (self.rank,)

    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        for name in ("flat", "first", "second"):
            getattr(self, name).copy_(tensors[name])
        rng.restore(envelope["random"])

    def reset(self) -> None:
        pass  # a step leaves nothing behind


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    trainer, job, done = Trainer(args.width), session.current(), 0

    def train() -> str:
        nonlocal done
        while (at := done if job is None else job.version) < args.steps:
            gradient, loss = trainer.gradients(at)
            if job is not None:
                rest(at, args.steps, LAST)
                job.commit_wait()
            dist.all_reduce(gradient)
            dist.all_reduce(loss)
            if job is not None:
                job.optimizer_begins()
            trainer.update(gradient)
            if trainer.rank == 0:
                print(f"iteration {at + 1}/{args.steps} | loss {loss.item() / trainer.world!r}", flush=True)
            if job is not None:
                job.step_done()
            done += 1
        return trainer.digest()

    digest = train() if job is None else job.protect(trainer, train, version=0)
    if trainer.rank == 0:
        print(f"digest sha256:{digest}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
