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
    "an error of `ftrun`'s own before the script's first line, or after its last": Own(
        FileNotFoundError(2, "No such file or directory", "/proc/7/task")
    ),
    "`KeyboardInterrupt`": Script("raise KeyboardInterrupt"),
    "`sys.exit(3)` in one rank of many": Script("import sys; sys.exit(3)"),
    '`sys.exit("a message")` in one rank of many': Script("import sys; sys.exit('a message')"),
    "`os._exit(5)` in one rank of many": Killed(5),
    "`os._exit(0)` in the middle of training": Killed(0),
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
    "NCCL: what no exception tells of and `get_error` does, though nobody was lost": Killed(
        -9, told=Fault.LINK
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
    "a full disk in a distributed checkpoint, as the rank that collects all errors raises it": Script(
        """
        from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
        text = "Worker failure: An error is caught while starting worker 0, error: <class 'OSError'>"
        raise CheckpointException("write", {1: _wrap_exception(RuntimeError(text))})
        """
    ),
    "the same, on ranks that are told no more than that it has failed": Script(
        "from torch.distributed.checkpoint.api import CheckpointException as E; raise E('write', {})"
    ),
    "ENOSPC in a loader's process": Script(
        LOADER.format("raise OSError(28, 'No space left on device', '/cache')")
    ),
    "a loader's process was killed": Script(LOADER.format("os.kill(os.getpid(), signal.SIGKILL)")),
    "a loader's process ended of a bus error (`/dev/shm` is full)": Script(
        RUNTIME("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that")
    ),
    "SIGKILL, nobody knows of whom": Killed(-signal.SIGKILL),
    "SIGKILL of the kernel's OOM killer, as the cgroup's count or the kernel's log shows": Killed(
        -signal.SIGKILL, out_of_memory=True
    ),
    "SIGSEGV": Killed(-signal.SIGSEGV),
    "SIGBUS": Killed(-signal.SIGBUS),
    "SIGABRT": Killed(-signal.SIGABRT),
    "SIGTERM to the worker alone": Killed(-signal.SIGTERM),
    "SIGINT to the worker alone, which does not handle it": Killed(-signal.SIGINT),
    "`ftctl kill --role`, or another order of the controller's": Killed(-signal.SIGKILL, ordered=True),
}
NODE = "a whole node is lost"
TABLE = table()
