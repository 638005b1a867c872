"""How long a recovery takes, phase by phase, and beside it the same failures under plain torchrun.

ftrun: two nodes of two workers and a spare node, all on this machine; a driver sends SIGKILL at a random
moment of a step. "Resumed" means that every role has finished a step after the recovery: the killed step, or
the one after it where the killed one was complete. Phases come from events.jsonl; there is one clock.

With `--state 100MB,1GB` instead: data parallel, one worker a node, as much state a role as is said, and what
counts is how long the others stall beyond one step. Beside it, at which rates a newcomer's state was fetched,
verified and loaded, and those of a bare copy of as many bytes and a bare TCP stream, on this machine at that
time. `--ready 0,1`: jobs without and with standbys that have started roles ahead of need, in turn.

With `--script pretrain` (megatron.training, so Python 3.12), `zero1` or `zero3` it is Megatron-LM's
own loop or DeepSpeed that is killed, without a baseline.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import bandwidth
from benchmarks.common import RECIPE, ROOT, environment, finish, ftrun, parser, read_events, spread, table
from ft_core.cli import ask, timeline
from ft_core.cli.ask import WholeStatus

BASELINE = ROOT / "benchmarks" / "restart_baseline.py"
NODES = 2
SIZE = "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2"
LAYOUT = "--pipeline-model-parallel-size 2 --use-distributed-optimizer --global-batch-size 16 --mock-data"
MODEL = (*SIZE.split(), *LAYOUT.split())
ENDLESS = 20_000
ON_CPU = (
    "--transformer-impl local --attention-backend unfused --distributed-backend gloo "
    "--use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-dropout-fusion --no-persist-layer-norm"
)
LOOP = (
    "--max-position-embeddings 128 --tokenizer-type NullTokenizer --vocab-size 63 "
    "--make-vocab-size-divisible-by 8 --lr 1e-3 --eval-interval 100000 --eval-iters 0"
)
DEEPSPEED = ROOT / "recipes" / "deepspeed"
SCRIPTS: dict[str, tuple[str, ...]] = {
    "core": (str(RECIPE), *MODEL, "--ft"),
    "pretrain": (
        str(RECIPE.with_name("pretrain_gpt.py")),
        *(*ON_CPU.split(), *LOOP.split(), *MODEL, "--ft"),
    ),
    **{
        f"zero{stage}": (
            str(DEEPSPEED / "pretrain_clm.py"),
            *("--deepspeed_config", str(DEEPSPEED / f"ds_zero{stage}.json"), "--mock-data"),
        )
        for stage in (1, 3)
    },
}
KINDS = {
    "node": "node (agent and workers), spare takes over",
    "agent": "agent only, spare takes over",
    "worker": "worker only, restarted on its node",
}
KINDS |= {f"{kind}, ready": f"{title}, ready" for kind, title in KINDS.items()}
PHASES = ("detected", "decided", "state_restored", "resumed")
RATES = ("fetched", "verified", "loaded")
TORCHRUN = {"worker": "torchrun: worker", "node": "torchrun: node, third agent waits"}
TORCHRUN_PHASES = ("imported", "built", "loaded", "resumed")
Found = dict[str, list[dict[str, float]]]
_SETTLE = 2.0
_PATIENCE = 300.0


def main() -> None:
    """Let jobs of both kinds take turns, kill, read the clocks, print."""
    p = parser(__doc__)
    p.add_argument("--rounds", type=int, default=5, help="repetitions of each kind of failure")
    p.add_argument("--kinds", default="node,agent,worker", help="failures to measure under ftrun")
    p.add_argument(
        "--torchrun", default="worker,node", help="failures to measure under torchrun; '' for none"
    )
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--state", default="", help="bytes of state a role, such as 100MB,1GB: see above")
    p.add_argument("--script", choices=list(SCRIPTS), default="core", help="what is trained: see above")
    p.add_argument("--ready", default="0", help="--ft-ready-standbys of the jobs, one after the other")
    p.add_argument("--bf16", action="store_true", help="with --state: train in bfloat16")
    args = p.parse_args()
    args.rounds = min(args.rounds, 1) if args.quick else args.rounds
    if args.state:
        by_state(args)
        return
    layout = Layout(script=SCRIPTS[args.script])
    alone = args.script != "core"
    found = rounds_of(args, layout, _list(args.kinds), [] if alone else _list(args.torchrun))
    result = _spreads(found)
    name = "recovery" + f"_{args.script}" * alone
    finish(name, args, {"seconds_after_sigkill": result, "runs": found}, report(result))


def rounds_of(args: Any, layout: Layout, kinds: list[str], torchrun: list[str]) -> Found:
    """Jobs of both kinds in turn, each with all failures asked for."""
    rng = random.Random(args.seed)
    found: Found = {}
    for number in range(args.rounds):
        for ready in _list(args.ready):
            with scratch() as place, FtJob(Path(place), replace(layout, ready=ready)) as job:
                for kind in kinds:
                    role, name = rng.randrange(layout.world), kind + ", ready" * (ready != "0")
                    found.setdefault(name, []).append(job.failure(kind, role, rng))
                    if args.state:
                        found[name][-1] |= job.rates(role)
                    _progress(number, f"ftrun {name}", found[name][-1])
        for kind in torchrun:
            with scratch() as place, TorchrunJob(Path(place), kind, layout) as baseline:
                found.setdefault(f"torchrun {kind}", []).append(baseline.failure(rng))
                _progress(number, f"torchrun {kind}", found[f"torchrun {kind}"][-1])
    return found


def by_state(args: Any) -> None:
    """One table a size."""
    sizes, texts = {}, []
    for size in _list(args.state):
        nbytes = _bytes(size)
        bare = {"copy_gb_s": bandwidth.copy(nbytes), "tcp_gb_s": bandwidth.tcp(nbytes)}
        kinds = [kind for kind in _list(args.kinds) if kind != "agent"]
        model = model_of(nbytes, args.bf16)
        layout = Layout(NODES, 1, model, (str(RECIPE), *model, "--ft"), cached=True)
        found = rounds_of(args, layout, kinds, _list(args.torchrun))
        for runs in found.values():
            for run in runs:
                run["stall"] = run["resumed"] - run["step"]
        result = _spreads(found)
        sizes[size] = {**bare, "seconds_after_sigkill": result, "runs": found}
        allowed = 0.3 + nbytes / bare["copy_gb_s"] / 1e9
        texts.append(
            f"{size} of state a role; copy {bare['copy_gb_s']:.1f} GB/s, TCP {bare['tcp_gb_s']:.1f} GB/s\n"
            f"0.3 s and a bare copy: {allowed:.2f} s\n{report(result, (*PHASES, 'step', 'stall'))}"
            f"{_rates(result)}"
        )
    name = "recovery_state" + "_bf16" * args.bf16
    finish(name, args, {"sizes": sizes}, "\n\n".join(texts))


def _rates(result: dict[str, Any]) -> str:
    """What is known of the newcomers' state, a line for each kind of failure."""
    lines = [""]
    for kind, title in KINDS.items():
        medians = {what: result.get(kind, {}).get(what) for what in RATES}
        known = [f"{what} at {found['median']:.1f} GB/s" for what, found in medians.items() if found]
        if known:
            lines.append(f"{title}: state {', '.join(known)}")
    return "\n".join(lines)


