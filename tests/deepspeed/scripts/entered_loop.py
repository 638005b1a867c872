"""A loop of one's own on DeepSpeed that is entered again after a recovery: it knows which step is next."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from digest import digest

from ft_deepspeed.training import ProtectedTraining

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--entered", type=Path, help="a file that says with which steps the loop was entered")
parser.add_argument("--checkpoints", type=Path, help="where it saves every fifth step, and goes on from")
parser.add_argument("--ft", action="store_true")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()

torch.manual_seed(0)
deepspeed.init_distributed()
layers = [torch.nn.Linear(16, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 16)]
engine, *_ = deepspeed.initialize(model=torch.nn.Sequential(*layers), config=args.deepspeed_config)
if args.checkpoints is not None:
    engine.load_checkpoint(str(args.checkpoints))
training = ProtectedTraining(enabled=args.ft, engine=engine)


def batch(step: int, part: int) -> torch.Tensor:
    """Of this rank, for a micro step: it follows from their numbers."""
    numbers = torch.Generator().manual_seed(step * 1000 + part * 100 + dist.get_rank())
    return torch.rand(4, 16, generator=numbers)


def log(step: int, loss: float) -> None:
    """Once for each step."""
    line = f"iteration {step}/{args.train_iters} | loss {loss!r}"
    if dist.get_rank() == 0 and not training.printed(line):
        print(line, flush=True)


def train() -> None:
    """Entered again from its top after a recovery."""
    if args.entered is not None:
        with args.entered.open("a") as file:
            file.write(f"{dist.get_rank()} {training.step}\n")
    if training.inherited is not None:
        log(training.step, training.inherited)
    while training.step < args.train_iters:
        total = 0.0
        for part in range(engine.gradient_accumulation_steps()):
            training.point("forward")
            loss = engine(batch(training.step, part)).square().mean()
            engine.backward(loss)
            engine.step()
            total += loss.item()
        norm = engine.get_global_grad_norm()
        training.step_done(total + float(norm or 0))
        if not training.replaying:
            log(training.step, total + float(norm or 0))
        training.point("between")
        if training.step % 5 == 0:
            dist.barrier()
            if args.checkpoints is not None:
                engine.save_checkpoint(str(args.checkpoints))


training.run(train)
final = digest(engine)
if dist.get_rank() == 0:
    print(f"digest sha256:{final}", flush=True)
