"""Computations whose answers are known in advance, to the bit: on each core, or each GPU.

All numbers are small integers, which float32 and bfloat16 hold exactly, as they do every sum on the way: in
whatever order a device adds, its answer is the same. What differs was computed wrongly.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_64_hexdigest

from ft_core.protocol.messages import NodeCheck, Soundness

if TYPE_CHECKING:
    import torch

NAME = "computation"
_CORES = 0.7
"""Seconds, at most, for one core after the other: with very many some are left out."""
_TIMES = 2
"""Each problem is solved so often on a GPU: it is to be warm."""


class Problem(NamedTuple):
    """A product of two matrices, the sums of its first factor's rows, and the running sums of these."""

    dtype: str
    rows: int
    inner: int
    columns: int
    top: int
    """The first factor has integers from -top to top, the second too: no sum exceeds what the type holds."""

    def __str__(self) -> str:
        return f"{self.rows} x {self.inner} x {self.columns} in {self.dtype}"


SMALL = Problem("float32", 96, 256, 64, 3)
MIDDLE = (Problem("float32", 384, 512, 256, 3), Problem("bfloat16", 512, 256, 384, 1))
LARGE = (Problem("float32", 2048, 4096, 2048, 3), Problem("bfloat16", 8192, 256, 8192, 1))

ANSWERS: Mapping[Problem, tuple[str, str, str]] = {
    SMALL: ("621fa52853ba4a72", "2d068e2fd22a13a8", "f67e72df2a6d253f"),
    MIDDLE[0]: ("c0e36ec15641c393", "10491211a26b03ec", "23a862984f5c97d4"),
    MIDDLE[1]: ("4e21a7277fef6920", "7da9640d5fd7caaa", "6d81dbcda188bdf0"),
    LARGE[0]: ("b7205c180dd7d871", "030b2feb71dab75a", "f7552220cfd2a14d"),
    LARGE[1]: ("1fe0f5a2eaf8f0a0", "ce5828e3d4d2ba32", "5562f0c7be910f85"),
}
"""Checksums of the three results, as `solved` has them."""


_BROKEN = re.compile(
    r"(?i)\bECC\b|uncorrectable|illegal memory access|illegal instruction|misaligned address"
    r"|launch failure|launch failed|hardware stack error|device-side assert|is lost|NVLink"
)
"""What errors of a device that is broken say, and no others."""


class DeviceError(Exception):
    """The device itself says that it cannot compute."""


def factor(rows: int, columns: int, top: int, salt: int, device: str) -> torch.Tensor:
    """A matrix of integers, the same everywhere."""
    import torch

    down = torch.arange(rows, dtype=torch.int64, device=device)[:, None]
    along = torch.arange(columns, dtype=torch.int64, device=device)[None, :]
    mixed = (down * 73856093) ^ (along * 19349663) ^ salt
    return (mixed >> 7) % (2 * top + 1) - top


def solved(problem: Problem, device: str) -> tuple[str, str, str]:
    """The checksums of what `device` comes to."""
    import torch

    about = problem.top, 1, device
    dtype = getattr(torch, problem.dtype)
    one = factor(problem.rows, problem.inner, *about).to(dtype)
    other = factor(problem.inner, problem.columns, problem.top, 83492791, device).to(dtype)
    sums = one.sum(dim=1)
    return _checksum(one @ other), _checksum(sums), _checksum(sums.float().cumsum(dim=0))


def _checksum(result: torch.Tensor) -> str:
    """A checksum of all bits; a zero has no sign."""
    import torch

    return xxh3_64_hexdigest((result + 0.0).contiguous().cpu().view(torch.uint8).numpy().data)


def wrong(problem: Problem, device: str) -> str:
    """What of the answer is wrong; empty: nothing. Raises DeviceError."""
    try:
        found = solved(problem, device)
    except RuntimeError as error:
        if device == "cpu" or not _BROKEN.search(str(error)):
            raise  # what another process, a driver that is starting or a setting may be the cause of
        raise DeviceError(str(error).partition("\n")[0]) from error
    parts = zip(("product", "sums", "running sums"), found, ANSWERS[problem], strict=True)
    return ", ".join(
        f"{name} {got} in place of {expected}" for name, got, expected in parts if got != expected
    )


def on_cores() -> Iterator[NodeCheck]:
    """On each core that this process may use, then on whichever the kernel chooses."""
    import torch

    cores, threads, end = sorted(os.sched_getaffinity(0)), torch.get_num_threads(), time.monotonic() + _CORES
    torch.set_num_threads(1)
    seen, bad = 0, dict[str, str]()
    try:
        for core in cores:
            if time.monotonic() > end:
                break
            os.sched_setaffinity(0, {core})
            seen += 1
            if what := wrong(SMALL, "cpu"):
                bad[f"core {core}"] = f"{SMALL}: {what}"
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
    for problem in MIDDLE:
        if what := wrong(problem, "cpu"):
            bad.setdefault("all cores", f"{problem}: {what}")
    yield _said(f"{seen} of {len(cores)} cores, {1 + len(MIDDLE)} problems", bad, -1)


def on_gpu(device: int) -> Iterator[NodeCheck]:
    """On one GPU."""
    name, bad = f"GPU {device}", dict[str, str]()
    try:
        for problem in (SMALL, *MIDDLE, *LARGE) * _TIMES:
            if what := wrong(problem, f"cuda:{device}"):
                bad.setdefault(name, f"{problem}: {what}")
    except DeviceError as error:
        bad[name] = f"it cannot compute: {error}"
    yield _said(f"{name}, {1 + len(MIDDLE) + len(LARGE)} problems", bad, device)


def _said(where: str, bad: Mapping[str, str], device: int) -> NodeCheck:
    if not bad:
        return NodeCheck(NAME, Soundness.OK, where, device=device)
    why = "; ".join(f"{place} computes wrongly: {what}" for place, what in list(bad.items())[:3])
    more = f"; and {len(bad) - 3} more" if len(bad) > 3 else ""
    return NodeCheck(NAME, Soundness.SICK, where, f"{why}{more}", device)
