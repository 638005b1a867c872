"""`deepspeed.comm` with some other functions, which stands for it in one of DeepSpeed's modules for a while.

So DeepSpeed's code of one rank is run on another for a rank that is away: what it gives to exchanges between
the data-parallel peers is kept (`alone`), and added up there (`together`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed import comm

Peers = Callable[[Any], bool]
"""Whether a process group is that of the data-parallel peers."""


class Comm:
    """`deepspeed.comm` with some other functions."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(comm, name)


def only(group: Any) -> Peers:
    """That group object itself."""
    return lambda other: other is group


def as_rank(rank: int) -> Comm:
    """For code that is to take this for another rank of all; in any other group it is what it is."""
    return Comm(get_rank=lambda group=None: rank if group is None else comm.get_rank(group))


def alone(rank: int, place: int, peers: Peers, given: list[torch.Tensor] | None = None) -> Comm:
    """For code that runs for a rank that is away, and communicates with nobody.

    `rank` is what it asks for as its own, `place` among its data-parallel peers. What it would have given to
    exchanges between those is appended to `given`.
    """

    def get_rank(group: Any = None) -> int:
        return place if peers(group) else rank if group is None else int(comm.get_rank(group))

    def all_reduce(tensor: torch.Tensor, *_: Any, group: Any = None, **__: Any) -> None:
        if given is not None and peers(group):
            given.append(tensor.clone())

    def all_gather(_: torch.Tensor, part: torch.Tensor, *__: Any, group: Any = None) -> None:
        all_reduce(part, group=group)

    return Comm(get_rank=get_rank, all_reduce=all_reduce, all_gather_into_tensor=all_gather)


def together(peers: Peers, given: Mapping[int, list[torch.Tensor]]) -> Comm:
    """For code whose exchanges between the peers are to count what some that are away have given, in the same
    order: by place among the peers."""
    exchanges = zip(*given.values(), strict=True)

    def all_reduce(tensor: torch.Tensor, op: Any = comm.ReduceOp.SUM, group: Any = None) -> Any:
        for other in next(exchanges) if peers(group) else ():
            if op == comm.ReduceOp.MAX:
                torch.maximum(tensor, other, out=tensor)
            else:
                tensor.add_(other)
        return comm.all_reduce(tensor, op=op, group=group)

    def all_gather(output: torch.Tensor, part: torch.Tensor, group: Any = None) -> Any:
        parts = output.view(-1).chunk(comm.get_world_size(group))
        for place, other in zip(given, next(exchanges), strict=True):
            parts[place].copy_(other)
        return comm.all_gather_into_tensor(output, part, group=group)

    return Comm(all_reduce=all_reduce, all_gather_into_tensor=all_gather)
