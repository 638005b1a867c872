"""What this agent knows of its node's health by its own check. No input, no output, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from ft_core.node.events import NodeExamined
from ft_core.protocol.messages import DeviceAction, DeviceFinding, NodeCheck, NodeChecked, Soundness, Symptom


class Checked:
    """The newest check of one node."""

    def __init__(self) -> None:
        self._under_way = False
        self._answer: NodeChecked | None = None
        self._at = 0.0

    def asked(self, again: bool, now: float) -> NodeChecked | bool:
        """Somebody wants to know: what is known; else whether a check is to be begun now."""
        if self._answer is not None and not again and not self._under_way:
            return replace(self._answer, age=now - self._at)
        begins, self._under_way = not self._under_way, True
        return begins

    def ended(self, event: NodeExamined, now: float) -> NodeChecked:
        """A check has."""
        self._under_way, self._at = False, now
        self._answer = NodeChecked(list(event.checks), event.times, event.hardware)
        return self._answer


def findings(checks: Sequence[NodeCheck], reported: Sequence[DeviceFinding]) -> list[DeviceFinding]:
    """What is wrong with this node. A device that reports something by itself has said what that leads to."""
    themselves = {(each.device, each.signature) for each in reported}
    return [
        *reported,
        *(
            DeviceFinding(
                *(Symptom.OTHER, 0, each.device, "", each.why),
                name=f"check of {each.name}",
                action=DeviceAction.CONDEMN,
            )
            for each in checks
            if each.soundness is Soundness.SICK and (each.device, each.found) not in themselves
        ),
    ]
