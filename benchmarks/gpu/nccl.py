"""Row "nccl": communicators that are aborted while a kernel waits for a peer, and opened again, 100 times.

Of one rank here, of two and four in processes of their own, which all use the one device. NCCL refuses two
ranks of a machine on one GPU, but not of two machines: each process gets a host's name of its own
(NCCL_HOSTID), so they meet over sockets. Where it refuses that as well, gloo carries the device's tensors.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.common import ROOT
from benchmarks.gpu.checks import NotThereError, Result, Row, main
from benchmarks.gpu.state import synchronize
from ft_core.comm.inner import Inner
from ft_core.comm.rendezvous_server import Stores
from ft_core.protocol.groups import GroupId

TIMES = 100
GROWTH = 64 << 20
"""Bytes of the device, from the tenth time to the last."""
SETTLED = 10
ALONE = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""The environment of ranks that use nothing but this machine."""
_BUDGET = {1: 25.0, 2: 45.0, 4: 20.0}
"""Seconds for each number of ranks."""


def alone(row: Row, times: int) -> None:
    """A communicator of one rank: made, given work, aborted with the work under way, dropped."""
    backend = "nccl" if row.device == "cuda" else "gloo"
    tensor = torch.ones(1 << 20, device=row.device)
    free: list[int] = []
    aborts: list[float] = []
    end = time.monotonic() + _BUDGET[1]
    while len(aborts) < times and time.monotonic() < end:
        number = len(aborts)
        group = GroupId.of((0,), number)
        devices = {row.device: backend}
        inner = Inner(group, (0,), 0, devices, timedelta(seconds=30), None, number, 0)
        inner.connect(dist.HashStore(), "127.0.0.1")
        if row.device == "cuda":
            torch.cuda._sleep(50_000_000)
        inner.pg.allreduce([tensor])
        began = time.perf_counter()
        inner.wake()
        synchronize(row.device)
        aborts.append(time.perf_counter() - began)
        inner.close()
        free.append(torch.cuda.mem_get_info()[0] if row.device == "cuda" else 0)
    value = (tensor * 2).sum().item()
    told(row, f"{backend}, 1 rank", times, {"aborts": aborts, "free": free, "alive": value == value})


def together(row: Row, world: int, backend: str, device: str, times: int, check: str) -> None:
    """Ranks in processes of their own. Raises NotThereError where NCCL does not open on one device."""
    found = ranks(world, backend, device, times, _BUDGET[world])
    told(row, check, times, found[0] | {"alive": all(f["alive"] for f in found)})


def ranks(world: int, backend: str, device: str, times: int, budget: float) -> list[dict[str, Any]]:
    """What each of them tells in the end; as often as `budget` seconds allow. Raises as `together`."""
    with tempfile.TemporaryDirectory() as scratch:
        secret = secrets.token_bytes(32)
        stores = Stores.in_thread("127.0.0.1", secret)
        flags = [str(world), backend, device, stores.address, str(times), str(budget), scratch]
        processes = []
        for role in range(world):
            env = {**os.environ, **ALONE, "FT_GPU_SECRET": secret.hex(), "NCCL_HOSTID": f"ft-gpu-{role}"}
            command = [sys.executable, "-m", "benchmarks.gpu.nccl_rank", str(role), *flags]
            process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
            processes.append(process)
        errors = _until_over(processes, budget + 30)
        found = [json.loads(p.read_text()) for p in sorted(Path(scratch).glob("rank-*.json"))]
    if len(found) < world:
        reason = _reason(errors)
        if backend == "nccl" and not any("opened once" in text for text in errors):
            raise NotThereError(f"NCCL opens no {world} ranks on one device: {reason}")
        raise RuntimeError(f"{world - len(found)} of {world} ranks did not come to the end: {reason}")
    return found


def for_one_device(device: str) -> str:
    """The backend by which several ranks can use the one device."""
    if device == "cuda":
        try:
            ranks(2, "nccl", device, 0, 5.0)
        except (NotThereError, RuntimeError):
            return "gloo"
        return "nccl"
    return "gloo"


def _until_over(processes: list[subprocess.Popen[str]], seconds: float) -> list[str]:
    """Their stderr. One that fails leaves its peers waiting: they are given some seconds."""
    end = time.monotonic() + seconds
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        if any(p.poll() for p in processes):
            end = min(end, time.monotonic() + 5)
        time.sleep(0.1)
    errors = []
    for process in processes:
        process.kill()
        errors.append(process.communicate()[1])
        sys.stderr.write(errors[-1])
    return errors


def _reason(errors: list[str]) -> str:
    """The last line that says what is wrong."""
    lines = [line for text in errors for line in text.splitlines() if "rror" in line or "WARN" in line]
    return (lines or ["they hung"])[-1].strip()[:120]


def told(row: Row, check: str, times: int, found: dict[str, Any]) -> None:
    """One line for a number of ranks."""
    aborts, free = found["aborts"], found["free"]
    growth = free[min(SETTLED, len(free) - 1)] - free[-1] if free else 0
    figure = (
        f"{len(aborts)} times; abort {statistics.median(aborts) * 1e3:.0f} ms (most {max(aborts) * 1e3:.0f})"
    )
    if reopened := found.get("reopened"):
        figure += f", open again {statistics.median(reopened) * 1e3:.0f} ms"
    figure += f"; {growth / 2**20:+.0f} MiB"
    good: Result | bool = growth <= GROWTH and found["alive"]
    if good and len(aborts) < times:  # no fault of theirs, but not what was to be shown
        good, figure = "seen", f"{figure}; no time for {times}"
    row.tell(check, good, figure, **found, growth_bytes=growth)


def body(row: Row) -> None:
    """All checks of the row."""
    times = 10 if row.quick or row.device == "cpu" else TIMES
    check = "gloo, 2 ranks on the host"
    with row.checking(check):
        together(row, 2, "gloo", "cpu", 10, check)
    row.on_device("1 rank", lambda: alone(row, times))
    for world in (2, 4):
        if row.device == "cpu":
            continue
        check = f"nccl, {world} ranks on one device"
        if not row.walks:
            row.tell(check, "no device")
            continue
        try:
            together(row, world, "nccl", row.device, times if world == 2 else min(times, 20), check)
        except NotThereError as error:
            row.tell(check, "not there", str(error))
            check = f"gloo with CUDA tensors, {world} ranks"
            with row.checking(check):
                together(row, world, "gloo", row.device, min(times, 20), check)
        except RuntimeError as error:
            row.tell(check, "fail", str(error))


if __name__ == "__main__":
    main("nccl", body)
