"""Plain DeepSpeed that has the gradients of all micro batches of a step reduced at once, and looks at its
engine with torch.func before it trains, and after."""

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
MICRO_BATCHES = 3

deepspeed.init_distributed()
rank = dist.get_rank()
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.deepspeed_config)
stage = engine.zero_optimization_stage()


def look() -> None:
    """See how the output changes with each input, where the weights are whole."""
    if stage < 3:
        of_engine, of_model = (
            torch.func.grad(lambda x, f=f: f(x).sum())(torch.ones(16, device=engine.device))
            for f in (engine, model)
        )
        assert torch.equal(of_engine, of_model) and of_model.any()


look()
for step in range(1, args.train_iters + 1):
    losses = []
    with engine.coalesce_grad_reduction():
        for micro in range(MICRO_BATCHES):
            drawn = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            x, y = torch.randn(4, 16, generator=drawn), torch.randn(4, 1, generator=drawn)
            loss = (engine(x.to(engine.device)) - y.to(engine.device)).square().mean()
            engine.set_gradient_accumulation_boundary(micro == MICRO_BATCHES - 1)
            engine.backward(loss)
            losses.append(loss.item())
    engine.step()
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, sum(losses))
    if rank == 0:
        print(f"iteration {step}/{args.train_iters} | loss {sum(everybody)!r}", flush=True)
look()

final = digest(engine)
if rank == 0:
    print(f"digest sha256:{final}", flush=True)
