"""What the control plane takes at 1,000 to 100,000 roles, 8 a node: a real controller process, and simulated
agents over real sockets.

    python -m benchmarks.scale --roles 1000 10000 100000
    python -m benchmarks.scale --roles 10000 --json

A job starts, trains, loses a node with a spare for it, loses one in a hundred nodes at once, loses one for
which there is no spare, and with it a replica group, which returns as soon as a node joins; its controller is
killed and started again. Printed are the time until the last node has its plan, the
controller's CPU seconds, its memory, what each node is sent, and with what power of the size they grow.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.common import cpu_seconds, environment, finish, parser, read_events, table
from benchmarks.scale_fleet import Sharded, Told, serve
from benchmarks.simulated import LAYOUTS, PER_NODE
from ft_core.protocol.http import FRESH
from ft_core.settings import Command, Settings, write_secret

PROFILED = """
import cProfile, os, runpy, signal, sys, time
profile, running, count = cProfile.Profile(time.process_time), False, 0
def toggle(*_):
    global running, count, profile
    running = not running
    if running:
        profile.enable()
    else:
        profile.disable()
        profile.dump_stats(f"{os.environ['FT_PROFILE']}.{os.getpid()}.{count}")
        profile, count = cProfile.Profile(time.process_time), count + 1
signal.signal(signal.SIGUSR2, toggle)
sys.argv[0] = "ft_core.control"
runpy.run_module("ft_core.control", run_name="__main__", alter_sys=True)
"""
"""With `FT_PROFILE` each phase of the controller's work leaves a profile in a file that begins with this."""
_DIRECT = 128
"""Nodes that speak for the others."""
_HUSH = 1.0
"""Seconds until what was said has been heard."""
PATIENCE = 900.0
"""Seconds for each phase."""


def own_core() -> set[int]:
    """That of the controller."""
    return {min(os.sched_getaffinity(0))}


def waited_for_core(pid: int) -> float:
    """Seconds for which a process could have run, and others had its core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def fleets_cores() -> set[int]:
    """The others, if there are any: what simulates the agents takes nothing of the controller's."""
    cores = os.sched_getaffinity(0)
    return cores - own_core() if len(cores) > 1 else cores


