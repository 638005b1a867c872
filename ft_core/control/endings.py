"""Roles that have come to the end of their script, or of a part, while others go on: the controller's part.

They wait for the others, so that they can take part in a recovery. The others come, as a rule. Where they
never will, since they wait in an operation for one that has left, nobody would notice: so they are asked, and
whoever has begun more operations in a group than one who has left was in is the proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ft_core.control.nodes import Message
from ft_core.protocol.groups import Series

if TYPE_CHECKING:
    from ft_core.control.controller import Controller

_INTERVAL = 3.0
"""Seconds between two rounds of questions, and before the first."""


class Endings:
    """Asks for as long as some have come to an end and others have not."""

    def __init__(self, controller: Controller) -> None:
        self._c = controller
        self._next = float("inf")
        self._round = 0
        self._answers: dict[int, Message] = {}

    def tick(self, at_end: set[int]) -> None:
        """`at_end`: the roles that have come to the end of what is under way."""
        now = self._c.clock.now
        if not at_end or at_end >= set(map(int, self._c.plan["roles"])):
            self._next = now + _INTERVAL
        elif now > self._next:
            self._next = now + _INTERVAL
            self._round, self._answers = self._round + 1, {}
            for node in self._c.nodes.values():
                node.post({"type": "issued", "round": self._round})

    def answered(self, message: Message) -> None:
        """A role tells what it has begun. What is compared is of one round: later all may go on."""
        if message["round"] != self._round or message["epoch"] != self._c.plan.get("epoch"):
            return
        self._answers[int(message["role"])] = message
        if (found := apart(self._answers)) is not None:
            self._c.end(1, found)


def apart(answers: Mapping[int, Message]) -> str | None:
    """What keeps roles from ever meeting again, or None where nothing does. `answers`: by role."""
    for left, there in answers.items():
        for role, here in answers.items() if there["at_end"] else ():
            for text, count in here["issued"].items():
                done = there["issued"].get(text, 0)
                if role != left and count > done and Series.parse(text).needs(left):
                    return (
                        f"role {left} came to the end of its script after step {there['step']} (sys.exit, or "
                        f"a loop that ended), and role {role} waits for it\nin operation {count} of group "
                        f"{text}: role {left} was in {done} of them. All roles must leave training at the "
                        "same step:\nsee that what ends it (time, signals, data, loss) is the same on all."
                    )
    return None
