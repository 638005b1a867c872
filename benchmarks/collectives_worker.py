"""A rank of `benchmarks.collectives`: it times exchanges, or loses a peer in the middle of one."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist

from ft_core.comm import backend
from ft_core.comm.inner import Inner, devices_of, start
from ft_core.comm.process_group import Communicators
from ft_core.comm.rendezvous import EpochStore
from ft_core.errors import EpochChanged
from ft_core.protocol.groups import GroupId

LIMIT = timedelta(seconds=180)
"""For one operation; only a rank that has gone makes it matter."""

SECRET = b"of this benchmark"

KINDS = ("bare", "ft", "control")
"""What takes turns. The control is bare again, over connections of its own."""

BLOCK = 0.01
"""Seconds: calls too short to time alone are timed in blocks of about this."""

ORDERS = tuple(itertools.permutations(KINDS))
"""A whole number of times through these: each kind comes as often after each other, and in each place."""

MOST_ROUNDS = 50 * len(ORDERS)


def throughput(
    rank: int, world: int, address: str, parent: Connection, sizes: list[int], seconds: float
) -> None:
    """Rank 0 sends, for each size (bytes), how many calls a block had and the seconds per call of each kind,
    round by round, of the slowest rank. Raises ArithmeticError if a sum is wrong."""
    gpus = torch.cuda.device_count() >= world
    if gpus:
        torch.cuda.set_device(rank)
    backends = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    _join(rank, world, address, backends)
    # A group of its own to meet in: who has just been used would have the warmer threads.
    bare, control, meet = (_bare(n, rank, world, address, backends) for n in ("bare", "control", "meet"))
    groups = {"bare": bare, "ft": dist.group.WORLD, "control": control}
    for size in sizes:
        tensor = torch.empty(size // 4, device="cuda" if gpus else "cpu")
        calls, times = _rounds(groups, meet, tensor, seconds)
        if rank == 0:
            parent.send((calls, times))
    _stay()


def _rounds(
    groups: dict[str, Any], meet: Any, tensor: torch.Tensor, seconds: float
) -> tuple[int, dict[str, list[float]]]:
    world = meet.size()
    for kind in KINDS:
        tensor.fill_(meet.rank() + 1)
        groups[kind].allreduce([tensor]).wait()
        _check(tensor, world * (world + 1) // 2)
    tensor.zero_()  # stays so, however often it is summed

    def block(kind: str, calls: int) -> float:
        _largest(meet, torch.zeros(1))
        began = time.perf_counter()
        for _ in range(calls):
            groups[kind].allreduce([tensor]).wait()
        _finish(tensor.device)
        return (time.perf_counter() - began) / calls

    first = torch.tensor([statistics.median(block(kind, 1) for kind in KINDS)])
    once = float(_largest(meet, first))  # the same on all ranks
    calls = max(1, int(BLOCK / once))
    cycles = int(seconds / (len(KINDS) * calls * once * len(ORDERS)))
    orders = ORDERS * min(MOST_ROUNDS // len(ORDERS), max(1, cycles))
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for order in orders:
        for kind in order:
            times[kind].append(block(kind, calls))
    slowest = _largest(meet, torch.tensor([times[kind] for kind in KINDS], dtype=torch.double))
    return calls, dict(zip(KINDS, slowest.tolist(), strict=True))


def interrupted(rank: int, world: int, address: str, parent: Connection, size: int) -> None:
    """Lose a rank in the middle of an exchange of `size` bytes, and repeat it among the others. On gloo.

    Sends the seconds that an exchange among all takes, and begins one. Receives (epoch, address, ranks that
    are lost). Sends when it was woken (monotonic seconds), None if the exchange had ended before the loss;
    then when it had repeated it, and the seconds that an exchange among the others takes.
    """
    comms = _join(rank, world, address, "gloo")
    group: Any = dist.group.WORLD
    gradient = torch.full((size // 4,), rank + 1.0)
    exchanged = torch.empty_like(gradient)
    absent: list[int] = []

    def listen() -> None:
        epoch, store, lost = parent.recv()
        absent.extend(lost)
        comms.abort(epoch)
        comms.swap(epoch, store, absent=dict.fromkeys(lost, min(set(range(world)) - set(absent))))

    def ready() -> float:
        exchanged.copy_(gradient)
        group.allreduce([torch.zeros(1)]).wait()  # nobody begins late
        return time.monotonic()

    def among() -> float:
        return min(-ready() + _exchange(group, exchanged) for _ in range(2))

    among_all = among()
    start("watcher", listen)
    ready()
    parent.send(among_all)
    try:
        _exchange(group, exchanged)
    except EpochChanged:
        parent.send(time.monotonic())
    else:
        parent.send(None)
        return _stay()
    comms.wait_live()
    comms.reset()
    exchanged.copy_(gradient)  # what was interrupted holds the sums of some ranks only
    repeated = _exchange(group, exchanged)
    _check(exchanged, sum(r + 1 for r in range(world) if r not in absent))
    parent.send((repeated, among()))
    _stay()


def _exchange(group: Any, tensor: torch.Tensor) -> float:
    group.allreduce([tensor]).wait()
    return time.monotonic()


def _check(tensor: torch.Tensor, expected: float) -> None:
    """Raises ArithmeticError unless every element is `expected`."""
    low, high = tensor.aminmax()
    if not float(low) == float(high) == expected:
        raise ArithmeticError(f"sums between {float(low)} and {float(high)}, not {expected}")


def _join(rank: int, world: int, address: str, backends: str) -> Communicators:
    """Make the default group one of the `ft` backend, in epoch 1."""
    torch.set_num_threads(1)
    comms = Communicators(rank, world, on_failure=lambda reason: None, secret=SECRET)
    backend.install(comms)
    comms.swap(1, address)
    comms.end_startup()
    dist.init_process_group(backends, timeout=LIMIT)
    return comms


def _bare(name: str, rank: int, world: int, address: str, backends: str) -> Any:
    """A plain group of torch's, not known to it by any name."""
    gpu = rank if "nccl" in backends else None
    group = GroupId.of(range(world), 0)
    inner = Inner(group, tuple(range(world)), rank, devices_of(backends), LIMIT, None, 1, gpu)
    store = EpochStore(address, SECRET, 1, rank)
    inner.connect(dist.PrefixStore(name, store), store.host)
    return inner.pg


def _largest(group: Any, values: torch.Tensor) -> torch.Tensor:
    """The largest over the ranks, by element. Also a barrier."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([values], options).wait()
    return values


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _stay() -> None:
    """Until the parent kills this rank or ends: others may still be using their connections to it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
