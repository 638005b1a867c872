"""State as an adapter gives it, without a framework."""

from __future__ import annotations

import torch

from ft_core.adapter import StateTensor
from ft_core.state.manifest import CHUNK


class Model:
    """A big shard, redundant parameters, an odd-sized tensor, and optimizer state that comes late."""

    ring = (0, 1)

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.shard = torch.randn(CHUNK // 4 * 2 + 12345, generator=g)
        self.weight = torch.randn(33, 7, generator=g).bfloat16()
        self.count = torch.tensor(0.0)
        self.statistic = torch.zeros(5)
        self.late = None
        self.lr = 0.1

    def tensors(self):
        yield StateTensor("weight", self.weight, (0, 1))
        yield StateTensor("shard", self.shard, (0,))
        yield StateTensor("count", self.count, (0,))
        yield StateTensor("statistic", self.statistic, (0, 1), volatile=True)
        if self.late is not None:
            yield StateTensor("late", self.late, (0,))

    def envelope(self):
        return {"lr": self.lr}

    def envelope_holders(self):
        return (0,)

    def restore(self, tensors, envelope):
        self.lr = envelope["lr"]
        self.late = tensors["late"].clone() if "late" in tensors else None
        for name in ("weight", "shard", "count", "statistic"):
            getattr(self, name).copy_(tensors[name])

    def reset(self):
        pass

    def step(self, snapshotter=None):
        if snapshotter is not None:
            snapshotter.step_begins()
        self.shard.mul_(1.5)
        self.weight.add_(1)
        self.count.add_(1)
        self.statistic.add_(2)
        self.lr /= 3
        self.late = torch.ones(10) if self.late is None else self.late * 2

    def content(self):
        return [t.clone() for t in (self.weight, self.shard, self.count, self.statistic)], self.late, self.lr
