"""Plain DeepSpeed that writes weights and the optimizer's state between its steps: in stage 3, or by
DeepSpeed's functions for that."""

from __future__ import annotations

import argparse
import os

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state
from digest import digest

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--only", choices=["buffers", "passes"], help="what writes: the model's passes do, too")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()


class Model(torch.nn.Sequential):
    """With a buffer that the script sets, and an average that passes make, whatever they are for."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
        self.register_buffer("scale", torch.ones(2))
        self.average = torch.nn.Parameter(torch.zeros(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if args.only == "passes":
            with torch.no_grad():
                self.average.mul_(0.9).add_(self[2].bias, alpha=0.1)
        return super().forward(x) * self.scale.sum() + self.average


deepspeed.init_distributed()
rank = dist.get_rank()
torch.manual_seed(5)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.deepspeed_config)
stage = engine.zero_optimization_stage()
first, last = model[0].weight, model[2].weight

for step in range(1, args.train_iters + 1):
    drawn = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(4, 16, generator=drawn), torch.randn(4, 16, generator=drawn)
    if step % 3 == 1 and args.only != "passes":
        model.scale = model.scale * 1.1
    loss = (engine(x.to(engine.device)) - y.to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    if args.only:
        engine.eval()
        with torch.inference_mode():
            engine(x.to(engine.device))
            if step % 2:
                model.scale = model.scale * 1.01
        engine.train()
    elif stage == 3:
        with deepspeed.zero.GatheredParameters([first], modifier_rank=0):
            if rank == 0:
                first.data.clamp_(-0.2, 0.2)
        safe_set_full_fp32_param(last, torch.full(last.ds_shape, 0.01 * step))
    if args.only or step % 2:
        pass
    elif stage:
        shape = getattr(first, "ds_shape", first.shape)
        safe_set_full_optimizer_state(first, torch.zeros(shape), "exp_avg")
    else:
        optimizer.state[first]["exp_avg"] = torch.zeros_like(first)
        optimizer.state[last]["exp_avg_sq"].mul_(0.5)
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, loss.item())
    if rank == 0:
        print(f"iteration {step}/{args.train_iters} | loss {sum(everybody)!r}", flush=True)

final = digest(engine)
if rank == 0:
    print(f"digest sha256:{final}", flush=True)
