"""One rank of row "nccl": role, ranks, backend, device, store, times, seconds, and where to report."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from benchmarks.gpu.state import synchronize
from ft_core.comm import backend
from ft_core.comm.process_group import Communicators
from ft_core.errors import EpochChanged

STUCK = 0.05
"""Seconds that a kernel has waited for its peers when it is aborted."""


def main() -> None:
    """Open, exchange, get stuck, abort; again and again. The last epoch's exchange ends it for all alike."""
    role, world, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
    store, times, seconds, out = sys.argv[5], int(sys.argv[6]), float(sys.argv[7]), Path(sys.argv[8])
    if device == "cuda":
        torch.cuda.set_device(0)
    secret = bytes.fromhex(os.environ.pop("FT_GPU_SECRET"))
    comms = Communicators(role, world, lambda reason: None, secret, failure_grace=20.0)
    backend.install(comms)
    comms.swap(1, store)
    dist.init_process_group(sys.argv[3], rank=role, world_size=world, timeout=timedelta(seconds=60))
    comms.end_startup()
    aborts: list[float] = []
    reopened: list[float] = []
    free: list[int] = []
    alive = True
    end = time.monotonic() + seconds
    while True:
        began = time.perf_counter()
        # Role 0 says to all whether it goes on.
        more = float(len(aborts) < times and time.monotonic() < end) if role == 0 else 0.0
        value = torch.tensor([1.0, more], device=device)
        dist.all_reduce(value)
        total, goes_on = value.tolist()
        alive &= total == world
        if len(aborts) == 0:
            print("opened once", file=sys.stderr, flush=True)
        else:
            reopened.append(time.perf_counter() - began)
        free.append(torch.cuda.mem_get_info()[0] if device == "cuda" else 0)
        if not goes_on:
            break
        aborts.append(stuck(comms, role, device))
        comms.reset()
        comms.swap(comms.aborted, store)
    alive &= torch.ones(1 << 20, device=device).sum().item() == 1 << 20
    report = {"aborts": aborts, "reopened": reopened, "free": free, "alive": alive}
    path = out / f"rank-{role}.json"
    path.with_suffix(".part").write_text(json.dumps(report))
    path.with_suffix(".part").rename(path)
    dist.all_reduce(torch.ones(1, device=device))
    synchronize(device)
    os._exit(0)


def stuck(comms: Communicators, role: int, device: str) -> float:
    """Role 0 waits for peers that do not come, until the epoch is over. Returns the seconds that took."""
    epoch = comms.epoch + 1
    if role:
        time.sleep(STUCK)
        comms.abort(epoch)
        return 0.0
    when: list[float] = []

    def abort() -> None:
        time.sleep(STUCK)
        when.append(time.perf_counter())
        comms.abort(epoch)

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        dist.all_reduce(torch.ones(1 << 20, device=device))
        synchronize(device)
    except EpochChanged:
        pass
    synchronize(device)
    freed = time.perf_counter()
    thread.join()
    return max(0.0, freed - when[0])


if __name__ == "__main__":
    main()
