"""Runs whole jobs of the recipe, with and without failures, and reads what they left behind."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from getpass import getuser
from pathlib import Path
from typing import Protocol, TypeVar
from urllib import request

from forked import Forked
from processes import in_groups

from ft_core.cli import ask, flags
from ft_core.control.observe.recorded import ACCOUNT, ALWAYS, EVENTS
from ft_core.history import goodput
from ft_core.protocol.goodput import Cause
from ft_core.protocol.messages import Inject, Injected
from ft_core.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
RECIPES = (ROOT / "recipes" / "megatron", ROOT / "recipes" / "deepspeed")
RECIPE = RECIPES[0] / "pretrain_gpt_core.py"
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --mock-data"
).split()


T = TypeVar("T")


class Training(Protocol):
    """What a job trains; hashable, since reference runs are kept by it."""

    @property
    def world(self) -> int:
        """How many roles there are."""

    @property
    def script(self) -> Path: ...

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        """The script's, for that many steps; `protected`: as a job that survives failures."""

    def environment(self) -> dict[str, str]:
        """Variables that the script needs, beside those of `environment()`."""


@dataclass(frozen=True)
class Layout:
    """The Megatron recipe's training: a parallel layout, and how the optimizer keeps its state."""

    tp: int
    pp: int
    dp: int
    distributed: bool = False
    bf16: bool = False
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = "distopt" if self.distributed else "plain"
        return f"tp{self.tp}pp{self.pp}dp{self.dp}-{kind}-{'bf16' if self.bf16 else 'fp32'}" + "".join(
            self.more
        )

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def flags(self) -> list[str]:
        flags = [f"--tensor-model-parallel-size={self.tp}", f"--pipeline-model-parallel-size={self.pp}"]
        flags += ["--use-distributed-optimizer"] * self.distributed + ["--bf16"] * self.bf16
        return [*flags, *self.more]

    @property
    def script(self) -> Path:
        return RECIPE

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        return [*TINY, *self.flags, f"--train-iters={iterations}", *["--ft"] * protected]

    def environment(self) -> dict[str, str]:
        return {}


@dataclass
class Result:
    """What a job printed and recorded."""

    code: int
    output: str
    losses: dict[int, list[str]]
    """Of each step, one for each line that tells of it."""
    digest: str | None
    events: list[dict] = field(default_factory=list)
    job_dir: Path | None = None

    def __post_init__(self) -> None:
        check_finite(loss for logged in self.losses.values() for loss in logged)

    def of(self, name: str) -> list[dict]:
        return [e for e in self.events if e["event"] == name]

    @property
    def recoveries(self) -> int:
        return len([e for e in self.of("decided") if e["epoch"] > 1])


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join(map(str, (ROOT, *RECIPES))),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        # torch's stores look up the name of 127.0.0.1 in the DNS, 5 s at a time where nobody answers.
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


def plain_environment() -> dict[str, str]:
    """For scripts that `torchrun` starts, without a plugin."""
    variables = environment()
    return variables | {"PYTHONPATH": f"{ROOT / 'tests' / 'plain'}:{variables['PYTHONPATH']}"}


def settings_of(*command: str) -> Settings:
    """What `ftrun` makes of its command line alone."""
    return flags.settings_of(flags.parse(command, {}))


def read_logs(job_dir: Path) -> str:
    """What all workers printed."""
    return "\n".join(p.read_text() for p in sorted(job_dir.glob("logs/*/worker-*/**/stdout.log")))


def read_losses(text: str) -> dict[int, list[str]]:
    """Of each step, one for each line that tells of it."""
    losses: dict[int, list[str]] = {}
    for step, loss in re.findall(r"iteration (\d+)/\d+ \| loss (\S+)", text):
        losses.setdefault(int(step), []).append(loss)
    return losses


def different(losses: dict[int, list[str]]) -> dict[int, list[str]]:
    """Without what only repeats a line of the same step."""
    return {step: list(dict.fromkeys(logged)) for step, logged in losses.items()}


def check_finite(losses: Iterable[str]) -> None:
    """Two trainings that both end in NaN are alike, and prove nothing."""
    bad = [loss for loss in losses if not math.isfinite(float(loss))]
    assert not bad, f"losses that are none: {bad}"


def read_digest(text: str) -> str | None:
    found = re.findall(r"^digest sha256:([0-9a-f]{64})$", text, re.M)
    return found[-1] if found else None


