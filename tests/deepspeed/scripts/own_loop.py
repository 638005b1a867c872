"""Plain DeepSpeed with as much of its own as a script may have: loader with processes, loss, learning rate,
collectives, an average of the weights."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from digest import digest, without_padding
from torch.utils.data import DataLoader, TensorDataset

from ft_core.kept import keep

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--micro-batches", type=int)
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--seeded", action="store_true", help="shuffle so that a resumed run shuffles alike")
parser.add_argument("--direct", action="store_true", help="loss.backward() in place of engine.backward(loss)")
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
loader = DataLoader(
    TensorDataset(inputs, labels),
    batch_size=4,
    shuffle=True,
    generator=generator,
    num_workers=2,
    persistent_workers=True,
)


class Average:
    """Of what this rank has of the weights; it is made in the first step."""

    def __init__(self):
        self.steps, self.shadow = 0, []

    def update(self):
        own = [
            without_padding(p.ds_tensor, [p]).clone() if hasattr(p, "ds_tensor") else p.detach().float()
            for p in model.parameters()
        ]
        self.shadow = [old * 0.9 + new * 0.1 for old, new in zip(self.shadow or own, own, strict=True)]
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.steps, self.shadow = state["steps"], [t.clone() for t in state["shadow"]]


average, highest = Average(), torch.zeros(())
keep(average=average, highest=highest)
done = 0
if args.checkpoints and args.checkpoints.exists():
    path, client = engine.load_checkpoint(args.checkpoints)
    if path:
        done = client["step"]
        average.load_state_dict(client["average"])
        highest.copy_(client["highest"])

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
        if args.direct:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        total += loss.item()
    schedule.step()
    average.update()
    highest.clamp_(min=total)
    everybody = [None] * world
    dist.all_gather_object(everybody, total)
    dist.barrier()
    if rank == 0:
        print(f"iteration {step}/{args.train_iters} | loss {sum(everybody)!r}", flush=True)
    if args.checkpoints and step % 5 == 0:
        client = {"step": step, "average": average.state_dict(), "highest": highest}
        engine.save_checkpoint(args.checkpoints, client_state=client)
if get_accelerator().device_name() == "cpu":
    own = [average.steps, highest.item(), *(t.tolist() for t in average.shadow)]
    everybody = [None] * world
    dist.all_gather_object(everybody, own)
    final = hashlib.sha256(f"{digest(engine)} {everybody!r}".encode()).hexdigest()
    if rank == 0:
        print(f"digest sha256:{final}", flush=True)
