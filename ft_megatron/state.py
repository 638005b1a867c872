"""Megatron-Core's state, as the engine wants to see it: what it is, who else has it, how to put it back.

Covers `ChainedOptimizer` over `DistributedOptimizer`, `Float16OptimizerWithFloat16Params` and
`FP32Optimizer`, with any inner optimizer: state is found through the inner optimizer's `param_groups`
and `state`, whatever it keeps there.

With the distributed optimizer the parameters follow from its shards: each rank casts its main parameters
into its part of them, and gathers the others'. So the state after a step is the shards, in fp32 too, where
they are views of the parameters, and `derive` makes the rest. Not with ``--ft-snapshot full``, nor where
Megatron keeps main parameters in another way; but always with ``--overlap-param-gather``, where a step ends
before the parameters are complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.package_info import __version__

from ft_core.adapter import Maker, Redundancy, ReplicaGroup, State, StateTensor
from ft_core.elastic.rules import Deal, Membership
from ft_core.errors import ConfigError, EpochChanged
from ft_core.kept import Kept
from ft_core.protocol.messages import Dealt
from ft_core.state import rng
from ft_core.state.optimizer import hyper_parameters, restore_group, restore_state
from ft_core.worker import session
from ft_megatron.adoption import Shards, can_adopt, remember_parameters
from ft_megatron.deal import Dealer

Holders = tuple[int, ...]
_OF_A_STEP = {
    "current_max_attn_logits",  # (--qk-clip)
    *("cached_fc1_input", "cached_fc2_input", "cached_fc2_output", "cached_output"),
    "gate_score",  # with those, of shared experts (--moe-shared-expert-overlap)
}
"""Attributes of Megatron's modules that hold something of the step that is under way, or None."""

remember_parameters()


