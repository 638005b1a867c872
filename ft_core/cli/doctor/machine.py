"""Checks of `ftctl doctor` on what this machine gives: memory, processors. Limits are looked at by whoever
joins, too: `ft_core.node.admission.limits`."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Iterator, Sequence

from ft_core.cli.doctor.case import Case, Check
from ft_core.cli.planner import command as planner
from ft_core.cli.planner.razor import plan
from ft_core.errors import ConfigError
from ft_core.node.admission.findings import Finding, judge, warn
from ft_core.node.admission.limits import limits, shared_memory
from ft_core.process import host_memory


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


CHECKS: Sequence[Check] = (memory, out_of_memory, shared_memory, processors, limits)
