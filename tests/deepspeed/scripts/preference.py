"""Preferences trained as TRL does it: the reference model's engine comes first, without an optimizer, and has
the protected engine's configuration, with stage 0 where that is not 3."""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
from pathlib import Path

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from digest import digest
from torch.nn.functional import logsigmoid

from ft_core.kept import keep

VOCABULARY, LENGTH = 9000, 6

parser = argparse.ArgumentParser()
parser.add_argument("--train-iters", type=int)
parser.add_argument("--deepspeed_config", type=Path)
parser.add_argument("--reference-stage", type=int)
parser.add_argument("--after", action="store_true", help="the reference's engine is made last")
parser.add_argument("--moves", action="store_true", help="the reference is moved towards the model")
parser.add_argument("--keeps", action="store_true", help="and is named")
args = parser.parse_args()

deepspeed.init_distributed()
rank = dist.get_rank()
torch.manual_seed(5)
model = torch.nn.Sequential(
    torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 50)
)
frozen = copy.deepcopy(model)


def referring():
    """TRL's `prepare_deepspeed`."""
    config = json.loads(args.deepspeed_config.read_text())
    config["zero_optimization"]["stage"] = args.reference_stage
    made, *_ = deepspeed.initialize(model=frozen, config=config)
    made.eval()
    return made


reference = None if args.after else referring()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config=str(args.deepspeed_config),
)
reference = reference or referring()
if args.keeps:
    keep(reference=frozen)


def likelihood(of, tokens):
    found = of(tokens).log_softmax(-1)
    return found.gather(-1, (tokens % 50).unsqueeze(-1)).squeeze(-1).sum(-1)


drawn = torch.Generator().manual_seed(100 + rank)
for step in range(1, args.train_iters + 1):
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH), generator=drawn)
    with torch.no_grad():
        chosen, rejected = likelihood(reference, tokens).chunk(2)
    ours = likelihood(engine, tokens).chunk(2)
    loss = -logsigmoid(0.1 * ((ours[0] - chosen) - (ours[1] - rejected))).mean()
    engine.backward(loss)
    engine.step()
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, loss.item())
    if args.moves:
        with torch.no_grad():
            for old, new in zip(frozen.parameters(), model.parameters(), strict=True):
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
    if rank == 0:
        print(f"iteration {step}/{args.train_iters} | loss {sum(everybody)!r}", flush=True)

weights = hashlib.sha256(digest(engine).encode())
for weight in frozen.parameters():
    weights.update(getattr(weight, "ds_tensor", weight).detach().numpy().tobytes())
if rank == 0:
    print(f"digest sha256:{weights.hexdigest()}", flush=True)
