"""Proves on one GPU what the engine does with CUDA and NCCL: `python -m benchmarks.gpu [--quick]`.

Each row runs in a process of its own with a time limit, so that one that crashes or hangs costs no other. All
of them take less than ten minutes. Without a device the checks that need none are made, the others say so,
and nothing is written. Exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, ROOT, about, environment
from benchmarks.gpu.checks import Check, available, read
from ft_core.comm import nccl_environment

LIMITS = {
    "software": 15,
    "first": 90,
    "snapshot": 115,
    "consistency": 70,
    "nccl": 110,
    "job": 90,
    "compiled": 45,
    "zero": 60,
}
"""Row -> seconds, in this order. What is started is `benchmarks.gpu.ROW`. Together less than ten minutes."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: to see that it works, not to quote"
    )
    parser.add_argument("--only", action="append", choices=LIMITS, help="this row (may be given repeatedly)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu", "none"), default=available(), help="cpu: walk the same code there"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json", help="where a device's results go")
    args = parser.parse_args(argv)
    rows = args.only or list(LIMITS)
    checks: list[Check] = []
    took: dict[str, float] = {}
    for row in rows:
        print(f"{row} ...", file=sys.stderr, flush=True)
        began = time.monotonic()
        checks += run(row, args.device, args.quick)
        took[row] = round(time.monotonic() - began, 1)
    print(text(checks))
    if args.device == "cuda":
        write(args.out, checks, took, args)
    else:
        print(f"\nnothing is written: device {args.device}", file=sys.stderr)
    return int(any(check.result == "fail" for check in checks))


def run(row: str, device: str, quick: bool) -> list[Check]:
    """A row in a process group of its own, all of which ends with it."""
    with tempfile.TemporaryDirectory(prefix=f"ft-gpu-{row}-") as scratch:
        out = Path(scratch) / "checks"
        command = [sys.executable, "-m", f"benchmarks.gpu.{row}", f"--device={device}", f"--out={out}"]
        env = {**environment(), "TMPDIR": scratch}
        # The row's own groups are the engine's workers'. A monitor that would end one does it within the row.
        env |= nccl_environment.completed(os.environ) | {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        process = subprocess.Popen(
            [*command, *["--quick"] * quick], cwd=ROOT, env=env, stdout=sys.stderr, start_new_session=True
        )
        late = False
        try:
            code = process.wait(LIMITS[row])
        except subprocess.TimeoutExpired:
            late = True
        _end(process)
        checks = read(out)
    if late:
        checks.append(Check(row, "ends", "fail", f"not within {LIMITS[row]} s"))
    elif code:
        checks.append(Check(row, "ends", "fail", f"exit code {code}"))
    elif not checks:
        checks.append(Check(row, "ends", "fail", "it has told nothing"))
    return checks


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a row: the processes of its session, which those that it starts are in."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == process.pid:
                os.kill(int(path.parent.name), signal.SIGKILL)
        except (OSError, IndexError):  # it has ended
            continue
    process.wait()


def text(checks: list[Check]) -> str:
    """The table."""
    lines = [("row", "check", "result", "figure"), *((c.row, c.check, c.result, c.figure) for c in checks)]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    rows = ["  ".join([*map(str.ljust, line, widths), line[3]]).rstrip() for line in lines]
    return "\n".join([rows[0], "-" * max(map(len, rows)), *rows[1:]])


def write(path: Path, checks: list[Check], took: dict[str, float], args: argparse.Namespace) -> None:
    """What was measured, and on what. A run of some rows replaces those."""
    done: dict[str, Any] = {}
    if args.only and path.exists():
        done = json.loads(path.read_text())
    kept = [c for c in done.get("checks", []) if c["row"] not in took]
    order = list(LIMITS)
    rows = sorted([*kept, *(vars(c) for c in checks)], key=lambda c: order.index(c["row"]))
    device = torch.cuda.get_device_properties(0)
    full = {
        "benchmark": "gpu",
        **about(),
        "command": "python -m benchmarks.gpu" + " --quick" * args.quick,
        "device": {
            "name": device.name,
            "memory_gib": round(device.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        },
        "seconds": done.get("seconds", {}) | took,
        "checks": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(full, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
