"""Forgetting a forward, backward or step that was interrupted: what DeepSpeed leaves behind is put in order.

Whatever collective raised, the engine is afterwards as in a process that has not yet begun the next
step. Where a step leaves something behind that only saves time (shapes known to pipeline neighbours), it goes
too: a newcomer does not have it, and all roles must make the same collective calls again. Stage 3's trace
and persistent parameters come back with a version (`trace`, `DeepSpeedAdapter.gather`). Nothing here
communicates.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.timer import SynchronizedWallClockTimer

from ft_deepspeed import persistent, trace

_ENGINE = {
    "_running_engine_backward": False,
    "_running_engine_backward_count": 0,
    "_running_engine_step": False,
    "_manual_backward_expected": False,
    "losses": None,
}
_PIPELINE: dict[str, Any] = {
    "_force_grad_boundary": False,
    "eval_return_logits": False,
    "first_gradient_send": True,
    "num_pipe_buffers": 0,
    "outputs": None,
    "total_loss": None,
    "total_additional_losses": None,
}
# Set where they exist: 0.17 and 0.18 keep fewer of them, or under other names.
_WRAPPER: dict[str, Any] = {
    "_backward_active_depth": 0,
    "_backward_seen_this_step": False,
    "_epilogue_ran_this_backward": False,
    "_hooks_fired_this_backward": 0,
    "_max_expected_hooks_seen": 0,
    "_remaining_grad_acc_hooks": 0,
    "_is_gradient_accumulation_boundary": True,
    "local_overflow": False,
    "ipg_bucket_has_moe_params": False,
    "ipg_index": 0,
}


External = list[tuple[Any, dict[int, Any]]]
"""Modules, and the parameters of others that stage 3 knows them to use."""


def external(module: Any) -> External:
    """The external parameters as they are now."""
    return [(part, dict(vars(part).get("_external_params", {}))) for part in module.modules()]


class Baseline:
    """What a fresh engine looked like, for state that later calls change and newcomers do not have."""

    def __init__(self, engine: Any) -> None:
        """`engine` must not have run a forward pass yet."""
        stage3 = isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)
        self.external = external(engine.module) if stage3 else []
        self.param_groups = [(o, o.param_groups) for o in _optimizers(engine)]


def abandon(engine: Any, baseline: Baseline) -> None:
    """Forget what the engine's calls since the last step have left behind, and communicate nothing.

    What the script has set around its calls stays: training mode, `no_sync`, a boundary set by hand.
    """
    if not get_accelerator().is_synchronized_device():
        get_accelerator().synchronize()  # what is still running writes into buffers that are given up here
    for parameter in engine.module.parameters():
        parameter.grad = None
        if hasattr(parameter, "grad_accum"):
            parameter.grad_accum = None
    _set(engine, _ENGINE)
    _timers(engine)
    for optimizer, param_groups in baseline.param_groups:
        optimizer.param_groups = param_groups  # stages 1 and 2 step one group at a time
    optimizer = engine.optimizer
    _wrapper(optimizer)
    for owner, name in ((optimizer, "torch_autocast_gradscaler"), (engine, "torch_autocast_z0_gradscaler")):
        if (scaler := vars(owner).get(name)) is not None:
            scaler._per_optimizer_states.clear()  # it refuses to unscale twice
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        _stage3(engine, optimizer, baseline)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        _stage12(optimizer)
    elif isinstance(optimizer, BF16_Optimizer):
        for partition in optimizer.fp32_groups_flat_partition:
            partition.grad = None
        optimizer.clear_hp_grads()
    else:
        for inner in _optimizers(engine):
            for group in inner.param_groups:
                for master in group["params"]:
                    master.grad = None
    if isinstance(optimizer, FP16_Optimizer) and not optimizer.has_executed_step:
        optimizer.flatten_grad_norm_mask_list.clear()  # or the first step, done again, would add to it
    if isinstance(engine, PipelineEngine):
        _pipeline(engine)
    checkpointing.reset()


def _optimizers(engine: Any) -> list[Any]:
    from ft_deepspeed.zero import inner_optimizers

    return inner_optimizers(engine)


def _set(target: Any, values: dict[str, Any]) -> None:
    """Attributes and properties that exist. (An engine passes what it does not have on to the module.)"""
    for name, value in values.items():
        if name in vars(target) or hasattr(type(target), name):
            setattr(target, name, value)


def _timers(engine: Any) -> None:
    """A timer that is running refuses to start."""
    owners = [engine, engine.optimizer, *engine.module.modules()]  # MoE layers have timers of their own
    for timers in (vars(owner).get("timers") for owner in owners):
        if isinstance(timers, SynchronizedWallClockTimer):
            for timer in timers.get_timers().values():
                timer.started_, timer.start_event = False, None
    for name in ("tput_timer", "batch_timer"):
        if (timer := vars(engine).get(name)) is not None:
            timer.started = False
    profiler = vars(engine).get("flops_profiler")
    if profiler is not None and getattr(profiler, "started", False):
        profiler.end_profile()


def _wrapper(optimizer: Any) -> None:
    """What DeepSpeed's optimizers have in common, or had in one version."""
    _set(optimizer, _WRAPPER)
    hooks = vars(optimizer).get("_backward_hook_state")
    if hooks is not None:
        _set(hooks, {"post_backward_callback_queued": False, "post_backward_callback_graph_task_id": None})
    if type(vars(optimizer).get("is_gradient_accumulation_boundary")) is bool:  # a method since 0.19
        optimizer.is_gradient_accumulation_boundary = True
    for name in ("averaged_gradients", "all_grad_tensors"):
        gradients = vars(optimizer).get(name, {})
        for key in gradients:
            gradients[key] = None  # parameters hold a reference to the dictionary itself
    for name in ("norm_for_param_grads", "_pending_offload_events", "accumulated_grads_in_cpu"):
        vars(optimizer).get(name, {}).clear()
    for name in ("_offload_accumulated_param_ids", "_offload_boundary_param_ids"):
        vars(optimizer).get(name, set()).clear()
    # One bucket in 0.17, one per communication dtype later.
    for name in ("grads_in_ipg_bucket", "params_in_ipg_bucket"):
        vars(optimizer).get(name, []).clear()
    if "elements_in_ipg_bucket" in vars(optimizer):
        optimizer.elements_in_ipg_bucket = 0
    for bucket in vars(optimizer).get("ipg_buckets", {}).values():
        for name in ("params", "grads", "ready_events", "reuse_events", "copy_streams"):
            vars(bucket).get(name, []).clear()
        _set(bucket, {"elements": 0, "index": 0, "has_moe_params": False, "process_group": None})
    for name in ("extra_large_param_to_reduce", "previous_reduced_grads"):
        if name in vars(optimizer):
            if isinstance(vars(optimizer)[name], dict):
                vars(optimizer)[name].clear()
            else:
                setattr(optimizer, name, None)


