"""Healthy jobs beside four busy processes per core, of which processes stop and go on: all stay healthy.

Small jobs of two nodes and a spare. Single processes, whole nodes and everything at once are stopped
(SIGSTOP) for 0.2 to 3 s, again and again. Each job must end by itself, with the digest that plain torchrun
gives. Nodes that the job takes for lost, though they live, are counted, and how long each takes to be a spare
again.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import RECIPE, ROOT, environment, finish, ftrun, parser, printed, read_events, spread
from benchmarks.loaded import busy, digest, undisturbed

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --mock-data --use-distributed-optimizer"
).split()
NODES = 2
SHORT = 2.0
"""Seconds: of the pauses under it, at most 1 % may cost a node."""
BACK = 10.0
"""Seconds in which a node that was given up is a spare again, once it goes on."""
_LIMIT = 600.0
"""Seconds after which a job waits for a hand."""
_LOST = re.compile(r"node (\S+) lost: ")


@dataclass
class Pause:
    """Of processes of one job, in seconds of the monotonic clock."""

    kind: str
    began: float
    ended: float
    nodes: list[str] = field(default_factory=list)
    """Of which any process was stopped."""

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.ended - self.began


@dataclass
class Run:
    """What became of one job."""

    number: int
    seconds: float
    hung: bool
    equal: bool
    pauses: list[Pause]
    evictions: list[dict[str, Any]]
    """Of nodes that live: when, why, the longest pause behind it, and the time to be a spare again."""

    @property
    def failed(self) -> bool:
        """Whether it waited for a hand, ended differently, or did without a node that is well."""
        return self.hung or not self.equal or any(e["late"] for e in self.evictions)


def main() -> int:
    """Returns 1 if a job has failed, or too many nodes were given up."""
    p = parser(__doc__)
    p.add_argument("--jobs", type=int, default=200)
    p.add_argument("--at-once", type=int, default=2, help="jobs at the same time")
    p.add_argument("--busy", type=int, default=4, help="busy processes per core")
    p.add_argument("--train-iters", type=int, default=60)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    jobs = min(args.jobs, 4) if args.quick else args.jobs
    runs: list[Run] = []
    with busy(args.busy * len(os.sched_getaffinity(0))):
        expected = undisturbed(args.train_iters, MODEL, NODES)

        def one(number: int) -> Run:
            return job(number, random.Random(args.seed * 100_000 + number), args.train_iters, expected)

        with ThreadPoolExecutor(args.at_once) as pool:
            for run in pool.map(one, range(jobs)):
                runs.append(run)
                print(f"{len(runs)} of {jobs}: {summary(run)}", file=sys.stderr, flush=True)
    failed = sum(run.failed for run in runs)
    pauses = [pause for run in runs for pause in run.pauses]
    evictions = [eviction for run in runs for eviction in run.evictions]
    short, unfounded = (
        sum(pause.seconds < SHORT for pause in pauses),
        sum(e["pause"] < SHORT for e in evictions),
    )
    text = report(runs, pauses, evictions, short, unfounded)
    result = {"failed": failed, "runs": [{**asdict(run), "pauses": len(run.pauses)} for run in runs]}
    finish("pauses", args, result, f"{text}\n{len(runs)} jobs, {failed} failed")
    return 1 if failed or unfounded > short / 100 else 0


def report(
    runs: list[Run], pauses: list[Pause], evictions: list[dict[str, Any]], short: int, unfounded: int
) -> str:
    """Everything but the last line."""
    back = [e["back"] for e in evictions if e["back"] is not None]
    times = spread(back) if back else None
    return "\n".join(
        [
            f"hung: {sum(run.hung for run in runs)}",
            f"bit-identical: {sum(run.equal for run in runs)} of {len(runs)}",
            f"pauses: {len(pauses)}, of these under {SHORT:g} s: {short}",
            f"nodes given up that live: {len(evictions)}, after pauses under {SHORT:g} s: {unfounded}",
            "a spare again after: "
            + (f"median {times['median']:.1f} s, {times['max']:.1f} s at most" if times else "none was to be")
            + f"; not within {BACK:g} s: {sum(e['late'] for e in evictions)}",
        ]
    )


def summary(run: Run) -> str:
    """A line for whoever waits."""
    what = "hung" if run.hung else "equal" if run.equal else "DIFFERENT"
    return f"job {run.number} {what} after {run.seconds:.0f} s, {len(run.pauses)} pauses, {run.evictions}"


def job(number: int, dice: random.Random, iterations: int, expected: str) -> Run:
    """One, from its start to its end."""
    with tempfile.TemporaryDirectory(prefix="ft-pauses-") as place:
        job_dir, console = Path(place) / "job", Path(place) / "console"
        command = ftrun(job_dir, f"--nnodes={NODES}", "--nproc-per-node=1", "--spares=1")
        command += [str(RECIPE), *MODEL, f"--train-iters={iterations}", "--ft"]
        began = time.monotonic()
        with console.open("w") as output:
            process = subprocess.Popen(
                command,
                env=environment(),
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            pauses = disturb(process, job_dir, dice, began + _LIMIT)
            hung = process.poll() is None
        finally:
            end(process)
        equal = process.returncode == 0 and digest(printed(job_dir)) == expected
        events = read_events(job_dir)
        ended = time.monotonic()
        if hung or not equal:
            print(console.read_text()[-3000:], *events[-8:], sep="\n", file=sys.stderr, flush=True)
        return Run(number, ended - began, hung, equal, pauses, evictions(events, pauses, ended))


def disturb(
    process: subprocess.Popen[bytes], job_dir: Path, dice: random.Random, limit: float
) -> list[Pause]:
    """Stop some of the job and have it go on, again and again, until it ends."""
    pauses = []
    while process.poll() is None and time.monotonic() < limit:
        wait(process, dice.uniform(0.3, 2.0))
        found = members(process.pid)
        agents = [pid for pid, (group, name) in found.items() if pid == group and name]
        kind = dice.choice(("process", "process", "process", "node", "everything"))
        if kind == "everything":
            chosen = list(found)
        elif kind == "node" and agents:
            group = dice.choice(agents)
            chosen = [pid for pid, (its, _) in found.items() if its == group]
        else:
            kind, chosen = "process", [dice.choice(list(found))] if found else []
        names = sorted({found[found[pid][0]][1] for pid in chosen if found[pid][0] in found})
        pause = Pause(kind, time.monotonic(), 0.0, [name for name in names if name])
        send(chosen, signal.SIGSTOP)
        wait(process, dice.uniform(0.2, 3.0))
        send(chosen, signal.SIGCONT)
        pause.ended = time.monotonic()
        pauses.append(pause)
    return pauses


def wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """That long, or until the job has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def members(ftrun: int) -> dict[int, tuple[int, str]]:
    """Processes of a job, by the pid of its `ftrun`, itself included: groups, and the node of agents. What it
    has started has sessions of its own."""
    found: dict[int, tuple[int, str]] = {}
    sessions, parents = {}, {ftrun: ftrun}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has ended
            state, parent, group, session, *_ = (path / "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                arguments = (path / "cmdline").read_text().split("\0")
                agent = "ft_core.node" in arguments and "--node" in arguments
                name = arguments[arguments.index("--node") + 1] if agent else ""
                pid = int(path.name)
                found[pid], sessions[pid], parents[pid] = (int(group), name), int(session), int(parent)
    ours = {ftrun} | {pid for pid, parent in parents.items() if parent == ftrun}
    return {pid: about for pid, about in found.items() if sessions[pid] in ours}


def send(pids: Iterable[int], number: int) -> None:
    """A signal, to those that are left."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end(process: subprocess.Popen[bytes]) -> None:
    """Whatever is left of the job."""
    deadline = time.monotonic() + 30
    while left := list(members(process.pid)):
        if process.poll() is None or time.monotonic() > deadline - 15:
            send(left, signal.SIGKILL)
            process.poll()
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {left} do not end")
        time.sleep(0.1)
    process.wait()


def lost(events: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Nodes that the job has taken for lost. Nobody has killed any."""
    for event in events:
        found = _LOST.match(event["reason"])
        if event["event"] == "spare_lost":
            yield event["node"], event
        elif found is not None:
            yield found[1], event


def evictions(events: list[dict[str, Any]], pauses: list[Pause], ended: float) -> list[dict[str, Any]]:
    """Of nodes that live, and what came of them."""
    found = []
    for name, event in lost(events):
        at = event["monotonic"]
        machine = name.partition("+")[0]
        behind = [
            p for p in pauses if p.began < at and p.ended > at - BACK and (name in p.nodes or not p.nodes)
        ]
        awake = max([at, *(p.ended for p in pauses if p.began < at < p.ended)])
        joined = [
            e["monotonic"]
            for e in events
            if e["event"] == "joined" and e["monotonic"] > at and e["node"].partition("+")[0] == machine
        ]
        stayed = any(e["event"] == "resumed" and e["monotonic"] > at for e in events)
        back = max(0.0, min(joined) - awake) if joined else None
        found.append(
            {
                "node": name,
                "reason": event["reason"],
                "pause": max((p.seconds for p in behind), default=0.0),
                "back": back,
                "late": back > BACK if back is not None else stayed and ended - awake > BACK + 5,
            }
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
