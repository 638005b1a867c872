"""A GPU for a worker that takes over: what it can have before it has a role, and memory that is free again.

A process that was killed is gone, and its pid (`worker.predecessor_cleanup`), but the driver may still be at
taking its memory back. A successor that needs all of the device would find it full.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ft_core.state.memory import ControlBlock, Word

log = logging.getLogger(__name__)

LIMIT = 20.0
"""Seconds."""
_POLL = 0.05


def warm(device: int) -> None:
    """Before this worker has a role: a context on the GPU `device`, or with -1, where it may be any, the
    driver alone. A context takes some hundred megabytes of a GPU, so a standby has none on each of them."""
    if device < 0:
        torch.cuda.init()
        return
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")


def choose(device: int) -> None:
    """From now on this worker uses the GPU `device`, if there is one of that number."""
    if device < torch.cuda.device_count():
        torch.cuda.set_device(device)


def tell(control: ControlBlock) -> None:
    """Have the agent know what this worker, which has started a role ahead of need, leaves of its GPU."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    control[Word.DEVICE_FREE], control[Word.DEVICE_MEMORY] = free, total


def wait(role: int, device: int) -> None:
    """Until the workers that have ended on the GPU `device` hold none of its memory, for `LIMIT` at most."""
    if device >= torch.cuda.device_count():
        return  # the script has its own idea of which one
    warm(device)
    given_back(role, device, lambda: torch.cuda.mem_get_info(device)[0], lambda: holders(device))


def given_back(
    role: int, device: int, free: Callable[[], int], pids: Callable[[], set[int] | None], limit: float = LIMIT
) -> bool:
    """Whether it was within `limit` seconds. `free`: bytes; `pids`: of those who hold memory, None where that
    cannot be told. Then what is free must not grow any more."""
    began = time.monotonic()
    before = first = free()
    while True:
        ended = {pid for pid in pids() or () if not Path(f"/proc/{pid}").exists()}
        time.sleep(_POLL)
        now = free()
        waited = time.monotonic() - began
        if not ended and now <= before:
            if now > first:
                log.info(
                    "role %d waited %.1f s for %d MB of GPU %d that ended workers had held",
                    *(role, waited, (now - first) >> 20, device),
                )
            return True
        if waited > limit:
            who = f"processes {sorted(ended)} hold" if ended else "it is still being given back:"
            log.warning(
                "role %d: after %.0f s GPU %d is not free of its former workers, %s memory; %d MB are free. "
                "If the script runs out of memory, reset the device or drain this node",
                *(role, waited, device, who, now >> 20),
            )
            return False
        before = now


def holders(device: int) -> set[int] | None:
    """Processes that have a context on the GPU, by NVML. None if it does not say, or has other pids."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        # CUDA_VISIBLE_DEVICES counts for torch, not for NVML.
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device))
        pids = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    except (pynvml.NVMLError, RuntimeError):
        return None
    return pids if os.getpid() in pids else None
