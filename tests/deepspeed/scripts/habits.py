"""Plain DeepSpeed with habits that scripts have: orders of their own, evaluations in the middle of an epoch,
the norm in the log, files that take each other's places, weights gathered between steps."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from digest import digest
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--deepspeed_config")
args = parser.parse_args()

deepspeed.init_distributed()
rank = dist.get_rank()
torch.manual_seed(5)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 8)
)
engine, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=args.deepspeed_config
)
files = Path(tempfile.gettempdir()) / f"habits-{os.environ['MASTER_PORT']}"
torch.manual_seed(100 + rank)
inputs, labels = torch.randn(40, 16), torch.randint(0, 8, (40,))
loader = DataLoader(TensorDataset(inputs, labels), batch_size=4, shuffle=True)
held_out = DataLoader(TensorDataset(inputs[:8], labels[:8]), batch_size=4, shuffle=True)


def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(engine(x.to(engine.device)).float(), y.to(engine.device))


def evaluated() -> float:
    engine.eval()
    with torch.no_grad():
        found = sum(loss_of(x, y).item() for x, y in held_out)
    engine.train()
    return found


def epochs():
    """Batches of a loader, and beside each one of an order of the script's own."""
    while True:
        for (x, y), own in zip(loader, torch.randperm(40).split(4), strict=True):
            yield torch.cat([x, inputs[own]]), torch.cat([y, labels[own]])


for step, batch in zip(range(1, args.train_iters + 1), epochs(), strict=False):
    loss = loss_of(*batch)
    engine.backward(loss)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    beside = evaluated()
    with deepspeed.zero.GatheredParameters(
        list(model.parameters()), enabled=engine.zero_optimization_stage() == 3
    ):
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    if rank == 0:
        files.mkdir(exist_ok=True)
        torch.save(weights, files / "new")
        os.replace(files / "new", files / f"weights-{step}")
        np.save(files / f"weights-{step}.npy", weights.numpy())
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [loss.item(), norm, beside])
    if rank == 0:
        print(f"iteration {step}/{args.train_iters} | loss {sum(map(sum, everybody))!r}", flush=True)

final = hashlib.sha256(digest(engine).encode())
if rank == 0:
    for step in range(1, args.train_iters + 1):
        final.update(torch.load(files / f"weights-{step}").numpy().tobytes())
        final.update(np.load(files / f"weights-{step}.npy").tobytes())
    shutil.rmtree(files)
    print(f"digest sha256:{final.hexdigest()}", flush=True)
