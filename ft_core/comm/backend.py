"""Registers the `ft` backend with torch, so that an unmodified script gets repairable groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from ft_core import patched
from ft_core.comm import strict
from ft_core.comm.collectives import FtProcessGroup
from ft_core.comm.process_group import Communicators
from ft_core.comm.works import for_cpp
from ft_core.errors import ConfigError

NAME = "ft"


def install(comms: Communicators) -> None:
    """Make `init_process_group` and `new_group` create `ft` groups, whichever backend they ask for.

    Two functions that both of them go through are replaced in torch's module, so it does not matter who
    imported what before: `rendezvous` (no network of its own: see `store`) and `_new_process_group_helper`.
    `get_backend` still returns what was asked for, because frameworks branch on "gloo" and "nccl". Once per
    process.
    """
    original = patched.NEW_GROUP.original()
    asked_for = ""
    bound: int | None = None

    def creator(options: Any, backend_options: Any) -> FtProcessGroup:
        members = tuple(options.global_ranks_in_group) or tuple(range(comms.world_size))
        return comms.create(members, asked_for, options.timeout, options.store, backend_options, bound)

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[Any]:
        _check_place(comms, rank, world_size)
        alone = comms.world_size == 1
        yield dist.HashStore() if alone else comms.shared, comms.role, comms.world_size

    def helper(
        size: int, rank: Any, ranks: list[int], backend: Any, store: Any, *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal asked_for, bound
        if str(backend) == c10d.Backend.FAKE:
            return original(size, rank, ranks, backend, store, *args, **kwargs)
        if not ranks:
            _check_place(comms, rank, size)
        asked_for = str(backend)
        _check_backend(asked_for)
        # A bound device would make torch look for a communicator to split from.
        bound = getattr(kwargs.pop("device_id", None), "index", None)
        group, prefix = original(size, rank, ranks, NAME, store, *args, **kwargs)
        if isinstance(group, FtProcessGroup):
            backend = c10d.Backend(asked_for)
            c10d._world.pg_map[group] = (backend, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(backend))
        return group, prefix

    c10d.Backend.register_backend(NAME, creator, extended_api=True, devices=["cpu", "cuda"])
    # From torch 2.15 on its flight recorder hooks into the others, which takes a backend of torch's.
    recorded: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded.add(NAME)
    patched.RENDEZVOUS.replace(rendezvous)
    patched.NEW_GROUP.replace(helper)
    patched.SET_TIMEOUT.wrap(_sets_timeout)
    patched.HANDED_OVER.wrap(_hands_over)
    patched.BARRIER.replace(lambda *args, **kwargs: None)
    for patch in patched.BATCH:
        patch.wrap(_batch)
    if strict.wanted():
        strict.training.begin()


def _batch(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """torch lets a batch go out as one only in groups of its own class."""

    def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
        c10d._check_p2p_op_list(p2p_op_list)
        group = p2p_op_list[0].group or c10d._get_default_group()
        device = p2p_op_list[0].tensor.device
        if not isinstance(group, FtProcessGroup) or not group.coalesces(device.type):
            return original(p2p_op_list)
        with group.together(device) as works:
            for each in p2p_op_list:
                peer = "group_dst" if each.op is c10d.isend else "group_src"
                each.op(each.tensor, group=each.group, tag=each.tag, **{peer: each.group_peer})
        return works

    return batch_isend_irecv


def _sets_timeout(original: Callable[..., None]) -> Callable[..., None]:
    def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        over = c10d._get_default_group() if group is None else group
        if isinstance(over, FtProcessGroup):
            over.set_timeout(timeout)
        else:
            original(timeout, group)

    return _set_pg_timeout


def _hands_over(original: Callable[..., None]) -> Callable[..., None]:
    return lambda reducer, work, *args, **kwargs: original(reducer, for_cpp(work), *args, **kwargs)


def _check_place(comms: Communicators, rank: int, world_size: int) -> None:
    if rank not in (-1, comms.role) or world_size not in (-1, comms.world_size):
        raise ConfigError(
            f"init_process_group was called with rank {rank} of {world_size}, but this worker plays "
            f"role {comms.role} of {comms.world_size}: pass neither, or RANK and WORLD_SIZE as given"
        )


def _check_backend(requested: str) -> None:
    names = {part.rpartition(":")[2] for part in requested.split(",")}
    if unknown := names - {"gloo", "nccl", "undefined", NAME}:
        raise ConfigError(
            "fault tolerance supports the backends gloo and nccl, not "
            f"{', '.join(sorted(unknown))} (asked for: {requested})"
        )
    if "nccl" in names and not dist.is_nccl_available():
        raise RuntimeError("Distributed package doesn't have NCCL built in")
