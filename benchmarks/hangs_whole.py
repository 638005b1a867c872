"""Whole jobs, one role of which hangs: it is found, its worker replaced, and the job ends bit-identically.

Megatron-Core jobs of two nodes and a spare, with layouts of TP, PP and DP, roles, steps and kinds of hangs
drawn from the seed. Time is from the hang to the event that names the culprit, and to the next step of all.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.common import finish, ftrun, parser, printed, read_events, spread, table
from benchmarks.hangs_how import ASTRAY, HANGS
from benchmarks.loaded import digest, run_to_end, undisturbed

SCRIPT = Path(__file__).parent / "hangs_script.py"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --mock-data"
).split()
LAYOUTS = (
    (1, 1, 2, "--use-distributed-optimizer"),
    (1, 1, 4, "--use-distributed-optimizer"),
    (1, 2, 2, ""),
    (2, 1, 2, "--use-distributed-optimizer"),
    (2, 2, 1, ""),
    (2, 2, 2, "--use-distributed-optimizer"),
)
"""Tensor, pipeline, data; how the optimizer keeps its state."""
NODES = 2
KINDS = (*HANGS, *ASTRAY)
_LIMIT = 240.0


@dataclass
class Run:
    """What became of one job. `sure`: the roles that were replaced, `named` those that it might be."""

    layout: str
    kind: str
    role: int
    step: int
    hung: bool
    equal: bool
    sure: list[int]
    named: list[int]
    found: float | None
    repaired: float | None
    words: str

    @property
    def verdict(self) -> str:
        """In a word. `raised`: it did not hang, since the backend noticed and raised an error."""
        if not self.equal:
            return "hung" if self.hung else "DIFFERENT"
        if not self.words:
            return "raised"
        return "right" if self.sure == [self.role] else "WRONG" if self.sure else "unsure"


def main() -> int:
    """Returns 1 if a job waited for a hand or ended differently, or a role was accused that is well."""
    p = parser(__doc__)
    p.add_argument("--jobs", type=int, default=30)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--train-iters", type=int, default=24)
    p.add_argument(
        "--healthy", type=int, default=0, help="so many steps of a job that stutters, instead: no hang"
    )
    p.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    args = p.parse_args()
    if args.healthy:
        return healthy(args)
    runs = []
    for number in range(len(args.kinds) if args.quick else args.jobs):
        dice = random.Random(args.seed * 1000 + number)
        runs.append(job(dice, args.kinds[number % len(args.kinds)], args.train_iters))
        run = runs[-1]
        print(f"{number + 1}: {run.layout} {run.kind} of role {run.role} in step {run.step}: {run.verdict}, "
              f"{run.found} s, {run.repaired} s; {run.words}", file=sys.stderr, flush=True)  # fmt: skip
    bad = [run for run in runs if run.verdict in ("hung", "DIFFERENT", "WRONG")]
    finish("hangs_whole", args, {"failed": len(bad), "runs": [asdict(run) for run in runs]}, report(runs))
    return 1 if bad else 0


def job(dice: random.Random, kind: str, iterations: int) -> Run:
    """One, from its start to its end."""
    tp, pp, dp, more = dice.choice(LAYOUTS)
    world = tp * pp * dp
    role, step = dice.randrange(world), dice.randrange(5, iterations - 4)
    model = [*MODEL, f"--tensor-model-parallel-size={tp}", f"--pipeline-model-parallel-size={pp}"]
    model += [more] * bool(more)
    with tempfile.TemporaryDirectory(prefix="ft-hangs-") as place:
        mark, job_dir = Path(place) / "mark", Path(place) / "job"
        flags = [f"--nnodes={NODES}", f"--nproc-per-node={world // NODES}", "--spares=1"]
        command = [*ftrun(job_dir, *flags), str(SCRIPT), *model, f"--train-iters={iterations}", "--ft"]
        env = {"FT_HANG": f"{role}@{step}:{kind}", "FT_HANG_MARK": str(mark)}
        code, console = run_to_end(command, env, _LIMIT)
        hung, events = code == -1, read_events(job_dir)
        began = float(mark.read_text().split()[0]) if mark.exists() else time.monotonic()
        equal = digest(printed(job_dir)) == expected(tuple(model), iterations, world)
        if hung or not equal:
            print(console[-3000:], *events[-8:], sep="\n", file=sys.stderr)
    hangs = [e for e in events if e["event"] == "hang" and e["monotonic"] > began]
    sure = sorted({role for e in hangs if e["explained"] for role in e["roles"]})
    named = sorted({role for e in hangs for role in e["roles"]})
    words = "; ".join(e["reason"] for e in hangs)
    after = {e["event"]: round(e["monotonic"] - began, 1) for e in reversed(events) if e["monotonic"] > began}
    found, repaired = after.get("hang"), after.get("resumed")
    layout = f"TP {tp} PP {pp} DP {dp}"
    return Run(layout, kind, role, step, hung, equal, sure, named, found, repaired, words)


def healthy(args: argparse.Namespace) -> int:
    """One job with evaluations, roles that come late and a rank that writes alone: it is no hang."""
    evaluated = f"--eval-interval={max(args.healthy // 20, 1)}"
    command = [*MODEL, evaluated, f"--train-iters={args.healthy}", "--log-interval=100", "--ft"]
    with tempfile.TemporaryDirectory(prefix="ft-hangs-") as place:
        job_dir = Path(place) / "job"
        flags = [f"--nnodes={NODES}", "--nproc-per-node=1", "--spares=1"]
        env = {"FT_STUTTER": str(args.seed), "FT_HANG_MARK": str(Path(place) / "mark")}
        began = time.monotonic()
        run_to_end([*ftrun(job_dir, *flags), str(SCRIPT), *command], env, limit=None)
        seconds = time.monotonic() - began
        events = read_events(job_dir)
    wrong = [event["reason"] for event in events if event["event"] in ("hang", "detected", "stopped")]
    ended = any(event["event"] == "finished" for event in events)
    text = (
        f"{args.healthy} steps in {seconds:.0f} s, ended: {ended}, false alarms: {len(wrong)} {wrong or ''}"
    )
    finish("hangs_healthy", args, {"seconds": seconds, "ended": ended, "wrong": wrong}, text)
    return 1 if wrong or not ended else 0


@cache
def expected(model: tuple[str, ...], iterations: int, world: int) -> str:
    """The digest under torchrun, of the same script."""
    return undisturbed(iterations, model, world, SCRIPT)


def report(runs: list[Run]) -> str:
    """A row for each kind, and all."""
    rows: list[list[Any]] = []
    for kind in dict.fromkeys(run.kind for run in runs):
        rows.append([kind, *row([run for run in runs if run.kind == kind])])
    rows.append(["all", *row(runs)])
    header = ["kind", "jobs", "equal", "did not hang", "culprit right", "among those named", "wrong"]
    header += ["found, s", "repaired, s"]
    return table(header, rows)


def row(runs: list[Run]) -> list[Any]:
    """Without the name."""
    hangs = [run for run in runs if run.verdict != "raised"]
    right, wrong = (sum(run.verdict == word for run in hangs) for word in ("right", "WRONG"))
    among = sum(run.role in run.named for run in hangs)
    cells: list[Any] = [
        len(runs),
        sum(run.equal for run in runs),
        len(runs) - len(hangs),
        right,
        among,
        wrong,
    ]
    for name in ("found", "repaired"):
        seconds = [getattr(run, name) for run in hangs if getattr(run, name) is not None]
        about = spread(seconds) if seconds else None
        cells.append(f"{about['median']:.1f} ({about['min']:.1f} to {about['max']:.1f})" if about else "")
    return cells


if __name__ == "__main__":
    sys.exit(main())
