"""ZeRO 1 and 2 with partitions of roles that are away (see docs/elastic.md).

The counterpart of a role that is away holds its partition of the optimizer, an `Adopted`: DeepSpeed's own
optimizer once more, of which everything is this role's but what a rank has for itself. While there is one,
this role's optimizer is an `Adopter`. Wherever DeepSpeed does something for the partition of the rank it runs
on, that does it for those that it has adopted as well, with DeepSpeed's own code:

- gradients that were reduced for an adopted partition are kept like those for the own one;
- norm and overflow are reduced over the partitions of this rank, then over the ranks;
- each partition is stepped, with the same hyper-parameters, and put in its place in the flat weights, from
  where the all-gather takes it (`ft_core.comm.partial`);
- checkpoints get its file, too.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.timer import NoopTimer

from ft_core.patching import replaced
from ft_core.state.adoption import AdoptedStates
from ft_deepspeed import fragments, patched
from ft_deepspeed.comm import Comm, alone, only, together
from ft_deepspeed.parts import Part, master_name
from ft_deepspeed.shard import AdoptedShard, Shard
from ft_deepspeed.zero import Master, inner_optimizer


def _nothing(*_: Any, **__: Any) -> None:
    pass


def objection(engine: Any) -> str:
    """Why partitions of this engine's optimizer, which has stage 1 or 2, cannot be adopted, if so."""
    optimizer = engine.optimizer
    if optimizer.cpu_offload:
        return "with offload, gradients go to buffers on the host that one rank has"
    if vars(optimizer).get("torch_autocast_gradscaler") is not None:
        return '"torch_autocast" with fp16 counts the steps of one rank\'s partition'
    if "muon" in type(inner_optimizer(engine)).__name__.lower():
        return "Muon has part of its step in the backward pass"
    if not optimizer.contiguous_gradients and optimizer.dtype != optimizer.gradient_accumulation_dtype:
        return '"zero_optimization.contiguous_gradients" is false, and gradients are accumulated in fp32'
    return ""


class Partitions:
    """The partitions that one role holds beside its own."""

    def __init__(self, adapter: Any) -> None:
        """`adapter`: the role's `state.DeepSpeedAdapter`."""
        engine = adapter.engine
        self._adapter, self._optimizer = adapter, engine.optimizer
        self._optimizer.groups_before = None
        self._held = AdoptedStates(lambda role: Partition(role, adapter))

        def saving_all(save: Callable[..., None]) -> Callable[..., None]:
            def save_all(*args: Any, **kwargs: Any) -> None:
                save(*args, **kwargs)
                for partition in self._held:
                    adopted = partition.optimizer
                    with (
                        adopted.playing() as comm,
                        patched.SAVING_COMM.replaced(comm),
                        replaced(engine, {"optimizer": adopted}),
                    ):
                        save(*args, **kwargs)

            return save_all

        patched.ADOPTED_FILES.wrap(saving_all, of=engine)

    def adopt(self, roles: Sequence[int]) -> Mapping[int, Partition]:
        """Hold those of these roles, and no others; see `ft_core.adapter.Adapter.adopt`."""
        held = self._held.adopt(roles)
        adopted = [partition.optimizer for partition in self._held]
        own = self._optimizer
        patched.ADOPTING_OPTIMIZER.replace(Adopter if adopted else DeepSpeedZeroOptimizer, of=own)
        own.adopted = adopted
        self._share_fragments()
        here = {id(p) for part in (own, *adopted) for group in part.params_in_partition for p in group}
        for group in own.bit16_groups:
            for parameter in group:
                own.is_param_in_current_partition[own.get_param_id(parameter)] = id(parameter) in here
        return held

    def _share_fragments(self) -> None:
        own, adopted = self._optimizer, [partition.optimizer for partition in self._held]
        own._link_all_hp_params()
        self._adapter.link_again()
        for parameter in (p for group in own.bit16_groups for p in group) if adopted else ():
            found = [functools.partial(other.links, parameter) for other in adopted]
            fragments.share(parameter, own.dp_process_group, found)

    def parts(self) -> Iterator[Part]:
        """The parts of the weights that all peers have whole."""
        for partition in self._held:
            yield from partition.parts

    def reset(self) -> None:
        """Forget an abandoned step."""
        self._optimizer.groups_before = None
        for partition in self._held:
            partition.optimizer.forget_gradients()


class Partition(AdoptedShard):
    """The state that one role which is away had alone (see `ft_core.adapter.State`)."""

    def __init__(self, role: int, adapter: Any) -> None:
        super().__init__(adapter, role)
        own = adapter.engine.optimizer
        rank = adapter.ring.index(role)
        self.optimizer = Adopted(own, rank)
        masters = []
        for i, master in enumerate(self.optimizer.single_partition_of_fp32_groups):
            part = Part(i, own.parallel_partitioned_bit16_groups, rank, master)
            listed = adapter.lean or part.weights.dtype != master.dtype
            masters.append(Master(master_name(i), master, self._holders, listed))
            self.parts.append(part)
        self._shard = Shard(masters, lambda: [self.optimizer.kept])