class Job:
    """One simulated job."""

    def __init__(self, layout: Sharded, job_dir: Path, processes: int, silence: float) -> None:
        nodes = layout.roles // PER_NODE
        self.hundredth = max(1, nodes // 100)
        self.spares = 1 + self.hundredth
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        missed = round(silence / Settings.heartbeat)
        self.settings = Settings(
            *(nodes, PER_NODE, Command("train.py")),
            controller=address,
            spares=self.spares,
            heartbeats_missed=missed,
            direct=_DIRECT,
            policy="shrink",
            hang_after=PATIENCE,  # that nobody trains for a while is on purpose
            hang_limit=PATIENCE,
        )
        self.job_dir, self.layout = job_dir, layout
        self.settings.write(job_dir)
        write_secret(job_dir)
        secret = (job_dir / "secret").read_bytes().strip()
        names = {f"node-{number:05}+{number:06x}": number for number in range(nodes + self.spares)}
        self.names = list(names)
        self.alive = set(names)
        self._fleets: list[Connection] = []
        self._processes = []
        self._of: dict[str, int] = {}
        context = multiprocessing.get_context("spawn")
        for number in range(processes):
            own, other = context.Pipe()
            part = {name: rank for name, rank in names.items() if rank % processes == number}
            self._of |= dict.fromkeys(part, number)
            arguments = (layout, address, secret, self.settings, part, other)
            self._processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self._processes[-1].start()
            os.sched_setaffinity(self._processes[-1].pid or 0, fleets_cores())
            self._fleets.append(own)
        self.controller = self._start_controller()

    def _start_controller(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ft_core.control", "--job-dir", str(self.job_dir), *flags]
        if os.environ.get("FT_PROFILE"):
            command[1:3] = ["-c", PROFILED]
        process = subprocess.Popen(command, env=environment())
        os.sched_setaffinity(process.pid, own_core())
        return process

    def start(self) -> None:
        """All agents connect."""
        self._order("start", time.monotonic())

    def kill(self, names: list[str]) -> None:
        """All of these at once."""
        self.alive -= set(names)
        self._order("kill", names)

    def join(self, count: int) -> None:
        """So many more nodes come."""
        names = [
            f"node-{number:05}+{number:06x}" for number in range(len(self.names), len(self.names) + count)
        ]
        self.names += names
        self.alive |= set(names)
        self._of |= dict.fromkeys(names, 0)
        self._fleets[0].send(("join", names))

    def restart(self) -> None:
        """Another controller takes over from one that is killed."""
        self.controller.kill()
        self.controller.wait()
        self.controller = self._start_controller("--failed-before", "0")

    def hush(self, how: int) -> None:
        """See `Fleet.hush`."""
        self._order("hush", how)
        self.told()
        time.sleep(_HUSH)

    def _order(self, order: str, argument: object = None) -> None:
        for fleet in self._fleets:
            fleet.send((order, argument))

    def told(self) -> Told:
        """What all agents were told."""
        self._order("told")
        total = Told()
        for fleet in self._fleets:
            told: Told = fleet.recv()
            for epoch, count in told.plans.items():
                total.plans[epoch] = total.plans.get(epoch, 0) + count
                total.last[epoch] = max(total.last.get(epoch, 0.0), told.last[epoch])
                size = told.planned_bytes[epoch]
                total.planned_bytes[epoch] = total.planned_bytes.get(epoch, 0) + size
            total.largest = max(total.largest, told.largest)
            total.received += told.received
            total.given_up += told.given_up
            total.connected += told.connected
            total.wrong += told.wrong
        assert not total.wrong, total.wrong[:3]
        return total

    def events(self, name: str) -> list[dict[str, Any]]:
        """What the controller has recorded."""
        return [event for event in read_events(self.job_dir) if event["event"] == name]

    def until(self, condition: Callable[[], object]) -> None:
        """Until it is so. Raises TimeoutError."""
        end = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > end or self.controller.poll() is not None:
                raise TimeoutError(f"{self.controller.poll()}: {self.told()}"[:2000])
            time.sleep(0.1)

    def close(self) -> None:
        """End all of its processes."""
        self.controller.kill()
        self.controller.wait()
        for fleet in self._fleets:
            with contextlib.suppress(OSError):
                fleet.send(("end", None))
        for process in self._processes:
            process.join(10)
            process.kill()

    # -- phases ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def measured(self, found: dict[str, float]) -> Iterator[None]:
        """What a phase takes of the controller, and what the nodes are sent in it."""
        pid, begun = self.controller.pid, time.monotonic()
        if profiled := bool(os.environ.get("FT_PROFILE") and self.told().plans):
            self.controller.send_signal(signal.SIGUSR2)
        cpu, received, waited = cpu_seconds(pid), self.told().received, waited_for_core(pid)
        yield
        if self.controller.pid != pid:
            cpu = waited = 0.0
        elif profiled:
            self.controller.send_signal(signal.SIGUSR2)
        found["seconds"] = time.monotonic() - begun
        found["controller_cpu_s"] = cpu_seconds(self.controller.pid) - cpu
        found["no_core_s"] = waited_for_core(self.controller.pid) - waited
        found["bytes_per_node"] = (self.told().received - received) / len(self.names)
        status = Path(f"/proc/{self.controller.pid}/status").read_text()
        found["memory_mb"] = int(status.partition("VmRSS:")[2].split()[0]) / 1024

    def recovery(self, names: list[str], background: float) -> dict[str, float]:
        """These nodes are lost at once: until the last node has the plan; then until all have done a step.

        What simulates the agents needs more time for its part than the controller, and as many machines
        would need next to none. So the seconds that count are those until the controller has noticed, by the
        clock, and its CPU time. It works with one thread. While that is measured nobody
        says more than it is asked; of the core it has what pulses do not take, `background`.
        """
        found = self._epoch(lambda: self.kill(names), hush=True)
        found["plan_everywhere_s"] = found["detected_s"] + found["controller_cpu_s"] / (1 - background)
        return found

    def back(self, count: int) -> dict[str, float]:
        """So many nodes join, with which replica groups come back that were away: from then on until the last
        node has the plan with them. Agents say at once what takes real ones the time to start, and to end a
        step."""
        returned = len(self.events("returned"))
        found = self._epoch(lambda: self.join(count))
        assert len(self.events("returned")) == returned + 1
        return found

    def _epoch(self, cause: Callable[[], None], hush: bool = False) -> dict[str, float]:
        """Of what it has the job do: until all have another plan, and then until all have done a step."""
        found: dict[str, float] = {}
        resumed: dict[str, float] = {}
        epoch, resumes = max(self.told().plans), len(self.events("resumed"))
        detected = len(self.events("detected"))
        self._order("restoring", True)
        if hush:
            self.hush(2)
        with self.measured(found):
            begun = time.monotonic()
            cause()
            self.until(lambda: self.planned() > epoch)
        told = self.told()
        newest = max(told.plans)
        found["plan_bytes"] = told.planned_bytes[newest] / told.plans[newest]
        found["with_agents_s"] = told.last[newest] - begun
        for event in self.events("detected")[detected:][:1]:
            found["detected_s"] = event["monotonic"] - begun
        self._order("hush", 0)
        with self.measured(resumed):
            self._order("restoring", False)
            self.until(lambda: len(self.events("resumed")) > resumes)
        found["resumed_cpu_s"] = resumed["controller_cpu_s"]
        return found

    def scrape(self, seconds: float) -> tuple[int, int]:
        """Read the metrics again and again, each time anew, as several Prometheus would. Returns how often,
        and the size."""
        url = (self.job_dir / "http").read_text().strip()
        count, size, end = 0, 0, time.monotonic() + seconds
        while time.monotonic() < end:
            with urlopen(f"{url}/metrics", timeout=30) as answer:
                size = len(answer.read())
            count += 1
            time.sleep(1.2 * FRESH)
        return count, size

    def planned(self) -> int:
        """The newest epoch whose plan all nodes have."""
        return max((e for e, n in self.told().plans.items() if n >= len(self.alive)), default=0)

    def trained(self) -> bool:
        """Whether all roles have done a step in the newest epoch."""
        events = self.events("resumed")
        return bool(events) and events[-1]["epoch"] == max(self.told().plans, default=-1)


def measure(roles: int, layout: str, seconds: float, processes: int, silence: float) -> dict[str, Any]:
    """One size."""
    shape = Sharded.of(layout, roles)
    phases: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="ft-scale-") as where:
        job = Job(shape, Path(where), processes, silence)
        try:
            with job.measured(start := phases.setdefault("start", {})):
                job.start()
                job.until(lambda: job.events("resumed"))
                job.until(lambda: job.planned() == 1)
            told = job.told()
            start["plan_bytes"] = told.planned_bytes[1] / told.plans[1]
            job.until(lambda: job.told().connected == len(job.names))
            with job.measured(steady := phases.setdefault("steady", {})):
                time.sleep(seconds)
            steady["cores"] = steady["controller_cpu_s"] / steady["seconds"]
            job.hush(1)
            with job.measured(idle := phases.setdefault("nobody trains", {})):
                time.sleep(seconds)
            idle["cores"] = idle["controller_cpu_s"] / idle["seconds"]
            job.hush(0)
            with job.measured(scraped := phases.setdefault("scraped", {})):
                scrapes, size = job.scrape(seconds)
            scraped["scrape_bytes"] = size
            more = scraped["controller_cpu_s"] - steady["cores"] * scraped["seconds"]
            scraped["scrape_cpu_ms"] = 1000 * more / scrapes
            phases["a node lost"] = job.recovery(job.names[1:2], idle["cores"])
            some = job.names[10 : 10 + 2 * job.hundredth : 2]
            phases["1 % of nodes lost"] = job.recovery(some, idle["cores"])
            if shape.data > 1:  # no spare is left
                phases["a replica group leaves"] = job.recovery(job.names[4:5], idle["cores"])
                phases["it returns"] = job.back(1)
            before, given_up = len(job.events("detected")), job.told().given_up
            with job.measured(phases.setdefault("controller restarted", {})):
                job.restart()
                job.until(lambda: job.events("controller_restarted"))
                job.until(lambda: job.told().connected == len(job.alive))
            time.sleep(2)
            lost = {node for event in job.events("detected")[before:] for node in event["roles"]}
            lost_after = len(lost) + len(job.events("spare_lost")) + job.told().given_up - given_up
            largest = job.told().largest
        finally:
            job.close()
    return {
        "roles": shape.roles,
        "layout": layout,
        "plan_everywhere_s": phases["a node lost"]["plan_everywhere_s"],
        "controller_cpu_s": phases["a node lost"]["controller_cpu_s"],
        "bytes_per_node": phases["a node lost"]["bytes_per_node"],
        "lost_after_restart": lost_after,
        "heartbeat_cores": phases["steady"]["cores"],
        "largest_message": largest,
        "phases": phases,
    }


def text(rows: list[dict[str, Any]]) -> str:
    """A table of all sizes, with the power of the size by which each figure grows."""
    names = [
        "plan_everywhere_s",
        "detected_s",
        "with_agents_s",
        "controller_cpu_s",
        "own_cpu_s",
        "resumed_cpu_s",
        "bytes_per_node",
    ]
    names += ["plan_bytes", "memory_mb", "seconds", "scrape_cpu_ms", "scrape_bytes"]
    lines = []
    for phase in rows[0]["phases"]:
        for name in ["cores", *names]:
            if name not in rows[0]["phases"][phase]:
                continue
            values = [row["phases"][phase][name] for row in rows]
            power = ""
            if len(rows) > 1 and min(values[0], values[-1]) > 0:
                size = math.log(rows[-1]["roles"] / rows[0]["roles"])
                power = f"N^{math.log(values[-1] / values[0]) / size:.2f}"
            lines.append([f"{phase}: {name}", *(f"{value:,.2f}" for value in values), power])
    for name in ("lost_after_restart", "largest_message"):
        lines.append([name, *(f"{row[name]:,}" for row in rows), ""])
    return table(["", *(f"{row['roles']:,} roles" for row in rows), "grows with"], lines)


def main() -> None:
    """Measure, print."""
    p = parser(__doc__)
    p.add_argument("--roles", type=int, nargs="+", default=[1000, 10_000])
    p.add_argument("--layout", choices=LAYOUTS, default="model")
    p.add_argument("--seconds", type=float, default=10.0, help="of training in which nothing happens")
    p.add_argument("--processes", type=int, default=2, help="that simulate the agents")
    p.add_argument("--silence", type=float, default=60.0, help="limit, in seconds: the agents share cores")
    args = p.parse_args()
    seconds = min(args.seconds, 3.0) if args.quick else args.seconds
    rows = []
    for roles in args.roles:
        rows.append(measure(roles, args.layout, seconds, args.processes, args.silence))
        if not args.json:
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = rows[0] if len(rows) == 1 else {"sizes": rows}
    finish("scale", args, result, text(rows))


if __name__ == "__main__":
    main()
