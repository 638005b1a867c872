"""The exchange: an all-reduce of the `ft` backend beside the bare backend, and with a rank lost in it.

Throughput: in the same processes, the bare backend, `ft`, and the bare backend again take turns, in every
order; the last is the control. NCCL where there is a GPU for each rank, else gloo. What is timed starts at
the method of the process group, below torch's Python wrapper, and ends with the slowest rank. (FT-HSDP,
section 6.3 and table 2.)

Loss: a rank is killed in the middle of an exchange, the communicators of the others are swapped for ones
without it, and the exchange is repeated. This process does the controller's part. (FT-HSDP, section 4.2.)
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from benchmarks import collectives_worker
from benchmarks.common import finish, parser, spread, table
from ft_core.comm.rendezvous_server import Stores

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.collectives_worker"])

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
PER_RANK = 300 * 2**20
"""Bytes of memory that a rank needs besides its tensors."""

TRIES = 5
"""So often a rank may be killed too late, when the exchange is over."""


def main() -> None:
    """Measure with each number of ranks, print."""
    p = parser(__doc__)
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="world sizes")
    p.add_argument(
        "--sizes",
        type=_bytes,
        nargs="+",
        default=[_bytes(s) for s in ("1K", "1M", "16M", "256M", "1G")],
        help="bytes of fp32 per rank, such as 1K, 16M, 1G: powers of 1024",
    )
    p.add_argument("--seconds", type=float, default=10.0, help="about how long to measure each size")
    p.add_argument("--loss", type=_bytes, default=_bytes("256M"), help="bytes of the exchange interrupted")
    p.add_argument("--kills", type=int, default=4, help="ranks killed per world size; 0: no loss")
    args = p.parse_args()
    if args.quick:
        args.sizes = [s for s in args.sizes if s <= _bytes("16M")]
        args.seconds, args.kills, args.loss = 1.0, min(1, args.kills), min(args.loss, _bytes("16M"))
    rows: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    for world in args.ranks:
        sizes = [s for s in args.sizes if _fits(world, s)]
        rows += throughput(world, sizes, args.seconds)
        if args.kills and _fits(world, 2 * args.loss):
            losses.append(loss(world, args.loss, args.kills))
    result = {"all_reduce": rows, "loss": losses}
    finish("collectives", args, result, report(result))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of bytes, such as 16M")
    return int(match[1]) * UNITS[match[2]]


def _fits(world: int, size: int) -> bool:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, needed = int(lines["MemAvailable"].split()[0]) * 1024, world * (size + PER_RANK)
    if needed > available:
        gib = [f"{value / 2**30:.1f} GiB" for value in (needed, available)]
        _progress(world, size, f"left out: needs {gib[0]} of memory, there are {gib[1]}")
    return needed <= available


class Ranks:
    """The processes of one world, in epoch 1. Use as a context manager: it kills what is left."""

    def __init__(self, world: int, target: Callable[..., None], *args: Any) -> None:
        self.store = Stores.in_thread("127.0.0.1", collectives_worker.SECRET).address
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Any] = {}
        for rank in range(world):
            ours, theirs = CONTEXT.Pipe()
            arguments = (rank, world, self.store, theirs, *args)
            process = CONTEXT.Process(target=target, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes[rank], self._pipes[rank] = process, ours

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*self._processes)

    def kill(self, *ranks: int) -> None:
        """SIGKILL; returns when they are gone."""
        for rank in ranks:
            self._processes[rank].kill()
        for rank in ranks:
            self._processes[rank].join()
            del self._processes[rank], self._pipes[rank]

    def send(self, message: Any) -> None:
        """To all that are left."""
        for pipe in self._pipes.values():
            pipe.send(message)

    def receive(self, ranks: Iterable[int]) -> dict[int, Any]:
        """The next message of each of `ranks`. Ends the benchmark if any rank has ended."""
        found: dict[int, Any] = {}
        wanted = set(ranks)
        while found.keys() < wanted:
            for ready in connection.wait([p for r, p in self._pipes.items() if r not in found]):
                rank = next(r for r, p in self._pipes.items() if p is ready)
                try:
                    found[rank] = self._pipes[rank].recv()
                except EOFError:
                    raise SystemExit(f"rank {rank} has ended; see above") from None
        return found


def throughput(world: int, sizes: list[int], seconds: float) -> list[dict[str, Any]]:
    """One row per size (bytes), measured for about `seconds` each."""
    rows = []
    with Ranks(world, collectives_worker.throughput, sizes, seconds) as ranks:
        for size in sizes:
            calls, times = ranks.receive([0])[0]
            rows.append(row(world, size, calls, times))
            print(
                f"{world} ranks, {_name(size)}: {rows[-1]['ratio']['median']:.3f}",
                file=sys.stderr,
                flush=True,
            )
    return rows


def row(world: int, size: int, calls: int, times: dict[str, list[float]]) -> dict[str, Any]:
    """`times`: seconds per call of each kind, by round. Ratios are of throughputs, within a round."""

    def ratio(kind: str) -> dict[str, float]:
        return spread([bare / other for bare, other in zip(times["bare"], times[kind], strict=True)])

    return {
        "ranks": world,
        "bytes": size,
        "calls_per_block": calls,
        "bytes_per_second": {kind: spread([size / t for t in found]) for kind, found in times.items()},
        "bus_factor": 2 * (world - 1) / world,
        "ratio": ratio("ft"),
        "control": ratio("control"),
        "added_us": 1e6 * (statistics.median(times["ft"]) - statistics.median(times["bare"])),
        "control_added_us": 1e6 * (statistics.median(times["control"]) - statistics.median(times["bare"])),
    }


def loss(world: int, size: int, kills: int) -> dict[str, Any]:
    """Seconds from SIGKILL until all others were woken, and had repeated the exchange among themselves."""
    rng = random.Random(world)
    rounds: list[dict[str, float]] = []
    late = 0
    while len(rounds) < kills:
        found = _one_loss(world, size, rng)
        if found is not None:
            rounds.append(found)
        elif (late := late + 1) > TRIES:
            raise SystemExit(f"{world} ranks, {_name(size)}: too short an exchange to kill a rank in it")
    _progress(world, size, f"one lost, {kills} times")
    return {
        "ranks": world,
        "bytes": size,
        "late_kills": late,
        **{key: spread([r[key] for r in rounds]) for key in rounds[0]},
    }


def _one_loss(world: int, size: int, rng: random.Random) -> dict[str, float] | None:
    victim = rng.randrange(world)
    others = [rank for rank in range(world) if rank != victim]
    with Ranks(world, collectives_worker.interrupted, size) as ranks:
        among_all = max(ranks.receive(range(world)).values())
        time.sleep(rng.uniform(0.2, 0.8) * among_all)
        killed = time.monotonic()
        ranks.kill(victim)
        told = time.monotonic()
        ranks.send((2, ranks.store, [victim]))
        woken = ranks.receive(others).values()
        if None in woken:
            return None
        repeated, among_others = zip(*ranks.receive(others).values(), strict=True)
        return {
            "told": told - killed,
            "woken": max(woken) - killed,
            "repeated": max(repeated) - killed,
            "exchange_among_all": among_all,
            "exchange_among_others": max(among_others),
        }


def _progress(world: int, size: int, text: str) -> None:
    print(f"{world} ranks, {_name(size)}: {text}", file=sys.stderr, flush=True)


def _name(size: int) -> str:
    unit = max((u for u in UNITS if size >= UNITS[u]), key=lambda u: UNITS[u])
    return f"{size / UNITS[unit]:g} {unit}{'iB' if unit else 'B'}"


def report(result: dict[str, Any]) -> str:
    """The result for people."""

    def ratio(found: dict[str, float]) -> str:
        return f"{found['median']:.3f} ({found['p25']:.3f} .. {found['p75']:.3f})"

    speeds, repeats = [], []
    for r in result["all_reduce"]:
        bare, ft = (r["bytes_per_second"][kind]["median"] / 1e9 for kind in ("bare", "ft"))
        speeds.append(
            [
                f"{r['ranks']} ranks, {_name(r['bytes'])}",
                *(f"{gb:.3g}" for gb in (bare, ft, bare * r["bus_factor"], ft * r["bus_factor"])),
                ratio(r["ratio"]),
                ratio(r["control"]),
                f"{r['added_us']:+.1f}" if r["bytes"] < UNITS["M"] else "",
                str(r["ratio"]["n"]),
            ]
        )
    for r in result["loss"]:
        keys = ("told", "woken", "repeated", "exchange_among_others", "exchange_among_all")
        span = f"{r['repeated']['min']:.3f} .. {r['repeated']['max']:.3f}"
        medians = [f"{r[key]['median']:.3f}" for key in keys]
        repeats.append([f"one of {r['ranks']}, {_name(r['bytes'])}", *medians, span, str(r["repeated"]["n"])])
    head = ["all_reduce, GB/s", "bare", "ft", "bus, bare", "bus, ft"]
    head += ["ft / bare (quartiles)", "bare / bare (control)", "us more per call", "rounds"]
    parts = [table(head, speeds)] if speeds else []
    if repeats:
        head = ["seconds from SIGKILL until", "others told", "all woken", "exchange repeated"]
        head += ["exchange alone", "among all", "repeated, range", "n"]
        parts.append(table(head, repeats))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