def torchrun(training: Training, script: Path, iterations: int, *flags: str) -> str:
    """What all ranks print under plain torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as logs:
        # A file each: in a pipe that they share, ranks write into each other's lines.
        command += [f"--nproc-per-node={training.world}", "--redirects=3", f"--log-dir={logs}"]
        command += [str(script), *training.arguments(iterations, protected=False), *flags]
        env = plain_environment() | training.environment()
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=110)
        output, errors = (
            "".join(path.read_text() for path in sorted(Path(logs).rglob(f"{name}.log")))
            for name in ("stdout", "stderr")
        )
    assert done.returncode == 0, (errors + done.stderr)[-3000:]
    return output


def undisturbed(training: Training, iterations: int, *flags: str) -> Result:
    """The same training as plain processes: no plugin, no failure, no torchrun, which would take longer."""
    arguments = [*training.arguments(iterations, protected=False), *flags]
    own = {name: value for name, value in training.environment().items() if name.startswith("FT_")}
    with tempfile.TemporaryDirectory() as logs:
        texts = forks(training).run(training.script, arguments, training.world, Path(logs), own)
    output = "".join(texts)
    return Result(0, output, read_losses(output), read_digest(output))


@cache
def reference(training: Training, iterations: int, *flags: str) -> Result:
    """What a job with failures must end in."""
    result = undisturbed(training, iterations, *flags)
    assert result.digest and len(result.losses) == iterations
    return result


def forks(training: Training) -> Forked:
    """What runs plain jobs with the versions of this one; variables of ours are given to each run."""
    variables = training.environment().items()
    return _forks(frozenset((name, value) for name, value in variables if not name.startswith("FT_")))


@cache
def _forks(variables: frozenset[tuple[str, str]]) -> Forked:
    # Not by what `environment()` has: pytest writes the name of the test there.
    log = Path(tempfile.mkdtemp(prefix="ft-forked-")) / "log"
    return Forked(environment() | dict(variables), log)


class Job:
    """A job under `ftrun --standalone`. Use as a context manager: nothing of it is left behind."""

    def __init__(self, job_dir: Path, layout: Training, iterations: int, *, nproc: int = 1, spares: int = 1,
                 ftrun: tuple[str, ...] = (), flags: tuple[str, ...] = (), script: Path | None = None,
                 protected: bool = True) -> None:  # fmt: skip
        self.job_dir = job_dir
        self._joined: list[subprocess.Popen] = []
        nnodes = layout.world // nproc
        command = [sys.executable, "-m", "ft_core.cli.launch", "--standalone", f"--nnodes={nnodes}"]
        command += [f"--nproc-per-node={nproc}", f"--spares={spares}", f"--job-dir={job_dir}", *ftrun]
        command += [str(script or layout.script), *layout.arguments(iterations, protected), *flags]
        # Not below `job_dir`: the path of a socket is 107 bytes long at most.
        self._temporary = Path(tempfile.mkdtemp(prefix="ft-job-"))
        self._environment = environment() | layout.environment() | {"TMPDIR": str(self._temporary)}
        self._awaited = job_dir.parent / f"{job_dir.name}.awaited"
        self._environment["FT_TESTS_AWAITED"] = str(self._awaited)  # for paced.py
        self._output = (job_dir.parent / f"{job_dir.name}.console").open("w+")
        self.process = subprocess.Popen(
            command,
            env=self._environment,
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        processes = [*self._joined, self.process]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._output.close()
        left = [path for path in self._temporary.iterdir() if path.name != f"torchinductor_{getuser()}"]
        shutil.rmtree(self._temporary)
        if error is None and all(process.returncode >= 0 for process in processes):
            assert not left, f"left behind: {left}"

    def join(self) -> subprocess.Popen:
        """Bring another node, as the `waiting` event says."""
        address = (self.job_dir / "controller").read_text().strip()
        command = [
            sys.executable,
            "-m",
            "ft_core.cli.launch",
            "--join",
            address,
            "--job-dir",
            str(self.job_dir),
        ]
        output = self._output
        self._joined.append(
            subprocess.Popen(command, env=self._environment, cwd=ROOT, stdout=output, stderr=output)
        )
        return self._joined[-1]

    def metrics(self) -> dict[str, float]:
        """What the controller serves, by name with its labels."""
        url = (self.job_dir / "http").read_text().strip()
        with request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def events(self) -> list[dict]:
        path = self.job_dir / "events.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # whole lines

    def until(self, condition: Callable[[], T], what: str, timeout: float = 60) -> T:
        """Until `condition` gives something, which is returned; `what` says that it has come."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            if found := condition():
                return found
            assert not ended, f"the job ended before {what}: {self.console()[-4000:]}"
            assert time.monotonic() < deadline, (
                f"no {what} within {timeout} s; {self.events()[-5:]}; {self.console()[-3000:]}"
            )
            time.sleep(0.02)

    def wait_for(self, event: str, count: int = 1, timeout: float = 60) -> list[dict]:
        """Until `count` events of that name are recorded."""

        def recorded() -> list[dict]:
            found = [e for e in self.events() if e["event"] == event]
            return found if len(found) >= count else []

        return self.until(recorded, f"{event} no. {count}", timeout)

    def wait_for_epoch(self, event: str, epoch: int, timeout: float = 60) -> dict:
        """Until `event` is recorded for that epoch or a later one; the newest such."""

        def recorded() -> list[dict]:
            return [e for e in self.events() if e["event"] == event and e["epoch"] >= epoch]

        return self.until(recorded, f"{event} of epoch {epoch}", timeout)[-1]

    def step(self) -> int:
        """The newest step that is logged."""
        return max(read_losses(read_logs(self.job_dir)), default=0)

    def wait_for_step(self, step: int, timeout: float = 60) -> int:
        """Until that step, or a later one, is logged: the newest one."""

        def reached() -> int:
            newest = self.step()
            return newest if newest >= step else 0

        return self.until(reached, f"step {step}", timeout)

    def wait_for_snapshots(self, count: int, timeout: float = 90) -> list[dict]:
        """Until every role's `count`-th snapshot is replicated; the status of the roles then."""

        def replicated() -> list[dict]:
            rows = self.status()["roles"] if self.events() else []
            return rows if all(row["h2h_snapshots"] == count for row in rows) else []

        return self.until(replicated, f"snapshot {count} of every role, replicated", timeout)

    def pids(self, role: int) -> tuple[int, int]:
        """The agent and the worker that play `role` since the newest recovery."""
        events = self.events()
        workers = [e for e in events if e["event"] == "state_restored"][-1]["pids"]
        agent = next(row["agent_pid"] for row in self.status()["roles"] if row["role"] == role)
        return agent, workers[str(role)]

    def kill_nodes(self, *roles: int) -> None:
        """SIGKILL for all that runs on the nodes of these roles, one right after the other."""
        agents = {row["role"]: row["agent_pid"] for row in self.status()["roles"]}
        for agent in {agents[role] for role in roles}:
            os.killpg(agent, signal.SIGKILL)

    def kill_worker(self, role: int) -> None:
        """What `ftctl kill --role` does, without the seconds that a new interpreter takes."""
        assert ask.ask(Inject(role), self.job_dir) == Injected(role)

    def ctl(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "ft_core.cli.ctl", "--job-dir", str(self.job_dir), *arguments]
        done = subprocess.run(
            command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict:
        """What `ftctl status --json` prints, without the seconds that a new interpreter takes."""
        return ask.status(self.job_dir).to_json()

    def console(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()

    def finish(self, timeout: float = 150) -> Result:
        """Wait for the end and read everything."""
        self._awaited.touch()
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs: {self.events()[-6:]}; {self.console()[-3000:]}") from None
        logs = read_logs(self.job_dir)
        return Result(code, self.console(), read_losses(logs), read_digest(logs), self.events(), self.job_dir)


def check_identical(result: Result, training: Training, iterations: int, *flags: str, again: int = 0) -> None:
    """Final digest and every logged loss equal those of the undisturbed run.

    At most `again` lines tell of a step once more; none, if nothing else is said.
    """
    expected = reference(training, iterations, *flags)
    assert result.code == 0, result.output[-4000:]
    assert different(result.losses) == expected.losses
    assert sum(map(len, result.losses.values())) <= iterations + again, f"logged twice: {result.losses}"
    assert result.digest == expected.digest


STEPS = 10
"""A random kill comes after so many steps at the latest, so that all fit in on a machine of any speed."""


def check_random_kills(
    job_dir: Path,
    training: Training,
    nproc: int,
    seed: int,
    kills: int,
    kinds: tuple[str, ...],
    again: int = 1,
) -> None:
    """Nodes, agents and workers die at random moments of whatever step it is; the job ends bit-identically.

    A successor repeats `again` lines at most. The next victim is chosen once the job has resumed from the
    last failure, which says that every role has finished a step: a step cannot finish before the version it
    began from is committed, so that version is then held twice again. Earlier, the loss of a second node
    could be more than k = 1 promises to survive: the newcomer's state may exist nowhere but on the node it
    was just fetched from.
    """
    dice = random.Random(seed)
    iterations = kills * (STEPS + 3)
    with Job(job_dir, training, iterations, nproc=nproc, spares=1, ftrun=("--respawn",)) as job:
        epoch = 0
        for number in range(kills):
            resumed = job.wait_for_epoch("resumed", epoch + 1, timeout=120)
            epoch = resumed["epoch"]
            due = time.monotonic() + dice.uniform(0.1, 0.8)
            while time.monotonic() < due and job.step() < resumed["version"] + STEPS:
                time.sleep(0.01)
            kind, role = dice.choice(kinds), dice.randrange(training.world)
            agent, worker = job.pids(role)
            print(
                f"seed {seed}, kill {number + 1}: {kind} of role {role} (agent {agent}, worker {worker}), "
                f"epoch {epoch}, step {job.step()}",
                flush=True,
            )
            if kind == "node":
                os.killpg(agent, signal.SIGKILL)
            else:
                os.kill(agent if kind == "agent" else worker, signal.SIGKILL)
        resumed = job.wait_for_epoch("resumed", epoch + 1, timeout=120)
        job.wait_for_step(resumed["version"] + 1)
        metrics = job.metrics()
        result = job.finish(timeout=200)
    check_identical(result, training, iterations, again=again * kills)
    check_metrics(metrics, result)
    check_survivors(result, training.world)
    check_clean(result)
    assert result.recoveries == kills


def check_drills(result: Result, injected: Iterable[str]) -> None:
    """Each of those failures happened, and was recovered from: a decision names its victim."""
    assert result.job_dir is not None
    wanted, fired = list(injected), {path.name for path in result.job_dir.glob("injected-*")}
    assert len(fired) == len(wanted), f"not every failure happened: {sorted(fired)}"
    victims = Counter(int(where.partition("@")[0]) for where in wanted)
    replaced = Counter(role for e in result.of("decided") if e["epoch"] > 1 for role in e["roles"])
    missing = victims - replaced
    assert missing.total() <= 1, f"no recovery of roles {dict(missing)}"  # two that fall together are one
    assert result.recoveries >= len(wanted) - 1


def check_survivors(result: Result, world: int) -> None:
    """No worker was replaced but those whose failure a decision names."""
    pids: dict[int, int] = {}
    moved: set[int] = set()
    for event in result.events:
        if event["event"] == "decided":
            moved |= set(event["roles"])
        elif event["event"] == "state_restored":
            now = {int(role): pid for role, pid in event["pids"].items()}
            assert len(now) == world
            changed = {role for role in pids if pids[role] != now[role]}
            assert changed <= moved, f"roles {changed - moved} lost their worker without need"
            pids, moved = now, set()
    assert pids


def check_nothing_runs(result: Result) -> None:
    """No process of any node is left; an agent leads a process group with all its workers in it."""
    groups = {event["agent_pid"] for event in result.of("joined")}
    assert groups, "no node has ever joined: there is nothing to look for"
    deadline = time.monotonic() + 30
    while left := in_groups(groups):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


def check_clean(result: Result) -> None:
    """Nothing runs any more, and of a job that its controller has ended the last word is there."""
    check_nothing_runs(result)
    check_accounted(result)
    for event in result.events:
        other = event.keys() - {*ALWAYS, *ACCOUNT, *EVENTS[event["event"]].fields}
        assert not other, f"the reference of events does not describe {other} of {event}"


def check_metrics(metrics: dict[str, float], result: Result) -> None:
    """They were read while roles trained, and say what the events alone say of the time until then: goodput,
    and what the rest went to."""
    found = dict.fromkeys(Cause, metrics["ft_productive_seconds_total"])
    for cause in set(Cause) - {Cause.PRODUCTIVE}:
        found[cause] = metrics[f'ft_lost_seconds_total{{cause="{cause}"}}']
    until = result.events[0]["time"] + sum(found.values())
    before = [event for event in result.events if event["time"] <= until + 0.05]
    passed = until - before[-1]["time"]
    now = {**before[-1], "event": "read", "time": until, "monotonic": before[-1]["monotonic"] + passed}
    read = goodput.seconds([*before, {name: now[name] for name in ("event", "term", "time", "monotonic")}])
    # That a step had to wait for copies is not in the events before the next one that says so.
    for account in (found, read):
        account[Cause.PRODUCTIVE] += account.pop(Cause.SAVING)
    whole = sum(found.values())
    for cause, seconds in found.items():
        assert abs(seconds - read[cause]) < 0.01 * whole, f"{cause}: {seconds} s, {read[cause]} s"


def check_accounted(result: Result) -> None:
    """Every second of the job is accounted for, by the controller as by the events alone."""
    told = [event for event in result.events if "spent" in event][-1]
    assert told["event"] == "goodput", f"the job's end does not say what its time went to: {told}"
    read, seconds = goodput.seconds(result.events), told["spent"]["seconds"]
    wall = told["time"] - result.events[0]["time"]
    assert abs(sum(seconds.values()) - wall) < 0.01 * wall + 0.1, f"{seconds} in {wall} s"
    apart = sum(abs(read[cause] - seconds.get(cause, 0.0)) for cause in read) / 2
    assert apart < 0.01 * wall + 0.1, f"the controller says {seconds}, its events {read}"
