"""SIGTERM to `ftrun`: the workers get it, and what they make of it decides how the job ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import Job, check_clean, check_nothing_runs
from waiting import wait_for_value

from ft_core.node.workers import departure

HANDLES = """
import os, pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
pathlib.Path(f"{sys.argv[1]}-{os.environ['RANK']}-{os.getpid()}").touch()
while not told or not pathlib.Path(sys.argv[1] + "-may-end").exists():
    time.sleep(0.02)
print("saved", flush=True)
"""
DOES_NOT = """
import os, pathlib, sys, time
pathlib.Path(f"{sys.argv[1]}-{os.environ['RANK']}-{os.getpid()}").touch()
time.sleep(300)
"""


@dataclass(frozen=True)
class Script:
    """Two workers that wait for a signal; each leaves a file when it is ready for it."""

    script: Path
    world: int = 2

    @property
    def ready(self) -> Path:
        return self.script.parent / "ready"

    def arguments(self, iterations: int, protected: bool) -> list[str]:
        return [str(self.ready)]

    def environment(self) -> dict[str, str]:
        return {}

    def begin(self, **more: object) -> Job:
        """The job, with both workers at their place."""
        job = Job(self.script.parent / "job", self, 0, **more)  # type: ignore[arg-type]
        try:
            self.wait(2)
        except BaseException:
            job.__exit__()
            raise
        return job

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len([*self.script.parent.glob("ready-[01]-*")]) < count:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def script(tmp_path: Path, text: str) -> Script:
    path = tmp_path / "train.py"
    path.write_text(text)
    return Script(path)


def test_workers_that_do_not_die_of_it(tmp_path: Path):
    with script(tmp_path, DOES_NOT).begin() as job:
        job.process.terminate()
        result = job.finish(60)
    assert result.code == 143
    assert "told to end (SIGTERM)" in result.of("stopped")[0]["reason"]
    assert len(result.of("decided")) == 1, "what ended because it was told to was replaced"
    check_clean(result)


@pytest.mark.parametrize("group", [False, True])
def test_workers_that_handle_it_end_the_job(group: bool, tmp_path: Path):
    """Slurm sends the signal to the whole `group` of processes, others to `ftrun` alone."""
    found = script(tmp_path, HANDLES)
    with found.begin() as job:
        for agent in job.wait_for("joined", 3) if group else ():
            os.killpg(agent["agent_pid"], signal.SIGTERM)
        if group:
            job.wait_for("leaving", 3)
        job.process.terminate()
        (tmp_path / "ready-may-end").touch()
        result = job.finish(60)
    assert result.code == 0 and result.output.count("saved") == 2, result.output
    assert [e["reason"] for e in result.of("finished")] == ["every role has finished"]
    check_clean(result)


def terminated(process: subprocess.Popen[Any]) -> bool:
    """Whether it has ended; told to once more if not."""
    if process.poll() is None:
        process.terminate()
    return process.poll() is not None


@pytest.mark.parametrize("how", ["again", "patience"])
def test_workers_that_take_too_long(how: str, tmp_path: Path):
    """They handle the signal and go on; a later one ends them, as does a time-out that was given."""
    ftrun = ("--shutdown-timeout=0.5",) if how == "patience" else ()
    with script(tmp_path, HANDLES).begin(ftrun=ftrun) as job:
        job.process.terminate()
        if how == "again":
            job.wait_for("leaving", 2)  # both nodes; the spare may not have joined yet
            wait_for_value(lambda: terminated(job.process), True)
        result = job.finish(60)
    assert result.code == 143 and "saved" not in result.output
    check_nothing_runs(result)


def test_a_node_is_told_to_end(tmp_path: Path):
    """As when a pod is deleted: its own `ftrun` alone has the signal. Who does not handle it leaves."""
    found = script(tmp_path, DOES_NOT)
    with found.begin(spares=0) as job:
        joined = job.join()
        spare = job.wait_for("joined", 3)[-1]
        joined.terminate()  # it has no role yet
        assert joined.wait(60) == 143
        assert [e["node"] for e in job.wait_for("spare_lost")] == [spare["node"]]
        agent = next(e["agent_pid"] for e in job.events() if e["event"] == "joined" and e["node"] == "node1")
        os.kill(agent, signal.SIGTERM)
        lost = job.wait_for("waiting")[0]
        assert lost["roles"] == [1]
        reason = job.wait_for("detected")[0]["reason"]
        assert "node1 lost: it was told to end (SIGTERM)" in reason


SUCCESSOR = """
import signal, sys
print("started", flush=True)
sys.stdin.readline()
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("handles it", flush=True)
while not told: signal.pause()
"""


def test_a_successor_is_told_when_it_is_ready(tmp_path: Path):
    """It must not die, in its start-up, of a signal that its predecessor has survived."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SUCCESSOR], **pipes) as process:
        assert process.stdin and process.stdout and process.stdout.readline()
        assert not departure.pass_on(process.pid, even_so=False)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "handles it\n"
        assert departure.pass_on(process.pid, even_so=False)
        assert process.wait(60) == 0


LEAVES_A_CHILD = """
import os, subprocess, sys, time
if os.environ["RANK"] == "0":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
time.sleep(0.2)
sys.exit(3)
"""


def test_nothing_outlives_a_job_that_fails(tmp_path: Path):
    """Nor what a worker had started: it is in its node's process group."""
    with Job(tmp_path / "job", script(tmp_path, LEAVES_A_CHILD), 0) as job:
        result = job.finish(60)
    assert result.code == 3
    check_clean(result)
