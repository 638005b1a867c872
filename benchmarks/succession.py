"""The leader's machine is lost again and again while a job trains: who decides next, and how long that takes.

A small Megatron-Core job of two machines and two spares, an `ftrun` each, and an etcd of three members. The
leader's machine is killed whole, and another takes its place as a spare. What is killed beside it:

    alone    nothing
    worker   a worker on another machine, right after the leader
    trains   the leader's machine is one of those that train, so its role has to be recovered too
    etcd     one of etcd's members, right before, which is started again later

Each of the last three is paired with the same failure a little earlier, while there is a leader.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.common import ROOT, environment, finish, parser, printed, spread, table
from benchmarks.etcd_members import Members
from benchmarks.loaded import digest, undisturbed
from benchmarks.machines import Machine, events_of
from ft_core.cli import ask
from ft_core.cli.ask import WholeStatus
from ft_core.errors import FtError

T = TypeVar("T")
SCRIPT = Path(__file__).parent / "succession_script.py"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --mock-data --use-distributed-optimizer"
).split()
NODES, SPARES = 2, 2
AIM = 5.0
"""Seconds later than with a leader that a failure is recovered, at most."""
_LIMIT = 300.0
"""Seconds after which a job waits for a hand."""
_SETTLE = 10
"""Steps between two failures."""


@dataclass
class Kill:
    """Of a leader with its machine. All times are in seconds from then."""

    kind: str
    etcd: str
    """What was killed of etcd as well: `leader` or `member` or nothing."""
    led: float
    """Until another has taken over, and decides."""
    steps: int
    """That were done until then."""
    gap: float
    """The longest between two steps that begins in that time, unless something else was killed as well."""
    usual: float
    """That of other times: the median."""
    recovered: float | None
    """Until all roles had finished a step again, where something that trains was killed."""
    otherwise: float | None
    """The same with a leader that lives."""
    decided: float | None = None
    """How much later it was decided what to do than with a leader that lives: the rest is a recovery like any
    other, of which the start of a script's process takes most."""

    @property
    def later(self) -> float | None:
        """How much later all had finished a step."""
        if self.recovered is None or self.otherwise is None:
            return None
        return self.recovered - self.otherwise


def main() -> int:
    """Returns 1 if a job ended differently, or a recovery came too late."""
    p = parser(__doc__)
    p.add_argument("--kills", type=int, default=50)
    p.add_argument("--per-job", type=int, default=10, help="kills in one job")
    p.add_argument("--train-iters", type=int, default=2500, help="steps of a job")
    p.add_argument("--etcd-every", type=int, default=5, help="kill a member of etcd with every so many")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    if shutil.which("etcd") is None:
        sys.exit("there is no etcd here (Debian: etcd-server)")
    kills = 2 if args.quick else args.kills
    iterations = min(args.train_iters, 500) if args.quick else args.train_iters
    expected = undisturbed(iterations, MODEL, NODES)
    dice = random.Random(args.seed)
    found: list[Kill] = []
    jobs: list[dict[str, Any]] = []
    while len(found) < kills:
        began = time.monotonic()
        wanted = min(args.per_job, kills - len(found))
        killed, equal = job(wanted, iterations, args.etcd_every, dice, expected)
        found += killed
        jobs.append({"kills": len(killed), "equal": equal, "seconds": time.monotonic() - began})
        print(f"{len(found)} of {kills}: {jobs[-1]}", file=sys.stderr, flush=True)
    late = [kill for kill in found if not kill.etcd and (kill.later or 0.0) > AIM]
    different = sum(not each["equal"] for each in jobs)
    result = {
        "kills": [{**asdict(kill), "later": kill.later} for kill in found],
        "jobs": jobs,
        "late": len(late),
        "different": different,
        "summary": summary(found),
    }
    finish("succession", args, result, report(found, jobs, len(late)))
    return 1 if (late and not args.quick) or different else 0


def summary(kills: list[Kill]) -> dict[str, Any]:
    """By what was killed."""
    found: dict[str, Any] = {}
    for kind, chosen in by_kind(kills):
        times: dict[str, list[float | None]] = {
            "led": [kill.led for kill in chosen],
            "gap": [kill.gap for kill in chosen if kill.kind == "alone"],
            "recovered": [kill.recovered for kill in chosen],
            "otherwise": [kill.otherwise for kill in chosen],
            "later": [kill.later for kill in chosen],
            "decided": [kill.decided for kill in chosen],
        }
        known = {name: [v for v in values if v is not None] for name, values in times.items()}
        found[kind] = {name: spread(values) for name, values in known.items() if values}
    return found


def by_kind(kills: list[Kill]) -> Iterator[tuple[str, list[Kill]]]:
    """Those that there are."""
    for kind in ("alone", "worker", "trains"):
        for etcd in ("", "member", "leader"):
            if chosen := [kill for kill in kills if (kill.kind, kill.etcd) == (kind, etcd)]:
                yield kind + f", etcd's {etcd}" * bool(etcd), chosen


