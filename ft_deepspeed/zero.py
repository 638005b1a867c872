"""Where DeepSpeed keeps a role's state: which tensors there are per ZeRO stage, and who has the same.

Everything an optimizer keeps is found through the inner optimizer's `state`, whatever optimizer it is.
What other state determines is left out and computed again when a snapshot is restored: 16-bit weights
whose fp32 master copy lies whole on the same role; in a lean snapshot weights of which each peer has a part
of the masters (see `parts`), in a full one masters that are the same as a slice of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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

from ft_deepspeed.parts import Part, master_name

Holders = tuple[int, ...]

_UNCOVERED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")


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


def unsupported(engine: Any) -> str | None:
    """Why this engine cannot be protected, if so: a sentence that names the configuration key to change."""
    return next(_objections(engine), None)


def _objections(engine: Any) -> Iterator[str]:
    config = engine._config
    zero = config.zero_config
    optimizer = engine.optimizer
    if optimizer is None or isinstance(optimizer, DeepSpeedZeRoOffload):
        yield "the engine has no optimizer: nothing is trained that could be protected"
        return
    if isinstance(inner_optimizer(engine), DummyOptim):
        yield "the engine has no optimizer: nothing is trained that could be protected"
        return
    for section in ("offload_optimizer", "offload_param"):
        if str(getattr(getattr(zero, section), "device", "none")).rpartition(".")[2] == "nvme":
            yield f'"zero_optimization.{section}.device": "nvme" keeps state in files; use "cpu"'
    if getattr(zero.offload_optimizer, "super_offload", False):
        yield '"zero_optimization.offload_optimizer.super_offload" steps in another process; set it to false'
    if getattr(zero, "zenflow", None) is not None:
        yield '"zero_optimization.zenflow" updates weights outside the step; remove it'
    if zero.zero_hpz_partition_size > 1:
        yield '"zero_optimization.zero_hpz_partition_size" must be 1: secondary partitions are not covered'
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if getattr(zero, key, False):
            yield f'"zero_optimization.{key}" must be false: quantized communication is not covered'
    if getattr(zero, "mics_shard_size", -1) > 0:
        yield '"zero_optimization.mics_shard_size" must be -1: MiCS is not covered'
    if getattr(getattr(config, "compile_config", None), "deepcompile", False):
        yield '"compile.deepcompile" must be false: compiled graphs hold gradients and weights of their own'
    kinds = {str(engine.optimizer_name() or "").lower(), type(inner_optimizer(engine)).__name__.lower()}
    if kinds & set(_UNCOVERED_OPTIMIZERS):
        yield '"optimizer.type": errors of 1-bit compression are not covered; use "Adam" or "Lamb"'
    if any("muon" in kind for kind in kinds) or vars(optimizer).get("use_muon"):
        yield '"optimizer.type": Muon changes its momentum before the step; use "AdamW"'
    if getattr(zero.offload_optimizer, "ratio", 1.0) < 1:
        yield '"zero_optimization.offload_optimizer.ratio" must be 1: one of two optimizers steps unseen'
    if getattr(config, "amp_enabled", False):
        yield '"amp.enabled" must be false: use "fp16", "bf16" or "torch_autocast"'
    if vars(engine).get("quantizer") is not None:
        yield '"quantize_training" must go: its quantization schedule is not covered'
    methods = getattr(vars(engine).get("compression_scheduler"), "different_compression_methods", {})
    if any(method.get("enabled") for method in methods.values()):
        yield '"compression_training" must go: its schedules are not covered'
    if getattr(getattr(config, "hybrid_engine", None), "enabled", False):
        yield '"hybrid_engine.enabled" must be false: generation rearranges the weights'
    yield from ()
