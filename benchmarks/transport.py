"""How fast a node's state goes to another, and what that takes of the CPUs, beside as many bare TCP streams.

Two nodes of namespaces (`tests/cluster/nodes.py`) with one and two interfaces; 1, 2, 4 and 8 roles, whose
segments are pushed as in each step. A bare stream goes from memory to memory by calls of 1 MiB; the *bare
copy* is that and a checksum of each MiB, which is the least that a verified copy takes. All share this
machine's cores, both nodes included, so judge the ratios alone. It needs root.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import environment, finish, parser, table
from tests.cluster.nodes import Cluster, missing

_END = "benchmarks.transport_end"
_CONGESTION = "reno"
"""BBR, where that is the default, paces by timers: that takes as much CPU time as all else, and hides it."""


def _rows(interfaces: int, workers: list[int], quick: bool, rate: str) -> list[dict[str, Any]]:
    with (
        tempfile.TemporaryDirectory() as directory,
        Cluster(Path(directory), 2, ipv6=False, networks=interfaces, rate=rate) as cluster,
    ):
        sender, receiver = cluster.nodes
        for node in cluster.nodes:
            node.run("sh", "-c", f"echo {_CONGESTION} >/proc/sys/net/ipv4/tcp_congestion_control").wait()
        addresses = [receiver.addresses(network)[0] for network in range(interfaces)]
        command, env = [sys.executable, "-m", _END], environment()
        receiver.run(*command, "serve", *addresses, env=env)
        what = json.dumps([workers, *((0.3, 1) if quick else (2.0, 3))])
        sending = sender.run(*command, "send", what, *addresses, env=env, output=subprocess.PIPE)
        said, _ = sending.communicate()
        if sending.returncode:
            sys.exit(f"the sender failed: {said}")
        return [_row(each) for each in json.loads(said.splitlines()[-1])]


def _row(measured: dict[str, Any]) -> dict[str, Any]:
    """The medians of all turns."""
    turns = measured.pop("turns")

    def median(kind: int, what: str) -> float:
        return statistics.median(turn[kind][what] for turn in turns)

    stream, ours, copy = (
        {what: median(kind, what) for what in ("gb_s", "cpu_s_per_gb")} for kind in range(3)
    )
    return measured | {
        "gb_s": ours["gb_s"],
        "cpu_s_per_gb": ours["cpu_s_per_gb"],
        "bare_stream": stream,
        "bare_copy": copy,
        "rate_over_bare": ours["gb_s"] / copy["gb_s"],
        "rate_over_bare_stream": ours["gb_s"] / stream["gb_s"],
        "cpu_over_bare": ours["cpu_s_per_gb"] / copy["cpu_s_per_gb"],
    }


def main() -> None:
    """Measure, print."""
    p = parser(__doc__)
    p.add_argument("--rate", default="", help="limit of each interface, as `tc` has it: 10gbit")
    p.add_argument("--interfaces", type=int, nargs="+", default=[1, 2])
    p.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    args = p.parse_args()
    if reason := missing():
        sys.exit(f"benchmarks.transport cannot run here: {reason}")
    rows = [row for count in args.interfaces for row in _rows(count, args.workers, args.quick, args.rate)]
    header = ["interfaces", "workers", "GB/s", "stream", "copy", "CPU s/GB", "stream", "copy"]
    header += ["rate / copy", "rate / stream", "CPU / copy"]
    lines = [
        [
            *(row["interfaces"], row["workers"]),
            *(f"{each['gb_s']:.2f}" for each in (row, row["bare_stream"], row["bare_copy"])),
            *(f"{each['cpu_s_per_gb']:.3f}" for each in (row, row["bare_stream"], row["bare_copy"])),
            *(f"{row[name]:.2f}" for name in ("rate_over_bare", "rate_over_bare_stream", "cpu_over_bare")),
        ]
        for row in rows
    ]
    finish("transport", args, {"rows": rows}, table(header, lines))


if __name__ == "__main__":
    main()
