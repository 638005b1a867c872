"""Imported by scripts of jobs of which some nodes are to compute wrongly, so by their agents' fork servers.

`FT_TESTS_SICK` names a file with the names of those nodes. It stands in for a device that is sick: whatever
is computed to check such a node has one bit that is wrong.
"""

from __future__ import annotations

import os
from pathlib import Path

from ft_core.node.admission import known_answer

SICK = "FT_TESTS_SICK"
_solved = known_answer.solved


def node() -> str:
    """That on which this process is: a child of an agent's fork server."""
    server = Path(f"/proc/{os.getppid()}/stat").read_text()
    agent = server.rpartition(")")[2].split()[1]
    words = Path(f"/proc/{agent}/cmdline").read_text().split("\0")
    return words[words.index("--node") + 1]


def solved(problem: known_answer.Problem, device: str) -> tuple[str, str, str]:
    """As the device, but for that bit."""
    product, *sums = _solved(problem, device)
    if node().partition("+")[0] in Path(os.environ[SICK]).read_text().split():
        product = f"{int(product, 16) ^ 1:016x}"
    return product, *sums


known_answer.solved = solved  # type: ignore[assignment]
