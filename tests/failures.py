"""The rows of the table in docs/failure_model.md, and an error for each: what is raised, or how it ends."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from ft_core.protocol.messages import Fault

DOCUMENT = Path(__file__).parents[1] / "docs" / "failure_model.md"
STEP = 4
EVERY = -1
"""In place of a role: what happens does so in each of them, once."""


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
    """One row for each error, in the order of `CASES`. A line of the table may have several, of one class,
    that lead to the same."""
    section = DOCUMENT.read_text().partition("## What an error leads to")[2].partition("\n## ")[0]
    cells = [re.findall(r"(?<=\|) (.*?) (?=\|)", line) for line in section.splitlines() if line[:1] == "|"]
    rows = [Row(error, Fault(row[1]), *row[2:]) for row in cells[1:] if row for error in row[0].split("; ")]
    order = [*CASES, NODE]
    return sorted(rows, key=lambda row: order.index(row.error) if row.error in order else -1)


@dataclass(frozen=True)
class Script:
    """An error as a script has it, in its training or before."""

    text: str
    step: int = STEP
    trained: bool = True


@dataclass(frozen=True)
class Killed:
    """Of a worker whose script has said nothing."""

    code: int
    out_of_memory: bool = False
    ordered: bool = False
    told: Fault | None = None
    """By the process itself."""


@dataclass(frozen=True)
class Own:
    """An error of the engine's, raised where the script has no part in it."""

    error: Exception


RUNTIME = "raise RuntimeError({!r})".format
CUDA = (
    "CUDA error: {}\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
).format
LOADER = """
    import os, signal
    from torch.utils.data import DataLoader, Dataset
    class Samples(Dataset):
        def __len__(self): return 4
        def __getitem__(self, at): {}
    list(DataLoader(Samples(), num_workers=1))
"""
CASES: dict[str, Script | Killed | Own] = {
    "an exception of the script's": Script("raise ValueError('no')"),
    "an exception in start-up or in the first step": Script("1 / 0", -1, False),
    "an exception in a successor's start-up, where its predecessor had none": Script("1 / 0", -1),
    "CUDA: device-side assert": Script(RUNTIME(CUDA("device-side assert triggered"))),
    "`ConfigError`": Script("from ft_core.errors import ConfigError; raise ConfigError('no')"),
    "`ReplayMismatch`": Script("from ft_core.errors import ReplayMismatch; raise ReplayMismatch('no')"),
    "`ftrun`'s own, before the script's first line or after its last": Own(
        FileNotFoundError(2, "No such file or directory", "/proc/7/task")
    ),
    "`KeyboardInterrupt`": Script("raise KeyboardInterrupt"),
    "`sys.exit(3)`": Script("import sys; sys.exit(3)"),
    '`sys.exit("a message")`': Script("import sys; sys.exit('a message')"),
    "`os._exit(5)`": Killed(5),
    "`os._exit(0)` in training": Killed(0),
    "`MemoryError`": Script("bytearray(1 << 62)"),
    "NumPy or torch cannot allocate host memory": Script("import torch; torch.empty(1 << 60)"),
    "ENOMEM": Script("import os, errno; raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))"),
    "CUDA out of memory": Script("import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried')"),
    "CUDA: illegal memory access": Script(RUNTIME(CUDA("an illegal memory access was encountered"))),
    "CUDA: uncorrectable ECC error": Script(
        f"import torch; raise torch.AcceleratorError({CUDA('uncorrectable ECC error encountered')!r})"
    ),
    "cuBLAS, cuDNN: execution failed": Script(RUNTIME("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")),
    "NCCL: unhandled cuda error": Script(
        "from torch import distributed; raise distributed.DistBackendError('NCCL: unhandled cuda error')"
    ),
    "NCCL: remote error, system error": Script(
        "import torch; raise torch.distributed.DistBackendError('NCCL error: ncclRemoteError: A call failed')"
    ),
    "NCCL: what `get_error` alone tells of": Killed(-9, told=Fault.LINK),
    "gloo: connection closed": Script(
        RUNTIME("[../third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:3232")
    ),
    "a collective or a store timed out": Script(
        RUNTIME("[unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete")
    ),
    "ENOSPC": Script("with open('/dev/full', 'w') as file: file.write('x')"),
    "EIO": Script("raise OSError(5, 'Input/output error', '/data/tokens.bin')"),
    "ESTALE": Script("import errno; raise OSError(errno.ESTALE, 'Stale file handle', '/data/tokens.bin')"),
    "`torch.save` onto a full disk": Script("import torch; torch.save(torch.zeros(1 << 16), '/dev/full')"),
    "a full disk in a distributed checkpoint": Script(
        """
        from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
        text = "Worker failure: An error is caught while starting worker 0, error: <class 'OSError'>"
        raise CheckpointException("write", {1: _wrap_exception(RuntimeError(text))})
        """
    ),
    "a distributed checkpoint failed on another rank": Script(
        "from torch.distributed.checkpoint.api import CheckpointException as E; raise E('write', {})"
    ),
    "ENOSPC in a loader's process": Script(
        LOADER.format("raise OSError(28, 'No space left on device', '/cache')")
    ),
    "a loader was killed": Script(LOADER.format("os.kill(os.getpid(), signal.SIGKILL)")),
    "a loader's bus error (`/dev/shm` is full)": Script(
        RUNTIME("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that")
    ),
    "SIGKILL, nobody knows of whom": Killed(-signal.SIGKILL),
    "SIGKILL of the kernel's OOM killer": Killed(-signal.SIGKILL, out_of_memory=True),
    "SIGSEGV": Killed(-signal.SIGSEGV),
    "SIGBUS": Killed(-signal.SIGBUS),
    "SIGABRT": Killed(-signal.SIGABRT),
    "SIGTERM": Killed(-signal.SIGTERM),
    "SIGINT": Killed(-signal.SIGINT),
    "`ftctl kill --role`, or another order": Killed(-signal.SIGKILL, ordered=True),
}
NODE = "a whole node is lost"
TABLE = table()
