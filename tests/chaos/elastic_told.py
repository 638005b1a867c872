"""What the ledger of a job says to a training that is to do the same."""

from __future__ import annotations

import json
from pathlib import Path

from ft_core.adapter import Adapter
from ft_core.elastic.rules import Membership, tellers
from ft_core.worker.groups import Groups


def tell_again() -> None:
    """Roles tell in each epoch of all steps that they know of, and not of those alone which the ledger
    lacks: were one of them not what the ledger has, it would say so."""

    def told(self: Groups, adapter: Adapter) -> None:
        version = self._plan.version or 0
        if self._own in tellers(self.membership.taking_part(version + 1)):
            for step, dealt in adapter.dealt_after(0, self.membership):
                self._tell(step, dealt)

    Groups.fill_the_ledger = told  # type: ignore[method-assign]


def taking_part(path: Path, step: int) -> tuple[int, ...]:
    """The replica groups that exchange gradients in `step`."""
    epochs = [line for line in map(json.loads, path.read_text().splitlines()) if "step" not in line]
    return Membership.from_json(epochs[-1]["membership"]).taking_part(step)


def told(path: Path) -> dict[int, dict[int, list[int]]]:
    """step -> replica group -> the samples that it trained, in order: what counts of a ledger's lines."""
    found: dict[int, dict[int, list[int]]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if "step" in line:
            found[line["step"]] = {
                int(group): [at for first, end in ranges for at in range(first, end)]
                for group, ranges in line["samples"].items()
            }
        elif line["version"] is not None:
            found = {step: samples for step, samples in found.items() if step <= line["version"]}
    return found
