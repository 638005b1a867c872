"""Nobody joins unchecked: a node that comes is asked whether it is well, and is given no role before that.

Its agent answers with what a process of its own has found (`node.admission`). What is wrong with it came
before, as reports of devices do, and leads to the same (`control.device_findings`): it is not used while
there is another. A check that does not end, or cannot be made, keeps nobody out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ft_core.control.cluster.node import Check, Node
from ft_core.control.cluster.state import ClusterState
from ft_core.control.device_findings import DeviceFindings
from ft_core.control.liveness import outliers
from ft_core.control.phases import Done, Forming, Rebuilding, Saving
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.protocol import messages as m
from ft_core.settings import PREFLIGHT_ALL, PREFLIGHT_OFF

ENOUGH = 64
"""Nodes of like hardware that one is compared with."""
PATIENCE = 18.0
"""Seconds until a check that has no answer is over: the agent itself gives it less."""


class Admission:
    """Whom one controller lets in."""

    def __init__(self, recovery: RecoveryCoordinator, devices: DeviceFindings) -> None:
        self._recovery, self._devices = recovery, devices
        self._cluster, self._out = recovery.cluster, recovery.out
        self._unasked: list[m.NodeName] = []
        """Nodes that have come, of which it was not clear whether they are given roles unchecked."""
        self._asked: set[m.NodeName] = set()

    def on_joined(self, node: Node, known: Node | None) -> None:
        """A node has greeted; if it was `known`, over another connection: it may have missed the question."""
        if self._cluster.settings.preflight == PREFLIGHT_OFF:
            return
        if known is not None:
            node.check = known.check
            if node.under_check:
                self._out.send(node, m.CheckNode(node.check is not None and node.check.was_slow))
            return
        self._unasked.append(node.name)
        if not isinstance(self._recovery.phase, Rebuilding):
            self._ask_all()

    def tick(self) -> None:
        """Time has passed, or the job has begun."""
        if self._unasked:
            self._ask_all()
        now = self._out.now
        for name in sorted(self._asked):
            node = self._cluster.nodes.get(name)
            if node is None or node.check is None or not node.under_check:
                self._asked.discard(name)
            elif now - node.check.asked_at > PATIENCE:
                what = f"it cannot be made: no answer for {PATIENCE:g} s"
                self._over(node, [m.NodeCheck("check", m.Soundness.UNKNOWN, "", what)])

    def _ask_all(self) -> None:
        """Ask those that are not to begin with the job; before it begins all, where that is wanted."""
        phase, everybody = self._recovery.phase, self._cluster.settings.preflight == PREFLIGHT_ALL
        if isinstance(phase, Rebuilding | Saving | Done) or (isinstance(phase, Forming) and not everybody):
            return
        names, self._unasked = self._unasked, []
        for name in names:
            node = self._cluster.nodes.get(name)
            if node is None or node.check is not None or name in self._cluster.roles_by_node:
                continue
            node.check = Check(self._out.now)
            self._ask(node, again=False)

    def _ask(self, node: Node, again: bool) -> None:
        self._asked.add(node.name)
        self._out.send(node, m.CheckNode(again))

    def on_checked(self, node: Node, said: m.NodeChecked) -> None:
        """The check of a node is over. What is wrong with it has been heard."""
        check = node.check
        if check is None or not check.under_way:
            return
        found = list(said.checks)
        sick = any(each.soundness is m.Soundness.SICK for each in found)
        slow = {} if sick else outliers.slower(said.times, self._times_of_others(node, said.hardware))
        if slow and not check.was_slow:  # once may be chance
            node.check = Check(self._out.now, was_slow=True)
            self._ask(node, again=True)
            return
        for name, times in slow.items():
            why = f"{name} takes {times:g} times as long as on other nodes with {said.hardware}"
            found.append(m.NodeCheck(name, m.Soundness.SICK, f"{times:g} times", why))
            about = m.Symptom.OTHER, 0, -1, "", why, said.age, f"time of {name}", m.DeviceAction.CONDEMN
            self._devices.on_finding(node, m.DeviceFinding(*about))
        if not sick and not slow:
            check.times, check.hardware = said.times, said.hardware
        self._over(node, found)

    def _times_of_others(self, node: Node, hardware: str) -> list[Mapping[str, m.Timing]]:
        others = (other.check for other in self._cluster.nodes.values() if other is not node)
        alike = (check.times for check in others if check is not None and hardware == check.hardware != "")
        return list(itertools.islice(alike, ENOUGH))

    def _over(self, node: Node, checks: list[m.NodeCheck]) -> None:
        assert node.check is not None
        node.check.under_way = False
        self._asked.discard(node.name)
        worst = _worst(checks)
        why = "; ".join(each.why for each in checks if each.soundness is worst and each.why)
        if worst is m.Soundness.SICK:
            node.check.why = why
        seconds = round(self._out.now - node.check.asked_at, 2)
        self._out.record("checked", why, node=node.name, found=worst.value, seconds=seconds)
        self._recovery.reconsider()
        if isinstance(self._recovery.phase, Forming) and not self._cluster.checking():
            self._recovery.decision_due = True


def left_out(cluster: ClusterState, now: float) -> dict[m.NodeName, str]:
    """With `--ft-preflight all`: nodes that the job does not begin with, and why."""
    if cluster.settings.preflight != PREFLIGHT_ALL:
        return {}
    return {
        name: (check.why if (check := cluster.nodes[name].check) is not None else "") or "it is avoided"
        for name in sorted(cluster.avoided(now))
    }


def too_few_are_sound(cluster: ClusterState, out: Mapping[m.NodeName, str]) -> str:
    """Why the job cannot begin with those that are there, but for the sick; empty: it may yet."""
    there, wanted = len(cluster.nodes), cluster.settings.first_nodes
    if cluster.checking() or there < wanted or there - len(out) >= wanted:
        return ""
    sick = "; ".join(f"node {name} is sick: {why}" for name, why in out.items())
    return (
        f"{sick}. Without {'it' if len(out) == 1 else 'them'} {there - len(out)} nodes are left, and the job "
        f"begins with {wanted}. Replace it, give spares, or use it nevertheless (--ft-preflight joining)"
    )


def _worst(checks: Sequence[m.NodeCheck]) -> m.Soundness:
    found = {each.soundness for each in checks}
    return next((each for each in (m.Soundness.SICK, m.Soundness.UNKNOWN) if each in found), m.Soundness.OK)
