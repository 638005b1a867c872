"""Row "first": what would end every job of several GPUs, each check within 20 seconds.

Two ranks share the one device, as in row "nccl"; without one, they run under NCCL's rules on the host
(`ft_core.comm.strict`). A check that hangs is ended, and has failed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from benchmarks.gpu.checks import NotThereError, Row, main
from benchmarks.gpu.first_rank import WORLD
from benchmarks.gpu.nccl import ALONE
from benchmarks.gpu.snapshot import tensors_of
from benchmarks.gpu.state import Copying, Tensors, synchronize
from ft_core.comm.rendezvous_server import Stores
from ft_core.state.device_copy import PIECE, PIECES, locked

LIMIT = 20.0
GB = 10**9
CHECKS = {
    "both_ways": "batches of both directions",
    "late": "single sends, one rank late",
    "newcomer_joins": "the same with a newcomer",
    "batch_is_cut": "an epoch ends inside a batch",
    "queue_is_full": "abort behind 2,000 launches",
    "peer_dies": "a peer is killed, and nobody tells",
    "gathers": "results that were waited for",
}
"""Method of `first_rank.Rank` -> what it is called."""


def ranks(row: Row, check: str) -> list[dict[str, Any]]:
    """What each rank tells, fewer where some do not come to the end."""
    with tempfile.TemporaryDirectory() as scratch:
        secret = secrets.token_bytes(32)
        stores = Stores.in_thread("127.0.0.1", secret)

        def started(role: int, epoch: int) -> subprocess.Popen[bytes]:
            env = {**os.environ, **ALONE, "FT_GPU_SECRET": secret.hex(), "NCCL_HOSTID": f"ft-gpu-{role}"}
            flags = ["nccl", "cuda"] if row.device == "cuda" else ["gloo", "cpu"]
            if row.device == "cpu":
                env["FT_COMM"] = "strict"
            command = [sys.executable, "-m", "benchmarks.gpu.first_rank", check, str(role), *flags]
            return subprocess.Popen([*command, stores.address, str(epoch), scratch], cwd=ROOT, env=env)

        processes = [started(role, 1) for role in range(WORLD)]
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and any(p.poll() is None for p in processes):
            if check == "newcomer_joins" and len(processes) == WORLD and processes[1].poll() is not None:
                processes.append(started(1, 2))
            time.sleep(0.05)
        for process in processes:
            process.kill()
            process.wait()
        return [json.loads(path.read_text()) for path in sorted(Path(scratch).glob("rank-*.json"))]


def together(row: Row, check: str, name: str) -> None:
    """One check of two ranks."""
    found = ranks(row, check)
    wanted = 1 if check == "peer_dies" else WORLD
    if len(found) < wanted:
        row.tell(
            name, False, f"{wanted - len(found)} of {wanted} ranks did not come to the end in {LIMIT:g} s"
        )
        return
    about = {
        key: value for each in found for key, value in each.items() if key != "good" and value is not None
    }
    figure = ", ".join(f"{key} {value:.2f}" for key, value in about.items() if isinstance(value, float))
    row.tell(name, all(each["good"] for each in found), figure, ranks=found)


def locking(row: Row) -> None:
    """To lock 1 GB of memory, and the pieces that copies go through."""
    if row.device == "cpu":
        raise NotThereError("memory is locked for a device only")
    began = time.perf_counter()
    pieces = locked(PIECES * PIECE)
    middle = time.perf_counter()
    memory = mmap.mmap(-1, GB)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = int(torch.cuda.cudart().cudaHostRegister(at, GB, 0))
    whole = time.perf_counter() - middle
    torch.cuda.cudart().cudaHostUnregister(at)
    figure = f"{PIECES} pieces {middle - began:.3f} s; 1 GB {whole:.3f} s"
    row.tell("locking memory", "seen" if code == 0 and pieces.is_pinned() else "fail", figure)


def small_copies(row: Row) -> None:
    """How long a copy of 4 KiB takes, without and beside a snapshot."""
    if row.device == "cpu":
        raise NotThereError("there is no link")
    state = tensors_of(row, (1 if row.quick else 8) * GB)
    copying, source = Copying(Tensors(lambda: state)), torch.ones(1024, device=row.device)
    to = locked(4096).view(torch.float32)

    def milliseconds() -> float:
        began = time.perf_counter()
        to.copy_(source, non_blocking=True)
        synchronize(row.device)
        return (time.perf_counter() - began) * 1e3

    copying.whole(1)
    alone = [milliseconds() for _ in range(200)]
    copying.snapshotter.stage(2)
    beside = []
    while (staging := copying.snapshotter._staging) is not None and not staging.done():
        beside.append(milliseconds())
    copying.snapshotter.wait()
    figure = f"{statistics.median(alone):.3f} ms, beside one {statistics.median(beside or alone):.3f} ms"
    row.tell("small copies beside a snapshot", "seen", f"{figure} (most {max(beside or alone):.2f} ms)")


def body(row: Row) -> None:
    """All checks of the row."""
    for check, name in CHECKS.items():
        row.on_device(name, lambda check=check, name=name: together(row, check, name))  # type: ignore[misc]
    row.on_device("locking memory", lambda: locking(row))
    row.on_device("small copies beside a snapshot", lambda: small_copies(row))


if __name__ == "__main__":
    main("first", body)
