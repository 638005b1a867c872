"""Workers that hang, and that nobody ends: who it is is found, replaced, and the run ends bit-identically."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from urllib import request

import pytest
from deepspeed_jobs import TWICE, Zero
from harness import Job, Layout, Training, check_clean, check_drills, check_identical, check_survivors
from processes import children

PACED, LATE = (Path(__file__).parent / name for name in ("paced.py", "late.py"))
LAYOUT = Layout(1, 2, 2, distributed=True)
STEPS = 40


def test_a_worker_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    with Job(tmp_path / "job", LAYOUT, STEPS, nproc=2, script=PACED) as job:
        job.wait_for("resumed")
        job.until(lambda: (job.status()["roles"][1]["step"] or 0) >= 4, "some steps")
        _, worker = job.pids(1)
        os.kill(worker, signal.SIGSTOP)
        job.wait_for("hang")
        job.until(lambda: worker in stacks(job), "where it is on the job's page")
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)
    check_clean(result)
    (hang,) = result.of("hang")
    assert hang["roles"] == [1] and hang["explained"] and "it is stopped (state T)" in hang["reason"]
    written = list((job.job_dir / "hangs").iterdir())
    assert job.job_dir / "hangs" / f"role-1-{worker}.txt" in written and len(written) == 2


def test_a_newcomer_that_does_not_come_is_replaced(tmp_path: Path) -> None:
    """Half a minute after the failure that it should have made good."""
    with Job(tmp_path / "job", LAYOUT, STEPS, nproc=2, script=LATE) as job:
        job.wait_for("resumed")
        job.until(lambda: (job.status()["roles"][1]["step"] or 0) >= 4, "some steps")
        (tmp_path / "job.late").touch()
        os.kill(job.pids(1)[1], signal.SIGKILL)
        job.wait_for("hang", timeout=90)
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)
    check_clean(result)
    (hang,) = result.of("hang")
    assert hang["roles"] == [1] and hang["explained"]


def test_a_standby_that_was_stopped_before_it_was_needed_is_replaced(tmp_path: Path) -> None:
    """It does not even take its role."""
    with Job(tmp_path / "job", LAYOUT, STEPS, nproc=2, script=PACED) as job:
        job.wait_for("resumed")
        job.until(lambda: (job.status()["roles"][1]["step"] or 0) >= 4, "some steps")
        workers = {job.pids(role)[1] for role in range(LAYOUT.world)}
        agent, worker = job.pids(1)
        standbys = {pid for child in children(agent) for pid in children(child)} - workers
        assert standbys
        for pid in standbys:
            os.kill(pid, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        job.wait_for("hang")
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)
    check_clean(result)
    hangs = result.of("hang")
    assert [hang["roles"] for hang in hangs] == [[1]] * len(standbys)
    assert all("it is stopped (state T)" in hang["reason"] for hang in hangs)


def stacks(job: Job) -> list[int]:
    """The workers whose stacks the job's page shows."""
    url = (job.job_dir / "http").read_text().strip()
    with request.urlopen(f"{url}/api/stacks", timeout=30) as answer:
        return [each["pid"] for each in json.loads(answer.read())]


DRILLS = ("0@forward:4:spin", "1@optimizer:9:lock", "2@backward:14:deadlock", "0@gradients:19:stop")


@pytest.mark.parametrize("training", [Layout(1, 1, 3, distributed=True), Zero(2)], ids=str)
def test_workers_that_hang_by_themselves(training: Training, tmp_path: Path) -> None:
    """In a loop, with the interpreter's lock, in a lock of their own, stopped: in all places of a step."""
    ftrun = ("--ft-inject", ",".join(DRILLS))
    flags = ("--global-batch-size=6",) if isinstance(training, Layout) else ()
    with Job(tmp_path / "job", training, 24, ftrun=ftrun, flags=flags) as job:
        result = job.finish()
    again = TWICE * len(DRILLS) if isinstance(training, Zero) else 0
    check_identical(result, training, 24, *flags, again=again)
    check_survivors(result, training.world)
    check_drills(result, DRILLS)
    check_clean(result)
    hangs = result.of("hang")
    assert [hang["roles"] for hang in hangs] == [[int(drill[0])] for drill in DRILLS], hangs
    assert all(hang["explained"] for hang in hangs)
