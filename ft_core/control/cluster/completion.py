"""Roles that have come to the end of their script, or of a part of it, while others go on.

They wait for the others, so that they can take part in a recovery. The others come, as a rule. Where they
never will, since they wait in an operation for one that has left, nobody would notice: so they are asked, and
whoever has begun more operations in a group than one who has left was in is the proof.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ft_core.protocol.groups import GroupId, Series
from ft_core.protocol.messages import Completed, Issued, SendIssued

INTERVAL = 3.0
"""Seconds between two rounds of questions, and before the first."""


@dataclass
class Completion:
    """How far the roles have come in their scripts."""

    completed: dict[int, Completed] = field(default_factory=dict)
    """The last end of a part that each role has reported."""
    finished: set[int] = field(default_factory=set)
    """Roles whose scripts are done."""
    left: dict[int, str] = field(default_factory=dict)
    """Roles whose processes have ended without a word in this epoch, before they trained, and how that is
    said. They may have done all that was theirs."""
    released: bool = False
    """Whether all have come to the end of training: only local work is left."""
    _ended: tuple[int, int, set[int]] = field(default_factory=lambda: (0, 0, set()))
    """Epoch, parts, and the roles that wait at the end of another part, in it and after them."""
    _next: float = float("inf")
    _round: int = 0
    _answers: dict[int, Issued] = field(default_factory=dict)

    def on_completed(self, end: Completed) -> None:
        """A role has come to the end of a part."""
        self.completed[end.role] = end
        epoch, parts, ended = self._ended
        if end.epoch == epoch and end.part > parts:
            ended.add(end.role)
        else:
            ended.discard(end.role)

    def at_end(self, epoch: int, parts: int) -> set[int]:
        """Roles that wait for the others at the end of a part, or of their script."""
        if self._ended[:2] != (epoch, parts):
            new = {role for role, end in self.completed.items() if end.epoch == epoch and end.part > parts}
            self._ended = epoch, parts, new
        return self._ended[2] | self.finished if self.finished else self._ended[2]

    def over(self, roles: Collection[int]) -> bool:
        """Whether all scripts are done."""
        return 0 < len(roles) <= len(self.finished) and set(roles) <= self.finished

    def passed(self, roles: Collection[int], epoch: int, parts: list[int]) -> list[int]:
        """The parts that all of `roles` have behind them (with which version), if that is news; else none.
        Notes whether that was the last part (`released`). `parts`: those that are known."""
        if len(self.at_end(epoch, len(parts))) < len(roles):
            return []
        others = set(roles) - self.finished
        done = [self.completed[role] for role in others & self.at_end(epoch, len(parts))]
        if not done or len(done) < len(others):
            return []
        self.released = all(end.last for end in done)
        # Of several at once, what the earlier ones ended with is not known: no more than the last.
        version = max(end.version for end in done)
        return [*parts, *[version] * (min(end.part for end in done) - len(parts))]

    def taken_over(self) -> None:
        """Another controller's plan was taken over: that scripts are done shows that they were let go."""
        found = self.finished & set(self.completed)
        self.released |= any(self.completed[role].last for role in found)

    def question(self, roles: Collection[int], epoch: int, parts: int, now: float) -> SendIssued | None:
        """What all nodes are to be asked now, if anything."""
        ended = self.at_end(epoch, parts)
        if not ended or ended >= set(roles):
            self._next = now + INTERVAL
        elif now > self._next:
            self._next = now + INTERVAL
            self._round, self._answers = self._round + 1, {}
            return SendIssued(round=self._round)
        return None

    def on_issued(self, answer: Issued, epoch: int) -> str | None:
        """A role says what it has begun. Returns why the roles will never meet again, if so.

        What is compared is of one round: later all may go on.
        """
        if answer.round != self._round or answer.epoch != epoch:
            return None
        self._answers[answer.role] = answer
        return self._lacks(answer) or apart(self._answers)

    def missed(self, why: str) -> str | None:
        """Roles that have left are waited for, as some role says. Returns that, if there are any."""
        where = "\n".join(self.left.values())
        return f"{where} (os._exit?), and others wait for it: {why}" if where else None

    def _lacks(self, answer: Issued) -> str | None:
        for name in answer.unopened:
            if any(role in GroupId.parse(name) for role in self.left):
                return self.missed(f"role {answer.role} to connect group {name}")
        return None


def apart(answers: Mapping[int, Issued]) -> str | None:
    """What keeps roles from ever meeting again, or None where nothing does. `answers`: by role."""
    for left, there in answers.items():
        for role, here in answers.items() if there.at_end else ():
            for name, count in here.issued.items():
                done = there.issued.get(name, 0)
                if role != left and count > done and Series.parse(name).needs(left):
                    return (
                        f"role {left} came to the end of its script after step {there.step} (sys.exit, or "
                        f"a loop that ended), and role {role} waits for it\nin operation {count} of group "
                        f"{name}: role {left} was in {done} of them. All roles must leave training at the "
                        "same step:\nsee that what ends it (time, signals, data, loss) is the same on all."
                    )
    return None