def _stage12(optimizer: Any) -> None:
    optimizer._release_ipg_buffers()
    optimizer.micro_step_id = -1
    optimizer.params_already_reduced[:] = [False] * len(optimizer.params_already_reduced)
    for master in optimizer.single_partition_of_fp32_groups:
        if not optimizer.cpu_offload:
            master.grad = None
        elif master.grad is not None:
            master.grad.zero_()  # offload keeps this buffer, and views of it


def _stage3(engine: Any, optimizer: Any, baseline: Baseline) -> None:
    optimizer.micro_step_id = 0
    optimizer.params_already_reduced.update(dict.fromkeys(optimizer.params_already_reduced, False))
    optimizer.param_reduce_events.clear()
    optimizer.inf_or_nan_tracker.zero_()
    # A parameter that gets no gradient keeps the one it got last. No newcomer could have that.
    optimizer.grad_partitions_flat_buffer.zero_()
    for master in optimizer.fp32_partitioned_groups_flat:
        if not optimizer.offload_optimizer:
            master.grad = None
        elif master.grad is not None:
            master.grad.zero_()
    for inner in _optimizers(engine):
        for group in inner.param_groups:
            group["params"] = []  # filled for the duration of a sub-group's step
    abandon_pass(engine.module, optimizer.parameter_offload.get_param_coordinator(), baseline.external)


def abandon_pass(module: Any, coordinator: Any, first: External) -> None:
    """Stage 3's weights and trace, as before the first pass through `module`; `first`: see `external`."""
    module.ds_inflight_param_registry.clear()
    if hasattr(partition_parameters.AllGatherCoalescedHandle, "data_buffer"):
        partition_parameters.AllGatherCoalescedHandle.data_buffer = []
    for parameter in module.parameters():
        parameter.ds_active_sub_modules.clear()
        parameter.is_external_param = False
    persistent.release(module.parameters())
    for part, known in first:
        if "_external_params" in vars(part):
            part._external_params = dict(known)
        _set(part, {"ds_grads_remaining": 0, "applied_pre_backward_ref_cnt": 0})
        vars(part).get("ds_recompute_parameters", set()).clear()
        _set(part._parameters, {"_in_forward": False})
    _forward_stack()
    trace.forget(coordinator)


def _forward_stack() -> None:
    """Drop the modules whose forward pass was interrupted; below them lies one root module per engine."""
    stack = parameter_offload.FWD_MODULE_STACK
    roots = [m for m in stack if hasattr(m, "ds_inflight_param_registry")]
    stack[:] = dict.fromkeys(roots)


def _pipeline(engine: Any) -> None:
    _set(engine, _PIPELINE)
    for buffers in engine.pipe_buffers.values():
        buffers.clear()
    engine.fwd_outputs = []
    engine.loss = torch.zeros_like(engine.agg_loss)
    engine.reset_activation_shape()
    p2p._async.clear()
