"""Workers that hang, and that nobody ends: who it is is found, replaced, and the run ends bit-identically."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from harness import Job, Layout, check_clean, check_identical, check_survivors

PACED = Path(__file__).parent / "paced.py"
LAYOUT = Layout(1, 2, 2, distributed=True)
STEPS = 40


def test_a_worker_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    with Job(tmp_path / "job", LAYOUT, STEPS, nproc=2, script=PACED) as job:
        job.wait_for("resumed")
        job.until(lambda: (job.status()["roles"][1]["step"] or 0) >= 4, "some steps")
        _, worker = job.pids(1)
        os.kill(worker, signal.SIGSTOP)
        job.wait_for("hang")
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_survivors(result, LAYOUT.world)
    check_clean(result)
    (hang,) = result.of("hang")
    assert hang["roles"] == [1] and hang["explained"] and "it is stopped (state T)" in hang["reason"]
    written = list((job.job_dir / "hangs").iterdir())
    assert job.job_dir / "hangs" / f"role-1-{worker}.txt" in written and len(written) == 2