def report(kills: list[Kill], jobs: list[dict[str, Any]], late: int) -> str:
    """A row for each kill, and one for each kind."""

    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    rows: list[list[Any]] = []
    for number, kill in enumerate(kills, 1):
        gap = f"{kill.gap:.2f} ({kill.usual:.2f})"
        repaired = [shown(value) for value in (kill.recovered, kill.otherwise, kill.later, kill.decided)]
        rows.append([f"{number} {kill.kind}", kill.etcd, shown(kill.led), kill.steps, gap, *repaired])
    header = ["killed", "etcd", "led by another after", "steps", "longest gap (usual)", "recovered"]
    every = table([*header, "otherwise", "later", "decided later"], rows)
    kinds: list[list[Any]] = []
    for kind, chosen in by_kind(kills):
        led, later = spread([kill.led for kill in chosen]), [k.later for k in chosen if k.later is not None]
        longest = f"{max(kill.gap for kill in chosen):.2f}"
        about = f"{spread(later)['median']:.2f}, at most {max(later):.2f}" if later else ""
        kinds.append([kind, len(chosen), f"{led['median']:.2f}, at most {led['max']:.2f}", longest, about])
    short = table(["killed", "times", "led by another after", "longest gap", "later"], kinds)
    equal = sum(each["equal"] for each in jobs)
    return (
        f"{every}\n\n{short}\n\n{len(kills)} leaders killed; {late} recoveries more than {AIM:g} s later; "
        f"{equal} of {len(jobs)} jobs bit-identical"
    )


# -- a job -----------------------------------------------------------------------------------------


