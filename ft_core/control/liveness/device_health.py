"""What is done about what devices report. Pure: tables, and how they are looked up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ft_core.control.liveness.xid_table import UNKNOWN, XIDS
from ft_core.protocol.domains import place
from ft_core.protocol.messages import DeviceAction, DeviceFinding, FailureRecord, Fault, NodeName, Symptom


class Verdict(NamedTuple):
    """A row of one of the tables here."""

    what: str
    action: DeviceAction


DRIVER_ADVICE: Mapping[int, Verdict] = {
    0: Verdict("nothing", DeviceAction.NOTHING),
    1: Verdict("to reset the GPU", DeviceAction.CONDEMN),
    2: Verdict("to restart the machine", DeviceAction.CONDEMN),
    3: Verdict("to have others leave its NVLinks", DeviceAction.DRAIN),
    4: Verdict("to have others leave its NVLinks, and reset it", DeviceAction.DRAIN),
    5: Verdict("to recover its domain of shared memory (IMEX)", DeviceAction.DRAIN),
    6: Verdict("to reset its PCIe bus", DeviceAction.CONDEMN),
    7: Verdict("to restart the system", DeviceAction.CONDEMN),
}
"""What XID 154, or NVML, names: by the driver's number (`nvmlDeviceGpuRecoveryAction_t`)."""

CONDITIONS: Mapping[Symptom, Verdict] = {
    Symptom.UNCORRECTED: Verdict("more uncorrected memory errors than before", DeviceAction.DRAIN),
    Symptom.REMAPPING: Verdict("a memory row is to be remapped by a reset", DeviceAction.DRAIN),
    Symptom.RETIRING: Verdict("a memory page is to be retired by a restart", DeviceAction.DRAIN),
    Symptom.REMAP_FAILED: Verdict("a memory row could not be remapped", DeviceAction.CONDEMN),
    Symptom.LOST: Verdict("its driver does not reach it any more", DeviceAction.CONDEMN),
}
"""What NVML says of a GPU, besides."""

LEADS_TO: Mapping[DeviceAction, str] = {
    DeviceAction.COUNT: "it counts against the node",
    DeviceAction.ELSEWHERE: "the device is used for no role while there is another",
    DeviceAction.DRAIN: "its node is to be taken out",
    DeviceAction.CONDEMN: "its node is to be taken out, and not used while there is another",
}
"""What each action means, for people. Nobody is told of `NOTHING`."""

DRAINS = frozenset({DeviceAction.DRAIN, DeviceAction.CONDEMN})
"""Actions that take roles away from a node that still plays them."""

_FAULTS: Mapping[DeviceAction, Fault] = {
    DeviceAction.COUNT: Fault.DEVICE_WARNING,
    DeviceAction.ELSEWHERE: Fault.DEVICE_FAULTY,
    DeviceAction.DRAIN: Fault.DEVICE_FAULTY,
    DeviceAction.CONDEMN: Fault.DEVICE_CONDEMNED,
}


def verdict(finding: DeviceFinding) -> Verdict:
    """What it means, and what is to be done."""
    if finding.symptom is Symptom.ADVICE:
        advised = DRIVER_ADVICE.get(finding.number, Verdict("something new", DeviceAction.COUNT))
        return Verdict(f"its driver advises {advised.what}", advised.action)
    if finding.symptom is Symptom.OTHER:
        return Verdict(finding.name + f" ({finding.text})" * bool(finding.text), finding.action)
    if finding.symptom in CONDITIONS:
        return CONDITIONS[finding.symptom]
    row = XIDS.get(finding.number, UNKNOWN)
    return Verdict(f"XID {finding.number}, {row.what}", row.action)


def record(finding: DeviceFinding, node: NodeName, action: DeviceAction) -> FailureRecord:
    """The record of a finding that is kept of the node. Raises KeyError for an action that leaves nothing
    behind."""
    return FailureRecord(
        place(node),
        device=finding.device,
        role=-1,
        pid=0,
        step=-1,
        fault=_FAULTS[action],
        signature=finding.signature,
        age=finding.age,
    )
