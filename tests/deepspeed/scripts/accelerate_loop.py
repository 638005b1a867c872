"""A loop on accelerate, which numbers the checkpoints that it saves, and removes old ones."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration, set_seed
from digest import digest
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--deepspeed_config")
args = parser.parse_args()

PartialState(cpu=True, backend="gloo")
named = [str(time.time_ns())]
dist.broadcast_object_list(named)
files = Path(tempfile.gettempdir()) / f"accelerate-{named[0]}"
accelerator = Accelerator(
    deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=json.loads(Path(args.deepspeed_config).read_text())),
    gradient_accumulation_steps=2,
    project_config=ProjectConfiguration(
        project_dir=str(files), automatic_checkpoint_naming=True, total_limit=2
    ),
)
set_seed(7)
data = TensorDataset(torch.randn(40, 16), torch.randn(40, 1))
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
model, optimizer, loader, schedule = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=4, shuffle=True), schedule
)
done = 0
while done < args.train_iters:
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        done += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == dist.get_world_size() - 1:
            rate = schedule.get_last_lr()[0]
            print(f"iteration {done}/{args.train_iters} | loss {total.item()!r} | lr {rate!r}", flush=True)
        if done % 3 == 0:
            accelerator.save_state()
        if done == args.train_iters:
            break

final = digest(model)
if dist.get_rank() == 0:
    kept = sorted(path.name for path in (files / "checkpoints").iterdir())
    shutil.rmtree(files)
    assert kept == [f"checkpoint_{done // 3 - 2}", f"checkpoint_{done // 3 - 1}"], kept
if dist.get_rank() == dist.get_world_size() - 1:
    print(f"digest sha256:{final}", flush=True)
