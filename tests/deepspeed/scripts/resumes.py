"""A loop that resumes from a file of its own, which DeepSpeed knows nothing of."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from digest import digest

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--own", type=Path)
parser.add_argument("--deepspeed_config")
args = parser.parse_args()

deepspeed.init_distributed()
rank = dist.get_rank()
torch.manual_seed(5)
model, done = torch.nn.Linear(16, 8), 0
if args.own.exists():
    saved = torch.load(args.own)
    model.load_state_dict(saved["model"])
    done = saved["step"]
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=args.deepspeed_config
)
for step in range(done + 1, args.train_iters + 1):
    torch.manual_seed(1000 * step + rank)
    x, y = torch.randn(4, 16), torch.randint(0, 8, (4,))
    loss = torch.nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
    if step == 4:
        time.sleep(1.5)  # longer than clocks are trusted to differ
    if step % 4 == 0 and rank == 0:
        torch.save({"model": engine.module.state_dict(), "step": step}, args.own.with_suffix(".new"))
        os.replace(args.own.with_suffix(".new"), args.own)
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"iteration {step}/{args.train_iters} | loss {total.item()!r}", flush=True)
final = digest(engine)
if rank == 0:
    print(f"digest sha256:{final}", flush=True)
