"""Which role has left the common order of operations.

Training repeats itself, and roles do alike. So who has left an operation out, done one twice or in another
order, shows: after the same operations, something else came before, and comes with everybody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ft_core.control.hangs.operations import Alike, Flight

_CONTEXTS = (64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2)
"""So many operations before another are compared, as many as there are elsewhere."""
_NEW = 48
"""The newest operations of a role, in which it may have gone astray."""
_COMPARED = 24
"""Roles that are compared with each other, at most."""

Context = tuple[Alike, ...]


class Habits:
    """What comes after what, in the records of many roles."""

    def __init__(self, done: Mapping[int, Sequence[Alike]]) -> None:
        self._done = done
        self._next: dict[Context, Counter[Alike]] = {}
        for operations in done.values():
            for length in _CONTEXTS:
                for at in range(length, len(operations)):
                    before = tuple(operations[at - length : at])
                    self._next.setdefault(before, Counter())[operations[at]] += 1

    def left(self, role: int) -> int | None:
        """How many operations ago, of late, a role did last what nobody else has, nor it itself."""
        operations = self._done[role]
        newest = range(len(operations) - 1, max(len(operations) - 1 - _NEW, -1), -1)
        return next((len(operations) - at for at in newest if self._unheard_of(operations, at)), None)

    def _unheard_of(self, operations: Sequence[Alike], at: int) -> bool:
        for length in _CONTEXTS:
            if length > at:
                continue
            known = self._next[tuple(operations[at - length : at])]
            if known[operations[at]] > 1:
                return False
            if max(known.values()) > 1:
                return True
        return False  # whatever came before was new as well, or two roles differ there


def astray(flights: Mapping[int, Flight], suspects: Collection[int]) -> list[int]:
    """Those of `suspects` that have left the habit last."""
    few = sorted(role for role in suspects if role in flights)[:_COMPARED]
    others = sorted(
        set(flights) - set(few), key=lambda role: min((abs(role - each) for each in few), default=0)
    )
    compared = [*few, *others[: _COMPARED - len(few)]]
    habits = Habits({role: flights[role].done for role in compared})
    left = {role: ago for role in few if (ago := habits.left(role)) is not None}
    return [role for role, ago in left.items() if ago == min(left.values())]
