"""Whether a machine's limits let a recovery work: memory that processes share, open files, threads."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

from ft_core.node.admission.findings import Finding, Machine, fail, judge
from ft_core.process import host_memory
from ft_core.state.memory import SharedMemory

_GIB = 1 << 30
_FILES, _FILES_PER_ROLE = 4096, 16
_THREADS_PER_WORKER = 256
"""torch's, NCCL's and the libraries' of one worker with Megatron's dozens of process groups, rounded up."""
_UNLIMITED = 1 << 60


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """Workers can map the agent's memory, and /dev/shm has room for NCCL and data loaders."""
    memory = SharedMemory.create("ft-doctor", 8)
    owner, descriptor, *_ = memory.address
    try:
        with open(f"/proc/{owner}/fd/{descriptor}", "r+b"):
            pass
        code = f"import os; f = os.open('/proc/{owner}/fd/{descriptor}', os.O_RDWR); os.write(f, b'seen')"
        child = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
        trouble = "" if bytes(memory.view[:4]) == b"seen" else child.stderr.strip().rpartition("\n")[2]
    except OSError as error:
        trouble = str(error)
    memory.close()
    if trouble:
        yield fail(
            "snapshot memory",
            f"one process cannot open another's memory file: {trouble}",
            "workers map their agent's memory through /proc/PID/fd: mount /proc without hidepid, let both "
            "run as one user in one PID namespace, and use no sandbox that forbids it (gVisor)",
        )
    shm = os.statvfs("/dev/shm")
    free = shm.f_bavail * shm.f_frsize
    found = f"/dev/shm has {free / _GIB:.2f} GiB free"
    advice = (
        "make it larger (docker --shm-size, Kubernetes: emptyDir with medium Memory). Snapshots are not "
        "there, but NCCL and data loaders are, and a recovery opens new communicators before all old ones "
        "are closed"
    )
    yield judge("shared memory", found, advice, bad=free < _GIB, fatal=free < _GIB // 8)


def limits(machine: Machine) -> Iterator[Finding]:
    """Open files, threads, locked memory: what a recovery opens anew must not meet a limit."""
    files = _hard(resource.RLIMIT_NOFILE)  # the job raises the soft limit to it
    need = max(_FILES, _FILES_PER_ROLE * machine.world_size)
    found = f"{_shown(files)} open files (ulimit -Hn)"
    advice = (
        f"ulimit -Hn {need} or more: agents hold memory files and connections of all roles, and gloo opens "
        "one socket per pair and group again in each recovery"
    )
    yield judge("open files", found, advice, bad=files < need, fatal=files < 1024)

    tasks = _soft(resource.RLIMIT_NPROC)
    for directory in host_memory.cgroup(machine.root, "pids"):
        allowed, used = (
            host_memory.number(directory, "pids.max"),
            host_memory.number(directory, "pids.current"),
        )
        if allowed is not None and used is not None:
            tasks = min(tasks, allowed - used)
    need = _THREADS_PER_WORKER * (machine.workers_here + 1)
    found = f"{_shown(tasks)} processes and threads (ulimit -u, pids.max)"
    advice = (
        f"allow {need} (Kubernetes: podPidsLimit): a recovery forks workers and starts threads for each "
        "communicator, and where it cannot the survivors die too"
    )
    yield judge("threads", found, advice, bad=tasks < need, fatal=tasks < need // 8)

    locked = _soft(resource.RLIMIT_MEMLOCK)
    if any((machine.root / "sys/class/infiniband").glob("*")) and locked < _GIB:
        yield fail(
            "locked memory",
            f"{_shown(locked)} bytes (ulimit -l), and there is InfiniBand",
            "ulimit -l unlimited (Slurm: PropagateResourceLimitsExcept=MEMLOCK): NCCL registers its buffers "
            "with the adapter each time it connects, in every recovery",
        )


def _soft(which: int) -> int:
    return _number_of(resource.getrlimit(which)[0])


def _hard(which: int) -> int:
    return _number_of(resource.getrlimit(which)[1])


def _number_of(value: int) -> int:
    return _UNLIMITED if value == resource.RLIM_INFINITY else value


def _shown(value: int) -> str:
    return "unlimited" if value >= _UNLIMITED else str(value)
