"""All checks of this node, in a process of their own: a device may hang in any of them, or end the process.

What is found is written to a file as it is found, a line each, so that it counts even if the process does
not come to its end. The agent itself imports no torch, and waits for nothing here (`node.admission.child`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ft_core import plugins
from ft_core.control.liveness import device_health
from ft_core.node.admission import known_answer, limits, nccl, speed
from ft_core.node.admission.findings import Finding, Level, MachineCheck, ThisMachine
from ft_core.node.devices import gpus, nvml
from ft_core.node.devices.health import Asked
from ft_core.node.devices.infiniband import Links
from ft_core.process import oom_score
from ft_core.protocol.messages import DeviceAction, DeviceFinding, NodeCheck, Soundness, Timing
from ft_core.worker import cuda_fork

MACHINE: tuple[MachineCheck, ...] = (
    limits.shared_memory,
    limits.limits,
    nccl.nccl_version,
    nccl.nccl_errors,
    nccl.nccl_threads,
    nccl.interfaces,
)
"""Checks of `ftctl doctor` that say of a machine, whatever the job, that no recovery works on it. What they
find is as a rule the same on all nodes, those that train included: it is told, and keeps nobody out."""
HEALTH = "device health"
_LONGEST = 30
"""Seconds that the process may live: more than its agent gives it."""


@dataclass(frozen=True)
class Subject:
    """What is to be checked."""

    host: str
    """This node's address."""
    devices: int
    """GPUs that its workers use, if there are so many."""
    world_size: int
    environment: Mapping[str, str]
    """What its workers have."""


@dataclass
class Examination:
    """What was found, so far."""

    checks: list[NodeCheck] = field(default_factory=list)
    times: dict[str, Timing] = field(default_factory=dict)
    findings: list[DeviceFinding] = field(default_factory=list)
    """What devices have reported."""
    hardware: str = ""
    complete: bool = False
    begun: str = ""
    """The part that was begun last."""


class Line(msgspec.Struct, omit_defaults=True):
    """One of the file."""

    begun: str = ""
    check: NodeCheck | None = None
    name: str = ""
    timing: Timing | None = None
    finding: DeviceFinding | None = None
    hardware: str = ""
    complete: bool = False


Said = NodeCheck | speed.Measured | DeviceFinding | str
"""What one part says; a text names the hardware."""
Part = tuple[str, Callable[[], Iterator[Said]]]


def parts(subject: Subject) -> Iterator[Part]:
    """What is done, in this order: what is most telling first."""
    count = visible_gpus(subject.devices)
    listed = gpus.by_bus(subject.devices, subject.environment.get("CUDA_VISIBLE_DEVICES")) or {}
    if 0 < count < len(listed):
        what = f"{count} of {len(listed)} can be used"
        yield "GPUs", lambda: iter([NodeCheck("GPUs", Soundness.SICK, what, f"of the node's GPUs {what}")])
    if count:
        for device in range(count):
            yield known_answer.NAME, lambda device=device: known_answer.on_gpu(device)  # type: ignore[misc]
    else:
        yield known_answer.NAME, known_answer.on_cores
    yield "machine", lambda: _machine(subject, count)
    yield speed.LOOPBACK, lambda: speed.loopback(subject.host)
    yield "hardware", lambda: iter([speed.hardware(count)])
    yield "speed", speed.of_host
    for device in range(count):
        yield "speed", lambda device=device: speed.of_gpu(device)  # type: ignore[misc]
    yield HEALTH, lambda: health(subject.devices)
    yield HEALTH, asked


def visible_gpus(devices: int) -> int:
    """How many GPUs this node's workers use. Raises ConfigError if this process cannot use them."""
    import torch

    from ft_core.process.stream import has_gpu

    cuda_fork.check()
    return min(torch.cuda.device_count(), devices) if has_gpu() else 0


