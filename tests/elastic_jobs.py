"""Jobs whose replica groups leave and come back: how far they go, and what roles tell of their state."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness import Job, check_finite

from ft_core.state import durable

STRIDE = 12
"""Steps in which a failure, or what comes after it, finds its place."""


def go_on(job: Job, step: int) -> None:
    """Let all groups train up to that step."""
    path = job.job_dir / "limit"
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".new").write_text(str(step))
    path.with_suffix(".new").rename(path)


def begin(job: Job) -> None:
    """Let all groups begin to train, until they do."""
    go_on(job, STRIDE)
    job.wait_for_step(3, timeout=90)


def wait_for_return(job: Job, epoch: int) -> dict:
    """Until a group has come back, in an epoch after that one, and has its state: the event."""
    returned = job.wait_for_epoch("returned", epoch + 1, timeout=120)
    job.wait_for_epoch("state_restored", returned["epoch"])
    return returned


def states(text: str, events: Iterable[dict] = ()) -> dict[int, dict[int, set[str]]]:
    """step -> rank -> digests of its state, of which a step done twice on the same state has one.

    With the `events` of a job whose lines end with their epoch, those of steps that a later epoch has undone
    are left out: where a shard is lost with a group, the others do its newest step again without it.
    """
    found: dict[int, dict[int, set[str]]] = {}
    for step, rank, digest, _ in _told(text, events):
        found.setdefault(step, {}).setdefault(rank, set()).add(digest)
    return found


def lasting_losses(text: str, events: Iterable[dict], logged: str) -> dict[int, list[str]]:
    """step -> each loss logged of it, without steps that were undone. `logged` matches a step and its loss.

    Workers tell of their state after a step before they log it.
    """
    found: dict[int, list[str]] = {}
    for step, _, _, after in _told(text, events):
        for number, loss in re.findall(logged, after):
            if int(number) == step:
                found.setdefault(step, []).append(loss)
    check_finite(loss for losses in found.values() for loss in losses)
    return found


def wait_for_durable(directory: Path, version: int, world: int) -> None:
    """Until the durable checkpoint of `version` is whole."""
    deadline = time.monotonic() + 60
    while version not in map(durable.version_of, found := durable.complete(str(directory), world)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def joined(jobs: list[Path], saved: int) -> str:
    """The ledgers of two jobs, the second of which went on from step `saved` of the first."""
    first, then = ([json.loads(x) for x in (j / "ledger.jsonl").read_text().splitlines()] for j in jobs)
    for record in then:
        record["epoch"] += first[-1]["epoch"]
        if "version" in record:
            record["version"] = record["version"] or saved
    return "".join(json.dumps(record) + "\n" for record in [*first, *then])


def _told(text: str, events: Iterable[dict]) -> Iterator[tuple[int, int, str, str]]:
    """(step, rank, digest, what is printed after it) of each state that was not undone."""
    began = {e["epoch"]: e["version"] or 0 for e in events if e["event"] == "decided"}
    _, *parts = re.split(r"^state (\d+) (\d+) (\w+)(?: (\d+))?$", text, flags=re.MULTILINE)
    for step, rank, digest, epoch, after in zip(*[iter(parts)] * 5, strict=True):
        if not any(int(epoch or 0) < later and version < int(step) for later, version in began.items()):
            yield int(step), int(rank), digest, after
