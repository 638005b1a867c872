"""Megatron-Core's state, as the engine wants to see it: what it is, who else has it, how to put it back.

Covers `ChainedOptimizer` over `DistributedOptimizer`, `Float16OptimizerWithFloat16Params` and
`FP32Optimizer`, with any inner optimizer: state is found through the inner optimizer's `param_groups`
and `state`, whatever it keeps there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from ft_core import rng
from ft_core.adapter import StateTensor

Holders = tuple[int, ...]


class MegatronAdapter:
    """Snapshot and restore of a role of a Megatron-Core job (see `ft_core.adapter.Adapter`)."""

    def __init__(self, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        """`model`: the DDP-wrapped chunks; `optimizer` as get_megatron_optimizer made it."""
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._optimizers = [
            o for o in getattr(optimizer, "chained_optimizers", [optimizer]) if o.optimizer is not None
        ]
        me = dist.get_rank()
        dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._data_parallel: Holders = _ranks(dense)
        self._expert_data_parallel: Holders = _ranks(parallel_state.get_expert_data_parallel_group())
        self._shard_holders: Holders = (me,)
        if model[0].ddp_config.num_distributed_optimizer_instances > 1:
            group = parallel_state.get_inter_distributed_optimizer_instance_group()
            self._shard_holders = _ranks(group)
        self.sharded = bool(model[0].ddp_config.use_distributed_optimizer)
        self.result: Any = None
        """What the training loop has to log for the newest step; restored with the state."""
        self.ring: tuple[int, ...] = self._data_parallel

    # -- what there is -------------------------------------------------------------------------

    def tensors(self) -> Iterator[StateTensor]:
        """Parameters and buffers (every DP peer has them), then the optimizer's main parameters and state."""
        for name, parameter in self._parameters():
            expert = not getattr(parameter, "allreduce", True)
            holders = self._expert_data_parallel if expert else self._data_parallel
            yield StateTensor(name, parameter.data, holders)
        for name, buffer in self._buffers():
            yield StateTensor(name, buffer, self._data_parallel, volatile=True)
        in_model = {p.untyped_storage().data_ptr() for _, p in self._parameters()}
        for name, main, state, holders in self._main_parameters():
            if main.untyped_storage().data_ptr() not in in_model:  # fp32 shards are views of the parameters
                yield StateTensor(f"{name}.main", main.data, holders)
            for key in sorted(state):
                if isinstance(state[key], torch.Tensor):
                    yield StateTensor(f"{name}.{key}", state[key], holders)

    def envelope_holders(self) -> Holders:
        """The envelope goes where the optimizer's state is: hyper-parameters and step counts belong to it."""
        return self._shard_holders if self.sharded else self._data_parallel

    def envelope(self) -> Any:
        """RNG states, scheduler, loss scalers, hyper-parameters and what else is no tensor."""
        return {
            "result": self.result,
            "rng": rng.capture(),
            "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
            "scalers": [
                o.grad_scaler.state_dict() if getattr(o, "grad_scaler", None) else None
                for o in self._optimizers
            ],
            "groups": [
                [{k: v for k, v in group.items() if k != "params"} for group in o.optimizer.param_groups]
                for o in self._optimizers
            ],
            "scalars": {
                name: {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
                for name, _, state, _ in self._main_parameters()
            },
        }

    # -- putting it back -----------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        """Copy a snapshot into the live objects; optimizer state that is not there yet is made."""
        for name, parameter in self._parameters():
            parameter.data.copy_(tensors[name])
        for name, buffer in self._buffers():
            buffer.copy_(tensors[name])
        for name, main, state, _ in self._main_parameters():
            if (saved := tensors.get(f"{name}.main")) is not None:
                main.data.copy_(saved)
            prefix = f"{name}."
            known = {key for key in state if isinstance(state[key], torch.Tensor)}
            saved_keys = {n[len(prefix) :] for n in tensors if n.startswith(prefix)} - {"main"}
            for key in known - saved_keys:  # the snapshot is older than the optimizer's first step
                del state[key]
            for key in saved_keys:
                saved = tensors[prefix + key]
                if key not in state:
                    # A step count of torch's Adam lives on the host, moments where the parameter is.
                    device = "cpu" if saved.dim() == 0 and not _capturable(self._optimizers) else main.device
                    state[key] = torch.empty(saved.shape, dtype=saved.dtype, device=device)
                state[key].copy_(saved)
            state.update(envelope["scalars"][name])
        for optimizer, groups, scaler in zip(
            self._optimizers, envelope["groups"], envelope["scalers"], strict=True
        ):
            for group, saved_group in zip(optimizer.optimizer.param_groups, groups, strict=True):
                group.update(saved_group)
            if scaler is not None:
                optimizer.grad_scaler.load_state_dict(scaler)
        if self._scheduler is not None:
            _load_scheduler(self._scheduler, envelope["scheduler"])
        self.result = envelope["result"]
        rng.restore(envelope["rng"])
        tensor_parallel.get_cuda_rng_tracker().set_states(envelope["tracker"])

    def reset(self) -> None:
        """Forget an abandoned step: gradients, and the DDP buckets' handles and flags."""
        for chunk in self._model:
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                group.param_gather_handle = None
                group.grad_reduce_handle = None
                group.param_gather_dispatched = False
                # In the very first batch DDP learns how often each gradient comes; half a batch must
                # not count (its `reset` would take it for a whole one).
                group.per_param_grad_ready_counts = {}
                group.is_last_microbatch = True
            chunk.zero_grad_buffer()
            chunk.train()  # an abandoned evaluation had dropout switched off
        self._optimizer.zero_grad()

    # -- names ---------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for index, chunk in enumerate(self._model):
            for name, parameter in chunk.named_parameters():
                yield f"model.{index}.{name}", parameter

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, chunk in enumerate(self._model):
            for prefix, module in chunk.named_modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if name not in module._non_persistent_buffers_set:
                        yield f"buffer.{index}.{prefix}.{name}", buffer

    def _main_parameters(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any], Holders]]:
        """(name, tensor that the inner optimizer steps, its state, who has the same) for each of them."""
        for o, optimizer in enumerate(self._optimizers):
            inner = optimizer.optimizer
            for g, group in enumerate(inner.param_groups):
                expert = group.get("is_expert_parallel", False)
                peers = self._expert_data_parallel if expert else self._data_parallel
                holders = self._shard_holders if self.sharded else peers
                for p, main in enumerate(group["params"]):
                    yield f"optimizer.{o}.{g}.{p:05d}", main, inner.state[main], holders


def _ranks(group: Any) -> Holders:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _capturable(optimizers: list[Any]) -> bool:
    return any(
        group.get("capturable") or group.get("fused")
        for o in optimizers
        for group in o.optimizer.param_groups
    )


def _load_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Set the counters back. Megatron's own load_state_dict would step, compare flags and print."""
    for name, value in state.items():
        if hasattr(scheduler, name):
            setattr(scheduler, name, value)
