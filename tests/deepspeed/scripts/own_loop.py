"""Plain DeepSpeed with as much of its own as a script may have: loader, loss, learning rate, collectives."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from digest import digest
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--micro-batches", type=int)
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--seeded", action="store_true", help="shuffle so that a resumed run shuffles alike")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()

deepspeed.init_distributed()
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 8)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.deepspeed_config)
schedule = torch.optim.lr_scheduler.MultiplicativeLR(
    getattr(engine.optimizer, "optimizer", engine.optimizer), lambda step: 0.97
)

# Every rank shuffles in its own way, a new one each epoch; the last batch of an epoch is smaller.
torch.manual_seed(100 + rank)
inputs, labels = torch.randn(43, 16), torch.randint(0, 8, (43,))
generator = torch.Generator().manual_seed(rank) if args.seeded else None
loader = DataLoader(TensorDataset(inputs, labels), batch_size=4, shuffle=True, generator=generator)

done = 0
if args.checkpoints and args.checkpoints.exists():
    path, client = engine.load_checkpoint(args.checkpoints)
    done = client["step"] if path else 0

batches = iter(())


def draw():
    global batches
    while True:
        for batch in batches:
            return batch
        batches = iter(loader)


for _ in range(done * args.micro_batches):
    draw()
for step in range(done + 1, args.train_iters + 1):
    total = 0.0
    for _ in range(args.micro_batches):
        x, y = draw()
        logits = engine(x.to(engine.device))
        loss = torch.nn.functional.cross_entropy(logits.float(), y.to(engine.device), label_smoothing=0.1)
        loss *= 2.0
        engine.backward(loss)
        engine.step()
        total += loss.item()
    schedule.step()
    everybody = [None] * world
    dist.all_gather_object(everybody, total)
    dist.barrier()
    if rank == 0:
        print(f"iteration {step}/{args.train_iters} | loss {sum(everybody)!r}", flush=True)
    if args.checkpoints and step % 5 == 0:
        engine.save_checkpoint(args.checkpoints, client_state={"step": step})
if get_accelerator().device_name() == "cpu":
    final = digest(engine)
    if rank == 0:
        print(f"digest sha256:{final}", flush=True)
