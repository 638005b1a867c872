"""Adoption in ZeRO stage 3: a role holds, beside its own slices, those of roles that are away.

A slice is a rank's part of one parameter, with its gradient, main parameter and optimizer state. What
DeepSpeed does for a rank's slices is done once more for each adopted role, by the same methods:
`Slices.as_role` swaps the attributes of the optimizer that hold a rank's slices for those of that role. Only
where data move there is more to do: members of a group that are away take no part (`ft_core.comm.partial`):

- gradients: what a reduce-scatter has left in its buffer at the place of an adopted role is kept for it;
- weights: an adopted slice is put into the buffer that they are gathered in, at the place of its role;
- norm and overflow: what each role would have given is added before the reduction;
- checkpoints get the files of adopted roles as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import distributed as dist

from ft_core.errors import FtError
from ft_core.patching import replaced
from ft_core.state.adoption import AdoptedStates
from ft_deepspeed import patched, zero
from ft_deepspeed.comm import Comm, alone, as_rank, together
from ft_deepspeed.slices import Adopted


def objection(engine: Any) -> str:
    """Why slices of this engine, which has stage 3, cannot be adopted, if so."""
    optimizer = engine.optimizer
    if optimizer.offload_optimizer or optimizer.offload_param:
        return "with offload, what a rank keeps is partly in buffers on the host"
    if any(hasattr(inner, "ds_opt_adam") for inner in zero.inner_optimizers(engine)):
        return "DeepSpeed's CPU Adam counts the steps of one rank's slices"
    if not optimizer.reduce_scatter:
        return '"zero_optimization.reduce_scatter" is false'
    if engine._config.zero_config.use_all_reduce_for_fetch_params:
        return '"zero_optimization.use_all_reduce_for_fetch_params" is true'
    if vars(optimizer).get("torch_autocast_gradscaler") is not None:
        return '"torch_autocast" with fp16 counts the steps of one rank\'s slices'
    if vars(optimizer).get("use_muon"):
        return "Muon gathers gradients"
    ring = list(dist.get_process_group_ranks(engine.seq_data_parallel_group))
    for parameter in engine.module.parameters():
        if dist.get_process_group_ranks(parameter.ds_process_group) != ring:
            return "not all parameters are partitioned over all data-parallel ranks"
    return ""


class Slices:
    """The adopted slices of one engine, and what lets DeepSpeed use them."""

    def __init__(self, adapter: Any) -> None:
        """`adapter`: the `DeepSpeedAdapter` of an engine with stage 3 without an `objection`."""
        self.engine = adapter.engine
        self.optimizer = self.engine.optimizer
        self.ring: tuple[int, ...] = adapter.ring
        self._place = self.ring.index(dist.get_rank())
        self._held = AdoptedStates(lambda role: Adopted(adapter, role))
        self._reduced: dict[int, list[torch.Tensor]] = {}
        """By role, its slices of the gradients that have just been reduced."""
        for patch in patched.FOR_EACH_ROLE:
            patch.wrap(self._for_each_role, of=self.optimizer)
        for patch in patched.OVER_ALL_ROLES:
            patch.wrap(self._over_all_roles, of=self.optimizer)
        for patch in patched.FILES_OF_EACH_ROLE:
            patch.wrap(self._for_each_role, of=self.engine)
        patched.PARTITION_GRADIENTS.wrap(self._partitioning, of=self.optimizer)
        patched.VECTORIZED_UPDATE.wrap(self._without_adopted, of=self.optimizer)
        patched.REDUCE_SCATTER.wrap(self._reducing)
        for parameter in self.engine.module.parameters():
            patched.GATHER_PARAMETER.wrap(partial(self._gathering, itself=parameter), of=parameter)
            patched.GATHER_PARAMETERS.wrap(self._gathering, of=parameter)
        for patch in patched.COMPARISONS:
            patch.wrap(_with_who_is_there)

    def adopt(self, roles: Sequence[int]) -> Mapping[int, Adopted]:
        """Hold the slices of these roles, whose content is to be restored, and of no others."""
        return self._held.adopt(roles)

    def reset(self) -> None:
        """Forget an abandoned step."""
        self._reduced = {}
        for adopted in self._held:
            adopted.forget_gradients()

    @contextlib.contextmanager
    def as_role(self, role: int, given: list[torch.Tensor] | None = None) -> Iterator[None]:
        """DeepSpeed's optimizer has the slices of that role, and runs as on it; see `comm.alone`."""
        as_role = alone(role, self.ring.index(role), self._is_ring, given)
        with contextlib.ExitStack() as stack:
            for patch in patched.SLICE_COMMS:
                stack.enter_context(patch.replaced(as_role))
            for part, values in self._held[role].attributes:
                stack.enter_context(replaced(part, values))
            yield

    # -- what DeepSpeed does, for adopted slices as well ---------------------------------------------

    def _for_each_role(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            for role, _ in self._held.items():
                with self.as_role(role):
                    method(*args, **kwargs)
            return result

        return wrapped

    def _over_all_roles(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            given: dict[int, list[torch.Tensor]] = {
                self.ring.index(role): [] for role, _ in self._held.items()
            }
            for role, _ in self._held.items():
                with self.as_role(role, given[self.ring.index(role)]):
                    method(*args, **kwargs)
            if not given:
                return method(*args, **kwargs)
            with patched.SLICE_REDUCTION_COMM.replaced(together(self._is_ring, given)):
                return method(*args, **kwargs)

        return wrapped

    def _without_adopted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._held:
                raise FtError(
                    f"{method.__name__} while replica groups are away: it would not see all gradients"
                )
            return method(*args, **kwargs)

        return wrapped

    def _is_ring(self, group: Any) -> bool:
        return group is not None and tuple(dist.get_process_group_ranks(group)) == self.ring

    # -- gradients -----------------------------------------------------------------------------------

    def _reducing(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
            outputs = reduce(tensors, group)
            self._reduced = {role: self._slices(tensors, outputs, role) for role, _ in self._held.items()}
            return outputs

        return wrapped

    def _slices(
        self, tensors: list[torch.Tensor], outputs: list[torch.Tensor], role: int
    ) -> list[torch.Tensor]:
        """DeepSpeed reduces one buffer: for each rank in turn a part of every tensor, padded to equal size.

        The outputs are this rank's parts, in place."""
        many, place = len(self.ring), self.ring.index(role)
        sizes = [-(-tensor.numel() // many) for tensor in tensors]
        at = outputs[0].storage_offset() + (place - self._place) * sum(sizes)
        found = []
        for tensor, size in zip(tensors, sizes, strict=True):
            real = min(max(tensor.numel() - place * size, 0), size)
            found.append(outputs[0].as_strided((real,), (1,), at))
            at += size
        return found

    def _partitioning(self, partition: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(params: list[Any], partitions: list[torch.Tensor]) -> Any:
            result = partition(params, partitions)
            for role, slices in self._reduced.items():
                with self.as_role(role):
                    partition(params, slices)
            self._reduced = {}
            return result

        return wrapped

    # -- weights -------------------------------------------------------------------------------------

    def _gathering(self, gather: Callable[..., Any], itself: Any = None) -> Callable[..., Any]:
        """`itself`: what is gathered where it is not said."""

        def wrapped(params: Iterable[Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            if "param_list" in kwargs:
                params = kwargs.pop("param_list")
            params = list([itself] if params is None else params)
            wanted = [p for p in params if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
            if itself is None:
                wanted.sort(key=lambda p: p.ds_id)  # as `all_gather_coalesced` does
            with patched.GATHERING_COMM.replaced(self._in_place(wanted)):
                return gather(params, *args, **kwargs)

        return wrapped

    def _in_place(self, params: list[Any]) -> Comm:
        """All-gathers of these parameters, each by itself or those of one type in one buffer. All ranks make
        them in place, as an exchange with adopted slices has to be (`ft_core.comm.partial`)."""

        def gather_from(place: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(output: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                parts = output.view(-1).chunk(len(self.ring))
                own = parts[self._place]
                if own.data_ptr() == given.data_ptr():
                    inside = [p for p in params if _gathered_as(p) == output.dtype]
                else:
                    inside = [params.pop(0)]
                    own.copy_(given.view(-1))
                for role, adopted in self._held.items():
                    slices = [adopted.weights[p.ds_id].to(output) for p in inside]
                    torch.cat(slices, out=parts[self.ring.index(role)])
                return place(output, own, *args, **kwargs)

            return wrapped

        return Comm(
            allgather_fn=gather_from(comm.allgather_fn),
            all_gather_into_tensor=gather_from(comm.all_gather_into_tensor),
        )


def _with_who_is_there(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Who stands in for rank 0 says what it has itself, as rank 0 would: all do."""

    def wrapped(numbers: list[int]) -> Any:
        with patched.COMPARING_COMM.replaced(as_rank(0)):
            return compare(numbers)

    return wrapped


def _gathered_as(parameter: Any) -> torch.dtype:
    """The type that DeepSpeed sends a parameter in: with autocast, not its own."""
    if hasattr(partition_parameters, "get_allgather_dtype"):  # since 0.18
        dtype: torch.dtype = partition_parameters.get_allgather_dtype(parameter, parameter.ds_tensor)
        return dtype
    return parameter.ds_tensor.dtype
