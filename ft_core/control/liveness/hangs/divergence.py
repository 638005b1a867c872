"""Which role has left the common order of operations.

Training repeats itself, and roles do alike. So who has left an operation out, done one twice or in another
order shows: after the same operations, something else came before, and comes with everybody else. What has
never been there is no such thing by itself: an evaluation comes for the first time, too. It is one role's
own doing only where nobody else takes part, and where it stands in the place of something that is usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ft_core.control.liveness.hangs.operations import Alike, Flight, Operation

_CONTEXTS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""How many operations before another are compared, as many as there are elsewhere. One: as a step begins."""
_NEW = 48
"""The newest operations of a role, in which it may have diverged."""
_COMPARED = 96
"""Roles that are compared with each other, at most."""
_ENOUGH = 2
"""How often something must have been done to count as usual."""
_SIZE = Alike._fields.index("nbytes")
_STEP = 0
"""The number in a sequence that stands for the end of a step."""

Place = tuple[int, int]
"""The place of an operation: the role, and which one of its sequence."""


@dataclass(frozen=True)
class Diverged:
    """Roles that have done what nobody else does, those first that did it last. `surely`: so many of them can
    have had no reason for it; the others may have begun something new, which their peers have left out."""

    roles: tuple[int, ...] = ()
    surely: int = 0

    @property
    def one(self) -> tuple[int, ...]:
        """The role that it certainly is, if it is one."""
        return self.roles[:1] if self.surely == 1 else ()


class UsualOrder:
    """What comes after what, in the records of many roles."""

    def __init__(self, done: Mapping[int, Sequence[tuple[Operation, Alike, int]]]) -> None:
        """`done`: by role what it has begun, what that is for other roles, and in which step."""
        numbers: dict[Alike, int] = {}
        self._alike = [Alike((), -1, "", 0, False)]
        """What a number in a sequence stands for; `_STEP` for nothing."""
        self.sequences: dict[int, list[int]] = {}
        self.operations: dict[int, list[Operation]] = {}
        self._steps: dict[int, list[int]] = {}
        self._texts: dict[int, str] = {}
        """The sequences, a character for each number: a context is a part of one."""
        for role, rows in done.items():
            sequence: list[int] = []
            operations: list[Operation] = []
            steps: list[int] = []
            for operation, alike, step in rows:
                if steps and step != steps[-1]:
                    sequence.append(_STEP)
                    operations.append(operation)
                    steps.append(steps[-1])
                if alike not in numbers:
                    numbers[alike] = len(self._alike)
                    self._alike.append(alike)
                sequence.append(numbers[alike])
                operations.append(operation)
                steps.append(step)
            self.sequences[role], self.operations[role] = sequence, operations
            self._steps[role], self._texts[role] = steps, "".join(map(chr, sequence))
        self._seen: dict[int, set[tuple[int, int]]] = {}
        """Number of an operation -> the roles and steps in which it was done."""
        for role, sequence in self.sequences.items():
            for at, number in enumerate(sequence):
                self._seen.setdefault(number, set()).add((role, self._steps[role][at]))
        classes: dict[frozenset[object], int] = {}
        self._class = {
            role: classes.setdefault(self._partners(role), len(classes)) for role in self.sequences
        }
        self._indices: dict[int, dict[tuple[int, str], dict[tuple[int, int], list[Place]]]] = {}

    def _partners(self, role: int) -> frozenset[object]:
        """With whom it does something: of roles in the same place of a layout the same."""
        found = (self._alike[number] for number in set(self.sequences[role]) - {_STEP})
        return frozenset((each.shape, each.ordinal, each.where) for each in found)

    def _after(self, length: int, role: int, at: int) -> Mapping[tuple[int, int], list[Place]]:
        """What came after the same, so many long, with roles like it and itself: by step, and what it was."""
        index = self._indices.get(length)
        if index is None:
            index = self._indices[length] = {}
            for other, sequence in self.sequences.items():
                steps = self._steps[other]
                for place in range(length, len(sequence)):
                    key = self._class[other], self._context(length, other, place)
                    seen = index.setdefault(key, {})
                    seen.setdefault((steps[place], sequence[place]), []).append((other, place))
        return index[self._class[role], self._context(length, role, at)]

    def _context(self, length: int, role: int, at: int) -> str:
        return self._texts[role][at - length : at]

    def judge(self, role: int, at: int, unknown: int | None) -> str:
        """What a role has done there: `usual`, `new` where others do so in the same step for the first time,
        `strange` where nobody does, or `perhaps`. `unknown`: since that place of the step it does what is
        new, which says nothing of what comes before other things."""
        done, step = self.sequences[role][at], self._steps[role][at]
        company = False
        for length in _CONTEXTS:
            if length > at or (length == 1 and self.sequences[role][at - 1] != _STEP):
                continue
            if unknown is not None and length <= at - unknown:
                return "usual" if company else "perhaps"
            seen = self._after(length, role, at)
            if any(what == done and when != step for when, what in seen):
                return "usual"
            company = company or len(seen[step, done]) > 1
            if company:
                if len({when for when, _ in seen} - {step}) >= _ENOUGH:
                    return "new"
                continue
            others: Counter[int] = Counter()
            for (_, what), places in seen.items():
                others[what] += len(places) * (what != done)
            if self._against(role, at, seen):
                return "strange"
            usual, times = others.most_common(1)[0]
            if times >= _ENOUGH:
                then = {
                    self._at(r, a + 1) for (_, what), there in seen.items() if what == usual for r, a in there
                }
                return "strange" if self._replaces(role, at, usual, then) else "perhaps"
        return "usual"

    def _at(self, role: int, at: int) -> int:
        sequence = self.sequences[role]
        return sequence[at] if at < len(sequence) else _STEP

    def is_first(self, role: int, at: int) -> bool:
        """Whether what a role has done there was done in no other step."""
        step = self._steps[role][at]
        return all(when == step for _, when in self._seen[self.sequences[role][at]])

    def _against(self, role: int, at: int, seen: Mapping[tuple[int, int], list[Place]]) -> bool:
        """Whether roles that do not depend on it have all done one other thing in this very step."""
        step, members = self._steps[role][at], self.operations[role][at].roles
        here = [{r for r, _ in there} - set(members) for (when, _), there in seen.items() if when == step]
        apart = [roles for roles in here if roles]
        return len(apart) == 1 and len(apart[0]) >= _ENOUGH

    def _replaces(self, role: int, at: int, usual: int, then: Collection[int]) -> bool:
        """Whether what a role has done can only have been in place of what is usual there. `then`: what comes
        after that."""
        done, before = self.sequences[role][at], self.sequences[role][at - 1]
        if done in (_STEP, before) or (usual != _STEP and done in then):
            return True  # it has ended the step early, done something twice, or left something out
        resized = self._alike[done][:_SIZE] == self._alike[usual][:_SIZE]
        if _STEP in (usual, before):
            # Between two steps there may be anything, but what trains.
            return resized and self._alike[done].grad
        return resized or not self.is_first(role, at)


