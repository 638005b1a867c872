"""The flight record of a whole job, read from outside, and given to PyTorch's own analyser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Job, Layout, check_clean, check_identical

from ft_core.cli.ask import ask
from ft_core.protocol.flight import FlightLog
from ft_core.protocol.messages import DescribeFlight, RoleFlight

GATHERED = Path(__file__).parent / "gathered.py"
LAYOUT = Layout(1, 2, 2, distributed=True)
STEPS = 6


def analysed(dump: Path) -> str:
    """What PyTorch's analyser says of a dump."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(dump)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_worker_that_is_stopped_is_read_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    monkeypatch.setenv("FT_TEST_GATE", str(gate))
    ftrun = ("--ft-hang-after=300",)  # who is stopped is to stay so
    with Job(tmp_path / "job", LAYOUT, STEPS, nproc=2, script=GATHERED, ftrun=ftrun) as job:

        def flight(role: int) -> FlightLog:
            answer = ask(DescribeFlight(role), job.job_dir)
            assert isinstance(answer, RoleFlight) and answer.log is not None
            return answer.log

        def waits(role: int) -> bool:
            return any(record.under_way for record in flight(role).records)

        roles = range(LAYOUT.world)
        job.until(lambda: all((gate / str(role)).exists() for role in roles), "all roles at the gate")
        job.until(lambda: not any(waits(role) for role in roles), "the end of what went on apart")
        healthy, stopped = tmp_path / "healthy", tmp_path / "stopped"
        assert "4 roles" in job.ctl("flight", f"--dump={healthy}")
        before = {role: flight(role) for role in roles}
        for role, log in before.items():
            assert (log.role, log.epoch, log.version, log.at_end) == (role, 1, 3, False)
            kinds = {record.kind for record in log.records}
            assert {"send", "recv", "all_reduce", "all_gather", "reduce_scatter"} <= kinds
            assert not waits(role)
            assert {group.label for group in log.groups} > {"DATA_PARALLEL_GROUP_WITH_CP"}
        said = analysed(healthy)
        assert "collective" not in said and "rank" not in said, said

        _, worker = job.pids(1)
        os.kill(worker, signal.SIGSTOP)
        (gate / "open").touch()
        job.until(lambda: all(waits(role) for role in (0, 2, 3)), "all others wait")
        assert flight(1).state == "T" and flight(1).records == before[1].records
        assert json.loads(job.ctl("flight", "--role=1", "--json"))["state"] == "T"
        shown = job.ctl("flight", "--role=0")
        assert "UNDER WAY" in shown and len(shown.splitlines()) == 3 + len(flight(0).records)
        job.ctl("flight", f"--dump={stopped}")
        said = analysed(stopped)
        assert "Not all ranks joining collective" in said and "missing ranks: {1}" in said
        os.kill(worker, signal.SIGCONT)
        result = job.finish()
    check_identical(result, LAYOUT, STEPS)
    check_clean(result)
    assert not result.recoveries
