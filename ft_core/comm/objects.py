"""Objects that a role has broadcast, once a newcomer plays it.

Who sends an object keeps its own, and nobody tells it what it has sent. A newcomer's may be another one (a
directory named by the clock), so where its peers have received one already, it takes that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from ft_core import patched
from ft_core.comm.collectives import FtProcessGroup
from ft_core.comm.startup import Startup

_OPERATIONS = 2
"""That an object takes: its size, and its bytes. A peer that has the first alone waits for the other."""


def install(startup: Startup) -> None:
    """Once per process."""

    def wrapper(broadcast: Callable[..., None]) -> Callable[..., None]:
        def broadcast_object_list(
            object_list: list[Any], src: int | None = None, group: Any = None, *args: Any, **kwargs: Any
        ) -> None:
            device = args[0] if args else kwargs.get("device")
            source = args[1] if len(args) > 1 else kwargs.get("group_src")
            over = group if group is not None else c10d._get_default_group()
            if source is None:
                source = dist.get_group_rank(over, 0 if src is None else src)
            if (
                not isinstance(over, FtProcessGroup)
                or over.rank() != source
                or not startup.are_on_record(over, _OPERATIONS)
            ):
                broadcast(object_list, src, group, *args, **kwargs)
                return
            where = torch.device("cpu") if device is None else torch.device(device)
            sizes = torch.zeros(len(object_list), dtype=torch.long, device=where)
            dist.broadcast(sizes, group_src=source, group=over)
            data = torch.zeros(int(sizes.sum()), dtype=torch.uint8, device=where)
            dist.broadcast(data, group_src=source, group=over)
            for at, part in enumerate(data.split(sizes.tolist())):
                object_list[at] = c10d._tensor_to_object(part, part.numel(), over)

        return broadcast_object_list

    for patch in patched.BROADCAST_OBJECTS:
        patch.wrap(wrapper)