def diverged(flights: Mapping[int, Flight], suspects: Collection[int]) -> Diverged:
    """Which of `suspects` have left the usual order."""
    few = sorted(role for role in suspects if role in flights)[:_COMPARED]
    others = sorted(
        set(flights) - set(few), key=lambda role: min((abs(role - each) for each in few), default=0)
    )
    compared = [*few, *others[: _COMPARED - len(few)]]
    usual = UsualOrder({role: flights[role].done for role in compared})
    left: dict[int, list[tuple[int, str]]] = {}

    def odd(role: int) -> list[tuple[int, str]]:
        if role not in left:
            left[role] = _left(usual, role, flights[role])
        return left[role]

    def together(role: int, operation: Operation) -> bool:
        """Whether another one does the same as new."""
        return any(
            operation == usual.operations[other][at]
            for other in operation.roles
            if other != role
            and other in usual.operations
            and operation in flights[other].records
            and flights[other].about(operation) == flights[role].about(operation)
            for at, _ in odd(other)
        )

    found: dict[int, tuple[bool, int]] = {}
    for role in few:
        for at, how in odd(role):
            if how != "new" and not together(role, usual.operations[role][at]):
                sure = how == "strange"
                ago = len(usual.sequences[role]) - at
                found[role] = max(found.get(role, (False, 0)), (sure, -ago))
    ranked = sorted(found, key=lambda role: found[role], reverse=True)
    return Diverged(tuple(ranked), sum(sure for sure, _ in found.values()))


def _left(usual: UsualOrder, role: int, flight: Flight) -> list[tuple[int, str]]:
    """Where of late a role has not done what is usual, and how it was."""
    sequence, found = usual.sequences[role], []
    unknown: int | None = None
    for at in range(max(0, len(sequence) - _NEW), len(sequence)):
        how = usual.judge(role, at, unknown)
        operation = usual.operations[role][at]
        if not flight.records[operation].under_way and usual.is_first(role, at):
            how = "new"  # all who take part in it agree
        if how != "usual":
            found.append((at, how))
            unknown = at if unknown is None else unknown
        if sequence[at] == _STEP:
            unknown = None
    return found
