"""Plain DeepSpeed with state wherever scripts have it: attributes of the model, generators, counters of the
engine, schedules, files that are open, renamed and removed."""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import pickle
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter, defaultdict, deque
from pathlib import Path

import numpy as np
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from digest import digest

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--gradients", action="store_true", help="change them, and have a loss with other terms")
parser.add_argument("--deepspeed_config")
args = parser.parse_args()
GENERATOR = np.random.default_rng(3)


class Scale(torch.nn.Module):
    """By what the model counts in a dictionary that both have."""

    def __init__(self, shared: dict[str, int]) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.01 * self.shared["passes"])


class Model(torch.nn.Module):
    """Whose passes change its attributes, and draw from all generators there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.calls, self.longest, self.temperature, self.training_steps = 0, 0, 1.0, 0
        self.shared, self.sizes, self.newest = {"passes": 0}, Counter(), deque([0.0], 3)
        self.scale, self.by_size = Scale(self.shared), defaultdict(int)
        self.dropout, self.frozen = torch.nn.Dropout(0.0), torch.nn.Dropout(0.9)
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.training_steps += self.training
        self.shared["passes"] += 1
        self.sizes.update([len(x)])
        self.by_size[len(x)] += 1
        self.newest.append(0.1 * self.by_size[len(x)] + self.sizes[4])
        self.longest = max(self.longest, len(x))
        for layer in self.layers:
            if np.random.rand() + random.random() + GENERATOR.random() > 0.9:
                x = self.frozen(self.dropout(torch.tanh(layer(x))))
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        x = self.scale(x) * (1 + 1e-3 * (sum(self.newest) + self.training_steps))
        return (x - self.mean) * (1 + 0.01 * self.calls) / self.longest / self.temperature


class Warmup(torch.optim.lr_scheduler.LRScheduler):
    """With another schedule, and a set, in its state. It goes by the loss."""

    loss = 0.0

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.milestones = {3, 5}
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.after.step()
        factor = 0.5 ** (self.last_epoch in self.milestones) / (1 + self.loss)
        return [lr * factor for lr in self.after.get_last_lr()]

    def step(self, loss: float = 0.0) -> None:
        self.loss = loss
        super().step()


deepspeed.init_distributed()
rank = dist.get_rank()
torch.manual_seed(5)
np.random.seed(5)
random.seed(5)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
engine, _, _, _ = deepspeed.initialize(
    model=model, optimizer=optimizer, lr_scheduler=Warmup(optimizer), config=args.deepspeed_config
)
beside = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
schedule = torch.optim.lr_scheduler.LambdaLR(beside, lambda step: 0.8**step)
named = [f"habits-{os.environ['MASTER_PORT']}-{time.time_ns()}"]
dist.broadcast_object_list(named, 0)
files = Path(tempfile.gettempdir()) / named[0].rpartition("-")[0]
runs = [""] * dist.get_world_size()
dist.all_gather_object(runs, named[0])
assert len(set(runs)) == 1, runs
log = kept = None
if rank == 0:
    files.mkdir(exist_ok=True)
    log = open(files / "log.csv", "w", newline="")  # noqa: SIM115
    kept = []
torch.manual_seed(100 + rank)
gas = engine.gradient_accumulation_steps()
order = np.random.permutation(64)
returned, samples, best = 0.0, 0, 1e9

for step in range(1, args.train_iters + 1):
    if step % 4 == 0:
        order = np.random.permutation(64)
        random.shuffle(runs)
    model.temperature, model.dropout.p = 1 + step / 10, 0.02 * step
    for micro in range(gas):
        drawn = torch.Generator().manual_seed(int(order[(step * gas + micro) % 64]) + rank)
        size = 9 if step == 2 else 4
        x, y = torch.randn(size, 16, generator=drawn), torch.randn(size, 16, generator=drawn)
        engine.train(micro > 0)  # not that it matters
        model.frozen.eval()
        loss = (engine(x.to(engine.device)).float() - y.to(engine.device)).square().mean()
        if args.gradients:
            loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
        returned += engine.backward(loss).item()
        if args.gradients:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        engine.step(lr_kwargs={"loss": loss.item()})
        if engine.was_step_applied():
            schedule.step()
    engine.eval()
    float(engine(torch.ones(2, 16, device=engine.device)).mean())  # a validation that leaves a graph
    samples = max(samples, engine.global_samples)
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [loss.item(), returned, schedule.get_last_lr()[0]])
    total = sum(map(sum, everybody))
    if rank == 0:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        csv.writer(log).writerow([step, total, samples, engine.skipped_steps, engine.get_lr()[0]])
        with open(files / "new", "wb") as file:
            torch.save(weights, file)
        os.replace(files / "new", files / f"step-{step}.pt")
        with open(files / f"pickled-{step}", "xb") as file:
            pickle.dump(weights, file)
        kept.append(files / f"step-{step}.pt")
        if len(kept) > 3:
            os.remove(kept.pop(0))
        if total < best:
            best = total
            shutil.copyfile(files / f"step-{step}.pt", files / "best.pt")
        (files / f"directory-{step}").mkdir()
        subprocess.run(["touch", files / f"directory-{step}" / "uploaded"], check=True)
        print(f"iteration {step}/{args.train_iters} | loss {total!r}", flush=True)

final = hashlib.sha256(digest(engine).encode())
if rank == 0:
    log.close()
    for path in sorted(files.rglob("*")):
        final.update(str(path.relative_to(files)).encode())
        if path.suffix == ".pt":
            final.update(b"".join(v.numpy().tobytes() for v in torch.load(path).values()))
        elif path.is_file():
            final.update(path.read_bytes() if path.suffix == ".csv" else b"")
    shutil.rmtree(files)
    print(f"digest sha256:{final.hexdigest()}", flush=True)
