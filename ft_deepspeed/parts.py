"""Weights that need not be kept: with ZeRO 1 and 2 they follow from the masters of all peers.

A step ends so: each rank rounds its masters into its part of the flat weights, and all ranks gather the
parts. A snapshot without the weights is made whole by the same: each role rounds what it was given, and then
all of them gather, survivors too, whose weights may be torn by a step that was left in its gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import all_gather_dp_groups

from ft_core.adapter import StateTensor

_AT_ONCE = 1 << 22
"""Elements that are compared at once: that much memory is needed."""


@dataclass
class Part:
    """A role's part of one group of weights, which all its peers have whole."""

    group: int
    slices: Sequence[Sequence[torch.Tensor]]
    """DeepSpeed's own, which may be made anew: of each group the parts, by rank among the peers."""
    rank: int
    master: torch.Tensor
    apart: bool = False
    """Whether the weights are not what the master says: something else has written them."""

    @property
    def weights(self) -> torch.Tensor:
        """In the flat weights."""
        return self.slices[self.group][self.rank].detach()

    @torch.no_grad()
    def compare(self) -> None:
        """Look, bit by bit, whether the weights follow from the master."""
        pairs = zip(self.weights.split(_AT_ONCE), self.master.detach().split(_AT_ONCE), strict=True)
        self.apart = not all(_same(weights, master) for weights, master in pairs)

    def tensors(self, holders: tuple[int, ...]) -> Iterator[StateTensor]:
        """What does not follow."""
        if self.apart:
            yield StateTensor(self._name, self.weights, holders)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], whole: bool) -> None:
        """Restore from a snapshot, once the master was restored if it is in there. `whole`: the weights
        were."""
        self.apart = self._name in tensors
        if self.apart:
            self.weights.copy_(tensors[self._name])
        elif f"master.{master_name(self.group)}" not in tensors:
            self.master.data.copy_(self.weights)
        elif not whole:
            self.weights.copy_(self.master)

    @property
    def _name(self) -> str:
        return f"part.{self.group}"


def master_name(group: int, index: int = 0) -> str:
    """What stands for a tensor that the inner optimizer steps."""
    return f"{group}.{index:05d}"


@torch.no_grad()
def gather(optimizer: Any) -> None:
    """All weights from the parts of all peers, as at the end of a step. (Communicates.)"""
    if isinstance(optimizer, BF16_Optimizer):
        flats, parts = optimizer.bf16_groups_flat, optimizer.bf16_partitioned_groups
    else:
        flats, parts = optimizer.bit16_groups_flat, optimizer.parallel_partitioned_bit16_groups
    all_gather_dp_groups(
        groups_flat=flats,
        partitioned_param_groups=parts,
        dp_process_group=optimizer.real_dp_process_group,
        start_alignment_factor=optimizer.nccl_start_alignment_factor,
        allgather_bucket_size=optimizer.allgather_bucket_size,
    )


def _same(weights: torch.Tensor, master: torch.Tensor) -> bool:
    """To the bit: no number equals itself that is none."""
    rounded = master.to(weights.device, weights.dtype)
    return torch.equal(weights.view(torch.uint8), rounded.view(torch.uint8))
