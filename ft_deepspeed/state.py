"""DeepSpeed's state, as the engine of ft_core wants to see it: what it is, how to put it back, how to forget
an abandoned step. Covers plain optimizers, the 16-bit wrappers, ZeRO 1 to 3 and the pipeline engine.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ft_core.adapter import Redundancy, ReplicaGroup, State, StateTensor
from ft_core.state import rng
from ft_core.state.optimizer import hyper_parameters, is_plain, restore_group
from ft_deepspeed import adoption, adoption3, parts, persistent, schedule, trace, zero
from ft_deepspeed.abandon import Baseline, abandon
from ft_deepspeed.cpu_adam import CPUAdams
from ft_deepspeed.shard import Shard

log = logging.getLogger(__name__)

_COMPARED = 3
"""Versions: what the script began with, and the outcomes of its first steps."""
_COUNTERS = (
    "global_steps",
    "global_samples",
    "micro_steps",
    "skipped_steps",
    "gas_boundary_ctr",
    "_unmanaged_backward_count",
    "_step_applied",
    "_global_grad_norm",
    "_is_gradient_accumulation_boundary",
    "scale_wrt_gas",
    "warn_unscaled_loss",
    "log_batch_step_id",
    "agg_loss",
    "agg_train_loss",
    "agg_additional_losses",
    "dp_group_loss",
)
# The scale proper is in `loss_scaler` (ZeRO) or `loss_scale_config`; in 0.17 the 16-bit wrappers have it.
_WRAPPER = (
    "overflow",
    "_global_grad_norm",
    "custom_loss_scaler",
    "external_loss_scale",
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
)
_SCALERS = ("loss_scaler", "loss_scale_config")
_GRAD_SCALERS = ("torch_autocast_gradscaler", "torch_autocast_z0_gradscaler")
# Their state is plain data among the attributes. The first two exist up to 0.18.
_SCHEDULES = (
    "progressive_layer_drop",
    "compression_scheduler",
    "curriculum_scheduler_legacy",
    "random_ltd_scheduler",
)


class DeepSpeedAdapter:
    """Snapshot and restore of a role of a DeepSpeed job (see `ft_core.adapter.Adapter`)."""

    def __init__(self, engine: Any, lean: bool) -> None:
        """`engine`: as deepspeed.initialize made it, before its first forward pass. `lean`: snapshots leave
        out what all roles together can derive. Raises ConfigError if it cannot be protected."""
        zero.check(engine)
        self.engine, self.lean = engine, lean
        self._layout = zero.layout(engine, lean)
        self.lacks_weights = False
        """Whether what was restored last has no weights that all peers have whole."""
        self._compared = 0
        self._baseline = Baseline(engine)
        self._cpu_adams = CPUAdams(engine)
        self._shard = Shard(self._layout.masters, lambda: zero.inner_optimizers(engine))
        self._me = (dist.get_rank(),)
        self.ring: tuple[int, ...] = tuple(dist.get_process_group_ranks(engine.seq_data_parallel_group))
        kept = [*self._layout.parameters, *((m.name, m.tensor, m.holders) for m in self._layout.masters)]
        # Ranks of sequence parallelism are in the ring, too, and have parts of the same samples.
        groups = 1 < len(self.ring) == engine.dp_world_size and not engine.has_moe_layers
        self.objection = "data-parallel ranks are not independent of each other"
        """Why the job cannot go on without one of the data-parallel ranks, where it cannot."""
        redundancy = Redundancy.SHARDED
        holder: Callable[[Any], Any] | None = None
        if groups and all(set(self.ring) <= set(holders) for _, _, holders in kept):
            redundancy = Redundancy.REPLICATED
        elif groups:
            holder, self.objection = _holder(engine)
            redundancy = Redundancy.ADOPTABLE if holder is not None else Redundancy.SHARDED
        self.replica_group = ReplicaGroup(self.ring.index(dist.get_rank()), len(self.ring), redundancy)
        self._holder = holder
        self._adopted: Any = None
        self._gathers = False
        """Whether the persistent parameters of the version that was restored are whole."""
        self._whole: list[torch.Tensor] = []
        """They, while this worker's script may have yet to come there."""

    # -- what there is -------------------------------------------------------------------------

    def tensors(self) -> Iterator[StateTensor]:
        """Weights and buffers, then the optimizer's masters and what it keeps for each."""
        for name, tensor, holders in [*([] if self.lean else self._layout.flats), *self._layout.parameters]:
            yield StateTensor(name, tensor.data, holders)
        yield from self.buffers(self._me)
        yield from self._shard.tensors()
        for part in self._layout.parts if self.lean else ():
            yield from part.tensors(self._me)

    def buffers(self, holders: tuple[int, ...]) -> Iterator[StateTensor]:
        """Each peer's own: a running statistic is never averaged."""
        for name, module, key in self._layout.buffers:
            yield StateTensor(name, getattr(module, key), holders, volatile=True)

    def stepped(self) -> Iterator[torch.Tensor]:
        """What a step changes: weights, whole or in parts, main parameters, the optimizer's state."""
        for parameter in self.engine.module.parameters():
            yield from (parameter, getattr(parameter, "ds_tensor", parameter))
        yield from (flat for _, flat, _ in self._layout.flats)
        yield from (master.tensor for master in self._layout.masters)
        for optimizer in zero.inner_optimizers(self.engine):
            yield from (each for each in zero.kept_by(optimizer) if isinstance(each, torch.Tensor))

    def envelope_holders(self) -> tuple[int, ...]:
        """RNG states are each role's own."""
        return self._me

    def envelope(self) -> Any:
        """RNG states, counters, scheduler, loss scalers, hyper-parameters and what else is no tensor."""
        engine = self.engine
        scheduler = engine.lr_scheduler
        state = {
            "tracker": checkpointing.get_cuda_rng_tracker().get_states(),
            "engine": _attributes(engine, _COUNTERS),
            "wrapper": _attributes(engine.optimizer, _WRAPPER),
            "scalers": {name: _plain_attributes(scaler) for name, scaler in self._parts(_SCALERS)},
            "grad_scalers": {name: scaler.state_dict() for name, scaler in self._parts(_GRAD_SCALERS)},
            "schedules": {name: _plain_attributes(part) for name, part in self._parts(_SCHEDULES)},
            "scheduler": schedule.capture(scheduler),
            # DeepSpeed's own schedulers leave it out of their state.
            "last_lr": vars(scheduler).get("_last_lr") if scheduler is not None else None,
            "groups": [
                [hyper_parameters(group) for group in o.param_groups] for o in zero.inner_optimizers(engine)
            ],
            **self._shard.envelope(),
            "cpu_adams": self._cpu_adams.state(),
            "trace": self._trace(),
            "gathered": persistent.are_whole(self.engine),
        }
        # Much of it goes on changing in place. Of the generators it is a copy; there are 625 numbers in one.
        return copy.deepcopy(state) | {"rng": rng.capture()}

    # -- what peers have that are away ---------------------------------------------------------

    def adopt(self, roles: Sequence[int]) -> Mapping[int, State]:
        """Adopt roles that are away, see `ft_core.adapter.Adapter.adopt`."""
        if self._adopted is None and self._holder is not None:
            self._adopted = self._holder(self)
        return self._adopted.adopt(roles) if self._adopted is not None else {}

    # -- putting it back -----------------------------------------------------------------------

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        """Copy a snapshot into the live objects; optimizer state that is not there yet is made.

        It may be lean or full, whatever this job's are: a durable checkpoint is that of another job. Raises
        ConfigError, before anything is changed, for one of another model.
        """
        self._shard.check(tensors)
        flats = self._layout.flats
        self.lacks_weights = any(name not in tensors for name, _, _ in flats)
        for name, tensor, _ in [*([] if self.lacks_weights else flats), *self._layout.parameters]:
            tensor.data.copy_(tensors[name])
        for name, module, key in self._layout.buffers:
            buffer = getattr(module, key)
            if buffer.is_inference():  # which nobody may write to
                setattr(module, key, tensors[name].to(buffer.device, copy=True))
            else:
                buffer.copy_(tensors[name])
        remade = self._shard.restore(tensors, envelope)
        for tensor, source in self._layout.derived:
            tensor.data.copy_(source.data)
        for part in self._layout.parts:
            part.restore(tensors, whole=not self.lacks_weights)
        if remade:
            self.link_again()
        self.settle(envelope)
        self._cpu_adams.restore(envelope.get("cpu_adams", []))

    def settle(self, envelope: Any) -> None:
        """Put back what is not on a device: counters, RNG, scheduler, scalers, hyper-parameters."""
        engine = self.engine
        device = engine.device
        envelope = copy.deepcopy(envelope)  # schedulers and groups keep what they are given
        for target, names in ((engine, _COUNTERS), (engine.optimizer, _WRAPPER)):
            values = envelope["engine" if target is engine else "wrapper"]
            for name in names:
                if name in values:
                    value = values[name]
                    setattr(target, name, value.to(device) if isinstance(value, torch.Tensor) else value)
                elif name in vars(target):
                    delattr(target, name)  # it came with a later step
        parts = dict(self._parts(_SCALERS + _SCHEDULES))
        for name, values in (envelope["scalers"] | envelope["schedules"]).items():
            vars(parts[name]).update(values)
        for name, scaler in self._parts(_GRAD_SCALERS):
            scaler.load_state_dict(envelope["grad_scalers"][name])
        if envelope["scheduler"] is not None:
            schedule.restore(engine.lr_scheduler, envelope["scheduler"])
        if envelope["last_lr"] is not None:
            engine.lr_scheduler._last_lr = envelope["last_lr"]
        for optimizer, groups in zip(zero.inner_optimizers(engine), envelope["groups"], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                restore_group(group, saved)
        if (coordinator := self._coordinator) is not None:
            trace.restore(coordinator, engine.module, envelope.get("trace"))
            persistent.release(engine.module.parameters())
        self._gathers = envelope.get("gathered", False)
        if self._gathers and self._whole:
            persistent.fill(engine, self._whole)
        rng.restore(envelope["rng"])
        checkpointing.get_cuda_rng_tracker().set_states(envelope["tracker"])

    def derive(self) -> None:
        """After a restore, and before anything is done with the weights: those that no snapshot has.
        (Communicates: every role comes here in every epoch that goes on from a version.)"""
        if self._layout.flats and (self.lean or self.lacks_weights):
            parts.gather(self.engine.optimizer)
        self._whole = []
        if self._gathers and (found := persistent.parameters(self.engine)):
            # Where "torch_autocast" has weights sent in 16 bits, those that a pass fetches are rounded, and
            # those that a step gathers are not.
            persistent.release(found)
            found[0].all_gather(found)
            self._whole = [parameter.data.clone() for parameter in found]

    def compare(self) -> None:
        """Before a version is staged: whether its weights follow from the masters.

        As a step of DeepSpeed's ends they do. So this looks at what the script began with, after the first
        steps, for what is not known of them, and after a step that was skipped, which leaves the weights as
        it has found them. Weights that do not follow are kept.
        """
        if not (self.lean and self._layout.parts):
            return
        skipped = bool(getattr(self.engine.optimizer, "overflow", False))
        found = [*self._layout.parts, *([] if self._adopted is None else self._adopted.parts())]
        apart = any(part.apart for part in found)
        if not (apart or skipped or self._compared < _COMPARED):
            return
        self._compared += 1
        for part in found:
            part.compare()
        if not apart and any(part.apart for part in found):
            log.warning(
                "weights are not what the optimizer's main parameters say: something else has written them, "
                "and they are kept in snapshots while that is so"
            )

    def arrived(self) -> None:
        """The script is where the engine is."""
        self._whole = []

    def passed(self) -> None:
        """A pass, or a step, was answered from the record and not made: what it leaves whole is whole, with
        nothing in it. Else the script would communicate to gather it between two calls, where its peers had
        no need to."""
        persistent.fill(self.engine)

    def reset(self) -> None:
        """Forget an abandoned call of the engine, wherever it was interrupted."""
        abandon(self.engine, self._baseline)
        if self._adopted is not None:
            self._adopted.reset()

    # -- inside --------------------------------------------------------------------------------

    @property
    def _coordinator(self) -> Any:
        """What fetches the weights in stage 3."""
        if not isinstance(self.engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
            return None
        return self.engine.optimizer.parameter_offload.get_param_coordinator()

    def _trace(self) -> list[int] | None:
        if (coordinator := self._coordinator) is None:
            return None
        if any(parameter.is_external_param for parameter in self.engine.module.parameters()):
            return None  # its modules come to know of it in passes, too
        return trace.order(coordinator)

    def link_again(self) -> None:
        """DeepSpeed's access to optimizer state by parameter holds slices of the tensors that were there."""
        wrapper = self.engine.optimizer
        if not hasattr(wrapper, "_hp_optimizer_states_linked"):
            return
        wrapper._hp_optimizer_states_linked = False
        if self._shard.complete():
            wrapper._lazy_init_hp_params_optimizer_state()

    def _parts(self, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        """Parts of the engine or of its optimizer wrapper, where they exist."""
        for name in names:
            part = vars(self.engine.optimizer).get(name) or vars(self.engine).get(name)
            if part is not None:
                yield name, part


def _holder(engine: Any) -> tuple[Callable[[Any], Any] | None, str]:
    """What holds shards of this engine's peers beside its own: made of the adapter, it has `adopt(roles)` and
    `reset()`. Or why there is no such thing."""
    if type(engine.optimizer) is DeepSpeedZeroOptimizer:
        objection = adoption.objection(engine)
        return (None if objection else adoption.Partitions), objection
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        objection = adoption3.objection(engine)
        return (None if objection else adoption3.Slices), objection
    return None, "data-parallel ranks share the state"


def _attributes(part: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: vars(part)[name] for name in names if name in vars(part)}


def _plain_attributes(part: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if is_plain(value)}
