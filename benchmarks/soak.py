"""One job under random faults for as long as is wanted: what became of it, and of each recovery.

Two nodes of two workers and two spares, `--respawn --ft-strikes 0`, all on this machine. Every 2.5 s on
average something is killed or stopped: workers, whole nodes, agents, controllers, standbys, spares, an
agent's pulse or fork server, two at once. What may cost a node's memory waits until the job has recovered
from what came before, as one copy of it is all that is promised; else nothing waits for anything, but for a
recovery that was cut short four times. The script rests in each step, so that it ends soon after the last
fault, and its digest is compared with an undisturbed run's.

Of each recovery: from the end of the epoch until every survivor has left its step, and until all have done a
step again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment, finish, ftrun, parser, printed, read_events, spread
from benchmarks.loaded import MODEL, digest, undisturbed
from benchmarks.soak_pace import SHARE
from ft_core.cli import ask, timeline
from ft_core.errors import FtError

NODES, PER_NODE, SPARES = 2, 2, 2
RECIPES = ROOT / "recipes"
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data".split()
STEPS = 8
"""For each fault: more than the job does meanwhile."""
IN_A_ROW = 4
"""Recoveries that are cut short by more faults. `control.liveness.strikes.TRIES` end a job, which a slow
machine would come to."""
LONG = 5.0
"""Seconds of a recovery above which its cause is looked for."""
HUNG = 240.0
"""Seconds without an event or a step after which a job waits for a hand."""
KINDS = {
    "worker": 5,
    "two workers": 2,
    "worker and controller": 2,
    "controller": 2,
    "standby": 2,
    "node": 2,
    "agent": 2,
    "spare": 1,
    "SIGTERM to a worker": 1,
    "pulse": 1,
    "fork server": 1,
    "worker stopped": 3,
    "agent stopped": 2,
    "controller stopped": 2,
}
"""What happens, and how often it does beside the others."""
COSTLY = ("node", "agent", "fork server", "agent stopped")
"""What may cost the memory of a node that has roles."""


@dataclass
class Fault:
    """What was done, in seconds since 1970."""

    kind: str
    pids: list[int]
    at: float
    until: float
    """When what was stopped went on."""
    load: float
    """Processes that wanted a core in the minute before."""


@dataclass
class Recovery:
    """From the end of an epoch until all have done a step again, whatever else happened meanwhile."""

    epoch: int
    at: float
    reasons: list[str]
    seconds: float = 0.0
    left: float | None = None
    """Seconds from the end of an epoch until the last survivor has left its step; None: nobody was in one."""
    causes: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """Of its epochs: when their survivors were told."""


class Processes:
    """Of a job, as the kernel sees them now."""

    def __init__(self, ftrun: int) -> None:
        table = dict(_running())
        of = lambda parent: [pid for pid, (of, _, _) in table.items() if of == parent]  # noqa: E731
        named = lambda pid, word: word in table[pid][2]  # noqa: E731
        self.controllers = [pid for pid in of(ftrun) if named(pid, "ft_core.control")]
        self.agents = [pid for pid in of(ftrun) if named(pid, "ft_core.node")]
        self.pulses = [pid for agent in self.agents for pid in of(agent) if named(pid, "ft_core.node")]
        forks = lambda pid: any("multiprocessing.forkserver" in word for word in table[pid][2])  # noqa: E731
        self.servers = [pid for agent in self.agents for pid in of(agent) if forks(pid)]
        self.workers = [pid for server in self.servers for pid in of(server)]

    @staticmethod
    def group(agent: int) -> list[int]:
        """All of an agent's node."""
        return [pid for pid, (_, group, _) in _running() if group == agent]