class Adopted(DeepSpeedZeroOptimizer):
    """The optimizer as a role that is away has it. What is not set here is that of the role it is held by."""

    def __init__(self, own: Any, rank: int) -> None:
        """`own`: the optimizer of this role, whose parameters have to be linked again. `rank`: of the other,
        among their data-parallel peers."""
        self.own, self.rank = own, rank
        self.kept = _Kept()
        self.averaged_gradients: dict[int, Any] = {}
        self.all_grad_tensors: dict[int, Any] = {}
        self.timers = NoopTimer()
        self.params_in_partition, self.params_not_in_partition, self.first_offset = [], [], []
        self.single_partition_of_fp32_groups, self.groups_padding = [], []
        paddings = vars(own).get("round_robin_bit16_padding") or [None] * len(own.bit16_groups)  # since 0.19
        for i, parameters in enumerate(own.round_robin_bit16_groups):
            padding, size = [] if paddings[i] is None else [paddings[i]], own.partition_size[i]
            found = own.get_partition_info(parameters, size, rank, *padding)
            self.params_in_partition.append(found[0])
            self.params_not_in_partition.append(found[1])
            self.first_offset.append(found[2])
            weights = own.parallel_partitioned_bit16_groups[i][rank].detach().clone()
            master = weights.to(own.device, own.single_partition_of_fp32_groups[i].dtype)
            self.single_partition_of_fp32_groups.append(master.requires_grad_())
            filled = sum(p.numel() for p in parameters) + sum(paddings[i] or ())
            self.groups_padding.append(min(max(0, (rank + 1) * size - filled), size))
        with self.playing():
            self._link_all_hp_params()
            slices = self._create_param_mapping()
            linked = {p: fragments.links(p) for group in own.bit16_groups for p in group}
        self._param_slice_mappings, self._links = slices, linked

    def __getattr__(self, name: str) -> Any:
        """Only for what is found neither here nor in the class."""
        return getattr(vars(self)["own"], name)

    @contextmanager
    def playing(self, given: list[torch.Tensor] | None = None) -> Iterator[Comm]:
        """For DeepSpeed's code to run as on the rank that is away, see `comm.alone`."""
        before, own = dict(self.__dict__), self.own
        inner, comm = own.optimizer, alone(dist.get_rank(), self.rank, only(own.dp_process_group), given)
        groups = [
            {**group, "params": [master]}
            for group, master in zip(self._groups(), self.single_partition_of_fp32_groups, strict=True)
        ]
        try:
            with (
                replaced(inner, {"param_groups": groups, "state": self.kept.state}),
                patched.PARTITION_COMM.replaced(comm),
                patched.PARTITION_GATHER.replaced(_nothing),
            ):
                yield comm
        finally:
            self.__dict__ = before  # what was set beside are counters and flags, which are the role's own

    def _groups(self) -> list[dict[str, Any]]:
        """The groups as they were before this role's own partition was stepped: some optimizers count
        there."""
        own = self.own
        return list(own.groups_before or own.optimizer.param_groups)

    def links(self, parameter: Any) -> tuple[int, fragments.Links]:
        """This rank, and what links a parameter to its fragment here."""
        found = self._links[parameter]
        if (mapping := found["_hp_mapping"]) is not None:
            master = self.single_partition_of_fp32_groups[mapping.param_group_index]
            mapping.set_optim_state_fragment(master, self.kept.state.get(master, {}))
        return self.rank, found

    def forget_gradients(self) -> None:
        """Have it as if there had been no backward pass."""
        for gradients in (self.averaged_gradients, self.all_grad_tensors):
            gradients.clear()
        for master in self.single_partition_of_fp32_groups:
            master.grad = None

    # What this role does, or has done, once for all its partitions.

    reduce_ipg_grads = _release_ipg_buffers = zero_grad = _clear_param_grad_only = _nothing
    _model_parallel_all_reduce = _update_scale = _update_model_bit16_weights = _nothing
    _lazy_init_hp_params_optimizer_state = _nothing

    def get_all_grad_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """A parameter may be in the own partition as well, where its gradient is added to."""
        return [gradient.clone() for gradient in super().get_all_grad_tensors(*args, **kwargs)]

    def has_overflow(self, *_: Any, **__: Any) -> bool:
        """There was none, or nothing would be stepped."""
        return False

    def scaled_global_norm(self, *_: Any, **__: Any) -> Any:
        """Over all partitions."""
        return self.own.total_norm


