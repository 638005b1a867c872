"""Does a newcomer take longer, the later it comes? One job of Hugging Face's Trainer on DeepSpeed, two ranks.

A worker is killed in an early step and in a late one. Of each of its successors: the seconds from when it
takes the role until it has done a step with the others, and how many steps its script passed over on its way.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from benchmarks.common import ROOT, environment, finish, ftrun, parser, table
from ft_core.cli import timeline

RECIPES = ROOT / "recipes" / "deepspeed"
MODEL = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data".split()
_HOURS = 2.0


def main() -> None:
    """Run the job, read what its workers have written of their time, print."""
    p = parser(__doc__)
    p.add_argument("--early", type=int, default=10, help="the step in which a worker is killed first")
    p.add_argument("--late", type=int, default=10_000, help="the step in which its successor is killed")
    p.add_argument("--samples", type=int, default=4096, help="in an epoch of data")
    args = p.parse_args()
    steps = [args.early, min(args.late, 300) if args.quick else args.late]
    with tempfile.TemporaryDirectory(prefix="ft-newcomers-") as place:
        rows = _measured(Path(place), steps, args.samples)
    text = table(
        ["killed in step", "its successor's seconds", "steps passed over"],
        [[step, f"{row['seconds']:.2f}", row["passed"]] for step, row in zip(steps, rows, strict=True)],
    )
    text += f"\nlate / early: {rows[1]['seconds'] / rows[0]['seconds']:.2f}"
    finish("newcomers", args, {"steps": dict(zip(map(str, steps), rows, strict=True))}, text)


def _measured(place: Path, steps: list[int], samples: int) -> list[dict[str, float]]:
    config = place / "ds.json"
    config.write_text((RECIPES / "ds_hf.json").read_text())
    injected = ",".join(f"1@forward:{step}:worker" for step in steps)
    command = ftrun(place / "job", "--nnodes=2", "--respawn", f"--ft-inject={injected}")
    command += [str(RECIPES / "hf_trainer.py"), *MODEL, f"--train-samples={samples}"]
    command += [f"--deepspeed={config}", f"--output_dir={place / 'output'}", f"--max_steps={steps[-1] + 5}"]
    command += ["--per_device_train_batch_size=1", "--learning_rate=1e-3", "--save_strategy=no"]
    command += ["--logging_steps=10", "--num_train_epochs=1"]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=_HOURS * 3600
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    lines = [line for line in timeline.read(place / "job") if line.role == 1 and line.epoch > 1]
    assert len(lines) == len(steps), f"{len(lines)} recoveries of {len(steps)}: {json.dumps(injected)}"
    return [{"seconds": _since_taken(line), "passed": line.passed} for line in lines]


def _since_taken(line: timeline.Line) -> float:
    """Before that its process stood by."""
    return line.end - max(end for name, _, end in line.spans() if name in ("forked", "standing by"))


if __name__ == "__main__":
    main()
