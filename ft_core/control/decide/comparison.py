"""What it means that holders of one segment say the same of it, or not: pure, from their checksums.

Nobody is to blame at the first difference. All do the step again, from the version before, in which they had
the same: a computation is repeated, and whoever does not come to the same as before was wrong. Where all come
to what they had, they differ for a reason of their own, and where nobody does the computation is not
deterministic: there is nothing to compare then. So a difference costs a step, and an alarm has been proven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

Values = Mapping[int, str]
"""Role -> the checksum of what it holds of one segment, in one version."""


@dataclass(frozen=True)
class Alike:
    """All holders have the same checksum. `culprits`: holders that had another one when this version was made
    before, and so were proven wrong."""

    culprits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Differ:
    """The holders differ, and whose fault that is, is not clear: the step is done again. `odd`: the one
    holder that differs from all others, of three or more."""

    odd: int | None = None


@dataclass(frozen=True)
class Corrupt:
    """The holders differ again, and one of them alone does not come to what it had before: it is wrong, and
    would be once more."""

    role: int


@dataclass(frozen=True)
class Incomparable:
    """The holders differ, and cannot be compared. `reproduced`: each comes to what it had before, so they
    differ for a reason of their own; else what they compute is not deterministic."""

    reproduced: bool


Verdict = Alike | Differ | Corrupt | Incomparable


def odd_one(values: Values) -> int | None:
    """The one holder that differs from all others, of three or more; None: there is no such one."""
    (_, most), *_ = counted = Counter(values.values()).most_common()
    if len(values) < 3 or len(counted) != 2 or most != len(values) - 1:
        return None
    return next(role for role, value in values.items() if value == counted[1][0])


def compare(values: Values, before: Values | None = None) -> Verdict:
    """`values`: of all holders that take part. `before`: what they had in this version when it was made
    before, and they differed."""
    same = len(set(values.values())) == 1
    if before is None:
        return Alike() if same else Differ(odd_one(values))
    changed = tuple(sorted(role for role, value in values.items() if before.get(role) != value))
    if same and len(changed) < len(values):
        return Alike(changed)
    if same:  # it is another result, and proves nothing
        return Alike()
    if len(changed) == 1:
        return Corrupt(changed[0])
    if 0 < len(changed) < len(values):  # some come to what they had, so it is deterministic: once more
        return Differ(odd_one(values))
    return Incomparable(reproduced=not changed)