class Job:
    """On several machines, all of them here."""

    def __init__(self, directory: Path, etcd: Members, iterations: int) -> None:
        self._directory, self.etcd, self._iterations = directory, etcd, iterations
        self.machines: list[Machine] = []
        self._output = (directory / "console").open("w+")
        for rank in range(NODES + SPARES):
            self.start(rank)

    def start(self, rank: int = NODES) -> None:
        """A machine; a spare, if nothing else is said."""
        number = len(self.machines)
        job_dir = self._directory / f"machine{number}"
        command = [sys.executable, "-m", "ft_core.cli.launch", f"--nnodes={NODES}", "--nproc-per-node=1"]
        command += [f"--node-rank={rank}", f"--job-dir={job_dir}", "--tee=0"]
        command += [f"--ft-leadership={self.etcd.place('job')}", f"--ft-domain=domain{number}", str(SCRIPT)]
        command += [*MODEL, f"--train-iters={self._iterations}", "--ft"]
        ftrun = subprocess.Popen(
            command,
            env={**environment(), "FT_STEPS": str(self._directory)},
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.machines.append(Machine(ftrun, job_dir))

    def close(self) -> None:
        """End what is left of it."""
        for machine in self.machines:
            if machine.runs:
                machine.kill()
        self._output.close()

    # -- what is to be seen ------------------------------------------------------------------------

    def running(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.runs]

    def events(self) -> list[dict[str, Any]]:
        """Of all leaders."""
        return events_of(self.machines)

    def status(self) -> WholeStatus | None:
        """As the leader sees it; None if there is none."""
        try:
            return ask.status(self.running()[0].job_dir)
        except (FtError, OSError):
            return None

    def steps(self) -> list[tuple[int, float]]:
        """Each, and when the last role had done it for the first time that all had."""
        path = self._directory / "steps"
        done: dict[int, list[float]] = {}
        for line in path.read_text().splitlines()[:-1] if path.exists() else []:
            step, at = line.split()
            done.setdefault(int(step), []).append(float(at))
        return [(step, max(times[:NODES])) for step, times in sorted(done.items()) if len(times) >= NODES]

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Until it gives something, which is returned."""
        deadline = time.monotonic() + _LIMIT
        while not (found := condition()):
            if time.monotonic() > deadline or not self.running():
                self._output.flush()
                console = Path(self._output.name).read_text()[-3000:]
                raise RuntimeError(f"no {what}: {self.events()[-6:]}\n{console}")
            time.sleep(0.02)
        return found

    def until_calm(self) -> WholeStatus:
        """Until it has trained for a while since the last failure, and has its spares."""
        recovered = len([event for event in self.events() if event["event"] == "decided"])
        self.until(lambda: self.resumed(0.0), "first step")
        reached = self.step()
        self.until(lambda: self.step() >= reached + _SETTLE, "steps")

        def calm() -> WholeStatus | None:
            found = self.status()
            if found is None or found.phase != "running" or len(found.roles) < NODES:
                return None
            whole = all(role.worker_pid and (role.committed or 0) > reached for role in found.roles)
            ready = sum(spare.idle > 0 for spare in found.spares) >= SPARES
            return found if whole and ready else None

        found = self.until(calm, f"calm after {recovered} decisions")
        return found

    def step(self) -> int:
        """The newest."""
        return max((step for step, _ in self.steps()), default=0)

    def resumed(self, after: float) -> float | None:
        """When all roles had finished a step of the newest epoch, if that is later than `after`."""
        events = self.events()
        epoch = max((event["epoch"] for event in events), default=0)
        found = [e["monotonic"] for e in events if e["event"] == "resumed" and e["epoch"] == epoch]
        return found[-1] if found and found[-1] > after else None

    def decided(self, after: float) -> float:
        """When the first epoch was begun after that."""
        return min(
            e["monotonic"] for e in self.events() if e["event"] == "decided" and e["monotonic"] > after
        )

    def leader(self, status: WholeStatus) -> Machine:
        return next(m for m in self.running() if status.controller_pid in m.children())

    def host(self, status: WholeStatus, role: int) -> Machine:
        """On which a role is played."""
        agent = next(each.agent_pid for each in status.roles if each.role == role)
        return next(machine for machine in self.running() if agent in machine.children())


def job(
    kills: int, iterations: int, etcd_every: int, dice: random.Random, expected: str
) -> tuple[list[Kill], bool]:
    """So many leaders are killed in one, if it is long enough. And whether it ended as it should."""
    os.environ["FT_JOB_SECRET"] = "of several machines"
    with tempfile.TemporaryDirectory(prefix="ft-succession-") as place, Members() as etcd:
        running = Job(Path(place), etcd, iterations)
        try:
            found = []
            for number in itertools.count(1):
                if number > kills or running.step() > iterations - 300:
                    break
                if number > 1:
                    running.start()  # in the place of the last one: in time, not when the job is over
                with_etcd = etcd_every > 0 and number % etcd_every == 0
                found.append(kill(running, dice, etcd if with_etcd else None))
                print(f"  {found[-1]}", file=sys.stderr, flush=True)
            (Path(place) / "enough").touch()
            codes = [machine.ftrun.wait(_LIMIT) for machine in running.running()]
            logs = "".join(printed(machine.job_dir) for machine in running.machines)
            return found, not any(codes) and digest(logs) == expected
        finally:
            running.close()


def kill(running: Job, dice: random.Random, etcd: Members | None) -> Kill:
    """The leader's machine, and perhaps something else."""
    status = running.until_calm()
    leader = running.leader(status)
    hosts = [running.host(status, role) for role in range(NODES)]
    kind = "trains" if leader in hosts else dice.choice(("alone", "worker", "worker"))
    otherwise, soon, decided = None, 0.0, None
    if kind != "alone":  # the same, while there is a leader
        role = next(role for role, host in enumerate(hosts) if host is not leader)
        at = hosts[role].kill() if kind == "trains" else kill_worker(status, role)
        otherwise = running.until(lambda: running.resumed(at), "recovery") - at
        soon = running.decided(at) - at
        if kind == "trains":
            running.start()
        status = running.until_calm()
        if running.leader(status) is not leader:
            raise RuntimeError("another leads, though nobody has killed the leader")
        hosts = [running.host(status, role) for role in range(NODES)]
    usual = spread([b - a for (_, a), (_, b) in itertools.pairwise(running.steps()[-20:])])["median"]
    which, lost = -1, ""
    if etcd is not None:
        which = dice.randrange(len(etcd.servers))
        lost = "leader" if etcd.leads(which) else "member"
        etcd.kill(which)
    before, terms = running.step(), {event["term"] for event in running.events()}
    at = leader.kill()
    failed = kill_worker(status, dice.randrange(NODES)) if kind == "worker" else at
    led = running.until(lambda: taken_over(running, terms), "successor")
    done = [step for step, when in running.steps() if step > before and when < led]
    recovered = None
    if kind != "alone":
        recovered = running.until(lambda: running.resumed(max(led, at)), "recovery") - failed
        decided = running.decided(led) - failed - soon
    running.until(lambda: running.step() > before + 3, "steps")
    times = [when for _, when in running.steps()]
    between = [(a, b - a) for a, b in itertools.pairwise(times) if b > at and a < led + 0.5]
    if etcd is not None:
        etcd.start(which)
    return Kill(
        *(
            kind,
            lost,
            led - at,
            len(done),
            max(gap for _, gap in between),
            usual,
            recovered,
            otherwise,
            decided,
        )
    )


def kill_worker(status: WholeStatus, role: int) -> float:
    """Returns when."""
    pid = next(each.worker_pid for each in status.roles if each.role == role)
    assert pid is not None
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return at


def taken_over(running: Job, terms: set[int]) -> float | None:
    """When a leader of a term that is none of these has taken over."""
    for event in running.events():
        if event["event"] == "controller_restarted" and event["term"] not in terms:
            return float(event["monotonic"])
    return None


if __name__ == "__main__":
    sys.exit(main())
