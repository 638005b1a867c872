"""Whole jobs on the one device: each role is a node of its own, so that all of them use the first GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, ftrun
from benchmarks.gpu.checks import Row
from benchmarks.gpu.nccl import ALONE

PHASES = ("detected", "decided", "communicators_ready", "state_restored", "resumed")


@dataclass
class Outcome:
    """Of a job: what its workers printed, and what it recorded."""

    code: int
    losses: dict[str, list[str]]
    digest: str
    events: list[dict[str, Any]] = field(default_factory=list)
    errors: str = ""

    @property
    def timeline(self) -> dict[str, float]:
        """Of the first recovery: seconds from its detection to each phase."""
        mine = [e for e in self.events if e.get("epoch") == 2 or e["event"] == "detected"]
        begins = next((e["monotonic"] for e in mine if e["event"] == "detected"), 0.0)
        return {e["event"]: round(e["monotonic"] - begins, 3) for e in mine if e["event"] in PHASES}


class Launched:
    """A job under way in `directory`."""

    def __init__(
        self, directory: Path, world: int, script: list[str], inject: str, env: dict[str, str]
    ) -> None:
        self._directory = directory
        flags = [f"--nnodes={world}", "--nproc-per-node=1", "--spares=0"]
        command = [*ftrun(directory, *flags, f"--ft-inject={inject}"), *script]
        self._errors = (directory.parent / f"{directory.name}.log").open("w+")
        variables = {**os.environ, **ALONE, **env}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=self._errors, stderr=self._errors
        )

    def finish(self, seconds: float) -> Outcome:
        """Wait for its end. Raises TimeoutExpired."""
        code = self._process.wait(seconds)
        self._errors.seek(0)
        errors = self._errors.read()
        logs = sorted(self._directory.glob("logs/*/worker-*/**/stdout.log"))
        text = "\n".join(path.read_text() for path in logs)
        losses: dict[str, list[str]] = {}
        for step, loss in re.findall(r"iteration (\d+)/\d+ \| loss (\S+)", text):
            losses.setdefault(step, [])
            if loss not in losses[step]:
                losses[step].append(loss)
        found = re.findall(r"^digest sha256:([0-9a-f]{64})$", text, re.M)
        events = (self._directory / "events.jsonl").read_text().splitlines()
        if code:
            sys.stderr.write(errors[-4000:])
        return Outcome(code, losses, found[-1] if found else "", [json.loads(e) for e in events], errors)

    def kill(self) -> None:
        """Its agents end with their launcher."""
        self._process.kill()


def recovered(
    row: Row,
    check: str,
    scratch: Path,
    world: int,
    plain: list[str],
    protected: list[str],
    env: dict[str, str],
) -> None:
    """The same training twice at once: undisturbed, and with a worker killed. Both must end alike."""
    began = time.monotonic()
    name = re.sub(r"\W+", "-", check)
    reference = Launched(scratch / f"{name}-plain", world, plain, "", env)
    job = Launched(scratch / name, world, protected, "1@backward:8:worker", env)
    try:
        expected, found = reference.finish(90), job.finish(90)
    finally:
        reference.kill()
        job.kill()
    for which, outcome in (("undisturbed", expected), ("killed", found)):
        if outcome.code:
            last = [line for line in outcome.errors.splitlines() if line.strip()][-1:]
            raise RuntimeError(f"the {which} job ended with {outcome.code}: {' '.join(last)[:120]}")
    recoveries = sum(e["event"] == "decided" and e["epoch"] > 1 for e in found.events)
    same = bool(found.digest) and found.digest == expected.digest and found.losses == expected.losses
    line = found.timeline
    figure = (
        f"{'bit-identical' if same else 'DIFFERENT'}, {recoveries} recovery; resumed {line.get('resumed')} s"
    )
    took = time.monotonic() - began
    row.tell(check, same and recoveries == 1, figure, timeline=line, steps=len(found.losses), seconds=took)
