"""Every row of the table in docs/failure_model.md: what an error is taken for, leads to, counts against."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from core.control.test_controller_machine import ControlPlane, lose
from failures import CASES, NODE, STEP, TABLE, Killed, Own, Row, Script
from msgspec.structs import replace

from ft_core import plugins
from ft_core.control.events import End
from ft_core.node.workers.worker_table import Worker, WorkerState, lost
from ft_core.protocol.messages import Fault, ScriptFailed, WorkerLost
from ft_core.settings import Command
from ft_core.worker import entry


def test_the_table_is_as_long_as_its_cases() -> None:
    assert len(TABLE) >= 20
    assert sorted(row.error for row in TABLE) == sorted([*CASES, NODE])


def ended(case: Script | Killed | Own, path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerLost:
    """The script is run, as a worker does, and its agent says how it has ended."""
    step = case.step if isinstance(case, Script) else -1 if isinstance(case, Own) else STEP
    worker = Worker(
        0, device=2, pid=7, doing=WorkerState.PLAYING, role=1, stage="training" if step >= 0 else "startup"
    )
    if isinstance(case, Killed):
        worker.ordered = case.ordered
        worker.failed = ScriptFailed(case.told, "its link", "", "") if case.told else None
        return lost(worker, case.code, step, case.out_of_memory)
    if isinstance(case, Own):
        code, worker.failed, _ = entry._ours(case.error)
        return lost(worker, code, step, False)
    script = path / "train.py"
    script.write_text(dedent(case.text))
    monkeypatch.setattr(plugins, "load", lambda group: [])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.setattr("sys.argv", ["train.py"])
    code, failure, _ = entry._outcome(Command(str(script)))
    assert isinstance(failure, ScriptFailed)
    worker.failed = failure
    return lost(worker, code, step, False)


def fails(job: ControlPlane, failure: WorkerLost) -> str:
    """The worker of role 1 does, wherever it is now; `restarts`, or how the job ends."""
    node = job.controller.cluster.places[1]
    job[node].workers.pop(1, None)
    epoch = job.controller.cluster.epoch
    job[node].say(failure)
    if job.phase == "saving":
        job.ends()
    job.all_report()
    if job.done is not None:
        return f"ends, {job.done.code}"
    assert job.phase == "running" and job.controller.cluster.epoch == epoch + 1
    return "restarts"


@pytest.mark.parametrize("row", [row for row in TABLE if row.error != NODE], ids=str)
def test_row(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[row.error]
    failure = ended(case, tmp_path, monkeypatch)
    assert failure.fault is row.fault, failure
    trained = not isinstance(case, Script) or case.trained
    job = ControlPlane(nodes=2)
    if trained:
        job.all_step(1)

    def counted() -> int:
        return len(job.controller.cluster.strikes.against("node1", job.now))

    found, counts = [fails(job, failure)], [counted()]
    if job.done is None:
        found.append(fails(job, replace(failure, pid=8)))
        counts.append(counted())
    assert found == [row.first, row.again][: len(found)]
    if job.done is not None:
        assert job.done == End(int(found[-1].rpartition(" ")[2]))
        assert f"of role 1 on node1: {failure.exit}" in job.said[0]
    assert len(found) == 2 or row.again == "-"
    if len(found) == 1:
        assert row.counts == "no"  # there is no more to count for
        return
    assert counts == {"no": [0, 0], "yes": [1, 2], "from the second on": [0, 1]}[row.counts]


def test_a_node_that_is_lost() -> None:
    [row] = [row for row in TABLE if row.error == NODE]
    assert (row.fault, row.first, row.again, row.counts) == (Fault.NODE, "restarts", "restarts", "yes")
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    assert job.phase == "running"
    [strike] = job.controller.cluster.strikes.against("node1", job.now)
    assert strike.fault is Fault.NODE


@pytest.mark.parametrize("text", ["ENOSPC", "EIO"])
def test_an_error_of_storage_comes_with_its_path(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[text]
    assert ("/data/tokens.bin" in ended(case, tmp_path, monkeypatch).exit) == ("/data" in str(case))
