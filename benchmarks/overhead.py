"""What protection costs a training that nothing happens to: the ratio of step times with it and without.

One job, two nodes of one rank each (data parallel, distributed optimizer: half of the state unique), a
model that keeps both cores busy. Blocks of steps with protection on and off alternate within the same
processes, so whatever else the machine does hits both alike; a control compares off with off in the same
pattern. With `--recorder`, protection stays on and the flight recorder alone is on and off; beside it, what
recording one operation takes. `benchmarks/overhead_worker.py` has the pattern, `benchmarks/README.md` the
choice of the model.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import bandwidth
from benchmarks.common import ROOT, environment, finish, ftrun, parser, spread, table
from ft_core.comm.flight import FlightRecorder
from ft_core.protocol.groups import GroupId

WORKER = ROOT / "benchmarks" / "overhead_worker.py"
RANKS = 2
TARGET = 1.03
CYCLE = "OXOA"
"""O: plain, X: protected, A: plain too, the control. Each X and A stands between two O."""
WARM_UP = 4
"""Steps before the first block: both snapshot buffers and both slots of the replicas are in use then."""


def main() -> None:
    """Run the job, pair the blocks, print."""
    p = parser(__doc__)
    p.add_argument("--cycles", type=int, default=8, help="repetitions of off, on, off, control")
    p.add_argument("--block", type=int, default=3, help="counted steps per block")
    p.add_argument(
        "--jobs", type=int, default=0, help="also: pairs of whole jobs, torchrun and ftrun in turn"
    )
    p.add_argument(
        "--recorder", action="store_true", help="what the flight recorder costs, in place of all protection"
    )
    model = p.add_argument_group("model (Megatron's flags)")
    model.add_argument("--num-layers", type=int, default=6)
    model.add_argument("--hidden-size", type=int, default=256)
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--seq-length", type=int, default=256)
    model.add_argument("--micro-batch-size", type=int, default=4)
    model.add_argument("--global-batch-size", type=int, default=24)
    model.add_argument("--bf16", action="store_true")
    args = p.parse_args()
    if args.quick:
        args.cycles, args.block = min(args.cycles, 2), min(args.block, 2)

    ranks = job(args, CYCLE * args.cycles + "O", args.block, protected=True)
    result = evaluate(ranks, args.block)
    if args.recorder:
        result["recorder_ns"] = recorder_ns()
    if args.jobs:
        result["jobs"] = pairs_of_jobs(args)
    finish("overhead_recorder" if args.recorder else "overhead", args, result, report(result))


def job(args: Any, pattern: str, block: int, *, protected: bool) -> list[dict[str, Any]]:
    """Run one job of blocks as in `pattern`; returns each rank's report. Exits with its output on failure."""
    steps = WARM_UP + len(pattern) * (1 + block)
    script = [str(WORKER), "--mock-data", "--use-distributed-optimizer", f"--train-iters={steps}"]
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        script.append(f"--{name.replace('_', '-')}={getattr(args, name)}")
    script += [f"--global-batch-size={args.global_batch_size}", *(["--bf16"] if args.bf16 else [])]
    with tempfile.TemporaryDirectory(prefix="ft-overhead-") as place:
        out = Path(place)
        if protected:
            command = [*ftrun(out / "job", f"--nnodes={RANKS}", "--nproc-per-node=1"), *script, "--ft"]
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*torchrun, f"--nproc-per-node={RANKS}", *script]
        env = {**environment(), "FT_BENCH": json.dumps([pattern, block, place, args.recorder])}
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(
                f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}\nthe job ended with code {done.returncode}"
            )
        return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def recorder_ns() -> dict[str, float]:
    """Nanoseconds that it takes to record the begin and the end of one operation, by kind; the best of some
    runs."""
    recorder, count = FlightRecorder(0), 20_000
    recorder.begins(1)
    group = recorder.add(GroupId.of((0, 1), 0), (0, 1))
    tensor = torch.zeros(8)
    kinds: dict[str, tuple[Any, ...]] = {
        "allreduce": ([tensor], None),
        "send": ([tensor], 1, 0),
        "allgather": ([[tensor] * 8], [tensor]),
        "barrier": (),
    }

    def run(kind: str) -> float:
        began = time.perf_counter_ns()
        for _ in range(count):
            recorder.end(recorder.begin(group, 1, kind, kinds[kind]))
        return (time.perf_counter_ns() - began) / count

    return {kind: min(run(kind) for _ in range(5)) for kind in kinds}


