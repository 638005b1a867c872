"""Where DeepSpeed keeps a role's state: which tensors there are per ZeRO stage, and who has the same.

Everything an optimizer keeps is found through the inner optimizer's `state`, whatever optimizer it is.
What other state determines is left out and computed again when a snapshot is restored: 16-bit weights
whose fp32 master copy lies whole on the same role; in a lean snapshot weights of which each peer has a part
of the masters (see `parts`), in a full one masters that are the same as a slice of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import DummyOptim
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from ft_core.errors import ConfigError
from ft_deepspeed import config
from ft_deepspeed.parts import Part, master_name

Holders = tuple[int, ...]


@dataclass(frozen=True)
class Master:
    """A tensor that the inner optimizer steps; its state is kept under it."""

    name: str
    tensor: torch.Tensor
    holders: Holders
    listed: bool
    """Whether it is state of its own, not a view of the weights or determined by them."""


@dataclass
class Layout:
    """What makes up the state, except for what the inner optimizer keeps and may make later."""

    parameters: list[tuple[str, torch.Tensor, Holders]] = field(default_factory=list)
    """Weights: flat buffers where a snapshot has them, else parameters, else (stage 3) their partitions."""
    flats: list[tuple[str, torch.Tensor, Holders]] = field(default_factory=list)
    """Weights that follow from the masters of all peers. In a full snapshot they are there all the same."""
    parts: list[Part] = field(default_factory=list)
    """This role's, of each of them."""
    masters: list[Master] = field(default_factory=list)
    buffers: list[tuple[str, torch.nn.Module, str]] = field(default_factory=list)
    """Persistent ones: (name, module, attribute). A module may replace its buffer at any time."""
    derived: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(tensor, what it is a copy or a rounding of), to be computed after the rest has been restored."""


def inner_optimizer(engine: Any) -> Any:
    """The optimizer proper, inside DeepSpeed's wrapper if there is one."""
    optimizer = engine.optimizer
    return optimizer.optimizer if isinstance(optimizer, DeepSpeedOptimizer) else optimizer


def inner_optimizers(engine: Any) -> list[Any]:
    """The inner optimizer, and the one that steps the share of stage 3's offload that stays on the device."""
    backup = vars(engine.optimizer).get("backup_optimizer")
    return [inner_optimizer(engine), *([backup] if backup is not None else [])]


def kept_by(optimizer: Any) -> Iterator[Any]:
    """What it keeps for its parameters, and beside them."""
    for kept in optimizer.state.values():
        yield from kept.values() if isinstance(kept, dict) else [kept]


def layout(engine: Any, lean: bool) -> Layout:
    """The layout of an initialised engine. Names and order depend on model and configuration alone.

    `lean`: without what only all peers together can derive.
    """
    result = Layout()
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _stage3(optimizer, result)
        covered = {id(p) for group in optimizer.fp16_groups for p in group}
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        _stage12(optimizer, result, lean)
        covered = {id(p) for group in optimizer.bit16_groups for p in group}
    elif isinstance(optimizer, BF16_Optimizer):
        _bf16(optimizer, result, lean)
        covered = {id(p) for group in optimizer.bf16_groups for p in group}
    elif isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        _replicated_masters(engine, optimizer, result)
        covered = {id(p) for group in optimizer.fp16_groups for p in group}
    else:
        _plain(engine, optimizer, result)
        covered = set()
    for name, parameter in engine.module.named_parameters():
        if id(parameter) in covered:
            continue
        if hasattr(parameter, "ds_tensor"):
            result.parameters.append((f"model.{name}", parameter.ds_tensor, (dist.get_rank(),)))
        else:
            result.parameters.append((f"model.{name}", parameter, replicas(engine, parameter)))
    for prefix, module in engine.module.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                result.buffers.append((f"buffer.{prefix}.{name}", module, name))
    return result


