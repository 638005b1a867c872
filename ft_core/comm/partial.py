"""Collectives of a group some of whose members are away: their replica groups have left (FT-HSDP, 4.1).

Ranks in a group stay what they were, and so does its size; the communicator inside has the members that
are there. A reduction counts those alone: whoever averages knows over how many. Where data move, the
counterpart in another replica group stands in for a member that is away, a root included: it sends what that
one would have sent.

Where every group has all the state, that is what the counterpart itself has. Where state is sharded, the
counterpart has adopted the shard of the one that is away (see `adoption`). A buffer that holds all shards
then has the adopted one in its place, and the exchange uses it there: a reduce-scatter leaves its sum in the
input, and an all-gather whose input is part of its output takes it from the output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist

from ft_core.errors import FtError
from ft_core.protocol.groups import GroupId

Fill = Callable[[], None] | None


class Partial:
    """The members of a group as its communicator of this epoch sees them."""

    def __init__(
        self, group: GroupId, members: Sequence[int], absent: Mapping[int, int], role: int, adopted: bool
    ) -> None:
        """`absent`: roles that are away, each with its counterpart. `role`: this one. `adopted`: counterparts
        hold the state of those that are away, beside their own."""
        self._group, self.members, self._absent = group, members, absent
        self._rank, self._adopted = members.index(role), adopted
        self._places = [i for i, role in enumerate(members) if role not in absent]
        """Ranks in the group, in the order of ranks in the communicator."""
        self._size = len(members)

    def issue(self, pg: Any, method: str, kind: str, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Fill]:
        """Issue an operation on the communicator `pg`: its work, and what to do once that is complete, which
        may take as long again; None: nothing.

        Raises FtError for an operation that has no meaning without the missing members.
        """
        if kind in ("allreduce", "barrier"):
            return getattr(pg, method)(*args, **kwargs), None
        if method in ("broadcast", "reduce"):
            with_root = [self._with_root(a) if hasattr(a, "rootRank") else a for a in args]
            return getattr(pg, method)(*with_root, **kwargs), None
        if kind in ("send", "recv") and method != "recv_anysource":
            tensors, peer, *rest = args
            if peer not in self._places:
                raise self._refusal(f"{method} with member {peer}, which is away")
            return getattr(pg, method)(tensors, self._places.index(peer), *rest, **kwargs), None
        if method == "allgather":
            outputs, inputs, *rest = args
            return self._gather(pg, outputs, inputs, rest)
        if method in ("_allgather_base", "all_gather_single"):
            output, given, *_ = args
            return self._gather(pg, [self._parts(output)], [given.reshape(-1)], [])
        if method in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
            outputs, inputs, *_ = args
            return self._gather(pg, [self._parts(o) for o in outputs], [i.reshape(-1) for i in inputs], [])
        if kind == "reduce_scatter":
            output, given, *rest = args
            options = rest[0] if rest else dist.ReduceScatterOptions()
            if method == "reduce_scatter":
                return self._reduce_scatter(pg, output, given, options)
            outputs, inputs = ([output], [given]) if isinstance(output, torch.Tensor) else (output, given)
            return self._reduce_scatter(pg, outputs, [self._parts(i) for i in inputs], options)
        raise self._refusal(kind)

    def _gather(self, pg: Any, outputs: Any, inputs: Any, rest: list[Any]) -> tuple[Any, Fill]:
        works, copies = [], []
        for options in rest:
            if hasattr(options, "asyncOp"):  # without it NCCL gives no work to wait for before what is left
                options.asyncOp = True
        for parts, given in zip(outputs, inputs, strict=True):
            works.append(pg.allgather([[parts[i] for i in self._places]], [given], *rest))
            in_place = parts[self._rank].data_ptr() == given.data_ptr()
            for place in sorted(set(range(self._size)) - set(self._places)):
                if self._adopted and in_place:
                    root = dist.BroadcastOptions()
                    root.rootRank = place
                    works.append(pg.broadcast([parts[place]], self._with_root(root)))
                else:
                    copies.append((parts[place], parts[self.stand_in(place)]))

        return _together(works, copies)

    def _reduce_scatter(self, pg: Any, outputs: Any, inputs: Any, options: Any) -> tuple[Any, Fill]:
        """Reduce each part to the one that holds its place; for this role's own also to the output."""
        works, copies = [], []
        for output, parts in zip(outputs, inputs, strict=True):
            for place, part in enumerate(parts):
                reduce = dist.ReduceOptions()
                reduce.reduceOp, reduce.rootRank = options.reduceOp, place
                works.append(pg.reduce([part], self._with_root(reduce)))
            own = parts[self._rank]
            if own.data_ptr() != output.data_ptr():
                copies.append((output.view(-1), own.view(-1)))

        return _together(works, copies)

    def stand_in(self, place: int) -> int:
        """Who stands for a rank of the group: itself, else its counterpart, else the next that is there."""
        role = self._absent.get(self.members[place])
        if role in self.members:
            return self.members.index(role)
        return next(p for i in range(self._size) if (p := (place + i) % self._size) in self._places)

    def _with_root(self, options: Any) -> Any:
        options.rootRank = self._places.index(self.stand_in(options.rootRank))
        return options

    def _parts(self, output: torch.Tensor) -> list[torch.Tensor]:
        return list(output.view(-1).chunk(self._size))

    def _refusal(self, what: str) -> FtError:
        return FtError(
            f"{what} in group {self._group}, of whose {self._size} members {self._size - len(self._places)} "
            "are away with their replica groups: it cannot go on without them; use --ft-policy wait"
        )


def _together(works: list[Any], copies: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Any, Fill]:
    """The last of `works`, and what is left to do after it: wait for the others, make `copies` (to, from)."""

    def fill() -> None:
        for work in works[:-1]:
            work.wait()
        for target, source in copies:
            target.copy_(source)

    return works[-1], fill
