"""How long a recovery takes, phase by phase, and beside it the same failures under plain torchrun.

ftrun: two nodes of two workers and a spare node, all on this machine; a driver sends SIGKILL at a random
moment of a step. "Resumed" means that every role has finished a step after the recovery: the killed step, or
the one after it where the killed one was complete. Phases come from events.jsonl; there is one clock.

torchrun: `benchmarks/restart_baseline.py` with a checkpoint in memory after every step, from SIGKILL until
every rank has finished the step that was killed. For a node, a third torchrun agent waits, as the spare does.
Jobs of both kinds take turns, so noise hits both alike.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import RECIPE, ROOT, environment, finish, ftrun, parser, read_events, spread, table
from ft_core.cli import ask
from ft_core.cli.ask import WholeStatus

BASELINE = ROOT / "benchmarks" / "restart_baseline.py"
NODES, PER_NODE = 2, 2
WORLD = NODES * PER_NODE
SIZE = "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2"
LAYOUT = "--pipeline-model-parallel-size 2 --use-distributed-optimizer --global-batch-size 16 --mock-data"
MODEL = [*SIZE.split(), *LAYOUT.split()]
ENDLESS = 20_000
KINDS = {
    "node": "node (agent and workers), spare takes over",
    "agent": "agent only, spare takes over",
    "worker": "worker only, restarted on its node",
}
PHASES = ("detected", "decided", "state_restored", "resumed")
TORCHRUN = {"worker": "torchrun: worker", "node": "torchrun: node, third agent waits"}
TORCHRUN_PHASES = ("imported", "built", "loaded", "resumed")
_SETTLE = 2.0
_PATIENCE = 150.0


def main() -> None:
    """Let jobs of both kinds take turns, kill, read the clocks, print."""
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=5, help="repetitions of each kind of failure")
    p.add_argument("--kinds", default="node,agent,worker", help="failures to measure under ftrun")
    p.add_argument(
        "--torchrun", default="worker,node", help="failures to measure under torchrun; '' for none"
    )
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    rounds = min(args.rounds, 1) if args.quick else args.rounds
    rng = random.Random(args.seed)
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(rounds):
        with scratch() as place, FtJob(Path(place)) as job:
            for kind in _list(args.kinds):
                found.setdefault(kind, []).append(job.failure(kind, rng.randrange(WORLD), rng))
                _progress(number, f"ftrun {kind}", found[kind][-1])
        for kind in _list(args.torchrun):
            with scratch() as place, TorchrunJob(Path(place), kind) as job:
                found.setdefault(f"torchrun {kind}", []).append(job.failure(rng))
                _progress(number, f"torchrun {kind}", found[f"torchrun {kind}"][-1])
    result = {
        name: {phase: spread([r[phase] for r in runs]) for phase in runs[0]} for name, runs in found.items()
    }
    finish("recovery", args, {"seconds_after_sigkill": result, "runs": found}, report(result))


class Processes:
    """Processes that are killed, whole groups, when the context ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **more: str) -> subprocess.Popen[bytes]:
        """Start a command in a process group of its own; its output goes to a file."""
        output = (self.directory / f"console-{len(self._started)}").open("wb")
        env = {**environment(), **more}
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        output.close()
        self._started.append(process)
        return process

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # lets a launcher end what it has started
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """The condition's value once it is true. Exits with the jobs' output when that takes too long."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.02)
        consoles = "\n".join(p.read_text(errors="replace")[-3000:] for p in self.directory.glob("console-*"))
        sys.exit(f"{consoles}\n{what}: did not happen within {_PATIENCE:.0f} s")


class FtJob(Processes):
    """The recipe under ftrun. A node that dies is replaced by a new one, which stands by."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._job = directory / "job"
        flags = (f"--nnodes={NODES}", f"--nproc-per-node={PER_NODE}", "--spares=1", "--respawn")
        self.start([*ftrun(self._job, *flags), str(RECIPE), *MODEL, f"--train-iters={ENDLESS}", "--ft"])

    def _ready(self) -> WholeStatus | None:
        """The job's status, once it trains and a spare stands by."""
        if not any(e["event"] == "resumed" for e in read_events(self._job)):
            return None
        status = ask.status(self._job)
        spare = any(s.idle >= PER_NODE for s in status.spares)
        steps = [row.step or 0 for row in status.roles]
        resumed = [e["version"] for e in read_events(self._job) if e["event"] == "resumed"][-1]
        training = len(steps) == WORLD and min(steps) > resumed + 5
        return status if status.phase == "running" and spare and training else None

    def failure(self, kind: str, role: int, rng: random.Random) -> dict[str, float]:
        """Kill what `kind` says around `role`; returns the seconds from SIGKILL to each phase."""
        self.until("training with a spare", self._ready)
        time.sleep(_SETTLE + rng.random())
        status = ask.status(self._job)
        row = status.roles[role]
        assert row.agent_pid is not None and row.worker_pid is not None
        killed = time.monotonic()
        if kind == "node":
            os.killpg(row.agent_pid, signal.SIGKILL)
        else:
            os.kill(row.agent_pid if kind == "agent" else row.worker_pid, signal.SIGKILL)

        def after() -> list[dict[str, Any]]:
            return [e for e in read_events(self._job) if e["epoch"] > status.epoch and e["event"] in PHASES]

        self.until(
            f"recovery from the loss of a {kind}", lambda: any(e["event"] == "resumed" for e in after())
        )
        found: dict[str, float] = {}
        for event in after():
            if event["event"] != "detected" or "detected" not in found:  # a second wave would decide again
                found[event["event"]] = event["monotonic"] - killed
            if event["event"] == "resumed":
                break
        return {phase: found[phase] for phase in PHASES}


