"""TRAIN before STATE: what a step takes where training and state share one link, with a gate and without.

Two nodes of namespaces (`tests/cluster/nodes.py`) and one network, whose links pass `--rate`. Training
exchanges something after each layer and waits for it; meanwhile each node sends its state to the other. In
one job blocks of steps take turns: no state, state without a gate, and with it. It needs root.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, environment, finish, parser, spread, table
from benchmarks.gate_worker import KINDS

sys.path.insert(0, str(ROOT / "tests"))

from cluster.nodes import DISK, Cluster, Node, missing

CYCLES = ("PSGN", "PNGS")
"""Blocks in both orders."""
WARM_UP = 5
_MB = 1_000_000
_PORT = 29400
_LONGEST = 600.0


def main() -> None:
    """Run the job, divide the steps of each cycle by its plain ones, print."""
    p = parser(__doc__)
    p.add_argument("--cycles", type=int, default=6, help="repetitions of all kinds of blocks")
    p.add_argument("--block", type=int, default=3, help="counted steps per block")
    p.add_argument("--rate", default="1gbit", help="of each link and way, as `tc` has it")
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--compute", type=float, default=0.4, help="seconds that a layer computes")
    p.add_argument("--exchange", type=int, default=48, help="MB that each node sends after a layer")
    p.add_argument("--state", type=int, default=112, help="MB of state that each node sends in a step")
    args = p.parse_args()
    if args.quick:
        args.cycles, args.block = min(args.cycles, 2), 1
    if reason := missing():
        sys.exit(f"benchmarks.gate: {reason}")
    pattern = "".join(CYCLES[i % 2] for i in range(args.cycles))
    about = {"pattern": pattern, "block": args.block, "warm_up": WARM_UP}
    about |= {"layers": args.layers, "compute": args.compute}
    about |= {"exchange": args.exchange * _MB, "state": args.state * _MB}
    result = evaluate(job(about, args.rate))
    finish("gate", args, result, describe(result))


def job(about: dict[str, Any], rate: str) -> list[list[dict[str, Any]]]:
    """What each rank reports of its blocks."""
    with (
        tempfile.TemporaryDirectory() as directory,
        (Path(directory) / "console").open("w+") as console,
        Cluster(Path(directory), 2, ipv6=False, networks=1, rate=rate) as cluster,
    ):
        variables = environment() | {"FT_BENCH": json.dumps(about), "FT_JOB_SECRET": "of a benchmark's nodes"}

        def start(node: Node, rank: int) -> subprocess.Popen[str]:
            flags = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}", f"--job-dir={DISK}/job"]
            flags += [
                f"--rdzv-endpoint=node0:{_PORT}",
                str(ROOT / "benchmarks" / "gate_worker.py"),
                str(DISK),
            ]
            command = [sys.executable, "-m", "ft_core.cli.launch", *flags]
            return node.run(*command, env=variables, output=console)

        for node in cluster.nodes:  # BBR would share a link by rules of its own
            node.run("sh", "-c", "echo reno >/proc/sys/net/ipv4/tcp_congestion_control").wait()
        started = [start(node, rank) for rank, node in enumerate(cluster.nodes)]
        codes = [process.wait(_LONGEST) for process in started]
        if any(codes):
            sys.exit(f"the job failed: {Path(console.name).read_text()[-4000:]}")
        found = [path for node in cluster.nodes for path in node.disk.glob("rank-*.json")]
        return [json.loads(path.read_text()) for path in found]


def evaluate(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of blocks, each divided by that of the plain block in its cycle. A step takes what it takes the
    slowest rank."""
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    waited: dict[str, list[float]] = {kind: [] for kind in KINDS}
    blocks = list(zip(*ranks, strict=True))
    for at in range(0, len(blocks), len(KINDS)):
        cycle = {
            same[0]["kind"]: (
                statistics.median(map(max, zip(*(each["seconds"] for each in same), strict=True))),
                statistics.median(map(max, zip(*(each["waited"] for each in same), strict=True))),
            )
            for same in blocks[at : at + len(KINDS)]
        }
        for kind, (seconds, held) in cycle.items():
            steps[kind].append(seconds)
            ratios[kind].append(seconds / cycle["P"][0])
            waited[kind].append(held)
    return {
        "step_seconds": {kind: spread(found) for kind, found in steps.items()},
        "ratio": {kind: spread(found) for kind, found in ratios.items() if kind != "P"},
        "commit_wait_seconds": {kind: spread(found) for kind, found in waited.items() if kind != "P"},
    }


def describe(result: dict[str, Any]) -> str:
    """A row for each kind of block."""
    rows = []
    for kind, meaning in KINDS.items():
        step, ratio = result["step_seconds"][kind], result["ratio"].get(kind)
        row = [meaning, f"{step['median']:.2f} s"]
        if ratio is None:
            row += ["1", "", ""]
        else:
            row += [f"{ratio['median']:.3f}", f"{ratio['p25']:.3f} to {ratio['p75']:.3f}"]
            row += [f"{result['commit_wait_seconds'][kind]['median']:.2f} s"]
        rows.append(row)
    return table(["steps", "median", "/ plain", "quartiles", "commit wait"], rows)


if __name__ == "__main__":
    main()
