"""A Slurm on the nodes of a cluster of namespaces: Debian's own daemons, one slurmd for each node.

The first node is the one people log in to: slurmctld and munged are there, and no job is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cluster import nodes
from cluster.nodes import DISK, ROOT, SHARED, Cluster, Node
from harness import environment, read_logs, read_losses

from benchmarks.common import read_events

T = TypeVar("T")

WORK = SHARED / "work"
"""Where jobs are submitted, as nodes see it."""
RECIPE = "recipes/megatron/slurm.sbatch"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_CONFIGURATION = """\
ClusterName=cluster
SlurmctldHost={head}
SlurmUser=root
# A job that is put back into the queue begins again after as many seconds and one; 120 unless it is said.
AuthInfo=cred_expire=5,socket={socket}
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={disk}/state
SlurmdSpoolDir={disk}/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={disk}/log
SlurmdLogFile={disk}/log
# A node counts as lost after so many seconds of silence; 300 unless it is said.
SlurmdTimeout={lost_after}
KillWait={kill_wait}
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs=2
PartitionName=all Nodes={nodes} Default=YES PriorityTier=1
PartitionName=urgent Nodes={nodes} PriorityTier=2 PreemptMode=OFF
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
"""States of a job that does not go on. It may be COMPLETING still: nodes are cleared."""


def _missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    if absent := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"a real Slurm needs {', '.join(absent)} (Debian's slurm-wlm and munge)"
    return nodes.missing()


needed = pytest.mark.skipif(bool(_missing()), reason=f"left out: {_missing()}")
"""For tests of a Slurm."""


class Slurm:
    """Nodes that Slurm gives to jobs, and one to give commands on. Use as a context manager."""

    def __init__(self, directory: Path, count: int, *, lost_after: int = 10, kill_wait: int = 30) -> None:
        self.cluster = Cluster(directory, count + 1, networks=1, shared=True)
        assert self.cluster.shared is not None
        self.work = self.cluster.shared / "work"
        """Where jobs are submitted, as it is seen outside."""
        self.head, *self.nodes = self.cluster.nodes
        given = environment()
        path = f"{Path(sys.executable).parent}:{given['PATH']}"
        self._environment = given | {"PATH": path, "SLURM_CONF": str(SHARED / "slurm.conf")}
        try:
            self._begin(lost_after=lost_after, kill_wait=kill_wait)
        except BaseException:
            self.cluster.close()
            raise

    def _begin(self, **settings: int) -> None:
        self.work.mkdir()
        (self.work / "recipes").symlink_to(ROOT / "recipes")
        key, socket = self.work.parent / "munge.key", SHARED / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = ["--pid-file=/run/munged.pid", "--seed-file=/run/munge.seed", f"--log-file={DISK}/munge.log"]
        files += [f"--socket={socket}", f"--key-file={SHARED / key.name}"]
        self._start(self.head, "munged", "--foreground", "--force", *files)
        names = ",".join(node.name for node in self.nodes)
        about = {"head": self.head.name, "socket": socket, "disk": DISK, "nodes": names}
        (self.work.parent / "slurm.conf").write_text(_CONFIGURATION.format(**about, **settings))
        (self.head.disk / "state").mkdir()
        self._start(self.head, "slurmctld", "-D")
        for node in self.nodes:
            self._start(node, "slurmd", "-D")
        self.until(lambda: set(self.states().values()) == {"IDLE"}, "idle nodes")

    def _start(self, node: Node, *command: str) -> None:
        with (node.disk / f"{command[0]}.console").open("w") as output:
            node.run(*command, env=self._environment, output=output)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.close()

    # -- what people do ----------------------------------------------------------------------------

    def command(self, *argv: str, **variables: str) -> str:
        """What a command prints where people are."""
        env = self._environment | variables
        process = self.head.run("env", f"--chdir={WORK}", *argv, env=env, output=subprocess.PIPE)
        said = str(process.communicate(timeout=60)[0])
        assert process.returncode == 0, f"{' '.join(argv)}: {said}"
        return said.strip()

    def submit(self, *argv: str, **variables: str) -> int:
        """The number of the job that `sbatch` makes of its arguments, and of these variables."""
        return int(self.command("sbatch", "--parsable", *argv, **variables))

    def about(self, job: int | str) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        said = self.command("scontrol", "show", "job", "--oneliner", str(job))
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def states(self) -> dict[str, str]:
        """Of the nodes, by name; "*" at the end: no answer."""
        said = self.command("sinfo", "--noheader", "--Node", "--partition=all", "--format=%N %T")
        return {name: state.upper() for name, state in map(str.split, said.splitlines())}

    # -- what comes of it --------------------------------------------------------------------------

    def until(self, condition: Callable[[], T], what: str, timeout: float = 60) -> T:
        """Until `condition` gives something, which is returned; `what` says that it has come."""
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            assert time.monotonic() < deadline, f"no {what} within {timeout} s; {self._told()}"
            time.sleep(0.1)
        return found

    def ended(self, job: int | str, timeout: float = 90) -> dict[str, str]:
        """What Slurm says of a job once it has ended, and its nodes are free of it."""

        def found() -> dict[str, str]:
            about = self.about(job)
            return about if about["JobState"] in ENDED else {}

        return self.until(found, f"end of job {job}", timeout)

    def log(self, job: int | str) -> str:
        """What a job has printed."""
        path = self.work / f"gpt-{job}.log"
        return path.read_text() if path.exists() else ""

    def _told(self) -> str:
        logs = [self.work / "gpt-1.log", self.head.disk / "log", *(node.disk / "log" for node in self.nodes)]
        said = [f"{path}: {path.read_text()[-2000:]}" for path in logs if path.exists()]
        return "\n".join([self.command("squeue", "--states=all"), *said])


class Run:
    """One run of a job of the recipe: each node has a directory in its own."""

    def __init__(self, slurm: Slurm, name: str) -> None:
        self._slurm, self._path = slurm, slurm.work / name

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def output(self) -> str:
        """What its workers have printed."""
        paths = sorted(path for path in self._path.glob("*") if path.is_dir())
        return "\n".join(map(read_logs, paths))

    def step(self) -> int:
        """The newest step that is logged."""
        return max(read_losses(self.output()), default=0)

    def until_step(self, step: int) -> None:
        self._slurm.until(lambda: self.step() >= step, f"step {step}", 90)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Those of that name."""
        return [event for event in read_events(self._path / "0") if event["event"] == name]
