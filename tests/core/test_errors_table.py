"""Every row of the table in docs/failure_model.md: what an error is taken for, leads to, counts against."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
from core.test_controller_machine import ControlPlane, lose
from msgspec.structs import replace

from ft_core import plugins
from ft_core.control.events import End
from ft_core.node.crew import Doing, Worker, lost
from ft_core.protocol.messages import Fault, ScriptFailed, WorkerLost
from ft_core.settings import Command
from ft_core.worker import entry

DOCUMENT = Path(__file__).parents[2] / "docs" / "failure_model.md"
STEP = 4


@dataclass(frozen=True)
class Row:
    """Of the table."""

    error: str
    fault: Fault
    first: str
    again: str
    counts: str

    def __str__(self) -> str:
        return self.error


def table() -> list[Row]:
    section = DOCUMENT.read_text().partition("## What an error leads to")[2].partition("\n## ")[0]
    cells = [re.findall(r"(?<=\|) (.*?) (?=\|)", line) for line in section.splitlines() if line[:1] == "|"]
    return [Row(row[0], Fault(row[1]), *row[2:]) for row in cells[1:] if row]


@dataclass(frozen=True)
class Script:
    """An error as a script has it, in its training or before."""

    text: str
    step: int = STEP
    trained: bool = True


@dataclass(frozen=True)
class End_:  # noqa: N801
    """Of a worker that has said nothing."""

    code: int
    out_of_memory: bool = False
    ordered: bool = False


RUNTIME = "raise RuntimeError({!r})".format
CUDA = "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call".format
LOADER = """
    import os, signal
    from torch.utils.data import DataLoader, Dataset
    class Samples(Dataset):
        def __len__(self): return 4
        def __getitem__(self, at): {}
    list(DataLoader(Samples(), num_workers=1))
