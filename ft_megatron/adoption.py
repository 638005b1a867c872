"""Shards of Megatron's distributed optimizer that this role has adopted (see `ft_core.state.adoption`).

Megatron's buckets hold gradients and parameters of all shards; what is a rank's own are main parameters and
optimizer state. For each shard adopted there is a second `DistributedOptimizer` over the same buckets, made
as the rank that is away would have made it, and those of this rank take it along in what they do in a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ft_core.adapter import StateTensor
from ft_core.state.adoption import AdoptedStates
from ft_megatron import patched

if TYPE_CHECKING:
    from ft_megatron.state import MegatronAdapter

_PARAMETERS = "_ft_parameters"


def remember_parameters() -> None:
    """Have optimizers that are made from now on keep which parameter is in which of their groups.

    They forget those that have no part in their own shard.
    """

    def remembering(made: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            groups = [list(g["params"]) for g in optimizer.param_groups] if optimizer is not None else []
            made(self, optimizer, *args, **kwargs)
            setattr(self, _PARAMETERS, groups)

        return init

    patched.MADE.wrap(remembering, once=True)


def can_adopt(optimizers: Sequence[Any]) -> bool:
    """Whether shards of these can be adopted: not where Megatron keeps weights in 8 bits, main parameters
    inside a fused optimizer, or optimizer state on the host."""
    return all(
        type(o) is DistributedOptimizer
        and getattr(o, _PARAMETERS, None) is not None
        and isinstance(o.optimizer, torch.optim.Optimizer)
        and not o.config.use_precision_aware_optimizer
        and not getattr(o.config, "optimizer_cpu_offload", False)
        and not any(o._get_fp8_params_and_shard_fp32_from_fp8()[0])
        for o in optimizers
    )


class Shard:
    """One role's shard of the optimizers, held by another (see `ft_core.adapter.State`)."""

    def __init__(self, adapter: MegatronAdapter, role: int, optimizers: Sequence[Any]) -> None:
        """`optimizers`: those of this rank."""
        self._adapter, self._role = adapter, role
        with _as_rank_of(role, optimizers):
            self.optimizers = [_sibling(optimizer) for optimizer in optimizers]

    def tensors(self) -> Iterator[StateTensor]:
        """Main parameters and optimizer state; what the script has named is as this rank has it."""
        yield from self._adapter.optimizer_tensors(self.optimizers, (self._role,))
        yield from self._adapter.kept.tensors((self._role,))

    def envelope(self) -> Any:
        """This rank's, whose random states the other takes over, but with the shard's own step counts."""
        return {**self._adapter.envelope(), "scalars": self._adapter.scalars(self.optimizers)}

    def envelope_holders(self) -> tuple[int, ...]:
        """The role that is away: the envelope goes with its shard."""
        return (self._role,)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        """Optimizer state that is not there yet is made."""
        self._adapter.restore_optimizers(self.optimizers, tensors, envelope)


class Shards:
    """The shards that this rank holds beside its own."""

    def __init__(self, adapter: MegatronAdapter, optimizers: Sequence[Any]) -> None:
        self._adopted = AdoptedStates(lambda role: Shard(adapter, role, optimizers))
        for index, optimizer in enumerate(optimizers):
            self._take_along(index, optimizer)

    def adopt(self, roles: Iterable[int]) -> dict[int, Shard]:
        """Hold the shards of these roles, and no others."""
        return self._adopted.adopt(roles)

    def _of_optimizer(self, index: int) -> list[Any]:
        return [shard.optimizers[index] for shard in self._adopted]

    def _take_along(self, index: int, optimizer: Any) -> None:
        def for_all(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
            def done(*args: Any, **kwargs: Any) -> Any:
                result = own(*args, **kwargs)
                for sibling in self._of_optimizer(index):
                    getattr(sibling, name)(*args, **kwargs)
                return result

            return done

        def of_all(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
            def listed() -> list[Any]:
                return sum((getattr(s, name)() for s in self._of_optimizer(index)), start=own())

            return listed

        for patch in patched.DONE_FOR_ALL:
            patch.wrap(partial(for_all, patch.name), of=optimizer)
        for patch in patched.LISTED_FOR_ALL:
            patch.wrap(partial(of_all, patch.name), of=optimizer)
        inner = optimizer.optimizer

        def with_siblings(step: Callable[..., Any]) -> Callable[..., Any]:
            def stepped(*args: Any, **kwargs: Any) -> Any:
                siblings = [sibling.optimizer for sibling in self._of_optimizer(index)]
                for sibling in siblings:
                    for group, own in zip(sibling.param_groups, inner.param_groups, strict=True):
                        group.update({key: value for key, value in own.items() if key != "params"})
                result = step(*args, **kwargs)
                for sibling in siblings:
                    sibling.step(*args, **kwargs)
                return result

            return stepped

        patched.INNER_STEP.wrap(with_siblings, of=inner)


def _sibling(optimizer: Any) -> Any:
    """One over the same buckets, for the rank that their groups say this is."""
    inner = object.__new__(type(optimizer.optimizer))
    vars(inner).update(vars(optimizer.optimizer))
    vars(inner).pop("step", None)
    inner.state = defaultdict(dict)
    everything = getattr(optimizer, _PARAMETERS)
    inner.param_groups = [
        {**group, "params": list(parameters)}
        for group, parameters in zip(optimizer.optimizer.param_groups, everything, strict=True)
    ]
    parameters = [parameter for group in everything for parameter in group]
    # Megatron notes at each parameter its main parameter: that of this rank, for the norm that it logs.
    noted = [{k: v for k, v in vars(p).items() if k.startswith("main_param")} for p in parameters]
    try:
        return DistributedOptimizer(
            inner,
            optimizer.config,
            optimizer.grad_scaler,
            optimizer.init_state_fn,
            model_chunks=optimizer.model_chunks,
            per_model_buffers=optimizer.per_model_buffers,
            data_parallel_group=optimizer.data_parallel_group,
            data_parallel_group_gloo=optimizer.data_parallel_group_gloo,
            data_parallel_group_idx=optimizer.data_parallel_group_idx,
            distributed_optimizer_instance_id=optimizer.distributed_optimizer_instance_id,
        )
    finally:
        for parameter, attributes in zip(parameters, noted, strict=True):
            vars(parameter).update(attributes)


@contextmanager
def _as_rank_of(role: int, optimizers: Sequence[Any]) -> Iterator[None]:
    """Groups over which buckets are sharded say that this is `role`."""
    groups = {id(g): g for o in optimizers for b in o.buffers for g in [b.data_parallel_group]}
    ranks = [(group, group._rank) for group in groups.values()]
    try:
        for group, _ in ranks:
            group._rank = group.members.index(role)
        yield
    finally:
        for group, rank in ranks:
            group._rank = rank
