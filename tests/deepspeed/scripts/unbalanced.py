"""Plain DeepSpeed of stage 3 in which a layer takes part in every second micro batch."""

from __future__ import annotations

import argparse
import os

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from digest import digest

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--deepspeed_config")
args = parser.parse_args()


class Model(torch.nn.Module):
    """With a layer that only some samples go through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, all_of_it: bool) -> torch.Tensor:
        x = self.first(x)
        return self.sometimes(x) if all_of_it else x


deepspeed.init_distributed()
rank = dist.get_rank()
torch.manual_seed(5)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.deepspeed_config)

for step in range(1, args.train_iters + 1):
    losses = []
    for micro in range(2):
        drawn = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        x = torch.randn(4, 16, generator=drawn).to(engine.device)
        loss = engine(x, all_of_it=bool(micro)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, sum(losses))
    if rank == 0:
        print(f"iteration {step}/{args.train_iters} | loss {sum(everybody)!r}", flush=True)

final = digest(engine)
if rank == 0:
    print(f"digest sha256:{final}", flush=True)
