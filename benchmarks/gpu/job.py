"""Row "job": Megatron-Core trains with two and four roles on the one device, and a worker is killed.

With deterministic kernels the job must end as the undisturbed one does, bit by bit. Then what a newcomer
needs before it can compute, phase by phase: a standby has the first two before it has a role.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import ROOT
from benchmarks.gpu import launched
from benchmarks.gpu.checks import NotThereError, Row, main
from benchmarks.gpu.nccl import for_one_device

SCRIPT = ROOT / "benchmarks" / "gpu" / "pretrain.py"
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2".split()
)
STEPS = 20
LAYOUTS = {
    2: ["--use-distributed-optimizer"],
    4: ["--use-distributed-optimizer", "--tensor-model-parallel-size=2"],
}
_PHASES = """
import sys, time
began = time.perf_counter()
def told(phase):
    print(phase, time.perf_counter() - began, flush=True)
    sys.stdin.readline()
import torch
told("torch imported")
torch.cuda.init()
told("driver")
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
told("context")
a = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16); (a @ a).sum().item()
told("first product")
"""


def body(row: Row) -> None:
    """All checks of the row."""
    backend = for_one_device(row.device) if row.walks else ""
    for world in (2, 4) if row.device != "cpu" else (2,):
        row.on_device(f"{world} roles, one worker killed", lambda w=world: _recovered(row, w, backend))  # type: ignore[misc]
    row.on_device("what a newcomer waits for", lambda: _newcomer(row))


def _recovered(row: Row, world: int, backend: str) -> None:
    flags = [str(SCRIPT), *MODEL, f"--global-batch-size={2 * world}", "--mock-data", f"--train-iters={STEPS}"]
    flags += ["--deterministic-mode", f"--distributed-backend={backend}", "--distributed-timeout-minutes=2"]
    if row.device == "cuda":
        flags.append("--bf16")
    if backend == "nccl" or row.device == "cpu":
        flags += LAYOUTS[world]  # gloo cannot scatter what is on a device
    with tempfile.TemporaryDirectory(prefix="ft-gpu-job-") as scratch:
        check = f"{world} roles over {backend}, one worker killed"
        env = {"PYTHONPATH": _path()}
        launched.recovered(row, check, Path(scratch), world, flags, [*flags, "--ft"], env)


def _path() -> str:
    import os

    return os.environ.get("PYTHONPATH", str(ROOT))


def _newcomer(row: Row) -> None:
    if row.device == "cpu":
        raise NotThereError("a context is a device's")
    process = subprocess.Popen(
        [sys.executable, "-c", _PHASES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    torch.zeros(1, device="cuda")
    before = torch.cuda.mem_get_info()[0]
    found: dict[str, tuple[float, int]] = {}
    last = 0.0
    for line in process.stdout:
        phase, _, seconds = line.rpartition(" ")
        memory = before - torch.cuda.mem_get_info()[0]
        found[phase] = (round(float(seconds) - last, 3), memory)
        process.stdin.write("\n")
        process.stdin.flush()
        last = float(seconds)
    code = process.wait(30)
    figure = ", ".join(f"{phase} {s:.2f} s {m >> 20} MiB" for phase, (s, m) in found.items())
    # A standby has the driver up, and must hold nothing of any device.
    holds = found.get("driver", (0.0, 1 << 40))[1]
    row.tell("what a newcomer waits for", code == 0 and holds < 1 << 20, figure, phases=found)


if __name__ == "__main__":
    main("job", body)