class TorchrunJob(Processes):
    """The baseline under torchrun: one agent with all workers, or an agent per node and one that waits."""

    def __init__(self, directory: Path, kind: str) -> None:
        super().__init__(directory)
        self._kind = kind
        script = [str(BASELINE), *MODEL, f"--train-iters={ENDLESS}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=100"]
        self._bench = {"FT_BENCH": str(directory)}
        self._agents: list[subprocess.Popen[bytes]] = []
        if kind == "worker":
            self.start([*torchrun, "--standalone", f"--nproc-per-node={WORLD}", *script], **self._bench)
            return
        self._bench["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
            "1"  # a store for each attempt, instead of a prefix
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        for node in range(NODES + 1):
            host = f"--rdzv-conf=is_host={'true' if node == 0 else 'false'}"
            where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench", host]
            size = [f"--nnodes={NODES}:{NODES}", f"--nproc-per-node={PER_NODE}"]
            self._agents.append(self.start([*torchrun, *where, *size, *script], **self._bench))
            if node == NODES - 1:
                self.until("first step", lambda: all(self._last(rank, "finished") for rank in range(WORLD)))

    def _lines(self, rank: int) -> list[tuple[float, str, int, int]]:
        path = self.directory / f"steps-{rank}"
        rows = (
            [line.split() for line in path.read_text().splitlines(True) if line.endswith("\n")]
            if path.exists()
            else []
        )
        return [(float(t), event, int(step), int(pid)) for t, event, step, pid in rows]

    def _last(self, rank: int, event: str, since: float = 0.0) -> tuple[float, str, int, int] | None:
        return next(
            (line for line in reversed(self._lines(rank)) if line[1] == event and line[0] > since), None
        )

    def failure(self, rng: random.Random) -> dict[str, float]:
        """Kill, and return the seconds from SIGKILL to each phase, of the slowest rank."""
        ranks = range(WORLD)
        self.until(
            "10 steps", lambda: all((self._last(r, "finished") or (0, "", 0, 0))[2] >= 10 for r in ranks)
        )
        time.sleep(_SETTLE + rng.random())
        if self._kind == "worker":
            pids = [self._lines(rng.choice(ranks))[-1][3]]
        else:  # not the agent that hosts the rendezvous: without it no torchrun job survives
            pids = [
                self._agents[1].pid,
                *(self._lines(r)[-1][3] for r in self._ranks_of(self._agents[1].pid)),
            ]
        before = {r: self._lines(r)[-1][3] for r in ranks}
        victims = [r for r in ranks if before[r] in pids]
        killed = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        step = 1 + max((self._last(r, "finished") or (0, "", 0, 0))[2] for r in victims)

        def done(rank: int) -> float | None:
            lines = [x for x in self._lines(rank) if x[3] != before[rank] and x[0] > killed]
            loaded = next((i for i, x in enumerate(lines) if x[1] == "loaded"), None)
            if loaded is None:
                return None
            return next((x[0] for x in lines[loaded:] if x[1] == "finished" and x[2] >= step), None)

        self.until("restart of all ranks", lambda: all(done(r) for r in ranks))
        found = {"resumed": max(done(r) or 0.0 for r in ranks) - killed}
        for phase in TORCHRUN_PHASES[:-1]:
            found[phase] = max(line[0] for r in ranks if (line := self._last(r, phase, killed))) - killed
        return {phase: found[phase] for phase in TORCHRUN_PHASES}

    def _ranks_of(self, agent: int) -> list[int]:
        return [r for r in range(WORLD) if _parent(self._lines(r)[-1][3]) == agent]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory for a job, in memory where possible."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="ft-recovery-", dir=memory)


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _progress(number: int, name: str, found: dict[str, float]) -> None:
    phases = "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in found.items())
    print(f"round {number + 1}: {name:<16} {phases}", file=sys.stderr, flush=True)


def report(result: dict[str, Any]) -> str:
    """The result for people: medians, and how many times faster than torchrun."""

    def rows(names: dict[str, str], prefix: str, phases: tuple[str, ...]) -> list[list[str]]:
        lines = []
        for kind, title in names.items():
            if (found := result.get(prefix + kind)) is not None:
                last = found["resumed"]
                span = f"{last['min']:.2f} .. {last['max']:.2f}"
                lines.append(
                    [title, *(f"{found[phase]['median']:.2f}" for phase in phases), span, str(last["n"])]
                )
        return lines

    def compared() -> list[str]:
        lines = []
        for kind, title in KINDS.items():
            slow = result.get("torchrun worker" if kind == "worker" else "torchrun node")
            if kind in result and slow is not None:
                ratio = slow["resumed"]["median"] / result[kind]["resumed"]["median"]
                what = "a killed worker" if kind == "worker" else "a killed node"
                lines.append(f"{title}: {ratio:.1f} times faster than torchrun with {what}")
        return lines

    ours, theirs = rows(KINDS, "", PHASES), rows(TORCHRUN, "torchrun ", TORCHRUN_PHASES)
    parts = []
    if ours:
        parts.append(table(["seconds after SIGKILL, median", *PHASES, "range", "n"], ours))
    if theirs:
        parts.append(table(["seconds after SIGKILL, median", *TORCHRUN_PHASES, "range", "n"], theirs))
    return "\n\n".join(filter(None, [*parts, "\n".join(compared())]))


if __name__ == "__main__":
    main()
