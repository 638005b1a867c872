"""How long the script waits for its data: in the iterators of torch's DataLoader, whoever made them.

Only the main thread's time counts, since one that reads ahead holds nobody up. What a script reads by other
means counts as its computing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ft_core.patched import NEXT_BATCH


class DataWaits:
    """Those of this process."""

    def __init__(self) -> None:
        self._nanoseconds = 0
        self._inside = False
        """Whether an iterator is at work: one that reads from another one is waited for once."""

    def install(self) -> None:
        """From here on."""
        NEXT_BATCH.wrap(self._measured, once=True)

    def take(self) -> int:
        """Nanoseconds since this was asked last."""
        found, self._nanoseconds = self._nanoseconds, 0
        return found

    def _measured(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def following(iterator: Any) -> Any:
            if self._inside or threading.current_thread() is not threading.main_thread():
                return original(iterator)
            began = time.monotonic_ns()
            try:
                self._inside = True
                return original(iterator)
            finally:
                self._nanoseconds += time.monotonic_ns() - began
                self._inside = False

        return following


data_waits = DataWaits()
