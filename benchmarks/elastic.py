"""How long the others stand still when a replica group leaves, and when it comes back.

Three replica groups under policy `shrink`, a node for each role, no spare: a node gets SIGKILL, the other two
groups train on, a new node joins and brings the group back. The stall of a leave is the time from SIGKILL
until every role that is left has finished its next step; of a return, from the end of the step at which the
first of the others stops for it until every role has.
Both hold one step, which would have been done anyway: the time of a median step with the same groups is taken
off. While the group starts, the others train. All times are from `events.jsonl`.

A group is one role; or one for each pipeline stage, as many as `--stages` says. With `--deepspeed STAGE` the
job is the DeepSpeed recipe.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RECIPE, ROOT, finish, ftrun, parser, read_events, spread, table
from benchmarks.recovery import Processes, scratch
from ft_core.cli.ask import status

GROUPS = 3
CLM = ROOT / "recipes" / "deepspeed" / "pretrain_clm.py"
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 "
    "--global-batch-size 12 --mock-data --train-iters 100000"
).split()
ROWS = {
    "leave": "a group leaves: SIGKILL to the others' next step",
    "return": "it comes back: end of a step to that of everybody's next",
    "start": "before that it starts, while the others train",
    "step": "a step with all groups",
    "step_without": "a step without one of them",
}


def main() -> None:
    """Let groups go and come, read the clock, print."""
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=5, help="how often a group leaves and comes back")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--sharded", action="store_true", help="one optimizer over all groups: shards are adopted")
    p.add_argument("--deepspeed", type=int, choices=range(4), metavar="STAGE", help="with that stage of ZeRO")
    p.add_argument("--stages", type=int, default=1, help="pipeline stages of Megatron, each a role")
    args = p.parse_args()
    if args.stages > 1 and args.deepspeed is not None:
        p.error("--stages is for Megatron")
    rng = random.Random(args.seed)
    name, command = "elastic", [str(RECIPE), *MODEL, "--ft"]
    if args.sharded:
        name, command = "elastic_sharded", [*command, "--use-distributed-optimizer"]
    if args.stages > 1:
        name += f"_pp{args.stages}"
        command += [f"--pipeline-model-parallel-size={args.stages}"]
    with scratch() as place:
        if args.deepspeed is not None:
            name, command = f"elastic_zero{args.deepspeed}", deepspeed(Path(place), args.deepspeed)
        with Elastic(Path(place), command, GROUPS * args.stages) as job:
            found = [job.round(rng) for _ in range(1 if args.quick else args.rounds)]
    result = {row: spread([times[row] for times in found]) for row in ROWS}
    finish(name, args, {"seconds": result, "rounds": found}, report(result))


def deepspeed(directory: Path, stage: int) -> list[str]:
    """The DeepSpeed recipe, with a configuration of its own."""
    config = json.loads((CLM.parent / "ds_zero1.json").read_text())
    config["zero_optimization"]["stage"] = stage
    config["fault_tolerance"] = {"enabled": True, "policy": "shrink"}
    path = directory / "deepspeed.json"
    path.write_text(json.dumps(config))
    size = "--hidden-size 128 --seq-length 128 --train-iters 100000".split()
    return [str(CLM), "--deepspeed", "--deepspeed_config", str(path), *size]


class Elastic(Processes):
    """The recipe under ftrun; a node that dies is replaced by a new one."""

    def __init__(self, directory: Path, command: list[str], roles: int) -> None:
        """`command`: a recipe with its flags."""
        super().__init__(directory)
        self._roles = roles
        self._job = directory / "job"
        flags = (f"--nnodes={roles}", "--nproc-per-node=1", "--ft-policy=shrink", "--respawn")
        self.start([*ftrun(self._job, *flags), *command])
        self._epoch = 1

    def round(self, rng: random.Random) -> dict[str, float]:
        """One group leaves and comes back: seconds."""
        self._event("resumed", self._epoch)
        time.sleep(rng.uniform(2.0, 3.0))
        step = self._step()
        role = rng.randrange(self._roles)
        agent = next(row.agent_pid for row in status(self._job).roles if row.role == role and row.agent_pid)
        killed = time.monotonic()
        os.killpg(agent, signal.SIGKILL)
        left = self._event("resumed", self._epoch + 1)
        preparing = self._event("preparing", self._epoch + 1)
        returning = self._event("returning", self._epoch + 2)
        step_without = self._step()
        held = [e for e in read_events(self._job) if e["event"] == "held" and e["epoch"] == self._epoch + 1]
        since = held[-1] if held else returning
        self._epoch = returning["epoch"]
        back = self._event("resumed", self._epoch)
        time.sleep(12 * step)  # beyond those that are done with a newcomer's first ones
        step = self._step()
        return {
            "leave": left["monotonic"] - killed - step_without,
            "return": back["monotonic"] - since["monotonic"] - step,
            "start": returning["monotonic"] - preparing["monotonic"],
            "step": step,
            "step_without": step_without,
        }

    def _event(self, name: str, epoch: int) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            return next(
                (e for e in read_events(self._job) if e["event"] == name and e["epoch"] == epoch), None
            )

        return dict(self.until(f"{name} of epoch {epoch}", found))

    def _step(self) -> float:
        """Seconds of a median step, of those that have been logged last."""
        found = []
        for path in self._job.glob("logs/*/worker-*/**/stdout.log"):
            if times := re.findall(r"\| ([\d.]+) ms$", path.read_text(), re.MULTILINE):
                found.append((path.stat().st_mtime, times[-8:]))
        return statistics.median(map(float, max(found)[1])) / 1e3


def report(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [
        [title, f"{found['median']:.3f}", f"{found['min']:.3f} .. {found['max']:.3f}", str(found["n"])]
        for name, title in ROWS.items()
        if (found := result[name])
    ]
    return table(["seconds, less a step's own", "median", "range", "n"], lines)


if __name__ == "__main__":
    main()
