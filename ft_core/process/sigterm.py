"""SIGTERM to a job, or to one of its machines: what its processes have in common about it."""

from __future__ import annotations

import asyncio
import signal

ENDED = 128 + signal.SIGTERM
"""Exit code of what was told to end, and did."""
GRACE = 30.0
"""Seconds for which workers may outlive a peer that the signal has ended; torchrun's."""


def ignore() -> None:
    """This process ends by itself, with a code that says why: another SIGTERM must not be quicker."""
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
