"""Whole nodes that stop and go on, before and after they were replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from harness import ROOT, Job, Layout, check_clean, check_identical, check_survivors, environment
from processes import alive

PACED = Path(__file__).parent / "paced.py"
LAYOUT = Layout(1, 1, 2, distributed=True)
STEPS = 40


@contextmanager
def stopped(job: Job, agent: int, waiting: int) -> Iterator[None]:
    """All processes of an agent's node stop, until the job waits for a node for the `waiting`-th time."""
    os.killpg(agent, signal.SIGSTOP)
    try:
        job.wait_for("waiting", waiting)
        yield
    finally:
        with suppress(ProcessLookupError):  # it has died, of a failed test
            os.killpg(agent, signal.SIGCONT)


def test_nodes_that_were_given_up_come_back_by_themselves(tmp_path):
    with (
        Job(tmp_path / "job", LAYOUT, STEPS, spares=0, script=PACED, ftrun=("--ft-heartbeat=0.15",)) as job,
        ExitStack() as later,
    ):
        job.wait_for("resumed")
        first, worker = job.pids(1)
        with stopped(job, first, 1):
            pass  # nobody has taken its role: it goes on as if nothing had been
        job.wait_for_epoch("resumed", 2)
        assert job.pids(1) == (first, worker)
        with stopped(job, first, 2):
            job.join()
            job.wait_for_epoch("resumed", 3)
            second, _ = job.pids(1)
            later.enter_context(stopped(job, second, 3))
        job.wait_for_epoch("resumed", 4)  # with the first node again, started by `ftrun --standalone`
        assert job.pids(1)[0] == first and not alive(worker)
        os.killpg(first, signal.SIGKILL)
        job.wait_for("waiting", 4)
        later.close()
        job.wait_for_epoch("resumed", 5)  # and with the second, started by an `ftrun` of its own
        assert job.pids(1)[0] == second
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)
    check_clean(result)


@pytest.mark.parametrize("what", ["agent", "node"])
def test_one_that_was_stopped_for_long_comes_back_as_a_spare(what, tmp_path):
    """Its agent alone, or all of its processes; others have its role by then."""
    steps = 150
    with Job(tmp_path / "job", LAYOUT, steps, spares=1, script=PACED, ftrun=("--ft-heartbeat=0.25",)) as job:
        job.wait_for("resumed")
        agent, worker = job.pids(1)
        name = next(row["node"] for row in job.status()["roles"] if row["role"] == 1)
        send = os.kill if what == "agent" else os.killpg
        send(agent, signal.SIGSTOP)
        try:
            decided = job.wait_for_epoch("decided", 2)
        finally:
            send(agent, signal.SIGCONT)
        assert set(decided["moved"]) == {"1"}
        back = job.wait_for("joined", 4)[3]
        assert back["node"] != name and back["node"].partition("+")[0] == name.partition("+")[0]
        assert back["agent_pid"] == agent and not alive(worker)
        assert [e["node"] for e in job.wait_for("given_up")] == [name]
        assert name in job.wait_for("detected")[0]["reason"]
        result = job.finish()
    assert result.recoveries == 1
    check_identical(result, LAYOUT, steps)
    check_clean(result)


def test_a_controller_that_was_stopped_takes_nobody_for_lost(tmp_path):
    limit = 20 * 0.1
    with Job(tmp_path / "job", LAYOUT, 120, spares=1, script=PACED, ftrun=("--ft-heartbeat=0.1",)) as job:
        job.wait_for("resumed")
        controller = job.status()["controller_pid"]
        os.kill(controller, signal.SIGSTOP)
        try:
            stopped_at, step = time.monotonic(), job.step()
            job.until(
                lambda: time.monotonic() > stopped_at + 2 * limit and job.step() > step, "some steps more"
            )
        finally:
            os.kill(controller, signal.SIGCONT)
        result = job.finish()
    assert not [e for e in result.events if e["event"] in ("detected", "spare_lost", "unreachable")]
    check_identical(result, LAYOUT, 120)
    check_clean(result)


def test_processes_that_stop_at_random(tmp_path):
    """A small instance of the benchmark, which says how often that costs a node."""
    command = [sys.executable, "-m", "benchmarks.pauses", "--jobs=1", "--busy=0", "--at-once=1"]
    with (tmp_path / "output").open("w+") as output:
        done = subprocess.run(command, env=environment(), cwd=ROOT, stdout=output, stderr=output, timeout=300)
        output.seek(0)
        said = output.read()
    assert done.returncode == 0 and said.endswith("\n1 jobs, 0 failed\n"), said
