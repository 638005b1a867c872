"""One rank of row "first": which check, role, backend, device, store, epoch, and where to report."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.gpu.state import synchronize
from ft_core.comm import backend
from ft_core.comm.process_group import Communicators
from ft_core.errors import EpochChanged

WORLD, LATE = 2, 1.0
"""Ranks; seconds that one comes late."""
LAUNCHES, GATHERS = 2000, 200


class Rank:
    """This process, and what it knows."""

    def __init__(self) -> None:
        _, check, role, self.backend, self.device, self.store, epoch, self.out = sys.argv
        self.role, self.peer, self.newcomer = int(role), 1 - int(role), epoch != "1"
        self.megabytes = 64 if self.device == "cuda" else 1
        self.failures: list[float] = []
        secret = bytes.fromhex(os.environ.pop("FT_GPU_SECRET"))
        self.comms = Communicators(self.role, WORLD, self._failed, secret, failure_grace=20.0)
        if self.device == "cuda":
            torch.cuda.set_device(0)
        backend.install(self.comms)
        self.comms.swap(int(epoch), self.store)
        dist.init_process_group(self.backend, rank=self.role, world_size=WORLD, timeout=timedelta(seconds=60))
        self.comms.end_startup()
        self.check = check

    def _failed(self, reason: str, by_link: bool = False) -> None:
        self.failures.append(time.monotonic())

    def tensor(self, megabytes: int = 0, value: float = 0.0) -> torch.Tensor:
        """So large, on the device."""
        return torch.full(((megabytes or self.megabytes) << 18,), value, device=self.device)

    def next_epoch(self) -> None:
        """As a worker does after `EpochChanged`."""
        self.comms.abort(self.comms.epoch + 1)
        self.comms.reset()
        self.comms.swap(self.comms.aborted, self.store, newcomers=[1])

    def both_ways(self) -> dict[str, Any]:
        """Batches of a send and a receive each, as a pipeline's neighbours have them."""
        good = True
        for _ in range(5):
            got = self.tensor()
            mine = self.tensor(value=self.role + 1.0)
            ops = [dist.P2POp(dist.isend, mine, self.peer), dist.P2POp(dist.irecv, got, self.peer)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            good &= got.mean().item() == self.peer + 1
        return {"good": good}

    def late(self) -> dict[str, Any]:
        """Single sends in turns; one rank comes late to each."""
        good = True
        for turn in range(3):
            time.sleep(LATE * self.role)
            tensor = self.tensor(value=turn + 1.0)
            if turn % 2 == self.role:
                dist.send(tensor, self.peer)
            else:
                dist.recv(tensor.zero_(), self.peer)
            good &= tensor.mean().item() == turn + 1
        return {"good": good}

    def newcomer_joins(self) -> dict[str, Any]:
        """The other rank is lost in an exchange, and another process takes its place."""
        if not self.newcomer:
            dist.all_reduce(self.tensor())
            synchronize(self.device)
            if self.role:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.5)
            self.next_epoch()
        began = time.perf_counter()
        found = self.both_ways() | self.late()
        return found | {"seconds": time.perf_counter() - began}

    def peer_dies(self) -> dict[str, Any]:
        """Nobody tells of it: how long until the engine notices, if ever."""
        dist.all_reduce(self.tensor())
        synchronize(self.device)
        if self.role:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        threading.Timer(10.0, self.comms.abort, (self.comms.epoch + 1,)).start()
        try:
            dist.all_reduce(self.tensor())
            synchronize(self.device)
            dist.barrier()
        except EpochChanged:
            pass
        noticed = self.failures[0] - began if self.failures else None
        return {"good": True, "noticed_s": noticed, "left_s": time.monotonic() - began}

    def queue_is_full(self) -> dict[str, Any]:
        """The host has run far ahead behind an exchange that a peer does not come to, and is woken."""
        dist.barrier()
        if self.role:
            time.sleep(3.0)
            return {"good": True}
        when: list[float] = []

        def abort() -> None:
            when.append(time.monotonic())
            self.comms.abort(2)

        threading.Timer(1.0, abort).start()
        value, small = self.tensor(), torch.ones(16, device=self.device)
        try:
            dist.all_reduce(value)
            for _ in range(LAUNCHES):
                value[:16] += 1
                dist.all_reduce(small, async_op=True)
            synchronize(self.device)
            dist.barrier()
        except EpochChanged:
            pass
        return {"good": bool(when), "left_s": time.monotonic() - when[0] if when else None}

    def batch_is_cut(self) -> dict[str, Any]:
        """An epoch ends inside a batch; in the next one operations are launched as ever."""
        dist.barrier()
        group: Any = dist.group.WORLD
        cut = False
        try:
            with group.together(torch.device(self.device)):
                dist.isend(self.tensor(), self.peer)
                self.comms.abort(2)
        except EpochChanged:
            cut = True
        self.next_epoch()
        return self.both_ways() | {"cut": cut}

    def gathers(self) -> dict[str, Any]:
        """Many results, each dropped once it was waited for: how many there are at once."""
        given, size = self.tensor(), WORLD * self.megabytes << 20
        dist.barrier()
        synchronize(self.device)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in range(GATHERS):
            out = torch.empty(WORLD * given.numel(), device=self.device)
            dist.all_gather_single(out, given, async_op=True).wait()
            del out
        synchronize(self.device)
        at_once = (torch.cuda.max_memory_allocated() - before) / size if self.device == "cuda" else 0.0
        return {"good": at_once < 8, "at_once": at_once}


def main() -> None:
    """Do the check, report, stay until the other has as well."""
    rank = Rank()
    found = getattr(rank, rank.check)()
    path = Path(rank.out) / f"rank-{rank.role}.json"
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)
    other = path.with_name(f"rank-{rank.peer}.json")
    end = time.monotonic() + 20
    while not other.exists() and time.monotonic() < end and rank.check != "peer_dies":
        time.sleep(0.05)
    os._exit(0)


if __name__ == "__main__":
    main()
