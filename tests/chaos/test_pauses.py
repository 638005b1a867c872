"""Whole nodes that stop and go on, before and after they were replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from harness import Job, Layout, check_clean, check_identical, check_survivors
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