def model_of(nbytes: int, bf16: bool) -> tuple[str, ...]:
    """A GPT whose weights and half of whose optimizer state take `nbytes`: 8 bytes a parameter, in fp32
    (4 + 8/2) and in bf16 (2 + 12/2)."""
    width = 512 if nbytes < 400e6 else 1024 if nbytes < 2e9 else 2048
    layers = max(1, round(nbytes / 8 / (12 * width**2)))
    size = f"--num-layers {layers} --hidden-size {width} --num-attention-heads 8 --seq-length 32"
    layout = "--use-distributed-optimizer --micro-batch-size 1 --global-batch-size 2 --mock-data"
    return (*size.split(), *layout.split(), *(["--bf16"] if bf16 else []))


def _spreads(found: Found) -> dict[str, Any]:
    return {
        name: {what: spread([r[what] for r in runs]) for what in runs[0] if all(what in r for r in runs)}
        for name, runs in found.items()
    }


@dataclass(frozen=True)
class Layout:
    """Of the jobs that fail."""

    nodes: int = NODES
    per_node: int = 2
    model: tuple[str, ...] = MODEL
    """Flags of the baseline."""
    script: tuple[str, ...] = SCRIPTS["core"]
    ready: str = "0"
    cached: bool = False
    """Whether indices of the data are kept in files, as those of real data are."""

    def of(self, directory: Path) -> list[str]:
        """More flags, of a job that has this directory."""
        indices = [f"--data-cache-path={directory / 'indices'}"] if self.cached else []
        return [f"--train-iters={ENDLESS}", *indices]

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


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

    def __init__(self, directory: Path, layout: Layout) -> None:
        super().__init__(directory)
        self._job, self._layout = directory / "job", layout
        size = (f"--nnodes={layout.nodes}", f"--nproc-per-node={layout.per_node}")
        flags = (*size, "--spares=1", "--respawn", f"--ft-ready-standbys={layout.ready}")
        self.start([*ftrun(self._job, *flags), *layout.script, *layout.of(directory)])

    def _ready(self) -> WholeStatus | None:
        """The job's status, once it trains and a spare stands by."""
        if not any(e["event"] == "resumed" for e in read_events(self._job)):
            return None
        status = ask.status(self._job)
        spare = any(s.idle >= self._layout.per_node for s in status.spares)
        steps = [row.step or 0 for row in status.roles]
        resumed = [e["version"] for e in read_events(self._job) if e["event"] == "resumed"][-1]
        training = len(steps) == self._layout.world and min(steps) > resumed + 5
        roles = {row.role for row in status.roles}
        guarded = {role for spare in status.spares for role in spare.guarding}
        started = self._layout.ready == "0" or (all(row.ready for row in status.roles) and guarded >= roles)
        return status if status.phase == "running" and spare and training and started else None

    def failure(self, kind: str, role: int, rng: random.Random) -> dict[str, float]:
        """Kill what `kind` says around `role`; returns the seconds from SIGKILL to each phase."""
        before = self.until("training with a spare", self._ready)
        began = time.monotonic()
        time.sleep(_SETTLE + rng.random())
        status = self._after(before.roles[role].step + 4, role)
        step = (time.monotonic() - began) / (status.roles[role].step - before.roles[role].step)
        time.sleep(step * rng.random())
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
        return {**{phase: found[phase] for phase in PHASES}, "step": step}

    def rates(self, role: int) -> dict[str, float]:
        """GB/s at which the state came to who plays the role since the newest recovery, as it saw that."""
        epoch = ask.status(self._job).epoch

        def line() -> timeline.Line | None:
            lines = timeline.read(self._job)
            return next((each for each in lines if (each.epoch, each.role) == (epoch, role)), None)

        found: timeline.Line = self.until("time line of the newcomer", line)
        return found.rates()

    def _after(self, step: int, role: int) -> WholeStatus:
        """The job's status, just after the role has finished a step that is not before `step`."""
        newest = ask.status(self._job).roles[role].step or 0

        def reached() -> WholeStatus | None:
            status = ask.status(self._job)
            return status if (status.roles[role].step or 0) > max(newest, step - 1) else None

        found: WholeStatus = self.until(f"step {step}", reached)
        return found


