"""What the roles of `test_strict.py` do: a GPU's habits, on a host."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from ft_core.comm import process_group, strict
from ft_core.errors import EpochChanged

LARGE = 64 * strict.BUFFER
"""Numbers that no buffer takes."""


def both_ways(worker: Any, rounds: int, lost: int) -> list[float]:
    """In each round all roles send to the next and receive from the one before; in the middle one is lost."""
    dist.init_process_group("gloo")
    role, world = worker.role, worker.world
    worker.begin_training()
    step, received = 0, []
    while step < rounds:
        try:
            if role == lost and step == rounds // 2 and not worker.newcomer:
                worker.tell("stopped")
                threading.Event().wait()
            t = torch.zeros(LARGE)
            ops = [
                dist.P2POp(dist.isend, torch.full((LARGE,), float(role)), (role + 1) % world),
                dist.P2POp(dist.irecv, t, (role - 1) % world),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            received.append(t.mean().item())
            dist.barrier()
            step += 1
        except EpochChanged:
            worker.next_epoch()
            step, received = 0, []
    return received


def all_send_first(worker: Any, lost: int) -> list[float]:
    """A ring of single sends, each of them before the receive, in a group of all; one is lost in it."""
    dist.init_process_group("gloo")
    role, world = worker.role, worker.world
    worker.begin_training()
    received: list[float] = []
    while len(received) < 4:
        try:
            if role == lost and len(received) == 2 and not worker.newcomer:
                worker.tell("stopped")
                threading.Event().wait()
            t = torch.zeros(LARGE)
            given = dist.isend(torch.full((LARGE,), float(role)), (role + 1) % world)
            taken = dist.irecv(t, (role - 1) % world)
            assert given is not None and taken is not None
            given.wait()
            taken.wait()
            received.append(t.mean().item())
            dist.barrier()
        except EpochChanged:
            worker.next_epoch()
            received = []
    return received


def destroyed(worker: Any) -> float:
    """A group is destroyed with an operation pending that the other role comes to later."""
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    dist.barrier(group)
    worker.begin_training()
    t = torch.full((LARGE,), 1.0 + worker.role)
    if worker.role == 1:
        threading.Event().wait(0.5)
    dist.all_reduce(t, group=group)
    dist.destroy_process_group(group)
    return t.mean().item()


def asked_before_first_use(worker: Any) -> float:
    """Role 0 sends in a group that role 1 has made and has not used."""
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    dist.barrier()
    worker.begin_training()
    t = torch.full((LARGE,), 3.0)
    if worker.role == 0:
        work = dist.isend(t, 1, group=group)
        worker.tell("sent")
        work.wait()
    else:
        worker.go.wait()
        t.zero_()
        dist.recv(t, 0, group=group)
    dist.barrier()
    return t.mean().item()


def runs_ahead(worker: Any) -> dict[str, Any]:
    """Role 1 comes late, and role 0 is told by nobody but what it reads."""
    dist.init_process_group("gloo")
    worker.begin_training()
    dist.barrier()
    t = torch.ones(4)
    if worker.role == 1:
        worker.go.wait()
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    out: dict[str, Any] = {"done": work.is_completed(), "view": list(t[1:].shape)}
    if worker.role == 0:
        worker.tell("ahead")
    out["value"] = (t + 1).tolist()
    out["done at the end"] = work.is_completed()
    return out


def aborted(worker: Any) -> dict[str, Any]:
    """Role 1 is lost. What role 0 waits for ends with garbage, and what it issues is refused."""
    dist.init_process_group("gloo")
    worker.begin_training()
    if worker.role == 1:
        if not worker.newcomer:
            dist.barrier()
            worker.tell("stopped")
            threading.Event().wait()
    else:
        dist.barrier()
        t, index = torch.ones(4), torch.zeros(2, dtype=torch.int64)
        dist.all_reduce(t)
        dist.broadcast(index, 1)
        worker.tell("blocked")
        garbage = [t.tolist()[0], index.tolist()[0]]
        try:
            with _coalescing_manager(dist.group.WORLD, torch.device("cpu"), async_ops=True):
                dist.all_reduce(t)
        except EpochChanged:
            garbage.append("told")
        worker.next_epoch()
    t = torch.ones(2)
    dist.all_reduce(t)
    return {"garbage": garbage if worker.role == 0 else None, "sum": t.tolist(), "left": len(strict.running)}


def in_start_up(worker: Any, lost: int) -> dict[str, Any]:
    """Each role has a part of a reduce-scatter to itself, in start-up; one is lost after all have issued it,
    and before it has ended."""
    dist.init_process_group("gloo")
    dist.barrier()
    t = torch.zeros(LARGE)
    if worker.role == lost and not worker.newcomer:
        worker.tell("stopped")
        threading.Event().wait()
    if not worker.newcomer:
        worker.tell("issues")
    dist.reduce_scatter_single(t, torch.ones(LARGE * worker.world))
    batch = torch.zeros(LARGE)
    peer = worker.role ^ 1
    ops = [dist.P2POp(dist.isend, torch.full((LARGE,), 7.0), peer), dist.P2POp(dist.irecv, batch, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    worker.begin_training()
    dist.barrier()
    return {"part": t.unique().tolist(), "batch": batch.unique().tolist()}


def link_fails(worker: Any) -> str:
    """The link of role 1 fails in an operation, while both roles live."""
    dist.init_process_group("gloo")
    worker.begin_training()
    t = torch.ones(2)
    reasons: list[str] = []
    said = threading.Event()

    def hung(reason: str, by_link: bool) -> None:
        assert by_link
        reasons.append(reason)
        said.set()

    worker.comms.hung, worker.comms._grace = hung, 0.1
    dist.all_reduce(t)
    dist.all_reduce(t)
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    if worker.role == 1:
        assert said.wait(30)
        return reasons[0] + f", completed: {work.is_completed()}"
    return ""


def held_back(worker: Any) -> list[int] | None:
    """Role 1 comes late, and is lost the second time. How many operations role 0 had queued at most: first
    those that it waits for later, then those that its stream waits for."""
    dist.init_process_group("gloo")
    worker.begin_training()
    if worker.newcomer:
        dist.barrier()
        return None
    dist.barrier()
    if worker.role == 1:
        worker.go.wait()
        for _ in range(1000):
            dist.all_reduce(torch.ones(1))
        worker.tell("stopped")
        threading.Event().wait()
    most, over = 0, threading.Event()

    def looks() -> None:
        nonlocal most
        while not over.wait(0.001):
            most = max(most, len(strict.running))

    looking = threading.Thread(target=looks)
    looking.start()
    threading.Timer(1, worker.tell, ["held"]).start()
    for work in [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(1000)]:
        work.wait()
    strict.training.settle()
    found, most = [most], 0
    worker.tell("goes on")
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(1))
    except EpochChanged:
        worker.next_epoch()
    over.set()
    looking.join()
    dist.barrier()
    return [*found, most]


def connects_again(worker: Any) -> list[float]:
    """The members have met, and one of them never comes out of connecting."""
    process_group.OPENED = 1.0
    dist.init_process_group("gloo")
    worker.begin_training()
    while True:
        try:
            t = torch.ones(2)
            dist.all_reduce(t)
            return t.tolist()
        except EpochChanged:
            worker.next_epoch()