def evaluate(ranks: list[dict[str, Any]], block: int) -> dict[str, Any]:
    """Pair each framed block with the mean of its two neighbours."""
    kinds = [b["kind"] for b in ranks[0]["blocks"]]
    # The barrier makes all ranks take equally long; the mean over them takes out the edges.
    seconds = [statistics.mean(r["blocks"][i]["seconds"] for r in ranks) / block for i in range(len(kinds))]
    cpu = [sum(r["blocks"][i]["cpu"] + r["blocks"][i]["agent_cpu"] for r in ranks) for i in range(len(kinds))]
    ratios: dict[str, list[float]] = {"X": [], "A": []}
    cpu_ratios: dict[str, list[float]] = {"X": [], "A": []}
    extra: list[float] = []
    for i, kind in enumerate(kinds):
        if kind == "O":
            continue
        plain = (seconds[i - 1] + seconds[i + 1]) / 2
        ratios[kind].append(seconds[i] / plain)
        cpu_ratios[kind].append(2 * cpu[i] / (cpu[i - 1] + cpu[i + 1]))
        if kind == "X":
            extra.append(seconds[i] - plain)

    def per_step(key: str, kind: str = "X") -> float:
        """Median over blocks, sum over ranks, per step."""
        blocks = [i for i, k in enumerate(kinds) if k == kind]
        return statistics.median(sum(r["blocks"][i][key] for r in ranks) / block for i in blocks)

    def per_rank(key: str) -> float:
        return per_step(key) / RANKS

    cores = len(os.sched_getaffinity(0))
    plain_step = statistics.median(s for s, k in zip(seconds, kinds, strict=True) if k == "O")
    sent = [r["h2h_bytes"] / max(1, r["h2h_snapshots"]) for r in ranks]
    bare = bandwidth.cpu(sum(r["state_bytes"] for r in ranks), int(sum(sent)))
    background = per_step("copy_cpu") + per_step("agent_cpu") - per_step("agent_cpu", "O")
    foreground = per_rank("foreground") + per_rank("waited")
    return {
        "ratio": spread(ratios["X"]),
        "control": spread(ratios["A"]),
        "target": TARGET,
        "cpu_ratio": spread(cpu_ratios["X"]),
        "cpu_control": spread(cpu_ratios["A"]),
        "bare_cpu_seconds_per_step": bare,
        "bare_ratio": 1 + bare / cores / plain_step,
        "step_seconds": {"off": plain_step}
        | {"on": statistics.median(s for s, k in zip(seconds, kinds, strict=True) if k == "X")},
        "extra_seconds_per_step": statistics.median(extra),
        "blocked_in_commit_wait_seconds_per_step": per_rank("waited"),
        "blocked_in_step_done_seconds_per_step": per_rank("foreground"),
        "d2h_seconds_per_step": per_rank("copy_wall"),
        "cpu_seconds_per_step": {
            "trainers_off": per_step("cpu", "O"),
            "trainers_on": per_step("cpu"),
            "of_it_d2h": per_step("copy_cpu"),
            "agents_off": per_step("agent_cpu", "O"),
            "agents_on": per_step("agent_cpu"),
        },
        "background_cpu_over_cores_seconds_per_step": background / cores,
        "unexplained_seconds_per_step": statistics.median(extra) - foreground - background / cores,
        "operations_per_rank_and_step": per_rank("operations"),
        "parameters": ranks[0]["parameters"],
        "state_bytes_per_rank": [r["state_bytes"] for r in ranks],
        "h2h_bytes_per_rank_and_step": sent,
        "ratios": ratios,
    }


