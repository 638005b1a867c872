"""Errors of GPUs as NVIDIA's driver numbers them (XIDs), which it tells the kernel's log."""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import NamedTuple

from ft_core.node.devices.kernel_log import PATH, KernelLog

_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d{1,4})\b([^\n]*)")
ADVICE = 154
"""The XID by which the driver says that its own advice has changed."""
MOST = 64
"""Numbers that are told apart; there are some 170."""
_WAITING = 64
"""Errors that are kept until somebody asks for them, the newest."""


class XidSeen(NamedTuple):
    """One error."""

    number: int
    bus: str
    """Where the GPU is, as the driver writes it: `0000:3b:00`."""
    text: str
    """The rest of the line."""


class Xids:
    """Errors of this machine's GPUs, since this object was made."""

    def __init__(self, kernel_log: str = PATH) -> None:
        self._log = KernelLog(kernel_log)
        self._counts: Counter[int] = Counter()
        self._new: deque[XidSeen] = deque(maxlen=_WAITING)

    def counts(self) -> dict[int, int]:
        """XID -> how often it came."""
        self._read()
        return dict(self._counts)

    def new(self) -> list[XidSeen]:
        """Errors that nobody has asked for yet."""
        self._read()
        found = list(self._new)
        self._new.clear()
        return found

    def _read(self) -> None:
        for record in self._log.records():
            for bus, found, text in _XID.findall(record):
                number = int(found)
                if number in self._counts or len(self._counts) < MOST:
                    self._counts[number] += 1
                self._new.append(
                    XidSeen(number, bus.removeprefix("PCI:").partition(" ")[0], text.strip(" ,"))
                )
