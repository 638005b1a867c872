"""A loop whose time is its own: a newcomer's script passes steps as slowly as they were done, and half of the
way it waits for the file `go`."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist

HALF, SLOW = 10, 0.1

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--signals", type=Path)
parser.add_argument("--deepspeed_config")
args = parser.parse_args()

deepspeed.init_distributed()
model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), config=args.deepspeed_config
)
before = args.signals / f"begun-{dist.get_rank()}"
newcomer = before.exists()
before.touch()
for step in range(1, args.train_iters + 1):
    engine.backward(engine(torch.ones(1, 8)).square().mean())
    engine.step()
    time.sleep(SLOW)
    while newcomer and step == HALF and not (args.signals / "go").exists():
        time.sleep(0.02)
    while step == args.train_iters - 1 and not (args.signals / "end").exists():
        time.sleep(0.02)
