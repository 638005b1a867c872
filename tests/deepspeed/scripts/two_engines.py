"""A script that makes a second engine before it trains the first: refused whatever its configuration says."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch

deepspeed.init_distributed()


def engine(**section):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, **section}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


engine(fault_tolerance={"enabled": True})
for section in ({}, {"fault_tolerance": {"enabled": False}}):
    try:
        engine(**section)
    except Exception as error:
        print(f"refused: {error}", flush=True)
engine(fault_tolerance={"enabled": True})
sys.exit("never reached")
