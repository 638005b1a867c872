"""What it means for the job that a device of a node reports something."""

from __future__ import annotations

from ft_core.control.changeovers import Changeovers
from ft_core.control.cluster.node import Node
from ft_core.control.liveness import device_health
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.protocol.messages import DeviceAction, DeviceFinding


class DeviceFindings:
    """The device findings that one controller hears of."""

    def __init__(self, recovery: RecoveryCoordinator, changeovers: Changeovers) -> None:
        self._recovery, self._changeovers = recovery, changeovers

    def on_finding(self, node: Node, finding: DeviceFinding) -> None:
        """A node's agent says so; again with each greeting."""
        recovery, cluster, out = self._recovery, self._recovery.cluster, self._recovery.out
        what, action = device_health.verdict(finding)
        if action is DeviceAction.NOTHING:
            return
        known = device_health.record(finding, node.name, action)
        if cluster.strikes.was_forgiven(known, out.now):
            return
        where = f" (PCI {finding.bus})" if finding.bus else ""
        reason = f"{what}{where}: {device_health.LEADS_TO[action]}"
        if not cluster.strikes.knows(known, out.now):
            roles = cluster.roles_by_node.get(node.name, ())
            about = {"device": finding.device, "finding": finding.signature, "said": finding.text}
            out.record("device", reason, roles, None, node=node.name, action=action.value, **about)
            recovery.strike(known, node.hello.domain)
        if action in device_health.DRAINS:
            why = f"device {finding.device}: {what}" if finding.device >= 0 else what
            self._changeovers.drain_sick(node, why)