class TorchrunJob(Processes):
    """The baseline under torchrun: one agent with all workers, or an agent per node and one that waits."""

    def __init__(self, directory: Path, kind: str, layout: Layout) -> None:
        super().__init__(directory)
        self._kind, self._world, self._per_node = kind, layout.world, layout.per_node
        script = [str(BASELINE), *layout.model, *layout.of(directory)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=100"]
        self._bench = {"FT_BENCH": str(directory)}
        self._agents: list[subprocess.Popen[bytes]] = []
        if kind == "worker":
            self.start(
                [*torchrun, "--standalone", f"--nproc-per-node={layout.world}", *script], **self._bench
            )
            return
        self._bench["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
            "1"  # a store for each attempt, instead of a prefix
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        for node in range(layout.nodes + 1):
            host = f"--rdzv-conf=is_host={'true' if node == 0 else 'false'}"
            where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench", host]
            size = [f"--nnodes={layout.nodes}:{layout.nodes}", f"--nproc-per-node={layout.per_node}"]
            self._agents.append(self.start([*torchrun, *where, *size, *script], **self._bench))
            if node == layout.nodes - 1:
                self.until("first step", lambda: all(self._last(r, "finished") for r in range(layout.world)))

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
        ranks = range(self._world)
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
        finished = [x for x in self._lines(victims[0]) if x[1] == "finished" and x[0] < killed][-5:]
        step_time = (finished[-1][0] - finished[0][0]) / max(1, len(finished) - 1)
        return {**{phase: found[phase] for phase in TORCHRUN_PHASES}, "step": step_time}

    def _ranks_of(self, agent: int) -> list[int]:
        return [r for r in range(self._world) if _parent(self._lines(r)[-1][3]) == agent]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory for a job, in memory where possible."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="ft-recovery-", dir=memory)


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _bytes(text: str) -> int:
    units = {"GB": 10**9, "MB": 10**6}
    if text[-2:] not in units or not text[:-2].isdigit():
        sys.exit(f"--state {text}: give sizes such as 100MB,1GB")
    return int(text[:-2]) * units[text[-2:]]


def _progress(number: int, name: str, found: dict[str, float]) -> None:
    phases = "  ".join(f"{phase} {seconds:.2f}" for phase, seconds in found.items())
    print(f"round {number + 1}: {name:<16} {phases}", file=sys.stderr, flush=True)


def report(result: dict[str, Any], phases: tuple[str, ...] = PHASES) -> str:
    """The result for people: medians, and how many times faster than torchrun in the last of the phases."""
    more = tuple(phase for phase in phases if phase not in PHASES)
    last_phase = phases[-1]

    def rows(names: dict[str, str], prefix: str, phases: tuple[str, ...]) -> list[list[str]]:
        lines = []
        for kind, title in names.items():
            if (found := result.get(prefix + kind)) is not None:
                last = found[last_phase]
                span = f"{last['min']:.2f} .. {last['max']:.2f}"
                lines.append(
                    [title, *(f"{found[phase]['median']:.2f}" for phase in phases), span, str(last["n"])]
                )
        return lines

    def compared() -> list[str]:
        lines = []
        for kind, title in KINDS.items():
            worker = kind.startswith("worker")
            slow = result.get("torchrun worker" if worker else "torchrun node")
            if kind in result and slow is not None:
                theirs, ours = slow[last_phase]["median"], result[kind][last_phase]["median"]
                what = "a killed worker" if worker else "a killed node"
                how = f"{theirs / ours:.1f} times faster than" if ours > 0 else "no stall was left beside"
                lines.append(f"{title}: {how} torchrun with {what}")
        return lines

    theirs_phases = (*TORCHRUN_PHASES, *more)
    ours, theirs = rows(KINDS, "", phases), rows(TORCHRUN, "torchrun ", theirs_phases)
    parts = []
    if ours:
        parts.append(table(["seconds after SIGKILL, median", *phases, "range", "n"], ours))
    if theirs:
        parts.append(table(["seconds after SIGKILL, median", *theirs_phases, "range", "n"], theirs))
    return "\n\n".join(filter(None, [*parts, "\n".join(compared())]))


if __name__ == "__main__":
    main()