def pairs_of_jobs(args: Any) -> dict[str, Any]:
    """Whole jobs in turn: plain torchrun, and ftrun with every step protected."""
    ratios, steps = [], 8 if args.quick else 20
    for number in range(args.jobs):
        taken: dict[bool, float] = {}
        for protected in (number % 2 == 0, number % 2 == 1):
            ranks = job(args, ("X" if protected else "O") * steps, 1, protected=protected)
            per_step = [statistics.mean(r["blocks"][i]["seconds"] for r in ranks) for i in range(steps)]
            taken[protected] = statistics.median(per_step)
        ratios.append(taken[True] / taken[False])
    return {"ratio": spread(ratios), "ratios": ratios}


def report(r: dict[str, Any]) -> str:
    """The result for people."""
    ratio, control, cpu, step = r["ratio"], r["control"], r["cpu_seconds_per_step"], r["step_seconds"]
    ms = lambda s: f"{s * 1e3:.1f} ms"  # noqa: E731
    mb = lambda b: f"{b / 1e6:.1f} MB"  # noqa: E731

    def row(name: str, found: dict[str, float]) -> list[str]:
        return [name, *(f"{found[k]:.4f}" for k in ("median", "p25", "p75", "min", "max")), str(found["n"])]

    on, off = ("recorded", "not recorded") if "recorder_ns" in r else ("protected", "plain")
    rows = [row(f"step time, {on} / {off}", ratio), row(f"step time, {off} / {off} (control)", control)]
    rows += [
        row(f"CPU s, {on} / {off}", r["cpu_ratio"]),
        row(f"CPU s, {off} / {off} (control)", r["cpu_control"]),
    ]
    if "recorder_ns" in r:
        each = ", ".join(f"{kind} {ns:.0f} ns" for kind, ns in r["recorder_ns"].items())
        return "\n".join(
            [
                f"{r['parameters'] / 1e6:.1f} M parameters, {RANKS} ranks; step {ms(step['off'])} {off}, "
                f"{ms(step['on'])} {on}; {r['operations_per_rank_and_step']:.0f} operations of each",
                "",
                table(["ratios", "median", "p25", "p75", "min", "max", "pairs"], rows),
                "",
                f"recording an operation: {each}",
            ]
        )
    if "jobs" in r:
        rows.append(row("step time, ftrun job / torchrun job", r["jobs"]["ratio"]))
    state, sent = max(r["state_bytes_per_rank"]), max(r["h2h_bytes_per_rank_and_step"])
    return "\n".join(
        [
            f"{r['parameters'] / 1e6:.1f} M parameters, {RANKS} ranks; "
            f"step {ms(step['off'])} plain, {ms(step['on'])} protected",
            f"state {mb(state)} per rank, staged every step; {mb(sent)} of it sent to the other node",
            "",
            table(["ratios", "median", "p25", "p75", "min", "max", "pairs"], rows),
            f"target {r['target']}: {'met' if ratio['median'] <= r['target'] else 'NOT met'}",
            f"a bare copy and TCP stream of these bytes: {ms(r['bare_cpu_seconds_per_step'])} of CPU, "
            f"{r['bare_ratio']:.4f} where no core is idle",
            "",
            table(
                ["where it goes, per step", ""],
                [
                    ["extra time (median of pairs)", ms(r["extra_seconds_per_step"])],
                    ["  blocked in the commit wait", ms(r["blocked_in_commit_wait_seconds_per_step"])],
                    [
                        "  blocked in step_done (layout, envelope)",
                        ms(r["blocked_in_step_done_seconds_per_step"]),
                    ],
                    [
                        "  background CPU, spread over the cores",
                        ms(r["background_cpu_over_cores_seconds_per_step"]),
                    ],
                    ["  rest (caches, scheduling, noise)", ms(r["unexplained_seconds_per_step"])],
                    ["D2H copy and checksums, in the background", ms(r["d2h_seconds_per_step"])],
                ],
            ),
            "",
            table(
                ["CPU s per step, all ranks", "plain", "protected"],
                [
                    ["trainers", f"{cpu['trainers_off']:.3f}", f"{cpu['trainers_on']:.3f}"],
                    ["  of it D2H and checksums", "-", f"{cpu['of_it_d2h']:.3f}"],
                    ["agents", f"{cpu['agents_off']:.3f}", f"{cpu['agents_on']:.3f}"],
                ],
            ),
        ]
    )


if __name__ == "__main__":
    main()
