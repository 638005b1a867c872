"""Where a script of the tests runs, which it cannot know as a script."""

from __future__ import annotations

import os
import re
from pathlib import Path


def node() -> str:
    """That on which this process is, by its agent's command line."""
    pid = os.getpid()
    while pid > 1:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "--node" in words:
            return words[words.index("--node") + 1]
        found = re.search(r"^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)
        assert found is not None
        pid = int(found[1])
    raise RuntimeError("this process is no worker of an agent's")
