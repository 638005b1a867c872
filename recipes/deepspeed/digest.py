"""A digest of what a DeepSpeed engine has trained, so that two runs can be compared bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch


def digest(engine: Any) -> str:
    """SHA-256, in hex, of all ranks' parameters and optimizer state in rank order; same on all ranks."""
    own = hashlib.sha256()
    for name, tensor in state_tensors(engine):
        own.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        own.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    ranks: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, own.hexdigest())
    return hashlib.sha256("".join(ranks).encode()).hexdigest()


def state_tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank holds: its (part of the) parameters, main parameters, Adam's state, loss scale."""
    for name, parameter in engine.module.named_parameters():
        # ZeRO-3 leaves an empty parameter behind and keeps this rank's part of it beside it.
        partitioned = hasattr(parameter, "ds_tensor")
        yield f"model.{name}", without_padding(parameter.ds_tensor, [parameter]) if partitioned else parameter
    wrapper = engine.optimizer
    optimizer = getattr(wrapper, "optimizer", wrapper)
    for m, (main, members) in enumerate(main_parameters(wrapper, optimizer)):
        yield f"optimizer.{m:05d}.main", without_padding(main, members)
        for key, value in sorted(optimizer.state.get(main, {}).items()):
            tensor = torch.as_tensor(value)
            yield f"optimizer.{m:05d}.{key}", without_padding(tensor, members) if tensor.dim() else tensor
    for g, group in enumerate(optimizer.param_groups):
        yield f"optimizer.group.{g}.lr", torch.as_tensor(group["lr"], dtype=torch.float64)
    if scaler := getattr(wrapper, "loss_scaler", None):
        yield "optimizer.loss_scale", torch.as_tensor(scaler.cur_scale, dtype=torch.float64)


def main_parameters(wrapper: Any, optimizer: Any) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    """What the optimizer steps on, in order, each with the ZeRO-3 parameters that it has parts of."""
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):  # ZeRO-3 fills `param_groups` only while it steps
        return list(zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True))
    return [(parameter, []) for group in optimizer.param_groups for parameter in group["params"]]


def without_padding(tensor: torch.Tensor, members: list[Any]) -> torch.Tensor:
    """`tensor` less what rounds up the parts of ZeRO-3's parameters to equal lengths: arbitrary memory."""
    if not members:
        return tensor
    rank = torch.distributed.get_rank()
    lengths = [member.ds_tensor.ds_numel for member in members]
    left = [member.ds_numel - rank * n for member, n in zip(members, lengths, strict=True)]
    parts = tensor.detach().reshape(-1).split(lengths)
    return torch.cat([part[: max(0, n)] for part, n in zip(parts, left, strict=True)])
