"""Jobs whose replica groups leave and come back: how far they go, and what roles tell of their state."""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness import Job, Result

STRIDE = 12
"""Steps in which a failure, or what comes after it, finds its place."""


def go_on(job: Job, step: int) -> None:
    """Let all groups train up to that step."""
    path = job.job_dir / "limit"
    path.with_suffix(".new").write_text(str(step))
    path.with_suffix(".new").rename(path)


def states(text: str, events: Iterable[dict] = ()) -> dict[int, dict[int, set[str]]]:
    """step -> rank -> digests of its state, of which a step done twice on the same state has one.

    With the `events` of a job whose lines end with their epoch, those of steps that a later epoch has undone
    are left out: where a shard is lost with a group, the others do its newest step again without it.
    """
    began = {e["epoch"]: e["version"] or 0 for e in events if e["event"] == "decided"}
    found: dict[int, dict[int, set[str]]] = {}
    for step, rank, digest, epoch in re.findall(r"^state (\d+) (\d+) (\w+)(?: (\d+))?$", text, re.MULTILINE):
        if not any(int(epoch or 0) < later and version < int(step) for later, version in began.items()):
            found.setdefault(int(step), {}).setdefault(int(rank), set()).add(digest)
    return found


def lasting_losses(result: Result) -> dict[int, str]:
    """step -> the loss that was logged last."""
    return dict(re.findall(r"iteration (\d+)/\d+ \| loss (\S+)", result.output))
