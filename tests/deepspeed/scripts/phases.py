"""Trains one engine, and then another that begins with its weights; checkpoints of its own for the second."""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from digest import digest

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--first", type=int, help="steps of the first engine")
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--dies-at", type=int, help="the step in which rank 1 kills itself, once")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()

deepspeed.init_distributed()
rank = dist.get_rank()


def made(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=args.deepspeed_config)[0]


def train(engine, steps):
    for step in steps:
        # Each step has its own data, whatever was drawn before: a script that resumes makes the same.
        torch.manual_seed(1000 * step + rank)
        x, y = torch.randn(8, 16), torch.randint(0, 8, (8,))
        loss = torch.nn.functional.cross_entropy(engine(x), y)
        engine.backward(loss)
        if step == args.dies_at and rank == 1 and not (died := args.checkpoints / "died").exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"iteration {step}/{args.train_iters} | loss {total.item()!r}", flush=True)
        if step > args.first and step % 3 == 0:
            engine.save_checkpoint(args.checkpoints / "second", client_state={"step": step})


def new():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))


torch.manual_seed(5)
first = made(new())
path, client = first.load_checkpoint(args.checkpoints / "first")
train(first, range(client["step"] + 1 if path else 1, args.first + 1))
weights = args.checkpoints / "first.pt"
if not path:
    first.save_checkpoint(args.checkpoints / "first", client_state={"step": args.first})
    if rank == 0:
        torch.save(first.module.state_dict(), weights)
    dist.barrier()
done, model = args.first, new()
model.load_state_dict(torch.load(weights))
second = made(model)
path, client = second.load_checkpoint(args.checkpoints / "second")
if path:
    done = client["step"]
train(second, range(done + 1, args.train_iters + 1))
final = hashlib.sha256(digest(second).encode()).hexdigest()
if rank == 0:
    print(f"digest sha256:{final}", flush=True)
