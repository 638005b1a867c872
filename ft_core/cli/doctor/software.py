"""Checks of `ftctl doctor` that need no look at the machine: launcher, versions, variables, arguments."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator

from ft_core.cli.doctor.case import Case, Check, Supported
from ft_core.node.admission.findings import Finding, fail, ok, warn
from ft_core.node.admission.nccl import interfaces, nccl_errors, nccl_threads, nccl_version

_SUPPORTED = {
    "python": Supported((3, 11), (3, 12)),
    "torch": Supported((2, 7), (2, 13)),
}
"""What the engine itself needs (docs/compatibility.md)."""


def launcher(case: Case) -> Iterator[Finding]:
    """Workers must be ftrun's: other launchers kill all of them when one dies."""
    under = "TORCHELASTIC_RUN_ID" in case.environment and "FT_JOB_DIR" not in case.environment
    started = "torchrun" if under else case.launcher
    if case.problem:
        yield fail("command line", case.problem, "ftrun would refuse to start; correct this")
    if started and started != "ftrun":
        what = "this process was started by torchrun" if under else f"the command line begins with {started}"
        yield fail(
            "launcher",
            what,
            f"put ftrun in its place, the flags stay: {started} kills every worker when one of them dies, "
            "so nobody would be left to go on",
        )
    elif started:
        yield ok("launcher", "ftrun")


def versions(case: Case) -> Iterator[Finding]:
    """Python, torch and the frameworks are ones that recoveries were tested with."""
    supported = _SUPPORTED | {name: of for each in case.frameworks for name, of in each.supported.items()}
    for name, text in case.versions.items():
        version = tuple(map(int, re.findall(r"\d+", text.partition("+")[0])[:3]))
        if name == "nccl":
            continue  # `nccl_version`
        tested = supported[name]
        broken = [why for first, last, why in tested.broken if first <= version <= last]
        if version[:2] < tested.lowest:
            least = ".".join(map(str, tested.lowest))
            advice = f"use {least} or later: the hooks were not written for this one"
            yield fail(f"version of {name}", text, advice)
        elif version[:2] > tested.highest:
            most = ".".join(map(str, tested.highest))
            advice = f"nothing above {most} was tested (docs/compatibility.md): kill a node on purpose first"
            yield warn(f"version of {name}", text, advice)
        elif broken:
            yield warn(f"version of {name}", text, f"use another: this one {broken[0]}")
        else:
            yield ok(f"version of {name}", text)


def nccl_waits(case: Case) -> Iterator[Finding]:
    """Waiting for NCCL on the host costs every step time, and a short-tempered monitor costs workers."""
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if case.environment.get(name, "0") not in ("0", ""):
            yield warn(
                "nccl blocking wait",
                f"{name}={case.environment[name]}",
                f"unset {name}: an abort ends collectives with or without it, and with it the training "
                "thread stands still in each one until the GPU is through",
            )
    patience = case.environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "")
    monitored = case.environment.get("TORCH_NCCL_ENABLE_MONITORING", "1") != "0"
    quiesce = case.settings.quiesce_timeout if case.settings is not None else 60.0
    if patience.isdigit() and monitored and int(patience) <= quiesce:
        yield warn(
            "nccl monitor",
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={patience}",
            f"give more than --ft-quiesce-timeout ({quiesce:.0f} s), or leave it out (480): "
            "torch's monitor ends a worker whose abort takes that long, which then must be replaced",
        )


def script(case: Case) -> Iterator[Finding]:
    """The script is protected, and by one engine only."""
    arguments = case.arguments or ()
    said = [(each, found) for each in case.frameworks if (found := each.protects(arguments)) is not None]
    ways = " or ".join(each.protection for each in [each for each, _ in said] or case.frameworks)
    cost = "without, a failure costs all that the script has not saved itself"
    unprotected = case.status.unprotected if case.status is not None else ""
    if unprotected:
        yield fail("protection", unprotected, f"start it with {ways}: {cost}")
    if case.arguments is None:
        return
    flags = {word.partition("=")[0] for word in case.arguments}
    for rival in (rival for framework in case.frameworks for rival in framework.rivals):
        if rival in flags:
            yield fail(
                "other fault tolerance",
                rival,
                f"leave {rival} out: it restarts or kills workers on time-outs of its own, in the middle of "
                "what ftrun is repairing",
            )
    if unprotected:
        return
    if asked := [words for _, (protected, words) in said if protected]:
        yield ok("protection", "; ".join(asked))
    elif case.frameworks:  # else nobody knows what to look for
        why = "; ".join(words for _, (_, words) in said) or "nothing among the script's arguments asks for it"
        yield warn("protection", why, f"give {ways}, unless the script itself asks for it: {cost}")


def slurm(case: Case) -> Iterator[Finding]:
    """Slurm must not end the job step because one of its tasks has died."""
    if "SLURM_JOB_ID" not in case.environment:
        return
    kills = case.environment.get("SLURM_KILL_BAD_EXIT", "")
    where = f"SLURM_KILL_BAD_EXIT={kills}"
    if not kills and shutil.which("scontrol"):
        answer = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=20)
        setting = re.search(r"^KillOnBadExit\s*=\s*(\d+)", answer.stdout, re.M)
        kills, where = (setting[1], "KillOnBadExit=1 in slurm.conf") if setting else ("", "")
    if kills not in ("", "0"):
        yield fail(
            "slurm",
            where,
            "start the agents with `srun --kill-on-bad-exit=0 --no-kill --wait=0`: else Slurm kills all "
            "nodes as soon as one has failed (docs/operations/clusters.md)",
        )
    else:
        yield ok("slurm", "one task's failure does not end the others")
    nodes = int(case.environment.get("SLURM_NNODES", "0") or 0)
    if case.settings is not None and nodes and nodes <= case.settings.nnodes:
        yield warn(
            "slurm spares",
            f"{nodes} nodes are allocated and {case.settings.nnodes} train",
            "allocate more nodes than --nnodes; the rest are spares. Without one a lost node is waited for, "
            "and Slurm brings none into a running allocation",
        )


CHECKS: tuple[Check, ...] = (
    launcher,
    script,
    versions,
    nccl_version,
    nccl_errors,
    nccl_threads,
    nccl_waits,
    interfaces,
    slurm,
)
