"""Whole jobs on a cluster: an `ftrun` on each node, started as people do it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cluster.nodes import DISK, ROOT, SHARED, Cluster, Node, missing
from harness import Result, Training, environment, read_digest, read_logs, read_losses

from benchmarks.common import read_events

T = TypeVar("T")

PORT = 29400
needed = pytest.mark.skipif(bool(missing()), reason=f"left out: {missing()}")
"""For tests of a cluster."""


@dataclass(frozen=True)
class Loop:
    """The training of `loop.py`."""

    world: int = 2
    width: int = 32

    @property
    def script(self) -> Path:
        return ROOT / "tests" / "cluster" / "loop.py"

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        return [f"--steps={iterations}", f"--width={self.width}"]

    def environment(self) -> dict[str, str]:
        return {}


class ClusterJob:
    """A job on the nodes of a cluster. What is left of it when the test is over the cluster's end ends."""

    def __init__(
        self,
        cluster: Cluster,
        training: Training,
        iterations: int,
        *ftrun: str,
        on: Sequence[Node] = (),
        meeting: str = f"node0:{PORT}",
        nproc: int = 1,
        user: int = 0,
        script: Path | None = None,
    ) -> None:
        """Started on all nodes, or `on` some: those beyond what `training` takes are spares. Where the
        cluster has a shared directory they share the job's directory, and else the secret in the environment.
        `meeting`: where the controller is to be, HOST:PORT, or where its lease is kept."""
        self.cluster, self.training, self.iterations = cluster, training, iterations
        self.user, self._output = user, (cluster.directory / "console").open("w+")
        where = "--ft-leadership" if "://" in meeting else "--rdzv-endpoint"
        self._flags = [f"--nnodes={training.world // nproc}", f"--nproc-per-node={nproc}", *ftrun]
        self._flags.append(f"{where}={meeting}")
        self._script = [str(script or training.script), *training.arguments(iterations, protected=True)]
        self.processes: dict[Node, Any] = {}
        """The newest `ftrun` of each node."""
        for rank, node in enumerate(on or cluster.nodes):
            self.start(node, rank)

    def start(self, node: Node, rank: int, *more: str) -> None:
        """`ftrun` on one of them, with a directory of its own unless they share one."""
        place, about = SHARED / "job", {"FT_TESTS_AWAITED": str(DISK / "awaited")}
        if self.cluster.shared is None:
            place, about["FT_JOB_SECRET"] = DISK / f"job{len(self._own(node))}", "of the nodes of a cluster"
        of_user = {"HOME", "USER", "LOGNAME"} if self.user else set()
        known = {name: value for name, value in environment().items() if name not in of_user | {"TMPDIR"}}
        self.processes[node] = node.run(
            *[sys.executable, "-m", "ft_core.cli.launch", *self._flags, f"--node-rank={rank}"],
            *[f"--job-dir={place}", *more, *self._script],
            env=known | self.training.environment() | about,
            user=self.user,
            output=self._output,
        )

    def _own(self, node: Node) -> list[Path]:
        """Its job directories, as they are seen outside: one for each `ftrun`."""
        return sorted(node.disk.glob("job*"))

    @property
    def job_dirs(self) -> list[Path]:
        """Those of the job, as they are seen outside."""
        if (shared := self.cluster.shared) is not None:
            return [shared / "job"]
        return [path for node in self.cluster.nodes for path in self._own(node)]

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Of all controllers, in the order of their terms."""
        found = [event for path in self.job_dirs for event in read_events(path)]
        found.sort(key=lambda event: (event["term"], event["monotonic"]))
        return [event for event in found if name in ("", event["event"])]

    def step(self) -> int:
        """The newest step that is logged."""
        return max((max(read_losses(read_logs(path)), default=0) for path in self.job_dirs), default=0)

    def until(self, condition: Callable[[], T], what: str, timeout: float = 90) -> T:
        """Until `condition` gives something, which is returned; `what` says that it has come."""
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            ended = {
                node.name: code for node, each in self.processes.items() if (code := each.poll()) is not None
            }
            if time.monotonic() > deadline or len(ended) == len(self.processes):
                raise AssertionError(f"no {what}; {ended}; {self.events()[-5:]}; {self.console()[-4000:]}")
            time.sleep(0.05)
        return found

    def wait_for(self, event: str, count: int = 1, timeout: float = 90) -> list[dict[str, Any]]:
        """Until `count` events of that name are recorded."""

        def recorded() -> list[dict[str, Any]]:
            return found if len(found := self.events(event)) >= count else []

        return self.until(recorded, f"{event} no. {count}", timeout)

    def wait_for_step(self, step: int, timeout: float = 90) -> int:
        """Until that step, or a later one, is logged: the newest one."""
        return self.until(lambda: reached if (reached := self.step()) >= step else 0, f"step {step}", timeout)

    def console(self) -> str:
        """What all of them have printed."""
        self._output.flush()
        return Path(self._output.name).read_text()

    def finish(self, timeout: float = 120) -> Result:
        """Wait for the end on all nodes, and read everything. The code is the largest of those that were not
        killed."""
        for node in self.cluster.nodes:
            (node.disk / "awaited").touch()
        deadline, codes = time.monotonic() + timeout, []
        for node, process in self.processes.items():
            try:
                codes.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                said = f"{self.events()[-6:]}; {self.console()[-4000:]}"
                raise AssertionError(f"{node.name} hangs: {said}") from None
        logs = "\n".join(map(read_logs, self.job_dirs))
        code = max(code for code in codes if abs(code) != signal.SIGKILL)
        return Result(code, self.console(), read_losses(logs), read_digest(logs), self.events())
