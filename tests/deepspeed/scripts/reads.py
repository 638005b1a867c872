"""Gives what a loader of torch's has read to the engine as it is, and looks at a few of the samples."""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import time

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from digest import digest
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--kind", choices=["plain", "noisy", "read-on"], default="plain")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--samples", type=int, default=160)
parser.add_argument("--file", help="which is read on, whatever the index is")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()


class Samples(Dataset):
    """Each takes some time to load. Of kind noisy it is another one each time."""

    def __init__(self, kind, file):
        self.kind, self.numbers = kind, file and mmap.mmap(os.open(file, os.O_RDONLY), 0, prot=mmap.PROT_READ)

    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        time.sleep(0.002)
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        if self.kind == "noisy":
            x += 0.1 * torch.randn(16)
        if self.numbers is not None:
            x += self.numbers.read_byte() / 256
        return {"x": x, "y": torch.tensor(index % 8)}


class Model(torch.nn.Module):
    """Its loss is its output."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.layers(x), y)


deepspeed.init_distributed()
rank = dist.get_rank()
torch.manual_seed(5)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=args.deepspeed_config)
data = Samples(args.kind, args.file)
sampler = DistributedSampler(data, dist.get_world_size(), rank, seed=3)
loader = DataLoader(data, 4, sampler=sampler, num_workers=args.workers)

step, epoch, looked = 0, 0, 0.0
while step < args.train_iters:
    sampler.set_epoch(epoch)
    epoch += 1
    for batch in loader:
        step += 1
        batch = {name: value.to(engine.device, non_blocking=True) for name, value in batch.items()}
        loss = engine(batch["x"], batch["y"])
        engine.backward(loss)
        engine.step()
        if step % 5 == 0:
            looked += batch["x"].double().sum().item()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"iteration {step}/{args.train_iters} | loss {total.item()!r}", flush=True)
        if step == args.train_iters:
            break
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, looked)
final = hashlib.sha256(f"{digest(engine)} {seen}".encode()).hexdigest()
if rank == 0:
    print(f"digest sha256:{final}", flush=True)
