"""The controller may die: training does not notice, and its successor handles the next failure."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import Job, Layout, check_clean, check_identical, check_survivors
from processes import alive

PACED = Path(__file__).parent / "paced.py"
LAYOUT = Layout(1, 1, 2, distributed=True)
STEPS = 120


@contextmanager
def no_controller(job: Job) -> Iterator[int]:
    """Kill the controller, and hold up ftrun, which would start another. Yields the step reached by then."""
    pid = job.status()["controller_pid"]
    job.process.send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    yield job.step()
    assert not alive(pid)
    job.process.send_signal(signal.SIGCONT)


def test_training_goes_on_without_a_controller_and_its_successor_recovers(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, script=PACED) as job:
        job.wait_for("resumed")
        job.wait_for("joined", 3)
        before = job.status()
        with no_controller(job) as reached:
            job.wait_for_step(reached + 10)
        job.wait_for("controller_restarted")
        after = job.status()
        assert after["phase"] == "running" and after["epoch"] == before["epoch"] == 1
        assert after["controller_pid"] != before["controller_pid"]
        assert [(r["node"], r["agent_pid"]) for r in after["roles"]] == [
            (r["node"], r["agent_pid"]) for r in before["roles"]
        ]
        assert [(s["node"], s["agent_pid"]) for s in after["spares"]] == [
            (s["node"], s["agent_pid"]) for s in before["spares"]
        ]
        job.kill_nodes(1)
        assert job.wait_for_epoch("decided", 2)["origin"] == "memory"
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)
    check_clean(result)
    assert result.recoveries == 1


def test_a_node_lost_while_the_controller_is_away_is_recovered_when_it_is_back(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, script=PACED) as job:
        job.wait_for("resumed")
        agent, _ = job.pids(1)
        _, survivor = job.pids(0)
        with no_controller(job):
            job.wait_for_step(10)
            os.killpg(agent, signal.SIGKILL)
        job.wait_for("controller_restarted")
        decided = job.wait_for_epoch("decided", 2)
        assert decided["roles"] == [1] and decided["origin"] == "memory"
        job.wait_for("resumed", 2)
        assert job.pids(0)[1] == survivor
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)


def test_a_worker_lost_while_the_controller_is_away_is_recovered_in_place(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, script=PACED) as job:
        job.wait_for("resumed")
        agent, worker = job.pids(1)
        known = job.job_dir / "logs" / "role-1.workers"
        known.unlink()
        known.mkdir()  # and who takes the role over cannot be noted
        with no_controller(job):
            job.wait_for_step(10)
            os.kill(worker, signal.SIGKILL)
        assert job.wait_for_epoch("decided", 2)["moved"] == {"1": "node1"}
        job.wait_for("resumed", 2)
        assert job.pids(1)[0] == agent
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)


def test_a_job_whose_directory_is_deleted_recovers_and_ends(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, script=PACED) as job:
        job.wait_for("resumed")
        _, worker = job.pids(1)
        shutil.rmtree(job.job_dir)
        os.kill(worker, signal.SIGKILL)
        assert job.process.wait(100) == 0, job.console()[-3000:]
        assert not alive(worker)


def test_a_job_whose_directory_is_deleted_has_another_controller(tmp_path):
    with Job(tmp_path / "job", LAYOUT, STEPS, script=PACED) as job:
        job.wait_for("resumed")
        controller = job.status()["controller_pid"]
        shutil.rmtree(job.job_dir)
        os.kill(controller, signal.SIGKILL)
        assert job.process.wait(100) == 0, job.console()[-3000:]
        assert not alive(controller)
