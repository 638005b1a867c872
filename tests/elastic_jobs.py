"""Jobs whose replica groups leave and come back: how far they go, and what roles tell of their state."""

from __future__ import annotations

import re

from harness import Job

STRIDE = 12
"""Steps in which a failure, or what comes after it, finds its place."""


def go_on(job: Job, step: int) -> None:
    """Let all groups train up to that step."""
    path = job.job_dir / "limit"
    path.with_suffix(".new").write_text(str(step))
    path.with_suffix(".new").rename(path)


def states(text: str) -> dict[int, dict[int, set[str]]]:
    """step -> rank -> digests of its state, of which a step done twice on the same state has one."""
    found: dict[int, dict[int, set[str]]] = {}
    for step, rank, digest in re.findall(r"^state (\d+) (\d+) (\w+)$", text, re.MULTILINE):
        found.setdefault(int(step), {}).setdefault(int(rank), set()).add(digest)
    return found
