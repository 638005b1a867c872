"""Row "snapshot": what a snapshot of every step costs a GPU: its link, its time, its memory.

Bandwidth: the copies that the engine's thread makes on its own stream, against one bare copy into pinned
memory that torch allocates. Time: blocks of steps with snapshots (X) stand between blocks without (O). One
that is only called so (A) is the control. Each is divided by the mean of its two neighbours, so slow drift
cancels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.checks import Row, main
from benchmarks.gpu.state import Copying, Tensors, synchronize

GB = 10**9
AIM_BANDWIDTH, AIM_TIME, AIM_MEMORY = 0.9, 1.01, 64 << 20
SIZES = (256 << 20, 64 << 20, 1 << 20, 4 << 10)
"""Bytes of tensors, in turns, as a model with its optimizer has them."""


def bare(row: Row, nbytes: int) -> float:
    """Bytes a second of a plain copy into pinned memory, the best of five."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=row.device)
    to = torch.empty(nbytes, dtype=torch.uint8, pin_memory=row.device == "cuda")
    seconds = []
    for _ in range(5):
        synchronize(row.device)
        began = time.perf_counter()
        to.copy_(source, non_blocking=True)
        synchronize(row.device)
        seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds)


def tensors_of(row: Row, total: int) -> dict[str, torch.Tensor]:
    """`total` bytes of state."""
    found: dict[str, torch.Tensor] = {}
    left, sizes = total, SIZES if row.device == "cuda" else SIZES[2:]
    while left > 0:
        nbytes = min(left, sizes[len(found) % len(sizes)])
        found[f"t{len(found)}"] = torch.ones(nbytes, dtype=torch.uint8, device=row.device)
        left -= nbytes
    return found


def bandwidth(row: Row, check: str, total: int, limit: float) -> None:
    """Of the state's copy, and of all that staging it takes."""
    state = tensors_of(row, total)
    copying = Copying(Tensors(lambda: state))
    # The first of each buffer locks its pages. Where two would be most of the machine's memory, one is used.
    versions = 4 if total <= 8 * GB else 1
    staged = [copying.whole(version) for version in range(versions)]
    if row.device == "cpu":  # there it is copied piece by piece, with the checksums
        copying.copied = staged
    rate = total / statistics.median(copying.copied[-2:])
    figure = f"{rate / GB:.1f} GB/s, {rate / limit:.0%} of a bare copy"
    figure += f"; with checksums {total / staged[-1] / GB:.1f} GB/s"
    data = {
        "bytes": total,
        "bytes_per_second": rate,
        "bare_bytes_per_second": limit,
        "staged_seconds": staged,
    }
    row.tell(check, rate >= AIM_BANDWIDTH * limit or row.device == "cpu", figure, **data)


