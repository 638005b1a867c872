"""Short jobs, one after the other, on a machine with four busy processes per core: does any need a hand?

Every job trains the same small model from the same seed: some undisturbed, some with a worker or a whole node
killed. Each must end by itself, with the same digest of all parameters and optimizer state as plain torchrun
gives on the same machine. Recoveries from what nobody did (a node "lost" because it was slow) are counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    RECIPE,
    ROOT,
    environment,
    finish,
    ftrun,
    parser,
    printed,
    read_events,
    spread,
    table,
)

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --mock-data --pipeline-model-parallel-size 2 --use-distributed-optimizer"
).split()
NODES, PER_NODE = 2, 2
KINDS = {"nothing": "", "worker": "1@backward:{step}:worker", "node": "2@forward:{step}"}
_LIMIT = 600.0
"""Seconds after which a job waits for a hand: it takes some 10 on an idle machine."""


def main() -> int:
    """Returns 1 if a job did not end by itself, or ended differently."""
    p = parser(__doc__)
    p.add_argument("--jobs", type=int, default=30)
    p.add_argument("--busy", type=int, default=4, help="busy processes per core")
    p.add_argument("--train-iters", type=int, default=12)
    args = p.parse_args()
    jobs = min(args.jobs, len(KINDS)) if args.quick else args.jobs
    runs: list[dict[str, Any]] = []
    with busy(args.busy * len(os.sched_getaffinity(0))):
        expected = undisturbed(args.train_iters, MODEL, NODES * PER_NODE)
        for number in range(jobs):
            kind = list(KINDS)[number % len(KINDS)]
            step = 1 + number % (args.train_iters - 2)
            runs.append({"killed": kind, "step": step, **job(kind, step, args.train_iters, expected)})
            print(f"{number + 1} of {jobs}: {runs[-1]}", file=sys.stderr, flush=True)
    failed = [
        r for r in runs if not r["equal"] or r["unprovoked"] or r["recovered"] != (r["killed"] != "nothing")
    ]
    result = {"load": os.getloadavg()[0], "failed": len(failed), "runs": runs}
    finish("loaded", args, result, report(runs))
    return 1 if failed else 0


def job(kind: str, step: int, iterations: int, expected: str) -> dict[str, Any]:
    """One job under ftrun: how long it took, whether it ended as it should, what nobody had caused."""
    with tempfile.TemporaryDirectory(prefix="ft-loaded-") as place:
        flags = [f"--nnodes={NODES}", f"--nproc-per-node={PER_NODE}", "--spares=1"]
        if kind != "nothing":
            flags.append(f"--ft-inject={KINDS[kind].format(step=step)}")
        job_dir = Path(place) / "job"
        command = [*ftrun(job_dir, *flags), str(RECIPE), *MODEL, f"--train-iters={iterations}", "--ft"]
        began = time.monotonic()
        code, errors = run_to_end(command)
        events = read_events(job_dir)
        recoveries = sum(e["event"] == "decided" and e["epoch"] > 1 for e in events)
        lost = sum(e["event"] == "spare_lost" for e in events)
        injected = 0 if kind == "nothing" else 1
        equal = code == 0 and digest(printed(job_dir)) == expected
        if not equal:
            print(errors[-3000:], *events[-5:], sep="\n", file=sys.stderr, flush=True)
        return {
            "seconds": round(time.monotonic() - began, 1),
            "equal": equal,
            "recovered": recoveries > 0,
            "unprovoked": max(recoveries - injected, 0) + lost,
        }


def undisturbed(
    iterations: int, model: Sequence[str], world: int, script: Path = RECIPE, limit: float | None = _LIMIT
) -> str:
    """The digest under plain torchrun, of `world` ranks. `limit`: seconds that it may take."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory(prefix="ft-loaded-") as logs:
        launcher += [f"--nproc-per-node={world}", "--redirects=3", f"--log-dir={logs}"]
        code, errors = run_to_end(
            [*launcher, str(script), *model, f"--train-iters={iterations}"], limit=limit
        )
        found = digest("".join(p.read_text() for p in sorted(Path(logs).rglob("stdout.log"))))
    if code or found is None:
        sys.exit(f"{errors[-3000:]}\nthe undisturbed job ended with code {code}")
    return found


def run_to_end(
    command: list[str], more: Mapping[str, str] | None = None, limit: float | None = _LIMIT
) -> tuple[int, str]:
    """Exit code and console of a command; a job that does not end by itself is ended, with code -1. `more`:
    variables. `limit`: seconds."""
    with tempfile.TemporaryFile("w+") as console:
        process = subprocess.Popen(
            command,
            env={**environment(), **(more or {})},
            cwd=ROOT,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # twice: ftrun ends everything at once
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
            process.terminate()
            process.wait()
            code = -1
        console.seek(0)
        return code, console.read()


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """That many processes that do nothing but compute."""
    # Each in a session of its own: the kernel may share the cores out by session first.
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command, start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def digest(log: str) -> str | None:
    """The digest that ends the log."""
    found = re.findall(r"^digest (sha256:[0-9a-f]{64})$", log, re.M)
    return found[-1] if found else None


def report(runs: list[dict[str, Any]]) -> str:
    """A row for each kind of job."""
    rows = []
    for kind in KINDS:
        chosen = [r for r in runs if r["killed"] == kind]
        if chosen:
            seconds = spread([r["seconds"] for r in chosen])
            equal, alarms = sum(r["equal"] for r in chosen), sum(r["unprovoked"] for r in chosen)
            times = f"{seconds['median']:.0f} ({seconds['min']:.0f} to {seconds['max']:.0f})"
            rows.append([kind, len(chosen), equal, alarms, times])
    return table(["killed", "jobs", "ended, equal", "false alarms", "seconds"], rows)


if __name__ == "__main__":
    sys.exit(main())