def replicas(engine: Any, parameter: Any) -> Holders:
    """The roles that keep a replicated parameter: the data-parallel peers; for an expert, its own."""
    if is_moe_param(parameter):
        return ranks(groups._get_expert_data_parallel_group(parameter.group_name))
    return ranks(engine.seq_data_parallel_group)


def ranks(group: Any) -> Holders:
    """Global ranks of a process group, in order."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _stage3(optimizer: Any, result: Layout) -> None:
    mine = (dist.get_rank(),)
    for i, (flat, master) in enumerate(
        zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    ):
        result.masters.append(Master(master_name(i), master, mine, listed=True))
        if flat.data_ptr() != master.data_ptr():
            result.derived.append((flat, master))


def _stage12(optimizer: Any, result: Layout, lean: bool) -> None:
    _partitioned_masters(
        optimizer,
        optimizer.bit16_groups_flat,
        optimizer.parallel_partitioned_bit16_groups,
        optimizer.single_partition_of_fp32_groups,
        result,
        lean,
    )


def _bf16(optimizer: Any, result: Layout, lean: bool) -> None:
    _partitioned_masters(
        optimizer,
        optimizer.bf16_groups_flat,
        optimizer.bf16_partitioned_groups,
        optimizer.fp32_groups_flat_partition,
        result,
        lean,
    )


def _partitioned_masters(
    optimizer: Any, flats: list[Any], partitions: list[Any], masters: list[Any], result: Layout, lean: bool
) -> None:
    """Weights whole on every peer, masters in as many parts as there are peers."""
    for i, (flat, master) in enumerate(zip(flats, masters, strict=True)):
        group = optimizer.real_dp_process_group[i]
        result.flats.append((f"flat.{i}", flat, ranks(group)))
        listed = lean or flat.dtype != master.dtype  # else it is a copy of a slice of the weights
        result.masters.append(Master(master_name(i), master, (dist.get_rank(),), listed))
        result.parts.append(Part(i, partitions, dist.get_rank(group), master))


def _replicated_masters(engine: Any, optimizer: Any, result: Layout) -> None:
    """16-bit training without ZeRO: every peer has all masters, of which the weights are the rounding."""
    fused = isinstance(optimizer, FP16_Optimizer)
    for i, weights in enumerate(optimizer.fp16_groups):
        if fused:
            flat = optimizer.fp32_groups_flat[i]
            result.masters.append(Master(master_name(i), flat, replicas(engine, weights[0]), listed=True))
            slices = torch._utils._unflatten_dense_tensors(flat.detach(), weights)
            result.derived.extend(zip(weights, slices, strict=True))
        else:
            for j, (weight, master) in enumerate(zip(weights, optimizer.fp32_groups[i], strict=True)):
                result.masters.append(
                    Master(master_name(i, j), master, replicas(engine, weight), listed=True)
                )
                result.derived.append((weight, master))


def _plain(engine: Any, optimizer: Any, result: Layout) -> None:
    weights = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
    for i, group in enumerate(optimizer.param_groups):
        for j, master in enumerate(group["params"]):
            own = master.untyped_storage().data_ptr() not in weights
            result.masters.append(Master(master_name(i, j), master, replicas(engine, master), listed=own))


def check(engine: Any) -> None:
    """Raise ConfigError, which says what to change, if this engine cannot be protected."""
    inner = inner_optimizer(engine)
    if isinstance(inner, (NoneType, DummyOptim, DeepSpeedZeRoOffload)):
        raise ConfigError("the engine has no optimizer: nothing is trained that could be protected")
    config.check(engine._config._param_dict)
    methods = getattr(vars(engine).get("compression_scheduler"), "different_compression_methods", {})
    config.check(
        {  # what a script may have given as an object, or what a version has turned its keys into
            "optimizer": {"type": type(inner).__name__},
            "quantize_training": vars(engine).get("quantizer") is not None,
            "compression_training": any(method.get("enabled") for method in methods.values()),
        }
    )
