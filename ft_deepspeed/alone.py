"""DeepSpeed's code of one rank, run on another for a rank that is away: what it reduces is added up there."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm


class Alone:
    """`deepspeed.comm` for a rank that is away: what it would give to reductions is kept."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank
        self.given: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(comm, name)

    def get_rank(self, group: Any = None) -> int:
        """In the data-parallel group that of the role, else this one's."""
        return self._rank if group is self._group else int(comm.get_rank(group))

    def all_reduce(self, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        """Keep this rank's part, instead of communicating."""
        self.given.append(tensor.clone())


class Together:
    """`deepspeed.comm`, where reductions count what ranks that are away gave as well, in the same order."""

    def __init__(self, group: Any, parts: list[list[torch.Tensor]]) -> None:
        self._group, self._parts = group, zip(*parts, strict=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(comm, name)

    def all_reduce(self, tensor: torch.Tensor, op: Any = comm.ReduceOp.SUM, group: Any = None) -> Any:
        """Over the parts of this role, then over the roles."""
        if group is self._group:
            for part in next(self._parts):
                if op == comm.ReduceOp.MAX:
                    torch.maximum(tensor, part, out=tensor)
                else:
                    tensor.add_(part)
        return comm.all_reduce(tensor, op=op, group=group)
