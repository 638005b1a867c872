"""What the workers of the process-group tests run. Imported by name in the worker processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from ft_core.comm.flight import FlightRecorder
from ft_core.comm.inner import Inner
from ft_core.errors import EpochChanged, FtError
from ft_core.node.workers.flight import Recorded, read
from ft_core.patching import replaced
from ft_core.protocol.flight import FlightLog
from ft_core.protocol.groups import GroupId
from ft_core.state.memory import ControlBlock, SharedMemory


def plain(value: Any) -> Any:
    """Tensors as lists: they cross a pipe after their process may have ended."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def every_collective(rank: int, world: int, group: Any) -> dict[str, Any]:
    """Each collective once; the same code runs over plain gloo and over `ft`."""
    out: dict[str, Any] = {}

    def mine(n: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.arange(n) + 10 * rank).to(dtype)

    t = mine()
    dist.all_reduce(t, group=group)
    out["all_reduce"] = t
    t = mine(dtype=torch.bfloat16)
    work = dist.all_reduce(t, dist.ReduceOp.MAX, group=group, async_op=True)
    work.wait()
    out["all_reduce_max"] = t
    t = mine()
    out["future"] = dist.all_reduce(t, group=group, async_op=True).get_future().wait()[0].clone()
    t = mine()
    dist.broadcast(t, src=1, group=group)
    out["broadcast"] = t
    parts = [torch.zeros(4) for _ in range(world)]
    dist.all_gather(parts, mine(), group=group)
    out["all_gather"] = parts
    t = torch.zeros(4 * world)
    dist.all_gather_single(t, mine(), group=group)
    out["all_gather_single"] = t
    t = torch.zeros(4 * world)
    group._allgather_base(t, mine()).wait()
    out["_allgather_base"] = t
    t = torch.zeros(4)
    dist.reduce_scatter(t, [mine() + i for i in range(world)], group=group)
    out["reduce_scatter"] = t
    t = torch.zeros(2)
    dist.reduce_scatter_single(t, mine(2 * world), group=group)
    out["reduce_scatter_single"] = t
    t = torch.zeros(world)
    dist.all_to_all_single(t, mine(world), group=group)
    out["all_to_all_single"] = t
    parts = [torch.zeros(4) for _ in range(world)] if rank == 0 else None
    dist.gather(mine(), parts, dst=0, group=group)
    out["gather"] = parts
    t = torch.zeros(4)
    dist.scatter(t, [mine() + i for i in range(world)] if rank == 2 else None, src=2, group=group)
    out["scatter"] = t
    t = mine()
    dist.reduce(t, dst=1, group=group)
    out["reduce"] = t if rank == 1 else None
    dist.barrier(group=group)
    dist.monitored_barrier(group=group, timeout=timedelta(seconds=30))
    tensors = [mine(2), mine(3)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t, group=group)
    manager.wait()
    out["coalesced_all_reduce"] = tensors
    gathered = [torch.zeros(2 * world), torch.zeros(3 * world)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for t, n in zip(gathered, (2, 3), strict=True):
            dist.all_gather_single(t, mine(n), group=group)
    manager.wait()
    out["coalesced_all_gather"] = gathered
    shards = [torch.zeros(2), torch.zeros(3)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for t, n in zip(shards, (2, 3), strict=True):
            dist.reduce_scatter_single(t, mine(n * world), group=group)
    manager.wait()
    out["coalesced_reduce_scatter"] = shards
    following, previous = (rank + 1) % world, (rank - 1) % world
    t = torch.zeros(4)
    if rank % 2:
        dist.send(mine(), following, group=group)
        dist.recv(t, previous, group=group)
    else:
        dist.recv(t, previous, group=group)
        dist.send(mine(), following, group=group)
    out["send_recv"] = t
    t = torch.zeros(4)
    ops = [dist.P2POp(dist.isend, mine(), following, group), dist.P2POp(dist.irecv, t, previous, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    out["batch_isend_irecv"] = t
    t = torch.zeros(4)
    if rank == 0:
        out["source"] = dist.recv(t, group=group)
    elif rank == 1:
        dist.send(mine(), 0, group=group)
    out["recv_anysource"] = t
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=group)
    out["all_gather_object"] = objects
    shared = [f"from {rank}", rank]
    dist.broadcast_object_list(shared, src=0, group=group)
    out["broadcast_object_list"] = shared
    collected = [None] * world if rank == 0 else None
    dist.gather_object(("o", rank), collected, dst=0, group=group)
    out["gather_object"] = collected
    out["ddp"] = data_parallel(rank, group)
    return plain(out)


def data_parallel(rank: int, group: Any) -> list[Any]:
    """Weights after some steps of a model whose gradients torch's own reducer exchanges, in C++."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(torch.randn(6, 4)).pow(2).sum().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def plain_gloo(rank: int, world: int, port: int, sender: Any) -> None:
    """The reference: the same collectives over torch's own gloo, with a store at that port."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    sender.send(every_collective(rank, world, dist.group.WORLD))
    dist.barrier()


def collectives(worker: Any, in_startup: bool) -> dict[str, Any]:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    if not in_startup:
        worker.begin_training()
    seen: list[int] = []
    worker.comms.traffic = seen.append
    out = every_collective(worker.role, worker.world, group)
    out["facts"] = {
        "backend": dist.get_backend(),
        "config": dist.distributed_c10d.get_backend_config(),
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "name": group.name(),
        "names": (type(group.group_name), type(group.group_desc)),
        "ranks": dist.get_process_group_ranks(group),
        "traffic": sorted(set(seen)),
        "last": seen[-1],
        "balanced": seen.count(0) == seen.count(1),
    }
    out["counts"] = dict(worker.comms.counts)
    dist.destroy_process_group()
    out["initialized"] = dist.is_initialized()
    return out


def groups(worker: Any) -> dict[str, Any]:
    """Groups of all kinds; the members of one use it while others never touch it."""
    dist.init_process_group("cpu:gloo", rank=worker.role, world_size=worker.world)
    worker.begin_training()
    role, world = worker.role, worker.world
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    explicit = dist.new_group(list(range(world)), backend="gloo")
    alone = [dist.new_group([r]) for r in range(world)]
    again = dist.new_group([0, 1])
    evens = dist.new_group([2, 0])
    half = halves[role // 2]
    t = torch.tensor([1.0 + role])
    dist.all_reduce(t, group=half)
    lonely = torch.tensor([5.0])
    dist.all_reduce(lonely, group=alone[role])
    if role == 0:
        # Roles 2 and 3 have no business with this group: they are asked to open it.
        dist.send(torch.tensor([7.0]), 1, group=explicit)
    if role == 1:
        dist.recv(lonely, 0, group=explicit)
    sub, _ = dist.new_subgroups(2)
    dist.barrier(group=sub)
    names = [
        str(g.identity) for g in (half, explicit, alone[role], again, evens, sub) if not isinstance(g, int)
    ]
    return {"sum": t.item(), "lonely": lonely.item(), "names": names, "backend": dist.get_backend(explicit)}


def crossed_first_use(worker: Any, in_startup: bool) -> float:
    """Roles 0 and 1 first use two groups in a different order, which is legal for asynchronous operations."""
    dist.init_process_group("gloo")
    if not in_startup:
        worker.begin_training()
    pair = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    ones = [torch.ones(1), torch.ones(1)]
    order = (0, 1) if worker.role == 0 else (1, 0)
    works = [dist.all_reduce(ones[i], group=pair[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    return sum(t.item() for t in ones)


def callers_mistake(worker: Any) -> list[str]:
    """Wrong arguments raise at once, as in torch, and break nothing."""
    dist.init_process_group("gloo")
    worker.begin_training()
    dist.barrier()
    group = dist.group.WORLD
    raised = []
    for call in (
        lambda: dist.all_reduce_coalesced([torch.ones(2).to_sparse(), torch.ones(2)]),
        lambda: dist.reduce_scatter_single(torch.ones(3), torch.ones(4)),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16), op="sum"),
        lambda: group.broadcast([torch.ones(1)], 7, 9, 11),
    ):
        try:
            call()
            raised.append("nothing")
        except EpochChanged:
            raised.append("EpochChanged")
        except Exception as error:
            raised.append(type(error).__name__)
    t = torch.ones(1)
    dist.all_reduce(t)
    return [*raised, str(t.item()), str(worker.failures)]


def train(worker: Any, steps: int, blocked_in: str, stop_at: dict[int, int]) -> dict[str, Any]:
    """A loop of collectives. In epoch e role `stop_at[e]` says so and waits in step 1 to be killed."""
    dist.init_process_group("gloo")
    world, role = worker.world, worker.role
    group = dist.group.WORLD
    neighbours = dist.new_group([0, 1])
    worker.begin_training()
    log: list[tuple[int, float]] = []
    identity = id(group)
    while True:
        try:
            for step in range(steps):
                t = torch.tensor([float(role + step)])
                dist.all_reduce(t)
                log.append((worker.epoch, t.item()))
                if role in (0, 1):
                    dist.barrier(group=neighbours)
                if step == 1 and worker.epoch in stop_at:
                    if stop_at[worker.epoch] == role:
                        worker.tell("stopped", worker.epoch)
                        threading.Event().wait()
                    worker.tell("blocked", worker.epoch)
                    _block(blocked_in, role, world, stop_at[worker.epoch])
            break
        except EpochChanged:
            worker.next_epoch()
    assert group is dist.group.WORLD and id(group) == identity
    dist.destroy_process_group()
    return {"log": log, "failures": len(worker.failures), "reasons": worker.failures}


def _block(how: str, role: int, world: int, lost: int) -> None:
    others = [r for r in range(world) if r != lost]
    if how == "all_reduce":
        dist.all_reduce(torch.ones(1000))
    elif how == "recv":
        # From a peer that is alive and silent: only the abort can end this.
        peer = others[(others.index(role) + 1) % len(others)]
        dist.recv(torch.ones(1), peer, tag=3)
    elif how == "anysource":
        dist.recv(torch.ones(1), tag=3)
    elif how == "async":
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        future = work.get_future()
        future.wait()
    elif how == "opening":
        dist.barrier(group=dist.new_group(list(range(world))))
    raise AssertionError("was not woken")


def settled(enough: tuple[int, int] | None = None) -> tuple[int, int]:
    """Threads and descriptors once what belongs to an older epoch has been given back.

    `enough`: they are to come down to that, however slow the machine is.
    """
    samples = []
    while True:
        time.sleep(0.05)
        samples.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        least = min(s[0] for s in samples), min(s[1] for s in samples)
        if len(samples) >= (20 if enough is None else 600) or (
            enough is not None and least[0] <= enough[0] and least[1] <= enough[1]
        ):
            return least


def endure(worker: Any, epochs: int) -> dict[str, Any]:
    """11 groups over many epochs: threads and descriptors early and late, seconds until all groups worked."""
    dist.init_process_group("gloo")
    world = worker.world
    made = [dist.new_group(list(range(world))) for _ in range(6)]
    made += [dist.new_group([a, b]) for a, b in ((0, 1), (2, 3), (0, 2), (1, 3))]
    mine = [dist.group.WORLD, *(g for g in made if not isinstance(g, int))]
    worker.begin_training()
    use: list[tuple[int, int]] = []
    times: list[float] = []
    start = time.monotonic()
    while True:
        try:
            for group in mine:
                dist.barrier(group=group)
            times.append(time.monotonic() - start)
            if worker.epoch in (5, epochs + 1):
                use.append(settled((use[0][0] + 3, use[0][1] + 3) if use else None))
            worker.tell("round", worker.epoch)
            if worker.epoch > epochs:
                return {"use": use, "times": times}
            if worker.role:
                dist.barrier(group=mine[1])
            else:
                dist.recv(torch.ones(1), 1, tag=9)
        except EpochChanged:
            worker.next_epoch()
            start = time.monotonic()


def _half(how: str, role: int) -> list[Any]:
    """Begin an operation of two roles, of which much is sent, or many messages that are small each."""
    much, other, group = torch.ones(16 << 20), 1 - role, dist.group.WORLD
    if how in ("send", "recv"):
        sends = (how == "send") == (role == 0)
        return [dist.isend(much, other) if sends else dist.irecv(much, other)]
    if how == "small sends":
        parts = much[: 100 * (15 << 10)].chunk(100)
        return [dist.irecv(part, other) if role else dist.isend(part, other) for part in parts]
    if how == "reduce_scatter":
        return [dist.reduce_scatter_single(torch.zeros(len(much) // 2), much, async_op=True)]
    if how.startswith("coalesced"):
        with _coalescing_manager(group, async_ops=True) as manager:
            for part in much.chunk(2):
                half = part[: len(part) // 2]
                if how == "coalesced reduce_scatter":
                    dist.reduce_scatter_single(half.clone(), part)
                elif how == "coalesced all_gather":
                    dist.all_gather_single(part, half.clone())
                else:
                    dist.all_reduce(part)
        return [manager]
    if how == "monitored_barrier":
        return []
    return [dist.broadcast(much, 0, async_op=True)]


def _small_buffers() -> None:
    """The kernel takes no more than some kilobytes at a time from now on, of whatever is connected."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def _waits(how: str, work: Any) -> None:
    if how == "future":
        work.get_future().wait()
    elif how == "asked":
        while not work.is_completed():
            time.sleep(0.01)
        work.wait()
    elif how == "limited":
        work.wait(timedelta(minutes=5))
    else:
        work.wait()


def half_sent(worker: Any, how: str) -> dict[str, Any]:
    """Role 1 is stopped, and then killed, when it has received a part of what role 0 sends, or sent a part of
    what that receives."""
    dist.init_process_group("gloo")
    worker.begin_training()
    log: list[int] = []
    while True:
        try:
            pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(pids, torch.tensor([os.getpid()]))
            log.append(worker.epoch)
            if worker.epoch > 1:
                return {"log": log}
            _small_buffers()
            both = how == "recv" or "reduce_scatter" in how  # role 1 has sent a part as well
            works = _half(how, worker.role) if worker.role or both else []
            if worker.role == 1:
                time.sleep(0.02 if both else 0.2)  # it has said so
                os.kill(os.getpid(), signal.SIGSTOP)
                works[0].wait()
            stat = Path(f"/proc/{pids[1].item()}/stat")
            while stat.read_text().split()[2] != "T":
                time.sleep(0.01)
            works = works or _half(how, worker.role)
            worker.tell("blocked")
            for work in works:
                _waits(how, work)
            dist.monitored_barrier(timeout=timedelta(minutes=5))
            raise AssertionError("it was sent")
        except EpochChanged:
            worker.next_epoch()


UNWOKEN = (
    *("reduce_scatter", "small sends", "send", "recv", "any source", "broadcast", "coalesced all_reduce"),
    *("coalesced reduce_scatter", "coalesced all_gather", "future", "asked", "limited"),
    *("limited send", "gather", "barrier", "monitored_barrier"),
)
"""What role 0 waits in, while nobody comes."""


def unwoken(worker: Any) -> list[str]:
    """Role 0 waits in one operation after the other, of each of which the end of the epoch is all that it
    hears: gloo is not told."""
    Inner.wake = lambda self: None  # type: ignore[method-assign]
    dist.init_process_group("gloo")
    worker.begin_training()
    left: list[str] = []
    for how in UNWOKEN:
        try:
            dist.barrier()
            worker.tell("blocked", how)
            if worker.role == 1:
                dist.recv(torch.zeros(1), 0, tag=9)
            elif how == "any source":
                dist.recv(torch.zeros(1), tag=3)
            elif how == "limited send":
                dist.isend(torch.zeros(1), 1, tag=3).wait(timedelta(minutes=5))
            elif how == "gather":
                dist.gather(torch.zeros(1), [torch.zeros(1), torch.zeros(1)])
            elif how == "barrier":
                dist.barrier()
            for work in _half(how, 0):
                _waits(how, work)
            dist.monitored_barrier(timeout=timedelta(minutes=5))
        except EpochChanged:
            left.append(how)
            worker.next_epoch()
    return left


def fail_alone(worker: Any) -> None:
    """Role 1 is killed and nobody starts a new epoch."""
    worker.comms._grace = 0.5
    dist.init_process_group("gloo")
    worker.begin_training()
    dist.barrier()
    if worker.role == 1:
        threading.Event().wait()
    worker.tell("blocked")
    dist.all_reduce(torch.ones(1))


def interrupted(worker: Any) -> dict[str, Any]:
    """Role 0 has a signal while it waits in a collective for role 1, which comes once it was sent."""
    dist.init_process_group("gloo")
    worker.begin_training()
    dist.barrier()

    def handler(*_: object) -> None:
        raise KeyError("own")

    def interrupt() -> None:
        while not any(record.under_way for record in own_log(worker).records):
            time.sleep(0.001)
        time.sleep(0.1)  # issued; now it waits
        os.kill(os.getpid(), signal.SIGUSR1)
        dist.send(torch.zeros(1), 1)

    signal.signal(signal.SIGUSR1, handler)
    if worker.role == 0:
        threading.Thread(target=interrupt).start()
    else:
        dist.recv(torch.zeros(1), 0)
    error, one = None, torch.ones(1)
    try:
        dist.all_reduce(one)
    except KeyError as caught:
        error = caught
    dist.barrier()
    return {"error": repr(error), "sum": one.item()}


def stop_here(worker: Any, stop: Any, point: int) -> None:
    """The first worker of role stop[0] says that it is at point stop[1], and waits to be killed."""
    if stop is not None and not worker.newcomer:
        if stop == (worker.role, point):
            worker.tell("stopped", point)
            threading.Event().wait()
        elif stop[1] == point:
            worker.tell("passed", point)


@contextlib.contextmanager
def before_second(action: Callable[[], None]) -> Iterator[None]:
    """`action` comes between the two broadcasts that an object takes: its size, and its bytes."""
    original, calls = c10d.broadcast, itertools.count(1)

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            action()
        return original(*args, **kwargs)

    with replaced(c10d, {"broadcast": broadcast}):
        yield


def start_up(worker: Any, stop: Any, then: Any) -> dict[str, Any]:
    """A start-up with all that can be replayed, then some training. `stop`: (role, point) in start-up;
    `then`: a role that stops in training."""
    dist.init_process_group("gloo")
    role, world = worker.role, worker.world
    out: dict[str, Any] = {}
    repeated: set[int] = set()
    worker.comms.startup.repeats = lambda: repeated.add(len(out))
    stop_here(worker, stop, 0)
    dist.barrier()
    pair = next(g for g in [dist.new_group([0, 1]), dist.new_group([2, 3])] if not isinstance(g, int))
    explicit = dist.new_group(list(range(world)), backend="gloo")
    stop_here(worker, stop, 1)
    t = torch.tensor([1.0 + role, 2.0])
    dist.all_reduce(t)
    out["all_reduce"] = t
    stop_here(worker, stop, 2)
    t = torch.full((3,), float(role), dtype=torch.bfloat16)
    dist.broadcast(t, src=1, group=explicit)
    out["broadcast"] = t
    stop_here(worker, stop, 3)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"role": role})
    out["objects"] = objects
    stop_here(worker, stop, 4)
    shared = ["from the source" if role == 0 else None, role]
    with before_second(lambda: stop_here(worker, stop, 7)):
        dist.broadcast_object_list(shared, src=0)
    out["shared"] = shared[0]
    t = torch.tensor([10 + role])
    dist.all_reduce(t, dist.ReduceOp.MAX, group=pair, async_op=True).wait()
    out["pair"] = t
    stop_here(worker, stop, 5)
    following, previous = (role + 1) % world, (role - 1) % world
    t = torch.zeros(2)
    ops = [
        dist.P2POp(dist.isend, torch.full((2,), float(role)), following),
        dist.P2POp(dist.irecv, t, previous),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    out["p2p"] = t
    stop_here(worker, stop, 6)
    collected = [None] * world if role == 0 else None
    # A newcomer's object may be another, and larger, than its predecessor's was: sizes are replayed.
    dist.gather_object(role if stop or not worker.newcomer else "another", collected, dst=0)
    parts = [torch.zeros(2) for _ in range(world)]
    dist.all_gather(parts, torch.full((2,), float(role)))
    out["all_gather"] = parts
    parameters = torch.full((1 << 19,), float(role))
    dist.broadcast(parameters, src=0)
    dist.barrier()
    out["repeated"] = sorted(repeated)
    worker.begin_training()
    while True:
        try:
            dist.all_reduce(torch.zeros(1))
            if then == role and not worker.newcomer:
                worker.tell("stopped", "training")
                threading.Event().wait()
            t = torch.tensor([float(role)])
            dist.all_reduce(t)
            dist.barrier(group=pair)
            break
        except EpochChanged:
            worker.next_epoch()
    out["trained"] = t
    return plain({**out, "epoch": worker.epoch})


def several_pending(worker: Any, issued: bool, waited: int) -> dict[str, Any]:
    """Operations of start-up that go on at once. Role 2 stops before it has issued them, or once all have;
    role 1 waits for none before the next epoch, and role 0 for the first few."""
    dist.init_process_group("gloo")
    role, everybody, again = worker.role, dist.group.WORLD, dist.new_group([0, 1, 2])

    def until_next_epoch() -> None:
        while worker.pending == worker.epoch == 1:
            time.sleep(0.005)

    def stop() -> None:
        if role == 2 and not worker.newcomer:
            worker.tell("stopped")
            threading.Event().wait()

    if not issued:
        stop()
    dist.barrier(async_op=True)  # which nobody waits for
    mine = [torch.tensor([1.0 + role + 10 * i]) for i in range(4)]
    gathered = [torch.zeros(1) for _ in range(3)]
    calls = [
        lambda: dist.all_reduce(mine[0], group=everybody, async_op=True),
        lambda: dist.all_reduce(mine[1], group=again, async_op=True),
        lambda: dist.all_reduce(mine[2], group=everybody, async_op=True),
        lambda: dist.broadcast(mine[3], 1, group=again, async_op=True),
        lambda: dist.all_gather(gathered, torch.tensor([float(role)]), async_op=True),
    ]
    order = (1, 3, 0, 2, 4) if role == 1 else (0, 1, 2, 3, 4)
    works = {i: calls[i]() for i in order}
    received = torch.zeros(1)
    works[5] = dist.isend(torch.tensor([float(role)]), (role + 1) % 3)
    works[6] = dist.irecv(received, (role - 1) % 3)
    if issued:
        store = c10d._get_default_store()
        store.set(f"all begun by {role}", "")
        store.wait([f"all begun by {other}" for other in range(3)])
        stop()
    if not worker.newcomer:
        for i in order[:waited] if role == 0 else ():
            works[i].wait()
        worker.tell("passed")
        until_next_epoch()
    for i in reversed(works):
        works[i].wait()
        assert works[i].is_completed()
    dist.barrier()
    out = plain({"sums": mine, "gathered": gathered, "received": received})
    return out | {"counts": worker.comms.startup_counts(), "pending": len(worker.comms.startup._pending)}


def between_steps(worker: Any, stops: dict[int, int], begin: int, more: int | None) -> dict[str, Any]:
    """What a script does between 30 training steps, of which a newcomer passes those from `begin` on.

    It does one operation more than it should in step `more`. `stops`: role -> step.
    """
    dist.init_process_group("gloo")
    role = worker.role
    pair = dist.new_group([1, 2])
    sums, received, late = [], [], None
    for step in range(begin if worker.newcomer else 0, 30):
        worker.comms.reached(step)
        t = torch.tensor([role + step])
        dist.all_reduce(t)
        sums.append(t)
        if late is not None:  # what the step before has begun
            late[0].wait()
            late[1].wait()
            received.append(late[2])
        if role:
            if step % 3 == 0:
                dist.barrier(pair)
            t = torch.zeros(1, dtype=torch.int64)
            late = dist.isend(torch.tensor([100 * role + step]), 3 - role), dist.irecv(t, 3 - role), t
        if step == more:
            dist.barrier()
        stop_here(worker, (role, stops.get(role)), step)
    return {**plain({"sums": sums, "received": received}), "counts": worker.comms.startup_counts()}


def with_checkpoints(worker: Any, stop: int, begin: int, steps: int, every: int) -> dict[str, Any]:
    """What a script does between training steps that saves a checkpoint after each `every` of them. Role 0
    stops in step `stop`; a newcomer begins at step `begin`."""
    dist.init_process_group("gloo")
    role, sums, most = worker.role, [], 0
    for step in range(begin if worker.newcomer else 0, steps):
        worker.comms.reached(step)
        most = max(most, len(worker.comms.startup.log))
        t = torch.tensor([role + step])
        dist.all_reduce(t)
        sums.append(t.item())
        t = torch.tensor([step])
        dist.send(t, 1 - role) if step % 2 == role else dist.recv(t, 1 - role)
        if (step + 1) % every == 0:
            dist.barrier()
            worker.comms.newcomers_begin_at(step + 1)
        stop_here(worker, (0, stop), step)
    return {"sums": sums, "most": most, "first": begin if worker.newcomer else 0}


def rehearse(worker: Any) -> dict[str, Any]:
    """Role 1 issues operations in a rehearsal, which nobody else does; then all issue one."""
    dist.init_process_group("gloo")
    out: dict[str, Any] = {}
    if worker.role == 1:
        with worker.comms.startup.rehearsal():
            out["sum"], out["mine"], out["theirs"], out["received"] = (torch.ones(2) for _ in range(4))
            dist.all_reduce(out["sum"], async_op=True).wait()
            dist.broadcast(out["mine"], 1)
            dist.broadcast(out["theirs"], 0)
            out["gathered"], out["scattered"] = torch.ones(2 * worker.world), torch.ones(2)
            dist.all_gather_single(out["gathered"], torch.ones(2))
            dist.reduce_scatter_single(out["scattered"], torch.ones(2 * worker.world))
            ops = [dist.P2POp(dist.isend, torch.ones(2), 0), dist.P2POp(dist.irecv, out["received"], 0)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            dist.barrier()
    out["real"] = torch.tensor([float(worker.role)])
    dist.all_reduce(out["real"])
    return {**plain(out), "counts": worker.comms.startup_counts()}


def divergent(worker: Any, how: str) -> None:
    """A newcomer whose start-up differs from its peers'."""
    dist.init_process_group("gloo")
    differs = worker.newcomer
    role = worker.role
    if how == "scatter":
        t = torch.zeros(1)
        dist.reduce_scatter_single(t, torch.ones(worker.world))
    if how == "shape" and differs:
        dist.all_reduce(torch.ones(3))
    elif how == "kind" and differs:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(2))
    if how == "more" and differs:
        dist.barrier()
    if not (how == "fewer" and differs):
        dist.barrier()
    worker.begin_training()
    while True:
        try:
            dist.barrier()
            if role == 1:
                worker.tell("stopped")
                threading.Event().wait()
            dist.barrier()
        except EpochChanged:
            worker.next_epoch()


def without_a_member(worker: Any, absent: int) -> dict[str, Any] | None:
    """What collectives are, once a role is away with its replica group."""
    dist.init_process_group("gloo")
    worker.begin_training()
    group, role, world = dist.group.WORLD, worker.role, worker.world
    dist.barrier()
    if role == absent:
        return None
    worker.comms.abort(2)
    worker.comms.swap(2, worker.store, {}, None, {absent: 3})
    worker.comms.reset()
    out: dict[str, Any] = {"rank": dist.get_rank(), "size": dist.get_world_size()}

    def mine(n: int = 2) -> torch.Tensor:
        return torch.arange(n) + 10.0 * role

    t = mine()
    dist.all_reduce(t)
    out["all_reduce"] = t
    t = mine()
    out["future"] = dist.all_reduce(t, async_op=True).get_future().wait()[0].clone()
    for root in range(world):
        t = mine()
        dist.broadcast(t, src=root)
        out[f"broadcast from {root}"] = t
    t = mine()
    dist.reduce(t, dst=absent)
    out["reduce"] = t
    parts = [torch.zeros(2) for _ in range(world)]
    dist.all_gather(parts, mine())
    out["all_gather"] = parts
    t = torch.zeros(2 * world)
    dist.all_gather_single(t, mine())
    out["all_gather_single"] = t
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, f"object {role}")
    out["objects"] = objects
    first, last = min({*range(world)} - {absent}), world - 1
    if role == first:
        dist.send(mine(), last)
    if role == last:
        dist.recv(t := torch.zeros(2), first)
        out["received"] = t
    try:
        dist.send(mine(), absent)
    except FtError as error:
        out["send"] = str(error)
    try:
        dist.all_to_all_single(torch.zeros(world), torch.zeros(world), group=group)
    except FtError as error:
        out["all_to_all"] = str(error)
    return plain(out)


# -- the flight record -----------------------------------------------------------------------------


def write_flight(address: list[int], pipe: Any) -> None:
    """Record operations, whose sizes follow from their numbers, until somebody says that it is enough."""
    recorder = FlightRecorder(0, ControlBlock(SharedMemory.open(address)).flight)
    recorder.begins(1)
    group = recorder.add(GroupId.of((0, 1), 0), (0, 1))
    tensors = [torch.zeros(size) for size in range(50)]
    count = 0
    while not pipe.poll():
        for _ in range(500):
            recorder.end(recorder.begin(group, 1, "allreduce", ([tensors[count % 50]], None)))
            count += 1
        if count == 5000:
            pipe.send("begun")


def own_log(worker: Any) -> FlightLog:
    return read(Recorded(os.getpid(), worker.control), False)


def recorded(worker: Any, in_startup: bool) -> dict[str, Any]:
    """By operation, what is on record of it: kind, bytes, type, peer, group, number."""
    dist.init_process_group("gloo")
    alone = [dist.new_group([role], group_desc="mine") for role in range(2)][worker.role]
    if not in_startup:
        worker.begin_training()
    role, group, other = worker.role, dist.group.WORLD, 1 - worker.role
    t = lambda n=4, dtype=torch.float32: torch.zeros(n, dtype=dtype)  # noqa: E731

    def coalesced(call: Any) -> None:
        with _coalescing_manager(group, async_ops=True) as manager:
            for n in (2, 3):
                call(n)
        manager.wait()

    def both_ways() -> None:
        if role:
            dist.send(t(), other)
        dist.recv(t(), other)
        if not role:
            dist.send(t(), other)

    def batch() -> None:
        ops = [dist.P2POp(dist.isend, t(), other), dist.P2POp(dist.irecv, t(), other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def at_once() -> None:
        for work in [dist.isend(t(), other), dist.irecv(t(), other)]:
            work.wait()

    def dropped() -> None:
        dist.all_reduce(t(), async_op=True)
        end = time.monotonic() + 30
        while any(record.under_way for record in own_log(worker).records) and time.monotonic() < end:
            time.sleep(0.001)

    calls = {
        "all_reduce": lambda: dist.all_reduce(t()),
        "broadcast": lambda: dist.broadcast(t(4, torch.int64), 0),
        "reduce": lambda: dist.reduce(t(4, torch.bfloat16), 1),
        "all_gather": lambda: dist.all_gather([t(), t()], t()),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(t(8), t()),
        "_all_gather_base": lambda: dist._all_gather_base(t(8), t()),
        "reduce_scatter": lambda: dist.reduce_scatter(t(), [t(), t()]),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(t(), t(8)),
        "_reduce_scatter_base": lambda: dist._reduce_scatter_base(t(), t(8)),
        "all_to_all_single": lambda: dist.all_to_all_single(t(), t()),
        "gather": lambda: dist.gather(t(), None if role else [t(), t()], 0),
        "scatter": lambda: dist.scatter(t(), None if role else [t(), t()], 0),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([t(2), t(3)]),
        "coalesced all_reduce": lambda: coalesced(lambda n: dist.all_reduce(t(n))),
        "coalesced all_gather": lambda: coalesced(lambda n: dist.all_gather_into_tensor(t(2 * n), t(n))),
        "coalesced reduce_scatter": lambda: coalesced(lambda n: dist.reduce_scatter_tensor(t(n), t(2 * n))),
        "send and recv": both_ways,
        "isend and irecv": at_once,
        "batch_isend_irecv": batch,
        "recv from any": lambda: dist.send(t(), 0) if role else dist.recv(t()),
        "future": lambda: dist.all_reduce(t(), async_op=True).get_future().wait(),
        "never waited for": dropped,
        "alone": lambda: dist.all_reduce(t(), group=alone),
    }
    did, seen = {}, 0
    for name, call in calls.items():
        call()
        log = own_log(worker)
        names = {each.id: each.name for each in log.groups}
        new, seen = log.records[seen:], len(log.records)
        assert all(record.started <= record.ended <= log.now for record in new), (name, new)
        did[name] = [
            (each.kind, each.nbytes, each.dtype, each.peer, names[each.group], each.number) for each in new
        ]
    labels = {each.name: each.label for each in own_log(worker).groups}
    dist.destroy_process_group()
    return {"did": did, "labels": labels, "after destroy": list(own_log(worker).groups)}


def recorded_apart(worker: Any) -> dict[str, list[bool]]:
    """By what is done with an operation of role 0 that role 1 has not come to: whether it goes on apart."""
    dist.init_process_group("gloo")
    worker.begin_training()
    late = dist.new_group([0, 1])
    alone = dist.new_group([worker.role])
    t = torch.zeros(4)
    dist.all_reduce(t, group=alone)
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, "x" * worker.role, group=late)
    before = [(record.kind, record.apart, record.under_way) for record in own_log(worker).records]
    found: dict[str, Any] = {"before": before}

    def apart() -> list[bool]:
        return [record.apart for record in own_log(worker).records if record.under_way]

    def note(name: str, then: Callable[[], Any], until: list[bool]) -> None:
        waiting = threading.Thread(target=then)
        waiting.start()
        end = time.monotonic() + 30
        while apart() != until and time.monotonic() < end:
            time.sleep(0.001)
        found[name] = apart()
        dist.send(torch.zeros(1), 1)  # role 1 comes
        waiting.join()

    def coalesced() -> Any:
        with _coalescing_manager(late, async_ops=True) as manager:
            for _ in range(2):
                dist.all_reduce(t, group=late)
        return manager

    for name in ("wait", "future", "asked", "several", "coalesced", "both"):
        if worker.role == 1:
            dist.recv(torch.zeros(1), 0)
            if name == "coalesced":
                coalesced().wait()
            else:
                for _ in range(1 + (name == "several")):
                    dist.all_reduce(t, group=late)
            if name == "both":
                dist.send(t, 0)
            continue
        if name == "coalesced":
            works = [coalesced()]
            found["issued"] = apart()
        else:
            works = [dist.all_reduce(t, group=late, async_op=True) for _ in range(1 + (name == "several"))]
        if name == "both":
            works += dist.batch_isend_irecv([dist.P2POp(dist.irecv, t, 1)])
        first = works[0]
        if name == "future":
            first = first.get_future()
        note(name, first.is_completed if name == "asked" else first.wait, [False, True][: len(works)])
        for work in works:
            work.wait()
    return found


def recorded_outside(worker: Any) -> None:
    """Role 0 waits for role 1 to open a group, which it does not."""
    dist.init_process_group("gloo")
    both = dist.new_group([0, 1])
    worker.begin_training()
    while True:
        try:
            worker.tell("memory", worker.epoch, worker.control.memory.address)
            for _ in range(2):
                dist.all_reduce(torch.ones(1))
            if worker.role == 0:
                dist.barrier(group=both)
            worker.tell("alone", worker.epoch)
            threading.Event().wait()
        except EpochChanged:
            worker.next_epoch()


def recorded_mistake(worker: Any) -> list[tuple[str, int, bool]]:
    """Role 0 makes one between two collectives."""
    dist.init_process_group("gloo")
    worker.begin_training()
    dist.all_reduce(torch.ones(1))
    if worker.role == 0:
        with contextlib.suppress(TypeError):
            dist.group.WORLD.broadcast([torch.ones(1)], 7, 9, 11)
    dist.all_reduce(torch.ones(1))
    return [(record.kind, record.number, not record.under_way) for record in own_log(worker).records]


# -- what torch's own groups do --------------------------------------------------------------------


def as_torch(worker: Any, in_startup: bool) -> dict[str, Any]:
    """What scripts get of torch's own groups beside the results of plain collectives."""
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    if not in_startup:
        worker.begin_training()
    role, other = worker.role, 1 - worker.role
    found: dict[str, Any] = {}

    sparse = torch.sparse_coo_tensor([[role, 1]], [1.0, 1.0], (3,), check_invariants=True)
    dist.all_reduce(sparse)
    found["sparse"] = sparse.to_dense()
    embedding = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))
    embedding(torch.tensor([role, 1])).sum().backward()
    found["sparse gradient"] = embedding.module.weight.grad.to_dense()

    received = torch.zeros(2)
    works = [dist.isend(torch.full((2,), float(role)), other), dist.irecv(received, other)]
    for _ in range(2):
        for work in works:
            work.wait()
            work.synchronize()
    found["received"] = received

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2, bias=False))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(1 + role):
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
    found["joined"] = model.module.weight.grad

    functional = all_reduce(torch.full((2,), 1.0 + role), "sum", dist.group.WORLD)
    registered = torch.ones(1)
    torch._C._distributed_c10d._register_work(registered, dist.all_reduce(registered, async_op=True))
    wait_tensor(registered)
    found["functional"] = [functional + 0, registered]

    if role == 0:
        anybodys = dist.irecv(received := torch.zeros(1))
        dist.barrier()
        anybodys.wait()
        found["from any"] = [received, anybodys.source_rank()]
    else:
        dist.barrier()
        dist.send(torch.full((1,), 5.0), 0)

    c10d._set_pg_timeout(timedelta(seconds=7), pair)
    found["time-outs"] = [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in (dist.group.WORLD, pair)
    ]
    dist.all_reduce(torch.ones(1), group=pair)
    dist.destroy_process_group(pair)
    try:
        dist.all_reduce(torch.ones(1), group=pair)
    except ValueError as error:
        found["destroyed"] = type(error).__name__
    dist.barrier()
    return plain(found)


def own_errors(worker: Any, in_startup: bool) -> dict[str, Any]:
    """Role 0 runs into time-outs that its script has set, and both make mistakes that gloo sees in `wait`."""
    dist.init_process_group("gloo")
    short, checked = dist.new_group(timeout=timedelta(seconds=1)), dist.new_group()
    if not in_startup:
        worker.begin_training()
    role, found = worker.role, {}

    def late(name: str, call: Callable[[], Any]) -> None:
        began = time.monotonic()
        with contextlib.suppress(RuntimeError):
            call()
            return
        found[name] = time.monotonic() - began

    one = torch.ones(1)
    for group in (short, checked):
        dist.all_reduce(torch.ones(1), group=group)
    if role == 0:
        work = dist.all_reduce(one, async_op=True)
        late("of a wait", lambda: work.wait(timedelta(seconds=1)))
        late(
            "of a receive", lambda: dist.irecv(one.clone(), 1, group=short).wait(timedelta(milliseconds=500))
        )
        late("of a group that had one", lambda: dist.barrier(group=short))
        late("of a barrier", lambda: dist.monitored_barrier(checked, timedelta(seconds=1)))
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(one)
    late("mistake", lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND))
    dist.all_reduce(torch.ones(1))  # and no barrier: gloo's may raise the mistake before it once more
    return {"seconds": found, "sum": one.item(), "failures": worker.failures}


def detail(worker: Any, in_startup: bool) -> dict[str, Any]:
    """Operations that differ between roles, where torch is told to compare them, and a role that is lost."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo")
    if not in_startup:
        worker.begin_training()
    role, raised = worker.role, []
    one, received = torch.ones(1), torch.zeros(1)
    calls = [
        lambda: dist.all_reduce(torch.ones(4 << role)),
        lambda: dist.broadcast(torch.ones(2), 0) if role else dist.all_reduce(torch.ones(2)),
    ]
    for call in () if worker.newcomer else calls:
        try:
            call()
            raised.append("nothing")
        except RuntimeError as error:
            raised.append(str(error)[:80])
    if worker.newcomer and not in_startup:
        one.fill_(2)
    else:
        dist.all_reduce(one)
        dist.monitored_barrier()
        works = [dist.isend(one, 1 - role), dist.irecv(received, 1 - role)]
        for work in works:
            work.wait()
    if not worker.newcomer:
        if role:
            worker.tell("stopped")
            threading.Event().wait()
        worker.tell("blocked")
    while True:
        try:
            dist.all_reduce(one)
            return {"raised": raised, "sums": [received.item(), one.item()]}
        except EpochChanged:
            worker.next_epoch()
            one.fill_(2)


def shared_store(worker: Any, in_startup: bool) -> dict[str, Any]:
    """Keys of torch's default store and of a group's, before and after role 1 is lost."""
    dist.init_process_group("gloo")
    role, store, found = worker.role, c10d._get_default_store(), {}
    grouped = dist.new_group([0, 1]).get_group_store()
    if not in_startup:
        worker.begin_training()
    store.set(f"of {role}", f"set by {role}")
    grouped.set(f"of {role}", "first")
    grouped.set(f"of {role}", f"in a group by {role}")
    found["mine"] = store.get(f"of {role}")
    if not worker.newcomer:
        found["peer's"] = [store.get(f"of {1 - role}"), grouped.get(f"of {1 - role}")]
        store.add("counter", 1)
        while store.add("counter", 0) < 2:
            time.sleep(0.01)
        found["compared"] = store.compare_set("once", "", f"{role}")
        found["deleted"] = [store.check(["of 0"]), store.check(["nobody's"]), store.delete_key("nobody's")]
        try:
            store.wait(["nobody's"], timedelta(milliseconds=100))
        except dist.DistStoreError as error:
            found["late"] = str(error)
        if role:
            store.wait(["read"])
            worker.tell("stopped")
            threading.Event().wait()
        store.set("read", "")
    else:
        store.set("new", "by the newcomer")
    while True:
        try:
            found["after"] = [store.get("new"), store.get(f"of {1 - role}"), grouped.get(f"of {1 - role}")]
            break
        except EpochChanged:
            worker.next_epoch()
    for name in ("add", "get"):
        try:
            store.add("counter", 1) if name == "add" else store.get("counter")
        except FtError as error:
            found[name] = str(error)
    return found