def _running() -> Iterator[tuple[int, tuple[int, int, list[str]]]]:
    """Parent, group and the words of the command of each process."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, parent, group, *_ = (path / "stat").read_bytes().rpartition(b")")[2].split()
            if state != b"Z":
                command = (path / "cmdline").read_bytes().decode(errors="replace")
                yield int(path.name), (int(parent), int(group), command.split("\0"))


class Job:
    """Under faults."""

    def __init__(self, place: Path, args: Any, script: list[str], more: Sequence[str] = ()) -> None:
        """`more`: flags."""
        self.job_dir, self.share, self.console = place / "job", place / "share", place / "console"
        self._args, self._dice = args, random.Random(args.seed)
        size = (f"--nnodes={NODES}", f"--nproc-per-node={PER_NODE}", f"--spares={SPARES}", "--respawn")
        flags = (f"--ft-policy={args.policy}", f"--ft-ready-standbys={args.ready}", "--ft-strikes=0")
        with self.console.open("w") as output:
            self.process = subprocess.Popen(
                [*ftrun(self.job_dir, *size, *flags, *more), *script],
                env={**environment_of_scripts(), SHARE: str(self.share)},
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._roles: dict[int, tuple[int, int]] = {}
        """Role -> worker and agent, as last heard."""
        self._costly = 0.0
        """When a node that may have had roles was last killed."""

    def events(self) -> list[dict[str, Any]]:
        """So far."""
        return read_events(self.job_dir)

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def faults(self, count: int) -> list[Fault]:
        """So many, once it trains; fewer if it ends before, or hangs."""
        done: list[Fault] = []
        heard, moved = time.monotonic(), 0
        while self.runs() and len(done) < count and time.monotonic() - heard < HUNG:
            if (now := len(self.events())) > moved:
                heard, moved = time.monotonic(), now
            if self._decided() > IN_A_ROW:
                self._wait(0.2)
                continue
            self._wait(self._dice.uniform(0.5, 2 * self._args.every - 0.5))
            if not self.runs():
                break
            self._look()
            if (fault := self._fault()) is not None:
                done.append(fault)
                self.share.write_text(str(len(done) / count))
                about = f"{len(done)} of {count}: {fault.kind} {fault.pids} {fault.until - fault.at:.1f} s"
                print(about, file=sys.stderr, flush=True)
        self.share.write_text("1.0")
        return done

    def end(self) -> bool:
        """Wait for it, and leave nothing behind. Whether it has ended by itself."""
        size, heard = 0, time.monotonic()
        while self.runs() and time.monotonic() - heard < HUNG:
            self._wait(0.5)
            if (now := sum(path.stat().st_size for path in self.job_dir.glob("logs/*/*/stdout.log"))) != size:
                size, heard = now, time.monotonic()
        ended = not self.runs()
        if not ended:
            self.process.terminate()  # twice: everything is ended at once
            self._wait(2)
            self.process.terminate()
            self.process.wait()
        return ended

    def _wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def _look(self) -> None:
        with contextlib.suppress(OSError, FtError):  # its controller is dead, or stopped
            status = ask.status(self.job_dir)
            pairs = {row.role: (row.worker_pid or 0, row.agent_pid or 0) for row in status.roles}
            self._roles = {role: pair for role, pair in pairs.items() if all(pair)}

    def _decided(self) -> float:
        """How often since all roles have done a step."""
        names = [event["event"] for event in self.events()]
        if "resumed" not in names:
            return math.inf
        return names[::-1][: names[::-1].index("resumed")].count("decided")

    def is_well(self) -> bool:
        """Whether it has recovered from all that was done, and keeps two copies of everything again."""
        tells = [e for e in self.events() if e["event"] in ("resumed", "detected", "waiting", "decided")]
        last = tells[-1]["time"] if tells else math.inf
        # A loss that no controller has seen yet is none of them.
        return (
            bool(tells)
            and tells[-1]["event"] == "resumed"
            and last > self._costly
            and time.time() - last > 1.0
        )

    def _fault(self) -> Fault | None:
        """One that can be now."""
        kinds = {kind: often for kind, often in KINDS.items() if kind in self._args.kinds}
        if not self.is_well():
            kinds = {kind: often for kind, often in kinds.items() if kind not in COSTLY}
        if not kinds:
            return None
        kind = self._dice.choices(list(kinds), list(kinds.values()))[0]
        found = Processes(self.process.pid)
        workers = [worker for worker, _ in self._roles.values() if worker in found.workers]
        agents = sorted({agent for _, agent in self._roles.values() if agent in found.agents})
        spares = [agent for agent in found.agents if agent not in agents]
        playing = {worker for worker, _ in self._roles.values()}
        standbys = [worker for worker in found.workers if worker not in playing]
        servers = [server for server in found.servers if any(server in Processes.group(a) for a in agents)]
        of: dict[str, list[int]] = {
            "worker": workers,
            "controller": found.controllers,
            "standby": standbys,
            "node": agents,
            "agent": agents,
            "spare": spares,
            "SIGTERM to a worker": workers,
            "pulse": found.pulses,
            "fork server": servers,
        }
        one = lambda kind: self._dice.sample(of[kind], min(1, len(of[kind])))  # noqa: E731
        if kind == "two workers":
            pids = self._dice.sample(workers, 2) if len(workers) > 1 else []
        elif kind == "worker and controller":
            pids = [*one("worker"), *one("controller")]
            pids = pids if len(pids) > 1 else []
        else:
            pids = one(kind.removesuffix(" stopped"))
        if not pids:
            return None
        if kind in ("node", "spare"):
            pids = Processes.group(pids[0])
        at = time.time()
        if kind in COSTLY:
            self._costly = at
        if not kind.endswith("stopped"):
            _send(pids, signal.SIGTERM if kind.startswith("SIGTERM") else signal.SIGKILL)
        else:
            _send(pids, signal.SIGSTOP)
            try:
                self._wait(self._dice.uniform(0.2, 3.0))
            finally:
                _send(pids, signal.SIGCONT)
        return Fault(kind, pids, at, time.time(), os.getloadavg()[0])


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def environment_of_scripts() -> dict[str, str]:
    """Variables that find the recipes."""
    path = ":".join(map(str, (ROOT, RECIPES / "megatron", RECIPES / "deepspeed")))
    return {**environment(), "PYTHONPATH": path, "RES_OPTIONS": "timeout:1 attempts:1"}


# -- what became of it -----------------------------------------------------------------------------


def recoveries(
    events: list[dict[str, Any]], faults: list[Fault], lines: list[timeline.Line]
) -> list[Recovery]:
    """All that have ended."""
    found: list[Recovery] = []
    under_way: Recovery | None = None
    between: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "detected":
            if under_way is None:
                under_way, between = Recovery(event["epoch"], event["time"], []), []
            under_way.reasons.append(event["reason"])
            under_way.ends.append(event["time"])
        elif event["event"] == "resumed" and under_way is not None:
            under_way.seconds = event["time"] - under_way.at
            found.append(under_way)
            _explain(under_way, between, faults)
            under_way = None
        between.append(event)
    all_left = list(_lefts(lines))
    for recovery in found:
        until = recovery.at + recovery.seconds
        told = lambda at, ends: max(end for end in ends if end <= at)  # noqa: E731
        lefts = [at - told(at, recovery.ends) for at in all_left if recovery.at <= at <= until]
        recovery.left = max(lefts, default=None)
    return found


def _lefts(lines: list[timeline.Line]) -> Iterator[float]:
    """When survivors have left their step."""
    for line in lines:
        for (before, _), (phase, at) in zip(line.phases, line.phases[1:], strict=False):
            if (before, phase) == ("unwinding", "waiting for the epoch"):
                yield at


def _explain(recovery: Recovery, events: list[dict[str, Any]], faults: list[Fault]) -> None:
    """What held it up, as far as events and faults show."""
    begin, end = recovery.at, recovery.at + recovery.seconds
    waits = [event for event in events if event["event"] in ("waiting", "unreachable")]
    recovery.causes += sorted({f"{event['event']}: {event['reason'].splitlines()[0]}" for event in waits})
    if len(recovery.reasons) > 1:
        recovery.causes.append(f"{len(recovery.reasons)} failures in it")
    during = Counter(fault.kind for fault in faults if fault.at < end and fault.until > begin - 0.5)
    if during:
        recovery.causes.append("meanwhile: " + ", ".join(f"{n} x {kind}" for kind, n in during.items()))
    if any(event["event"] == "controller_restarted" for event in events):
        recovery.causes.append("without a controller for a while")
    near = [fault.load for fault in faults if begin - 30 < fault.at < end + 30]
    if near:
        recovery.causes.append(f"load {max(near):.1f} on {len(os.sched_getaffinity(0))} cores")


def stopped(recovery: Recovery, faults: list[Fault]) -> bool:
    """Whether something was stopped while its survivors were to leave their step."""
    until = recovery.at + recovery.seconds
    return any(
        fault.kind.endswith("stopped") and fault.at < until and fault.until > recovery.at for fault in faults
    )


def report(result: dict[str, Any], found: list[Recovery], faults: list[Fault]) -> str:
    """For people."""
    kinds = ", ".join(f"{count} x {kind}" for kind, count in result["faults"].items())
    lines = [
        ", ".join(f"{what} {result[what]}" for what in ("script", "policy", "ready", "seed")),
        f"{sum(result['faults'].values())} faults: {kinds}",
        f"{len(found)} recoveries, {result['controllers']} controllers, "
        f"{result['groups_left']} times without a replica group",
        f"ended with code {result['code']}, "
        + ("by itself" if result["ended"] else "which it did not by itself")
        + f"; digest {result['digest']}",
    ]
    for what, values in (("left their step after", result["left_s"]), ("recovered after", result["seconds"])):
        if values is not None:
            lines.append(f"{what} {values['median']:.2f} s, {values['max']:.2f} s at most (n={values['n']})")
    if (free := result["left_unstopped_s"]) is not None:
        lines.append(f"left their step, where nothing was stopped: {free['max']:.2f} s at most")
    for recovery in found:
        if recovery.seconds > LONG or (recovery.left or 0.0) > LONG:
            about = f"{recovery.seconds:.1f} s, left after {recovery.left or 0.0:.1f} s"
            causes = "; ".join([recovery.reasons[0][:120], *recovery.causes])
            lines.append(f"epoch {recovery.epoch}: {about}; {causes}")
    return "\n".join(lines)


def main() -> int:
    """Returns 1 if the job did not end well by itself, or ended differently."""
    p = parser(__doc__)
    p.add_argument("--faults", type=int, default=100)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--every", type=float, default=2.5, help="seconds between faults, on average")
    p.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="of faults; all of them")
    p.add_argument("--script", choices=["core", "zero1", "zero3"], default="core", help="what is trained")
    p.add_argument("--policy", choices=["wait", "shrink"], default="wait")
    p.add_argument("--ready", default="0", help="--ft-ready-standbys")
    p.add_argument("--keep", default="", help="put the job's directory there, and leave it")
    args = p.parse_args()
    args.faults = min(args.faults, 8) if args.quick else args.faults
    steps = STEPS * args.faults + 20
    with tempfile.TemporaryDirectory(prefix="ft-soak-") as scratch:
        place = Path(args.keep or scratch)
        place.mkdir(parents=True, exist_ok=True)
        script, plain = scripts(args.script, place, steps, args.policy)
        job = Job(place, args, [*script, f"--train-iters={steps}"])
        try:
            faults = job.faults(args.faults)
            ended = job.end()
        finally:
            if job.runs():
                job.process.kill()
        events, text = job.events(), printed(job.job_dir)
        found = recoveries(events, faults, timeline.read(job.job_dir))
        left = sum(event["event"] == "left" for event in events)
        same = False
        if ended and job.process.returncode == 0:
            expected = undisturbed(steps, plain[1:], NODES * PER_NODE, Path(plain[0]), limit=None)
            same = digest(text) == expected
        else:
            print(job.console.read_text()[-4000:], *events[-8:], sep="\n", file=sys.stderr, flush=True)
    lefts = [r.left for r in found if r.left is not None]
    free = [r.left for r in found if r.left is not None and not stopped(r, faults)]
    result: dict[str, Any] = {
        "script": args.script,
        "policy": args.policy,
        "ready": args.ready,
        "seed": args.seed,
        "faults": dict(Counter(fault.kind for fault in faults)),
        "controllers": 1 + sum(event["event"] == "controller_restarted" for event in events),
        "groups_left": left,
        "ended": ended,
        "code": job.process.returncode,
        "digest": "equal" if same else "not comparable: groups were away" if left else "DIFFERENT",
        "left_s": spread(lefts) if lefts else None,
        "left_unstopped_s": spread(free) if free else None,
        "seconds": spread([r.seconds for r in found]) if found else None,
        "recoveries": [asdict(recovery) for recovery in found],
    }
    finish("soak", args, result, report(result, found, faults))
    well = ended and job.process.returncode == 0 and sum(result["faults"].values()) == args.faults
    return 0 if well and result["digest"] != "DIFFERENT" else 1


def scripts(name: str, place: Path, steps: int, policy: str) -> tuple[list[str], list[str]]:
    """What is trained, at the pace of the faults and as it is; each a script and its flags."""
    if name == "core":
        paced, plain = ROOT / "benchmarks" / "soak_core.py", RECIPES / "megatron" / "pretrain_gpt_core.py"
        return [str(paced), *MODEL, "--ft"], [str(plain), *MODEL]
    config = json.loads((RECIPES / "deepspeed" / f"ds_{name}.json").read_text())
    config["scheduler"]["params"]["total_num_steps"] = steps
    config["fault_tolerance"] |= {"spares": SPARES, "policy": policy}
    path = place / "ds.json"
    path.write_text(json.dumps(config))
    flags = [*TINY, f"--deepspeed_config={path}"]
    paced, plain = ROOT / "benchmarks" / "soak_deepspeed.py", RECIPES / "deepspeed" / "pretrain_clm.py"
    return [str(paced), *flags], [str(plain), *flags]


if __name__ == "__main__":
    sys.exit(main())