class MegatronAdapter:
    """Snapshot and restore of a role of a Megatron-Core job (see `ft_core.adapter.Adapter`)."""

    maker = Maker("Megatron-Core", __version__, "ProtectedTraining", 1)

    def __init__(self, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        """`model`: the DDP-wrapped chunks; `optimizer` as get_megatron_optimizer made it.

        Raises ConfigError for an optimizer whose state could not be restored.
        """
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._optimizers = [
            o for o in getattr(optimizer, "chained_optimizers", [optimizer]) if o.optimizer is not None
        ]
        _check_supported(optimizer, self._optimizers)
        # DDP's own groups: its replicas, whatever else later versions count as data-parallel.
        self._data_parallel: Holders = _ranks(model[0].dp_cp_group)
        self._expert_data_parallel: Holders = _ranks(model[0].expt_dp_group)
        self._shard_holders: Holders = (dist.get_rank(),)
        if model[0].ddp_config.num_distributed_optimizer_instances > 1:
            self._shard_holders = _ranks(model[0].inter_dist_opt_group)
        self.sharded = bool(model[0].ddp_config.use_distributed_optimizer)
        self._gathers_late = bool(model[0].ddp_config.overlap_param_gather)
        current = session.current()
        lean = current is not None and current.lean and self.sharded and can_adopt(self._optimizers)
        lean = lean and not model[0].config.qk_clip  # it clips weights and main parameters apart
        self._derives = lean or self._gathers_late
        """Whether parameters are left out of the state."""
        self._own_parameters = [(name, p) for name, p in self._parameters() if not self._is_derived(p)]
        """Those that are state of their own: which they are does not change any more."""
        self._incomplete = False
        """Whether what was restored had none, whatever is left out now."""
        experts = parallel_state.get_expert_model_parallel_world_size() > 1
        if not self.sharded or len(self._shard_holders) > 1:
            redundancy = Redundancy.REPLICATED
        elif not experts and can_adopt(self._optimizers):
            redundancy = Redundancy.ADOPTABLE
        else:
            redundancy = Redundancy.SHARDED
        adopts = redundancy is Redundancy.ADOPTABLE
        self._shards = Shards(self, self._optimizers) if adopts else None
        self.result: Any = None
        """What the training loop has to log for the newest step; restored with the state."""
        self.ring: tuple[int, ...] = self._data_parallel
        self.replica_group = _replica_group(model[0], redundancy)
        members = parallel_state.get_data_parallel_world_size() // self.replica_group.groups
        self.member = parallel_state.get_data_parallel_rank() % members, members
        """Which of the data-parallel ranks of its replica group this role is, of how many."""
        self.leads_group = _leads(model[0])
        """Whether this role speaks for its replica group in the ledger."""
        self.dealers: list[Dealer] = []
        """Who deals samples to this role, one for each iterator over the training data."""
        self._deals: list[Any] = []
        self.kept = Kept()
        """What the script has named, as it was when its newest step ended."""

    # -- what there is -------------------------------------------------------------------------

    def tensors(self) -> Iterator[StateTensor]:
        """Parameters and buffers (every DP peer has them), then the optimizer's main parameters and state.

        Main parameters in fp32 may be views of parameters, which need not be kept twice.
        """
        for name, parameter in self._own_parameters:
            expert = not getattr(parameter, "allreduce", True)
            holders = self._expert_data_parallel if expert else self._data_parallel
            yield StateTensor(name, parameter.data, holders)
        for name, buffer in self._buffers():
            yield StateTensor(name, buffer, self._data_parallel, volatile=True)
        yield from self.optimizer_tensors(self._optimizers)
        yield from self.kept.tensors((dist.get_rank(),))

    def optimizer_tensors(
        self, optimizers: list[Any], shard_holders: Holders | None = None
    ) -> Iterator[StateTensor]:
        """The tensors of these optimizers, of which `shard_holders` have the same: by default, as this
        rank's."""
        in_model = {p.untyped_storage().data_ptr() for _, p in self._own_parameters}
        for name, main, state, holders in self._main_parameters(optimizers):
            holders = shard_holders or holders
            if not in_model or main.untyped_storage().data_ptr() not in in_model:
                yield StateTensor(f"{name}.main", main.data, holders)
            for key in sorted(state):
                if isinstance(state[key], torch.Tensor):
                    yield StateTensor(f"{name}.{key}", state[key], holders)

    def adopt(self, roles: Sequence[int]) -> Mapping[int, State]:
        """Adopt the shards of roles that are away, see `adoption.Shards`."""
        return self._shards.adopt(roles) if self._shards is not None else {}

    def deal(self, dealer: Dealer) -> None:
        """One more dealer, which goes on from where a predecessor's was."""
        if len(self.dealers) < len(self._deals):
            dealer.restore(self._deals[len(self.dealers)])
        self.dealers.append(dealer)

    def dealt_after(self, version: int, membership: Membership) -> Iterator[tuple[int, Dealt]]:
        """What the newest steps trained, as `ft_core.adapter.Adapter.dealt_after`."""
        if self._deals and self.leads_group:
            yield from Deal.from_json(self._deals[0]).entries_after(version, membership)

    def envelope_holders(self) -> Holders:
        """The envelope goes where the optimizer's state is: hyper-parameters and step counts belong to it.

        Where experts are spread over data-parallel peers, each has random states of its own for them.
        """
        if self._expert_data_parallel != self._data_parallel:
            return (dist.get_rank(),)
        return self._shard_holders if self.sharded else self._data_parallel

    def envelope(self) -> Any:
        """RNG states, scheduler, loss scalers, hyper-parameters and what else is no tensor."""
        return {
            "result": self.result,
            "rng": rng.capture(),
            "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
            "deals": [dealer.to_json() for dealer in self.dealers],
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
            "scalers": [
                o.grad_scaler.state_dict() if getattr(o, "grad_scaler", None) else None
                for o in self._optimizers
            ],
            "groups": [
                [hyper_parameters(group) for group in o.optimizer.param_groups] for o in self._optimizers
            ],
            "scalars": self.scalars(self._optimizers),
        }

    def scalars(self, optimizers: list[Any]) -> dict[str, Any]:
        """What these optimizers keep for each main parameter that is no tensor."""
        return {
            name: {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
            for name, _, state, _ in self._main_parameters(optimizers)
        }

    # -- putting it back -----------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        """Copy a snapshot into the live objects; optimizer state that is not there yet is made.

        Raises ConfigError, before anything is changed, for one of another model or parallel layout.
        """
        self._check_layout(tensors, envelope["scalars"])
        self._incomplete = False
        for name, parameter in self._parameters():
            if (saved := tensors.get(name)) is not None:
                parameter.data.copy_(saved)
            else:  # `derive` makes it
                self._incomplete = True
        for name, buffer in self._buffers():
            if buffer.dtype != tensors[name].dtype:
                # Megatron's routers turn theirs into fp32 in the first forward pass, with what they hold.
                buffer.data = torch.empty_like(tensors[name], device=buffer.device)
            buffer.copy_(tensors[name])
        self.restore_optimizers(self._optimizers, tensors, envelope)
        for optimizer, groups, scaler in zip(
            self._optimizers, envelope["groups"], envelope["scalers"], strict=True
        ):
            for group, saved in zip(optimizer.optimizer.param_groups, groups, strict=True):
                restore_group(group, saved)
            if scaler is not None:
                optimizer.grad_scaler.load_state_dict(scaler)
        if self._scheduler is not None:
            _load_scheduler(self._scheduler, envelope["scheduler"])
        Kept(tensors).apply()
        self.result = envelope["result"]
        self._deals = envelope["deals"]
        for index, dealer in enumerate(self.dealers):
            dealer.restore(self._deals[index] if index < len(self._deals) else None)
        rng.restore(envelope["rng"])
        tensor_parallel.get_cuda_rng_tracker().set_states(envelope["tracker"])

    def _check_layout(self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
        """Main parameters are known by their places alone, so those of another model might fit as well."""
        own = {name: main.shape for name, main, *_ in self._main_parameters(self._optimizers)}
        shapes = {name: parameter.shape for name, parameter in self._parameters()}
        other = own.keys() ^ scalars.keys()
        other |= {name for name in tensors if name.startswith("model.")} - shapes.keys()
        shapes |= {f"{name}.main": shape for name, shape in own.items()}
        other |= {name for name, shape in shapes.items() if name in tensors and tensors[name].shape != shape}
        if other:
            raise ConfigError(
                f"what was saved is of another model or parallel layout: {min(other)} and {len(other) - 1} "
                "others differ; go on with the flags that it was saved with, or give another --ft-durable-dir"
            )

    def restore_optimizers(
        self, optimizers: list[Any], tensors: Mapping[str, torch.Tensor], envelope: Any
    ) -> None:
        """Main parameters and state of these optimizers."""
        kept: dict[str, dict[str, torch.Tensor]] = {}
        for full, saved in tensors.items():
            if full.startswith("optimizer."):
                _, o, g, p, key = full.split(".", 4)
                kept.setdefault(f"optimizer.{o}.{g}.{p}", {})[key] = saved
        for name, main, state, _ in self._main_parameters(optimizers):
            of_this = dict(kept.get(name, {}))
            if (main_saved := of_this.pop("main", None)) is not None:
                main.data.copy_(main_saved)
            restore_state(state, of_this, envelope["scalars"][name], partial(self._place, main))

    def _place(self, main: torch.Tensor, _: str, saved: torch.Tensor) -> torch.device:
        """A step count of torch's Adam lives on the host, moments where the parameter is."""
        on_host = saved.dim() == 0 and not _capturable(self._optimizers)
        return torch.device("cpu") if on_host else main.device

    @torch.no_grad()
    def derive(self) -> None:
        """The parameters, from the shards of all: a newcomer has its own only, and on a survivor they are
        torn where it has left its step in the gather."""
        if self._derives or self._incomplete:
            for optimizer in self._optimizers:  # with the shards that this rank has adopted
                optimizer._copy_main_params_to_model_params()  # into their part of the buffers
            for chunk in self._model:
                chunk.start_param_sync(force_sync=True)

    def reset(self) -> None:
        """Forget an abandoned step: gradients, router statistics, the DDP buckets' handles and flags."""
        for chunk in self._model:
            for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
                for handle in (group.param_gather_handle, group.grad_reduce_handle):
                    _wait_for_end(handle)
                group.param_gather_handle = None
                group.grad_reduce_handle = None
                group.param_gather_dispatched = False
                # In its first batch DDP learns how often each gradient comes, and reduces them at the end of
                # it, in the order of the buckets; later as they come. A newcomer begins with its first batch,
                # and its peers must issue the same collectives in the same order.
                group.is_first_batch = True
                group.golden_per_param_grad_ready_counts = {}
                group.per_param_grad_ready_counts = {}
                group.is_last_microbatch = True
            chunk.zero_grad_buffer()
            chunk.train()  # an abandoned evaluation had dropout switched off,
            if self._gathers_late and not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()  # and these hooks taken off
            for module in chunk.modules():
                for name in _OF_A_STEP & vars(module).keys():
                    setattr(module, name, None)
                if (overlap := vars(module).get("_overlap_state")) is not None:
                    module._overlap_state = type(overlap).IDLE
        reset_model_temporary_tensors(self._model[0].config, self._model)
        self._optimizer.zero_grad()
        for optimizer in (self._optimizer, *self._optimizers):
            # What all ranks found out together in their first step (megatron-core 0.19), a newcomer has not.
            vars(optimizer).pop("_has_grad_norm_group_cache", None)

    # -- names ---------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for index, chunk in enumerate(self._model):
            for name, parameter in chunk.named_parameters():
                yield f"model.{index}.{name}", parameter

    def _is_derived(self, parameter: torch.nn.Parameter) -> bool:
        """Whether `derive` makes it, and no state of its own: not one that is frozen."""
        return self._derives and any(parameter in chunk.param_to_bucket_group for chunk in self._model)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, chunk in enumerate(self._model):
            for prefix, module in chunk.named_modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and name not in module._non_persistent_buffers_set:
                        yield f"buffer.{index}.{prefix}.{name}", buffer

    def _main_parameters(
        self, optimizers: list[Any]
    ) -> Iterator[tuple[str, torch.Tensor, dict[str, Any], Holders]]:
        """(name, tensor that the inner optimizer steps, its state, who has the same) for each of them."""
        for o, optimizer in enumerate(optimizers):
            inner = optimizer.optimizer
            for g, group in enumerate(inner.param_groups):
                expert = group.get("is_expert_parallel", False)
                peers = self._expert_data_parallel if expert else self._data_parallel
                holders = self._shard_holders if self.sharded else peers
                for p, main in enumerate(group["params"]):
                    yield f"optimizer.{o}.{g}.{p:05d}", main, inner.state[main], holders


def _replica_group(ddp: Any, redundancy: Redundancy) -> ReplicaGroup:
    """Which replica group this role is in, of how many: the outermost data-parallel index."""
    group = parallel_state.get_data_parallel_group()
    if ddp.ddp_config.num_distributed_optimizer_instances > 1:
        group = ddp.inter_dist_opt_group
    elif parallel_state.get_expert_model_parallel_world_size() > 1:
        group = ddp.expt_dp_group  # experts are spread over data-parallel peers, which belong together then
    return ReplicaGroup(group.rank(), group.size(), redundancy)


def _leads(ddp: Any) -> bool:
    """Whether this role is the first of its replica group."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if ddp.ddp_config.num_distributed_optimizer_instances > 1:
        first = ddp.intra_dp_cp_group.rank() == 0
    elif parallel_state.get_expert_model_parallel_world_size() > 1:
        first = parallel_state.get_expert_model_parallel_rank() == 0
    else:
        first = group.rank() % parallel_state.get_context_parallel_world_size() == 0
    model_parallel = parallel_state.get_tensor_model_parallel_rank(), parallel_state.is_pipeline_first_stage()
    return first and model_parallel == (0, True)


def _check_supported(optimizer: Any, parts: list[Any]) -> None:
    if any(isinstance(o, LayerWiseDistributedOptimizer) for o in (optimizer, *parts)):
        raise ConfigError(
            "--ft cannot restore the layer-wise distributed optimizer (--optimizer dist_muon): it "
            "does not tell who holds which of its state; take --optimizer muon without "
            "--use-distributed-optimizer, or adam, or leave --ft out"
        )
    for part in parts:
        # Transformer Engine's FusedAdam, with --use-precision-aware-optimizer.
        dtypes = getattr(part.optimizer, "name_to_dtype_map", {})
        if scaled := sorted(name for name, dtype in dtypes.items() if dtype != torch.float32):
            raise ConfigError(
                f"--ft cannot restore {', '.join(scaled)} in less than fp32: Transformer Engine keeps their "
                "scales outside the optimizer's state; leave --exp-avg-dtype, --exp-avg-sq-dtype and "
                "--main-params-dtype at fp32, or leave --ft out"
            )


def _wait_for_end(handle: Any) -> None:
    """An operation of the epoch that is over fails at once, but must not write any more after this."""
    for work in getattr(handle, "works", () if handle is None else (handle,)):
        with suppress(EpochChanged):
            work.wait()


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
