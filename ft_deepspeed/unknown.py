"""A number that a newcomer's script reads of what it does not have: it goes along in what is computed of it,
and nothing is decided by it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

DECIDES = "its script decides by what is made of the model's larger outputs or its weights"
Refuse = Callable[[str], NoReturn]


class Unknown(float):
    """Not a number for all that reads it, but that a loss which is read before `backward` is finite."""

    since: int
    """After how many steps the oldest was read that it is computed of."""
    output = False
    """Whether it is the model's own."""
    _refuse: Refuse

    @property
    def newest(self) -> int:
        """When it was read: a number is not added to."""
        return self.since

    @classmethod
    def made(cls, value: float, since: int, refuse: Refuse) -> Unknown:
        """`refuse`: called with what the script wants of it that cannot be had."""
        found = cls(value)
        found.since, found._refuse = since, refuse
        return found

    def _computed(self, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        since = min([self.since, *(other.since for other in others if isinstance(other, Unknown))])
        return Unknown.made(math.nan, since, self._refuse)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _computed
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _computed
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _computed

    def __round__(self, digits: Any = None) -> Any:
        return self._computed()

    def _decides(self, other: Any = None) -> NoReturn:
        self._refuse(DECIDES)

    __lt__ = __le__ = __gt__ = __ge__ = _decides
    __int__ = __index__ = __bool__ = __trunc__ = __floor__ = __ceil__ = _decides

    def __eq__(self, other: object) -> bool:
        return False if other is self else self._decides()

    def __ne__(self, other: object) -> bool:
        return True if other is self else self._decides()

    __hash__ = object.__hash__

    def __reduce__(self) -> Any:
        return float, (float(self),)
