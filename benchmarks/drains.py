"""Nodes are taken out of one job, one after the other, at random: is a step done again for any of them?

Two nodes of two workers and two spares, all on this machine. A line in a file says that a node's machine goes
in a minute, a node gets SIGTERM, or `ftctl drain` names it; which, and when, is the dice's. Once it is out,
another node joins. The script rests in each step, so that it ends soon after the last drain, and its digest
is compared with an undisturbed run's.

Of each drain: until the controller has begun it, until the node is out, and for how long the others did no
step (from the end of the epoch until all have done a step in the next), with the time that a step takes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import soak
from benchmarks.common import ROOT, finish, parser, printed, spread, table
from benchmarks.loaded import digest, undisturbed
from benchmarks.soak_pace import SHARE
from ft_core.cli import ask
from ft_core.errors import FtError

MINUTE = 60.0
"""Seconds that a notice leaves."""
HOW = ("notice", "SIGTERM", "ftctl drain")
STEPS = 64
"""For each drain: more than the job does meanwhile."""


@dataclass
class Drain:
    """One node's, in seconds since it was told."""

    how: str
    node: str
    roles: list[int]
    begun: float
    out: float
    stall: float
    """For which no step was done, of which `step` are the step's own."""
    step: float


class Job(soak.Job):
    """Whose nodes are drained."""

    def __init__(self, place: Path, args: Any, script: list[str]) -> None:
        self._notices = place / "notices"
        super().__init__(place, args, script, [f"--ft-notices=file:{self._notices}"])
        self.joined: list[subprocess.Popen[bytes]] = []

    def drains(self, count: int) -> list[Drain]:
        """So many; fewer if the job ends before, or one is not over in time."""
        done: list[Drain] = []
        while self.runs() and len(done) < count:
            if not self._waited_for(lambda: self.is_well() and self._spare()):
                break
            self._wait(self._dice.uniform(0.0, self._args.every))
            found = self._drain()
            if found is None:
                break
            done.append(found)
            self.share.write_text(str(len(done) / count))
            print(f"{len(done)} of {count}: {found}", file=sys.stderr, flush=True)
            self._join()
        self.share.write_text("1.0")
        return done

    def _drain(self) -> Drain | None:
        rows = ask.status(self.job_dir).roles
        row = self._dice.choice([row for row in rows if row.node and row.agent_pid])
        how, node, before = self._dice.choice(HOW), row.node, len(self.events())
        at = time.time()
        if how == "notice":
            with self._notices.open("a") as file:
                file.write(f"{node} {MINUTE:g} goes at {at:.3f}\n")
        elif how == "SIGTERM":
            os.kill(row.agent_pid or 0, signal.SIGTERM)
        else:
            command = [sys.executable, "-m", "ft_core.cli.ctl", "--job-dir", str(self.job_dir), "drain", node]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

        def named(name: str) -> dict[str, Any] | None:
            about = [e for e in self.events()[before:] if e["event"] == name]
            return next((e for e in about if e.get("node", node) == node), None)

        if not self._waited_for(lambda: named("drained") is not None and named("resumed") is not None):
            return None
        begun, moving, resumed, out = (named(n) for n in ("draining", "moving", "resumed", "drained"))
        if begun is None or moving is None or resumed is None or out is None:
            return None
        return Drain(
            how=how,
            node=node,
            roles=[row.role for row in rows if row.node == node],
            begun=begun["time"] - at,
            out=out["time"] - at,
            stall=resumed["time"] - moving["time"],
            step=resumed["spent"]["step"],
        )

    def _join(self) -> None:
        address = (self.job_dir / "controller").read_text().strip()
        launch = [sys.executable, "-m", "ft_core.cli.launch", "--tee=0", f"--ft-notices=file:{self._notices}"]
        with self.console.open("a") as output:
            self.joined.append(
                subprocess.Popen(
                    [*launch, "--join", address, "--job-dir", str(self.job_dir)],
                    env={**soak.environment_of_scripts(), SHARE: str(self.share)},
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _spare(self) -> bool:
        """Whether a node is there whose workers are ready to take roles."""
        try:
            return any(spare.idle >= soak.PER_NODE for spare in ask.status(self.job_dir).spares)
        except (OSError, FtError):  # its controller is about to be another one
            return False

    def _waited_for(self, condition: Callable[[], bool]) -> bool:
        until = time.monotonic() + soak.HUNG
        while self.runs() and time.monotonic() < until:
            if condition():
                return True
            self._wait(0.1)
        return False

    def leave(self) -> None:
        """End those who have joined and are there yet."""
        for process in self.joined:
            if process.poll() is None:
                process.terminate()
            process.wait()


def main() -> int:
    """Returns 1 if the job did not end well by itself, or ended differently, or anything was done again."""
    p = parser(__doc__)
    p.add_argument("--drains", type=int, default=20)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--every", type=float, default=2.0, help="seconds to wait at most before the next")
    p.add_argument("--script", choices=["core", "zero1", "zero3"], default="core", help="what is trained")
    p.add_argument("--keep", default="", help="put the job's directory there, and leave it")
    args = p.parse_args()
    args.policy, args.ready = "wait", "0"
    args.drains = min(args.drains, 3) if args.quick else args.drains
    steps = STEPS * args.drains + 20
    with tempfile.TemporaryDirectory(prefix="ft-drains-") as scratch:
        place = Path(args.keep or scratch)
        place.mkdir(parents=True, exist_ok=True)
        script, plain = soak.scripts(args.script, place, steps, args.policy)
        job = Job(place, args, [*script, f"--train-iters={steps}"])
        try:
            drains = job.drains(args.drains)
            ended = job.end()
        finally:
            if job.runs():
                job.process.kill()
            job.leave()
        events, text = job.events(), printed(job.job_dir)
        code, same = job.process.returncode, False
        if ended and code == 0:
            expected = undisturbed(steps, plain[1:], soak.NODES * soak.PER_NODE, Path(plain[0]), limit=None)
            same = digest(text) == expected
        else:
            print(job.console.read_text()[-4000:], *events[-8:], sep="\n", file=sys.stderr, flush=True)
    told = Counter(int(step) for step in re.findall(r"iteration (\d+)/\d+ \| loss", text))
    again = sum(times - 1 for times in told.values())
    failures = [event["reason"] for event in events if event["event"] in ("detected", "not_drained")]
    result: dict[str, Any] = {
        "script": args.script,
        "seed": args.seed,
        "drains": [asdict(drain) for drain in drains],
        "steps_done_again": again,
        "failures": failures,
        "ended": ended,
        "code": code,
        "digest": "equal" if same else "DIFFERENT",
    }
    finish("drains", args, result, report(result, drains))
    well = same and not again and not failures and len(drains) == args.drains
    return 0 if well else 1


def report(result: dict[str, Any], drains: list[Drain]) -> str:
    """A row for each way to be told."""

    def shown(values: list[float]) -> str:
        found = spread(values)
        return f"{found['median']:.1f} (to {found['max']:.1f})"

    rows = [
        [
            how,
            len(those),
            *(shown([getattr(d, name) for d in those]) for name in ("begun", "out")),
            shown([max(0.0, d.stall - d.step) for d in those]),
        ]
        for how in HOW
        if (those := [drain for drain in drains if drain.how == how])
    ]
    head = ["told by", "drains", "begun after, s", "out after, s", "others stood still beyond a step, s"]
    what = f"{result['steps_done_again']} steps done again, {len(result['failures'])} failures"
    return f"{table(head, rows)}\n{what}; exit code {result['code']}, digest {result['digest']}"


if __name__ == "__main__":
    sys.exit(main())