"""
CASES: dict[str, Script | End_] = {
    "an exception of the script's": Script("raise ValueError('no')"),
    "an exception of the script's in start-up, or in the first step": Script("1 / 0", -1, False),
    "an exception in the start-up of a successor, where its predecessor had none": Script("1 / 0", -1),
    "CUDA: device-side assert (an index out of range, say)": Script(
        RUNTIME(CUDA("device-side assert triggered"))
    ),
    "`ConfigError`: a configuration that cannot work": Script(
        "from ft_core.errors import ConfigError; raise ConfigError('no')"
    ),
    "`ReplayMismatch`: start-up is not deterministic": Script(
        "from ft_core.errors import ReplayMismatch; raise ReplayMismatch('no')"
    ),
    "`KeyboardInterrupt`": Script("raise KeyboardInterrupt"),
    "`sys.exit(3)` in one rank of many": Script("import sys; sys.exit(3)"),
    '`sys.exit("a message")` in one rank of many': Script("import sys; sys.exit('a message')"),
    "`os._exit(5)` in one rank of many": End_(5),
    "`os._exit(0)` in the middle of training": End_(0),
    "`MemoryError`": Script("bytearray(1 << 62)"),
    "NumPy or torch cannot allocate host memory": Script("import torch; torch.empty(1 << 60)"),
    "ENOMEM: a process or a map is refused": Script(
        "import os, errno; raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))"
    ),
    "CUDA out of memory": Script("import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried')"),
    "CUDA error: illegal memory access": Script(RUNTIME(CUDA("an illegal memory access was encountered"))),
    "CUDA error: uncorrectable ECC error": Script(
        f"import torch; raise torch.AcceleratorError({CUDA('uncorrectable ECC error encountered')!r})"
    ),
    "cuBLAS, cuDNN: execution failed": Script(RUNTIME("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")),
    "NCCL: unhandled cuda error": Script(
        "from torch import distributed; raise distributed.DistBackendError('NCCL: unhandled cuda error')"
    ),
    "NCCL: remote error, system error": Script(
        "import torch; raise torch.distributed.DistBackendError('NCCL error: ncclRemoteError: A call failed')"
    ),
    "gloo: connection closed, though nobody was lost": Script(
        RUNTIME("[../third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:3232")
    ),
    "a collective or a store timed out, though nobody was lost": Script(
        RUNTIME("[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete")
    ),
    "ENOSPC: storage is full": Script("with open('/dev/full', 'w') as file: file.write('x')"),
    "EIO: storage is broken": Script("raise OSError(5, 'Input/output error', '/data/tokens.bin')"),
    "ESTALE: a file of a network's file system is gone": Script(
        "import errno; raise OSError(errno.ESTALE, 'Stale file handle', '/data/tokens.bin')"
    ),
    "`torch.save` onto a full disk": Script("import torch; torch.save(torch.zeros(1 << 16), '/dev/full')"),
    "ENOSPC in a loader's process": Script(
        LOADER.format("raise OSError(28, 'No space left on device', '/cache')")
    ),
    "a loader's process was killed": Script(LOADER.format("os.kill(os.getpid(), signal.SIGKILL)")),
    "a loader's process ended of a bus error (`/dev/shm` is full)": Script(
        RUNTIME("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that")
    ),
    "SIGKILL, nobody knows of whom": End_(-signal.SIGKILL),
    "SIGKILL of the kernel's OOM killer, as the cgroup's count or the kernel's log shows": End_(
        -signal.SIGKILL, out_of_memory=True
    ),
    "SIGSEGV": End_(-signal.SIGSEGV),
    "SIGBUS": End_(-signal.SIGBUS),
    "SIGABRT": End_(-signal.SIGABRT),
    "SIGTERM to the worker alone": End_(-signal.SIGTERM),
    "SIGINT to the worker alone, which does not handle it": End_(-signal.SIGINT),
    "`ftctl kill --role`, or another order of the controller's": End_(-signal.SIGKILL, ordered=True),
}
NODE = "a whole node is lost"
TABLE = table()


def test_the_table_is_as_long_as_its_cases() -> None:
    assert len(TABLE) >= 20
    assert sorted(row.error for row in TABLE) == sorted([*CASES, NODE])


def ended(case: Script | End_, path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerLost:
    """The script is run, as a worker does, and its agent says how it has ended."""
    step = case.step if isinstance(case, Script) else STEP
    worker = Worker(
        0, device=2, pid=7, doing=Doing.PLAYING, role=1, stage="training" if step >= 0 else "startup"
    )
    if isinstance(case, End_):
        worker.ordered = case.ordered
        return lost(worker, case.code, step, case.out_of_memory)
    script = path / "train.py"
    script.write_text(dedent(case.text))
    monkeypatch.setattr(plugins, "load", lambda group: [])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.setattr("sys.argv", ["train.py"])
    code, failure = entry._outcome(Command(str(script)))
    assert isinstance(failure, ScriptFailed)
    worker.failed = failure
    return lost(worker, code, step, False)


def fails(job: ControlPlane, failure: WorkerLost) -> str:
    """The worker of role 1 does, wherever it is now; `restarts`, or how the job ends."""
    node = job.controller.facts.places[1]
    job[node].workers.pop(1, None)
    epoch = job.controller.facts.epoch
    job[node].say(failure)
    job.all_report()
    if job.done is not None:
        return f"ends, {job.done.code}"
    assert job.phase == "running" and job.controller.facts.epoch == epoch + 1
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
        return len(job.controller.facts.strikes.against("node1", job.now))

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
    [strike] = job.controller.facts.strikes.against("node1", job.now)
    assert strike.fault is Fault.NODE


@pytest.mark.parametrize("text", ["ENOSPC: storage is full", "EIO: storage is broken"])
def test_an_error_of_storage_comes_with_its_path(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[text]
    assert ("/data/tokens.bin" in ended(case, tmp_path, monkeypatch).exit) == ("/data" in str(case))
