"""The slices that a rank of ZeRO stage 3 has alone, held for it by another (see `adoption3`)."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from ft_deepspeed import zero
from ft_deepspeed.shard import AdoptedShard, Shard

_GRADIENTS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class Adopted(AdoptedShard):
    """The slices of one role that is away (see `ft_core.adapter.State`)."""

    def __init__(self, adapter: Any, role: int) -> None:
        """`adapter`: the `DeepSpeedAdapter` of the role that holds them. They are zeros until restored."""
        super().__init__(adapter, role)
        engine, optimizer = adapter.engine, adapter.engine.optimizer
        own = zero.layout(engine, adapter.lean)
        self.weights: dict[int, torch.Tensor] = {}
        """By id of the parameter, its slice."""
        flats, masters, parts = [], [], []
        for flat, master, parameters in zip(
            optimizer.fp16_partitioned_groups_flat,
            optimizer.fp32_partitioned_groups_flat,
            optimizer.fp16_groups,
            strict=True,
        ):
            flats.append(torch.zeros_like(flat.detach()))
            parts.append(list(flats[-1].split([p.partition_numel() for p in parameters])))
            self.weights.update(zip((p.ds_id for p in parameters), parts[-1], strict=True))
            if master.data_ptr() == flat.data_ptr():
                masters.append(flats[-1])
            else:
                masters.append(torch.zeros_like(master.detach()))
                self._derived.append((flats[-1], masters[-1]))
        self._masters = [master.requires_grad_() for master in masters]
        by_slice = {id(p.ds_tensor): p for p in engine.module.parameters()}
        for name, tensor, _ in own.parameters:
            self._frozen.append((name, torch.zeros_like(tensor)))
            self.weights[by_slice[id(tensor)].ds_id] = self._frozen[-1][1]
        self._gradients = torch.zeros_like(optimizer.grad_partitions_flat_buffer)
        by_id = {
            key: self._gradients.narrow(0, part.storage_offset(), part.numel())
            for key, part in getattr(optimizer, _GRADIENTS).items()
        }
        self._kept = SimpleNamespace(state=defaultdict(dict))
        self._shard = Shard(
            [
                zero.Master(described.name, master, self._holders, described.listed)
                for described, master in zip(own.masters, self._masters, strict=True)
            ],
            lambda: [self._kept],
        )
        self._of_optimizer = {
            "fp16_partitioned_groups": parts,
            "fp16_partitioned_groups_flat": flats,
            "fp32_partitioned_groups_flat": self._masters,
            "grad_partitions_flat_buffer": self._gradients,
            _GRADIENTS: by_id,
            "averaged_gradients": {},
        }
        self.attributes = [
            (optimizer, self._of_optimizer),
            (zero.inner_optimizer(engine), {"state": self._kept.state}),
            (engine, {"_get_param_fragment_func": lambda p: self.weights[p.ds_id].cpu()}),
        ]
        """What is that role's: of whom, and by attribute."""

    def forget_gradients(self) -> None:
        """Have it as if there had been no backward pass."""
        self._gradients.zero_()
        self._of_optimizer["averaged_gradients"] = {}
        for master in self._masters:
            master.grad = None
