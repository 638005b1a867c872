"""An ordinary script of accelerate: the model is in torch's DistributedDataParallel. One rank dies in it."""

from __future__ import annotations

import os
import signal

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 16), torch.randint(0, 8, (96,)))
model = torch.nn.Linear(16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for step, (x, y) in enumerate(loader, 1):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    mean = accelerator.gather(loss.detach()).mean().item()
    accelerator.print(f"iteration {step}/6 | loss {mean!r}", flush=True)
    if step == 4 and accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
