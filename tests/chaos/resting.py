"""Scripts with a rest after each step, so that a test has time to do something to a job while it trains: the
last steps take their time until the test waits for the job's end. As paced.py, for other recipes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

REST = 0.05
"""Seconds. What is trained is the same."""
LONGEST_REST, LAST = 2.0, 45
"""Seconds, less than any step has to take for a hang, and in how many of them."""
AWAITED = "FT_TESTS_AWAITED"
"""The environment variable that names the file which says that the end is waited for."""


def rest(step: int, steps: int, last: int = LAST) -> None:
    """After that one of so many, of which the `last` take their time."""
    time.sleep(REST)
    if step >= steps - last and AWAITED in os.environ:
        until = time.monotonic() + LONGEST_REST
        while not Path(os.environ[AWAITED]).exists() and time.monotonic() < until:
            time.sleep(REST)
