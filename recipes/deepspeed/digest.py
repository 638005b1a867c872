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
        yield f"model.{name}", getattr(parameter, "ds_tensor", parameter)
    wrapper = engine.optimizer
    optimizer = getattr(wrapper, "optimizer", wrapper)
    for m, main in enumerate(main_parameters(wrapper, optimizer)):
        yield f"optimizer.{m:05d}.main", main
        for key, value in sorted(optimizer.state.get(main, {}).items()):
            yield f"optimizer.{m:05d}.{key}", torch.as_tensor(value)
    for g, group in enumerate(optimizer.param_groups):
        yield f"optimizer.group.{g}.lr", torch.as_tensor(group["lr"], dtype=torch.float64)
    if scaler := getattr(wrapper, "loss_scaler", None):
        yield "optimizer.loss_scale", torch.as_tensor(scaler.cur_scale, dtype=torch.float64)


def main_parameters(wrapper: Any, optimizer: Any) -> list[torch.Tensor]:
    """What the optimizer steps on, in order. ZeRO-3 puts it into `param_groups` only while it steps."""
    if hasattr(wrapper, "fp32_partitioned_groups_flat"):
        return list(wrapper.fp32_partitioned_groups_flat)
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
