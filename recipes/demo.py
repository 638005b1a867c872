"""`make demo`: a GPT trains on four roles, a whole node is killed in the middle, and training goes on.

Trains twice on this machine: once undisturbed under plain torchrun, once under ftrun with a node lost.
Ends by comparing every loss and the digest of all parameters and optimizer state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "megatron" / "pretrain_gpt_core.py"
LAYOUT = ["--pipeline-model-parallel-size", "2", "--use-distributed-optimizer", "--bf16"]
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2".split()
)
VICTIM = "node1"
PHASES = ("detected", "decided", "communicators_ready", "state_restored", "resumed")


def main() -> int:
    """Run the demo. Returns 0 if the disturbed run ended exactly like the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train-iters", type=int, default=60)
    parser.add_argument("--kill-at", type=int, default=30, help="step after which the node is killed")
    args = parser.parse_args()
    data = ROOT / "runs" / "data" / "stdlib"
    if not data.with_suffix(".idx").exists():
        title("Tokenising the Python standard library")
        run([sys.executable, str(ROOT / "recipes/megatron/prepare_data.py"), "--output-prefix", str(data)])
    script = [str(RECIPE), *MODEL, *LAYOUT, "--global-batch-size", "16", "--data-path", str(data)]
    script += ["--train-iters", str(args.train_iters)]

    title("1. Undisturbed: torchrun, PP=2 x DP=2, no plugin")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    expected = "".join(follow([*launcher, *script], show=every(10)))

    title("2. The same training under ftrun: 2 nodes of 2 workers, 1 spare node")
    job_dir = Path(tempfile.mkdtemp(prefix="ft-demo-"))
    killer = Killer(job_dir, args.kill_at)
    launcher = [
        sys.executable,
        "-m",
        "ft_core.cli.launch",
        "--standalone",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
    ]
    launcher += ["--spares", "1", "--job-dir", str(job_dir)]
    survived = "".join(follow([*launcher, *script, "--ft"], show=killer.watch))
    events = [json.loads(line) for line in (job_dir / "events.jsonl").read_text().splitlines()]

    title("3. The recovery, from events.jsonl")
    timeline(events, killer.killed_at)

    title("4. Is it the same training?")
    same_losses = losses(expected) == losses(survived)
    same_digest = digest(expected) == digest(survived) is not None
    print(f"losses of all {len(losses(expected))} steps equal, bit by bit:  {'yes' if same_losses else 'NO'}")
    print(f"undisturbed  {digest(expected)}\nwith failure {digest(survived)}")
    print(f"digests of all parameters and optimizer state equal:  {'yes' if same_digest else 'NO'}")
    return 0 if same_losses and same_digest and killer.killed_at else 1


class Killer:
    """Kills a node once the log has reached a step, while the user watches."""

    def __init__(self, job_dir: Path, step: int) -> None:
        self._job_dir, self._step = job_dir, step
        self.killed_at = 0.0
        self._show = every(10)

    def watch(self, line: str) -> bool:
        """Called with each line of the log; says whether to print it."""
        found = re.match(r"iteration (\d+)/", line)
        step = int(found[1]) if found else 0
        if step == self._step and not self.killed_at:
            print(f"\n  >>> SIGKILL to every process of {VICTIM} (agent and both workers)\n", flush=True)
            threading.Thread(target=self._kill).start()
        near = self._step - 2 <= step <= self._step + 4
        return near or self._show(line)

    def _kill(self) -> None:
        status = json.loads(run(ctl(self._job_dir, "status", "--json")))
        self.killed_at = time.monotonic()
        pid = next(r["agent_pid"] for r in status["roles"] if r["node"] == VICTIM)
        os.killpg(pid, 9)


def ctl(job_dir: Path, *arguments: str) -> list[str]:
    """A call of ftctl for that job."""
    return [sys.executable, "-m", "ft_core.cli.ctl", "--job-dir", str(job_dir), *arguments]


def timeline(events: list[dict], killed_at: float) -> None:
    """Print when each phase of the recovery was reached, in seconds after the SIGKILL."""
    for event in events:
        if event["epoch"] > 1 and event["event"] in PHASES:
            after = event["monotonic"] - killed_at
            about = event["reason"] or ""
            print(f"  {after:7.3f} s  {event['event']:<20} {about}")


def losses(log: str) -> dict[str, set[str]]:
    """Step -> the losses that were logged for it (a step done again is logged again)."""
    found: dict[str, set[str]] = {}
    for step, loss in re.findall(r"iteration (\d+)/\d+ \| loss (\S+)", log):
        found.setdefault(step, set()).add(loss)
    return found


def digest(log: str) -> str | None:
    """The digest that ends the log."""
    found = re.findall(r"^digest (sha256:[0-9a-f]{64})$", log, re.M)
    return found[-1] if found else None


def every(n: int):  # type: ignore[no-untyped-def]
    """A filter that lets every n-th line of progress through, and the digest."""

    def show(line: str) -> bool:
        found = re.match(r"iteration (\d+)/", line)
        return bool(found and int(found[1]) % n == 0) or line.startswith("digest")

    return show


def follow(command: list[str], show) -> Iterator[str]:  # type: ignore[no-untyped-def]
    """Run a command and yield its lines, printing those that `show` wants. Exits with its code on failure."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    ) as process:
        errors: list[str] = []
        assert process.stdout is not None and process.stderr is not None
        reader = threading.Thread(target=lambda stream=process.stderr: errors.extend(stream), daemon=True)
        reader.start()
        for line in process.stdout:
            if show(line):
                print("  " + line, end="", flush=True)
            yield line
    reader.join(5)
    if process.returncode:
        sys.exit("".join(errors[-60:]) + f"\n{' '.join(command)}\nended with code {process.returncode}")


def run(command: list[str]) -> str:
    """Run a command to its end; exits with its error output on failure."""
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def environment() -> dict[str, str]:
    """One thread per worker, and quiet libraries."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}


def title(text: str) -> None:
    """Print a heading above what follows."""
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
