"""Errors of GPUs as NVIDIA's driver numbers them (XIDs), which it tells the kernel's log."""

from __future__ import annotations

import re
from collections import Counter

from ft_core.node.devices.kernel_log import PATH, KernelLog

_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d{1,4})\b")
MOST = 64
"""Numbers that are told apart; there are some 170."""


class Xids:
    """Errors of this machine's GPUs, since this object was made."""

    def __init__(self, kernel_log: str = PATH) -> None:
        self._log = KernelLog(kernel_log)
        self._counts: Counter[int] = Counter()

    def counts(self) -> dict[int, int]:
        """By number, how often."""
        for record in self._log.records():
            for found in _XID.findall(record):
                if int(found) in self._counts or len(self._counts) < MOST:
                    self._counts[int(found)] += 1
        return dict(self._counts)