def _machine(subject: Subject, count: int) -> Iterator[NodeCheck]:
    versions = {}
    if count:
        import torch

        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    about = ThisMachine(subject.environment, versions, count, subject.world_size, subject.devices)
    for check in MACHINE:
        for finding in check(about):
            yield of_doctor(finding)


def of_doctor(finding: Finding) -> NodeCheck:
    """What is found of a machine's settings keeps nobody out: those that train may have the same."""
    fails = finding.level is Level.FAIL
    why = f"{finding.name}: {finding.found}; {finding.advice}" if fails else ""
    return NodeCheck(finding.name, Soundness.UNKNOWN if fails else Soundness.OK, finding.found, why)


def health(devices: int) -> Iterator[Said]:
    """What GPUs say now."""
    library = nvml.opened(gpus.by_bus(devices, os.environ.get("CUDA_VISIBLE_DEVICES")))
    yield from of_devices(library.look() if library is not None else [])


def asked() -> Iterator[Said]:
    """What links say now, and plugins."""
    for plugin in (Links(), *plugins.load(plugins.HEALTH)):
        yield from of_devices(Asked(plugin).news())


def of_devices(found: Sequence[DeviceFinding]) -> Iterator[Said]:
    """Reports that are there, and which of them are a reason to keep the node out."""
    yield from found
    verdicts = ((each, device_health.verdict(each)) for each in found)
    bad = [(each, what) for each, (what, action) in verdicts if action not in _HARMLESS]
    if not bad:
        yield NodeCheck(HEALTH, Soundness.OK, "nothing is reported")
    for each, what in bad:
        yield NodeCheck(HEALTH, Soundness.SICK, each.signature, what, each.device)


_HARMLESS = frozenset({DeviceAction.NOTHING, DeviceAction.COUNT})


def examine(subject: Subject, tell: Callable[[Line], None]) -> None:
    """Do all of it. What cannot be done is unknown, and says why."""
    try:
        all_parts = list(parts(subject))
    except Exception as error:  # of torch's or a driver's
        all_parts = []
        tell(Line(check=_unknown("start", error)))
    for name, part in all_parts:
        tell(Line(begun=name))
        try:
            for said in part():
                tell(_line(said))
        except Exception as error:  # a check is others' code too, and none of it ends the rest
            tell(Line(check=_unknown(name, error)))
    tell(Line(complete=True))


def _unknown(name: str, error: Exception) -> NodeCheck:
    return NodeCheck(name, Soundness.UNKNOWN, "", f"it cannot be made: {error!r}")


def _line(said: Said) -> Line:
    if isinstance(said, NodeCheck):
        return Line(check=said)
    if isinstance(said, DeviceFinding):
        return Line(finding=said)
    if isinstance(said, speed.Measured):
        check = NodeCheck(said.name, Soundness.OK, said.text)
        return Line(check=check, name=said.name, timing=said.timing)
    return Line(hardware=said)


def main(path: str, subject: Subject) -> None:
    """In a process of its own, which ends by itself, should nobody be there any more to end it."""
    signal.alarm(_LONGEST)
    oom_score.go_first()
    with open(path, "ab", buffering=0) as file:

        def tell(line: Line) -> None:
            file.write(msgspec.json.encode(line) + b"\n")

        examine(subject, tell)


def read(path: Path) -> Examination:
    """What there is by now."""
    found = Examination()
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return found
    for text in lines:
        with contextlib.suppress(msgspec.DecodeError):  # it was being written, or storage is full
            add(found, msgspec.json.decode(text, type=Line))
    return found


def impossible(name: str, why: str) -> Examination:
    """Nothing could be found out."""
    return Examination([NodeCheck(name, Soundness.UNKNOWN, "", f"it cannot be made: {why}")])


def add(found: Examination, line: Line) -> None:
    """One more."""
    found.begun = line.begun or found.begun
    found.hardware = line.hardware or found.hardware
    found.complete |= line.complete
    if line.check is not None:
        found.checks.append(line.check)
    if line.timing is not None:
        found.times[line.name] = line.timing
    if line.finding is not None:
        found.findings.append(line.finding)
