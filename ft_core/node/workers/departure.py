"""SIGTERM for a worker: whether it is where it can be sent."""

from __future__ import annotations

import contextlib
import os
import signal

from ft_core.process.signals import catches, ignores


def pass_on(pid: int, even_so: bool) -> bool:
    """Send SIGTERM to a process that handles it, or else, if `even_so`, does not ignore it. Returns whether
    it was sent."""
    if not catches(pid, signal.SIGTERM) and (not even_so or ignores(pid, signal.SIGTERM)):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    return True
