"""What the `ft` backend costs over the bare gloo inside it: all_reduce from 1 KB to 64 MB, on 2 and 4 ranks.

In the same processes, `ft` and bare calls alternate one by one; both start at the method of the process
group, below torch's Python wrapper, which they share. The difference of medians is the dispatch: a few
look-ups, a lock, a work object.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.common import finish, parser, spread, table
from ft_core.inner import Inner
from ft_core.process_group import Communicators

KB = 1024
SIZES = (KB, 16 * KB, 256 * KB, 4 * KB * KB, 64 * KB * KB)
_LIMIT = timedelta(seconds=60)
_WARM_UP = 5


def main() -> None:
    """Measure on each world size, print."""
    p = parser(__doc__)
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="world sizes")
    p.add_argument("--seconds", type=float, default=4.0, help="about how long to measure each size")
    args = p.parse_args()
    if args.quick:
        args.seconds = 0.5
    rows: list[dict[str, Any]] = []
    for world in args.ranks:
        rows += measure(world, args.seconds)
    finish("collectives", args, {"all_reduce": rows}, report(rows))


def measure(world: int, seconds: float) -> list[dict[str, Any]]:
    """One row per size, from rank 0 of a world of `world` processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, world, store.port, seconds, results), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a rank of {world} ended with code {process.exitcode}")
    found: list[dict[str, Any]] = results.get()
    return found


def _rank(rank: int, world: int, port: int, seconds: float, results: Any) -> None:
    torch.set_num_threads(1)
    comms = Communicators(rank, world, on_failure=lambda reason: None)
    comms.install()
    comms.swap(1, f"127.0.0.1:{port}")
    comms.end_startup()
    dist.init_process_group("gloo")
    ours = dist.group.WORLD
    bare = Inner("bare", tuple(range(world)), rank, {"cpu": "gloo"}, _LIMIT, None, 1, None)
    bare.connect(
        dist.PrefixStore("bare", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    )
    rows = []
    for size in SIZES:
        tensor = torch.ones(size // 4)

        def call(group: Any, data: torch.Tensor = tensor) -> float:
            began = time.perf_counter()
            group.allreduce([data]).wait()
            taken = time.perf_counter() - began
            data.fill_(1.0)
            return taken

        warm = statistics.median(call(group) for _ in range(_WARM_UP) for group in (ours, bare.pg))
        count = torch.tensor([min(3000, max(10, int(seconds / 2 / warm)))])
        dist.broadcast(count, 0)
        times: dict[str, list[float]] = {"ft": [], "bare": []}
        for number in range(int(count)):
            pair = [("ft", ours), ("bare", bare.pg)]
            for name, group in pair if number % 2 else pair[::-1]:
                times[name].append(call(group))
        rows.append(
            {
                "ranks": world,
                "bytes": size,
                "ft_us": _us(times["ft"]),
                "bare_us": _us(times["bare"]),
                "difference_us": 1e6 * (statistics.median(times["ft"]) - statistics.median(times["bare"])),
                "ratio": statistics.median(times["ft"]) / statistics.median(times["bare"]),
            }
        )
    if rank == 0:
        results.put(rows)
    dist.barrier()


def _us(seconds: list[float]) -> dict[str, float]:
    return spread([1e6 * s for s in seconds])


def report(rows: list[dict[str, Any]]) -> str:
    """The result for people."""
    lines = []
    for row in rows:
        size = f"{row['bytes'] // KB} KB" if row["bytes"] < KB * KB else f"{row['bytes'] // (KB * KB)} MB"
        medians = [f"{row[k]['median']:.0f}" for k in ("bare_us", "ft_us")]
        difference = f"{row['difference_us']:+.1f}"
        spans = f"{row['bare_us']['p25']:.0f} .. {row['bare_us']['p75']:.0f}"
        lines.append(
            [
                f"{row['ranks']} ranks, {size}",
                *medians,
                difference,
                f"{row['ratio']:.3f}",
                spans,
                str(row["ft_us"]["n"]),
            ]
        )
    head = ["all_reduce, medians in us", "gloo", "ft", "difference", "ratio", "gloo p25 .. p75", "calls"]
    return table(head, lines)


if __name__ == "__main__":
    main()
