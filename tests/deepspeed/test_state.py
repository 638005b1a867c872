"""DeepSpeed's state under real engines: interrupted at every collective of a step, restored, compared."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

HERE = Path(__file__).parent

# One launch each: what takes long is importing DeepSpeed.
LAUNCHES: dict[str, tuple[int, list[str]]] = {
    "without-zero": (
        2,
        [
            "stage0-fp32",
            "stage0-fp32-sgd",
            "stage0-fp16-static",
            "stage0-fp16-dynamic",
            "stage0-fp16-fused",
            "stage0-bf16",
            "stage1-bf16-fp32-gradients",
            "stage1-bf16-fp32-gradients-accumulated",
        ],
    ),
    "zero12": (
        2,
        [
            "stage1-fp32",
            "stage1-bf16",
            "stage1-fp32-accumulated",
            "stage2-fp32",
            "stage2-bf16-accumulated",
            "stage2-fp16-dynamic",
            "stage2-overlap",
            "stage2-timers",
            "stage2-offload",
        ],
    ),
    "zero3": (2, ["stage3-fp32", "stage3-bf16-accumulated", "stage3-fp16-dynamic"]),
    "zero3-more": (2, ["stage3-bf16", "stage3-offload"]),
    "three-ranks": (3, ["stage1-bf16", "stage2-overlap"]),
    "pipeline": (2, ["pipeline-fp32", "pipeline-stage1-bf16"]),
}


@functools.cache
def launch(name: str, directory: Path) -> tuple[str, list[dict[str, int | str]]]:
    """Run a launch's cases. Returns what it printed, and each rank's results."""
    ranks, cases = LAUNCHES[name]
    out = directory / name
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    done = subprocess.run(
        [*command, str(HERE / "state_worker.py"), str(out), *cases],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    files = [out.with_suffix(f".{rank}") for rank in range(ranks)]
    return done.stdout, [json.loads(f.read_text()) if f.exists() else {} for f in files]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, (_, cases) in LAUNCHES.items() for case in cases]
)
def test_interrupted_anywhere(name: str, case: str, directory: Path) -> None:
    output, results = launch(name, directory)
    failures = [f"rank {rank}: {r[case]}" for rank, r in enumerate(results) if isinstance(r.get(case), str)]
    assert not failures, "\n".join(failures)
    assert all(case in r for r in results), (
        f"not reached: an earlier case failed, or the launch:\n{output[-3000:]}"
    )
    assert all(r[case] for r in results), "no collective was interrupted"
