"""Programs on ranks of torchrun's that try one case after the other, and write down what came of each."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness import ROOT, environment


def run_cases(
    worker: Path, ranks: int, cases: str, out: Path, timeout: float = 110
) -> tuple[str, list[dict[str, int | str]]]:
    """A program that calls `run_each`, with the results of each rank in `out`.RANK.

    Returns what it printed, and by rank the results: case -> what was compared, or a traceback.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    variables = environment() | {"DS_ACCELERATOR": "cpu"}
    variables["PYTHONPATH"] += f":{ROOT / 'tests'}"
    done = subprocess.Popen(
        [*command, str(worker), str(out), *cases.split()],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = done.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        done.terminate()  # torchrun ends its ranks then, and not when it is killed
        printed, _ = done.communicate()
    files = [out.with_suffix(f".{rank}") for rank in range(ranks)]
    return printed, [json.loads(f.read_text()) if f.exists() else {} for f in files]


def check_cases(worker: Path, ranks: int, cases: str, out: Path) -> None:
    """The same, and every case is as it should be on every rank, and compared something."""
    output, results = run_cases(worker, ranks, cases, out)
    for rank, found in enumerate(results):
        failures = [f"rank {rank}: {result}" for result in found.values() if isinstance(result, str)]
        assert not failures, "\n".join(failures)
        assert list(found) == cases.split(), output[-3000:]
        assert all(found.values()), "nothing was compared"


def run_each(run: Callable[[str], int]) -> None:
    """On each rank, whose process group is there. Arguments: `out`, then the names of cases."""
    out, cases = Path(sys.argv[1]), sys.argv[2:]
    results: dict[str, Any] = {}
    for case in cases:
        try:
            results[case] = run(case)
        except Exception:
            results[case] = traceback.format_exc()
        out.with_suffix(f".{dist.get_rank()}").write_text(json.dumps(results))
        if isinstance(results[case], str):
            print(results[case], file=sys.stderr, flush=True)
            sys.exit(1)  # the ranks may be out of step
