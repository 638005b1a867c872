"""Checks of `ftctl doctor` on what this machine gives: memory, processors, limits."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence

from ft_core.cli.doctor.case import Case, Check, Finding, fail, judge, warn
from ft_core.cli.planner import command as planner
from ft_core.cli.planner.razor import plan
from ft_core.errors import ConfigError
from ft_core.process import host_memory
from ft_core.state.memory import SharedMemory

_GIB = 1 << 30
_FILES, _FILES_PER_ROLE = 4096, 16
_THREADS_PER_WORKER = 256
"""torch's, NCCL's and the libraries' of one worker with Megatron's dozens of process groups, rounded up."""
_UNLIMITED = 1 << 60


def memory(case: Case) -> Iterator[Finding]:
    """Snapshots and replicas have room: two snapshots of each role, two slots for each replica."""
    free, total = host_memory.room(case.root)
    room = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free, cgroup limits counted in"
    if case.status is not None:
        advice = "the kernel is about to kill something; `ftctl plan` says what the job takes of it"
        yield judge("memory", room, advice, bad=free < total / 20)
        return
    need = _needed(case)
    copies = 2 + 2 * (case.settings.replicas if case.settings is not None else 1)
    if need is None:
        found = f"{room}: enough for {free / copies / 1e9:.1f} GB of state on this node, {copies} GB for each"
        advice = "others use most of this machine; `ftctl plan` says what the job needs"
        yield judge("memory", found, advice, bad=free < total / 2)
        return
    found = f"{room}; snapshots and replicas need {need / 1e9:.1f} GB, the script's own memory comes on top"
    advice = "more memory, fewer workers per node, or a smaller --ft-replicas (`ftctl plan` has the sum)"
    yield judge("memory", found, advice, bad=need > 0.8 * free, fatal=need > free)


def _needed(case: Case) -> int | None:
    """Bytes on this machine, if the script's arguments say enough of the model for `ftctl plan`."""
    if case.settings is None or not case.arguments:
        return None
    settings = case.settings
    flags = argparse.ArgumentParser(allow_abbrev=False)
    planner.add_arguments(flags, case.planners)
    given = [*case.arguments, f"--world-size={settings.world_size}"]
    given += [f"--nproc-per-node={settings.nproc_per_node}", f"--ft-replicas={settings.replicas}"]
    if not any(word.startswith("--vocab-size") for word in given):
        given.append("--vocab-size=131072")  # the tokenizer knows; this is a large one
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            job = planner.described(flags.parse_known_args(given)[0], case.planners)
            nbytes = plan(job).memory_per_node
        except (SystemExit, ConfigError):  # a value that `ftctl plan` does not know, or too few flags
            return None
    return nbytes * (settings.nnodes if case.standalone else 1)


def out_of_memory(case: Case) -> Iterator[Finding]:
    """Running out of memory should cost a worker, which is restarted from its snapshot, and not the node."""
    for directory in host_memory.cgroup(case.root, "memory"):
        if host_memory.number(directory, "memory.oom.group") == 1:
            yield warn(
                "out of memory",
                f"{directory}/memory.oom.group is 1",
                "set it to 0 (Kubernetes: singleProcessOOMKill of the kubelet): else the kernel kills the "
                "agent, with all snapshots of the node, along with the worker that took too much",
            )
            return
    score = host_memory.number(case.root / "proc/self", "oom_score_adj")
    if score is not None and score >= 900:
        yield warn(
            "out of memory",
            f"oom_score_adj is {score}: the kernel kills this job first",
            "give the container requests equal to its limits (Kubernetes: class Guaranteed)",
        )


def shared_memory(case: Case) -> Iterator[Finding]:
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


def processors(case: Case) -> Iterator[Finding]:
    """The agent gets to run: it says twice a second that it lives, and must not be silent for long."""
    cores: float = len(os.sched_getaffinity(0))
    for directory in host_memory.cgroup(case.root, "cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (directory / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
    workers = case.workers_here
    found = f"{cores:g} cores for {workers} workers and an agent"
    advice = (
        "give one core more than there are workers (srun --cpus-per-task, cpu of the container): an agent "
        "that does not get to run holds up recoveries, and after seconds of silence its node counts as lost"
    )
    yield judge("processors", found, advice, bad=cores <= workers)


def limits(case: Case) -> Iterator[Finding]:
    """Open files, threads, locked memory: what a recovery opens anew must not meet a limit."""
    world = case.settings.world_size if case.settings is not None else 1
    files = _hard(resource.RLIMIT_NOFILE)  # the job raises the soft limit to it
    need = max(_FILES, _FILES_PER_ROLE * world)
    found = f"{_shown(files)} open files (ulimit -Hn)"
    advice = (
        f"ulimit -Hn {need} or more: agents hold memory files and connections of all roles, and gloo opens "
        "one socket per pair and group again in each recovery"
    )
    yield judge("open files", found, advice, bad=files < need, fatal=files < 1024)

    tasks = _soft(resource.RLIMIT_NPROC)
    for directory in host_memory.cgroup(case.root, "pids"):
        allowed, used = (
            host_memory.number(directory, "pids.max"),
            host_memory.number(directory, "pids.current"),
        )
        if allowed is not None and used is not None:
            tasks = min(tasks, allowed - used)
    need = _THREADS_PER_WORKER * (case.workers_here + 1)
    found = f"{_shown(tasks)} processes and threads (ulimit -u, pids.max)"
    advice = (
        f"allow {need} (Kubernetes: podPidsLimit): a recovery forks workers and starts threads for each "
        "communicator, and where it cannot the survivors die too"
    )
    yield judge("threads", found, advice, bad=tasks < need, fatal=tasks < need // 8)

    locked = _soft(resource.RLIMIT_MEMLOCK)
    if any((case.root / "sys/class/infiniband").glob("*")) and locked < _GIB:
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


CHECKS: Sequence[Check] = (memory, out_of_memory, shared_memory, processors, limits)
