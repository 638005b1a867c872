"""Waits for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for_value(read: Callable[[], Any], expected: Any, seconds: float = 60) -> None:
    """Until `read` gives what is expected."""
    end = time.monotonic() + seconds
    while (found := read()) != expected:
        assert time.monotonic() < end, f"{found}, not {expected}, after {seconds} s"
        time.sleep(0.02)