class Training:
    """Layers as wide as a GPU needs to be busy, bf16, fp32 Adam beside, and snapshots that can be off."""

    def __init__(self, row: Row) -> None:
        torch.manual_seed(0)
        big = row.device == "cuda"
        self._device, self.width = row.device, 4096 if big else 64
        self._passes, self._tokens = (4 if row.quick else 12, 16384) if big else (1, 64)
        depth = 16 if big else 2
        layers = [torch.nn.Linear(self.width, self.width, bias=False) for _ in range(depth)]
        self.model = torch.nn.Sequential(*layers).to(device=row.device, dtype=torch.bfloat16)
        self.main = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.optimizer = torch.optim.Adam(self.main, lr=1e-5, fused=big)
        shape = (self._tokens, self.width)
        self.inputs = torch.randn(shape, device=row.device, dtype=torch.bfloat16)
        self.version = 0
        self._step(None)
        self.copying = Copying(Tensors(self.tensors))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, main parameters, moments."""
        found = {f"p{i}": p.detach() for i, p in enumerate(self.model.parameters())}
        for i, own in enumerate(self.main):
            found[f"main{i}"] = own.detach()
            found |= {f"{k}{i}": v for k, v in self.optimizer.state[own].items() if torch.is_tensor(v)}
        return found

    def _step(self, copying: Copying | None) -> None:
        for _ in range(self._passes):
            out = self.inputs
            for layer in self.model:
                out = torch.nn.functional.gelu(layer(out))
            out.float().square().mean().backward()
        if copying is not None:
            copying.snapshotter.wait()  # as the commit wait does
        # In every kind of step, as `Session.optimizer_begins` does.
        synchronize(self._device)
        for own, parameter in zip(self.main, self.model.parameters(), strict=True):
            assert parameter.grad is not None
            own.grad = parameter.grad.float()
            parameter.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for own, parameter in zip(self.main, self.model.parameters(), strict=True):
                parameter.copy_(own)
                own.grad = None
        if copying is not None:
            self.version += 1
            copying.snapshotter.stage(self.version)

    def block(self, kind: str, steps: int) -> float:
        """Seconds of a block. Its first step is not counted: it carries what the block before has left."""
        copying = self.copying if kind == "X" else None
        self._step(copying)
        synchronize(self._device)
        began = time.perf_counter()
        for _ in range(steps):
            self._step(copying)
        synchronize(self._device)
        seconds = time.perf_counter() - began
        self.copying.snapshotter.wait()
        return seconds


def step_time(row: Row) -> None:
    """Two checks: time, and memory of the device."""
    training = Training(row)
    steps = 2 if row.quick or row.device == "cpu" else 4
    training.block("O", steps)
    free, peak = _memory(row)
    training.block("X", steps)
    training.block("X", steps)
    free_with, peak_with = _memory(row)
    used = max(free - free_with, peak_with - peak)
    row.tell("device memory", used <= AIM_MEMORY, f"{used / 2**20:.0f} MiB more with snapshots", bytes=used)
    pattern = "OXOAO" if row.quick or row.device == "cpu" else "OXOAOXOAOXOAO"
    seconds = [training.block(kind, steps) for kind in pattern]
    ratios: dict[str, list[float]] = {"X": [], "A": []}
    for i in range(1, len(pattern) - 1):
        if pattern[i] != "O":
            ratios[pattern[i]].append(2 * seconds[i] / (seconds[i - 1] + seconds[i + 1]))
    ratio, control = statistics.median(ratios["X"]), statistics.median(ratios["A"])
    nbytes = sum(t.numel() * t.element_size() for t in training.tensors().values())
    plain = statistics.median(s for s, kind in zip(seconds, pattern, strict=True) if kind == "O") / steps
    figure = f"x {ratio:.4f} (control {control:.4f}); {plain:.2f} s a step, {nbytes / GB:.1f} GB of state"
    data = {
        "ratios": ratios,
        "seconds": seconds,
        "pattern": pattern,
        "steps_per_block": steps,
        "bytes": nbytes,
    }
    row.tell("step time", ratio <= AIM_TIME or row.device == "cpu", figure, **data)


def _memory(row: Row) -> tuple[int, int]:
    """Bytes: free on the device, and the most that torch has reserved there."""
    if row.device != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0], torch.cuda.memory_stats()["reserved_bytes.all.peak"]


def body(row: Row) -> None:
    """All checks of the row."""
    row.on_device("step time", lambda: step_time(row))
    if row.device == "none":
        row.tell("device memory", "no device")
    if row.device == "cuda":
        torch.cuda.empty_cache()
    limit = bare(row, GB if row.device == "cuda" else 8 << 20) if row.walks else 0.0
    totals = {"1 GB": GB} if row.quick else {"1 GB": GB, "8 GB": 8 * GB, "32 GB": 32 * GB}
    for name, total in totals.items() if row.device != "cpu" else [("16 MB", 16 << 20)]:
        check = f"copy of {name}"
        row.on_device(check, _measured(row, check, total, limit))
        if row.device == "cuda":
            torch.cuda.empty_cache()


def _measured(row: Row, check: str, total: int, limit: float) -> Callable[[], Any]:
    return lambda: bandwidth(row, check, total, limit)


if __name__ == "__main__":
    main("snapshot", body)