class Adopter(DeepSpeedZeroOptimizer):
    """The optimizer of a role that has adopted partitions."""

    adopted: list[Adopted]
    groups_before: list[dict[str, Any]] | None
    """The inner optimizer's, while a step is under way."""

    def allreduce_and_copy_with_multiple_ranks(
        self, *args: Any, bucket_ranks: Iterable[Any], **kwargs: Any
    ) -> None:
        """Reduced over all, and kept by the rank that a slice belongs to."""
        ranks = [self._host(rank) for rank in bucket_ranks]
        super().allreduce_and_copy_with_multiple_ranks(*args, bucket_ranks=ranks, **kwargs)

    def allreduce_no_retain(self, *args: Any, rank: int | None = None, **kwargs: Any) -> None:
        """Reduced to the rank that a slice belongs to; others name the one that is away, see `Partial`."""
        super().allreduce_no_retain(*args, rank=self._host(rank), **kwargs)

    def _host(self, rank: Any) -> Any:
        if isinstance(rank, frozenset):
            return frozenset(map(self._host, rank))
        away = any(adopted.rank == rank for adopted in self.adopted)
        return dist.get_rank(group=self.dp_process_group) if away else rank

    def copy_grads_in_partition(self, *args: Any) -> None:
        """Out of the bucket, into a buffer that has room for all parameters in the partitions held here."""
        parts = zip(self.params_in_partition, *(a.params_in_partition for a in self.adopted), strict=True)
        together = [list(dict.fromkeys(p for part in group for p in part)) for group in parts]
        with replaced(self, {"params_in_partition": together}):
            super().copy_grads_in_partition(*args)

    def _get_compact_grad_partition_slice(
        self, group_idx: int, partition_id: int, param_id: int, num_elements: int
    ) -> Any:
        """Where gradients are accumulated in fp32, if it is in a partition held here (since 0.19)."""
        what = group_idx, partition_id, param_id, num_elements
        for adopted in self.adopted:
            if adopted.rank == partition_id:
                with adopted.playing():
                    return adopted._get_compact_grad_partition_slice(*what)
        return super()._get_compact_grad_partition_slice(*what)

    def _add_full_reduction_to_compact_grad_partition(self, *args: Any) -> None:
        add = DeepSpeedZeroOptimizer._add_full_reduction_to_compact_grad_partition
        self._all(lambda part: add(part, *args))

    def independent_gradient_partition_epilogue(self) -> None:
        """At the end of a backward pass: what is in buckets is reduced, then sorted into partitions."""
        self.reduce_ipg_grads()
        with replaced(self, {"reduce_ipg_grads": _nothing}):
            self._all(DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue)

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Where scripts manage the accumulation (since 0.19)."""
        self._all(DeepSpeedZeroOptimizer.finalize_gradient_accumulation_boundary)

    def has_overflow(self, *args: Any, **kwargs: Any) -> bool:
        """Do as DeepSpeed's does, over all partitions that are held here."""
        return bool(self._over_all(DeepSpeedZeroOptimizer.has_overflow, *args, **kwargs))

    def scaled_global_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Do as DeepSpeed's does, over all partitions that are held here."""
        self.total_norm = self._over_all(DeepSpeedZeroOptimizer.scaled_global_norm, *args, **kwargs)
        return self.total_norm

    def _update_scale(self, has_overflow: bool = False) -> None:
        super()._update_scale(has_overflow)
        if has_overflow:
            for adopted in self.adopted:
                adopted.forget_gradients()

    def _optimizer_step(self, group_no: int) -> None:
        """Behind the own partition's last group comes the all-gather, so the others are stepped here."""
        if group_no == 0:
            self.groups_before = [dict(group) for group in self.optimizer.param_groups]
        super()._optimizer_step(group_no)
        if group_no == len(self.bit16_groups) - 1:
            for adopted in self.adopted:
                with adopted.playing():
                    DeepSpeedZeroOptimizer.step(adopted)
            self.groups_before = None

    def _all(self, method: Callable[[Any], None]) -> None:
        """For each partition, the own one last: it gives up the buffers."""
        for adopted in self.adopted:
            with adopted.playing():
                method(adopted)
        method(self)

    def _over_all(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a method that reduces something over the ranks: here over all partitions."""
        given: dict[int, list[torch.Tensor]] = {adopted.rank: [] for adopted in self.adopted}
        for adopted in self.adopted:
            with adopted.playing(given[adopted.rank]):
                method(adopted, *args, **kwargs)
        with patched.PARTITION_COMM.replaced(together(only(self.dp_process_group), given)):
            return method(self, *args, **kwargs)


class _Kept:
    """Has, like an optimizer, state by master."""

    def __init__(self) -> None:
        self.state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
