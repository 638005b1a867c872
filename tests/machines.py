"""A job on several machines, all of them here: an `ftrun` for each, whose processes are killed together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from harness import ROOT, Result, Training, environment, read_digest, read_logs, read_losses

from benchmarks import machines
from ft_core.cli import ask

T = TypeVar("T")


@dataclass
class Machine(machines.Machine):
    """One of them."""

    spare: bool


class Machines:
    """Those of a job. Use as a context manager: nothing is left behind."""

    def __init__(self, directory: Path, place: str, training: Training, iterations: int, script: Path,
                 spares: int, addresses: Sequence[str] = (), flags: Sequence[str] = ()) -> None:  # fmt: skip
        """`place`: where the controller's lease is kept, or the address of one that is not elected.
        `addresses`: of the machines in the cluster, as Slurm has them; without, each has a domain by flag.
        `flags`: more of them for each `ftrun`."""
        self._directory, self._place, self._training = directory, place, training
        self._addresses, self._flags = addresses, flags
        self._command = [str(script), *training.arguments(iterations, protected=True)]
        self._temporary = Path(tempfile.mkdtemp(prefix="ft-job-"))
        about = {"TMPDIR": str(self._temporary), "FT_JOB_SECRET": "of several machines"}
        self._environment = environment() | training.environment() | about
        self._output = (directory / "console").open("w+")
        self.machines: list[Machine] = []
        for rank in range(training.world + spares):
            self.start(rank)

    def start(self, rank: int) -> Machine:
        """One of them, with a directory of its own; from `training.world` on they are spares."""
        job_dir = self._directory / f"machine{len(self.machines)}"
        command = [sys.executable, "-m", "ft_core.cli.launch", f"--nnodes={self._training.world}"]
        command += ["--nproc-per-node=1", f"--node-rank={rank}", f"--job-dir={job_dir}"]
        elected = "://" in self._place
        command += [f"--{'ft-leadership' if elected else 'rdzv-endpoint'}={self._place}"]
        slurm = {}
        if self._addresses:
            address = self._addresses[rank]
            pattern = ".".join(["switch"] * address.count(".") + ["node"])
            slurm = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
        else:
            command += ["--ft-domain", f"domain{len(self.machines)}"]
        ftrun = subprocess.Popen(
            [*command, *self._flags, *self._command],
            env=self._environment | slurm,
            cwd=ROOT,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.machines.append(Machine(ftrun, job_dir, rank >= self._training.world))
        return self.machines[-1]

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for machine in self.machines:
            if machine.runs:
                machine.kill()
        self._output.close()
        shutil.rmtree(self._temporary)

    def kill(self, *ranks: int) -> None:
        """These machines at once, as if a rack's power failed."""
        lost = [self.machines[rank] for rank in ranks]
        for machine in lost:
            machine.ftrun.send_signal(signal.SIGSTOP)  # it would start what dies once more
        for pid in [pid for machine in lost for pid in machine.children()]:
            os.killpg(pid, signal.SIGKILL)
        for machine in lost:
            machine.ftrun.kill()
            machine.ftrun.wait()

    def running(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.runs]

    def events(self, name: str = "") -> list[dict]:
        """Of all leaders, in the order of their terms."""
        found = machines.events_of(self.machines)
        return [event for event in found if not name or event["event"] == name]

    def status(self) -> dict:
        """Of the leader; raises as `ask.status`."""
        os.environ["FT_JOB_SECRET"] = self._environment["FT_JOB_SECRET"]
        try:
            return ask.status(self.machines[0].job_dir).to_json()
        finally:
            del os.environ["FT_JOB_SECRET"]

    def leader(self) -> tuple[Machine, int]:
        """The machine that leads, and the controller's pid; waits until there is one."""

        def found() -> tuple[Machine, int] | None:
            try:
                pid = self.status()["controller_pid"]
            except Exception:
                return None
            return next(((machine, pid) for machine in self.running() if pid in machine.children()), None)

        return self.until(found, "leader")

    def step(self) -> int:
        """The newest step that is logged."""
        return max((max(read_losses(read_logs(m.job_dir)), default=0) for m in self.machines), default=0)

    def until(self, condition: Callable[[], T], what: str, timeout: float = 90) -> T:
        """Until `condition` gives something, which is returned."""
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            if time.monotonic() > deadline or not self.running():
                raise AssertionError(f"no {what}: {self.events()[-5:]}; {self.console()[-3000:]}")
            time.sleep(0.05)
        return found

    def until_step(self, step: int) -> None:
        self.until(lambda: self.step() >= step, f"step {step}")

    def console(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()

    def finish(self, timeout: float = 150) -> Result:
        """Wait for the end of those that the job has begun with and still run, and read everything."""
        for machine in [each for each in self.running() if not each.spare]:
            try:
                machine.ftrun.wait(timeout)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"hangs: {self.events()[-6:]}; {self.console()[-3000:]}") from None
        ended = [machine.ftrun.poll() for machine in self.machines]
        codes = {code for code in ended if code is not None and code >= 0}
        logs = "\n".join(read_logs(machine.job_dir) for machine in self.machines)
        return Result(max(codes), self.console(), read_losses(logs), read_digest(logs), self.events())
