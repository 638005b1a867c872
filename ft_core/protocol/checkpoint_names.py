"""Names of durable checkpoints: `step-<version>-<epoch>-<job>-<roles>`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_NAME = re.compile(r"step-(\d+)-(\d+)-(\w+)-(\d+)")


class CheckpointId(NamedTuple):
    """What a checkpoint is of. Later ones are greater; their names are not, as the number of an epoch has as
    many digits as it needs."""

    version: int
    epoch: int
    job: str
    roles: int


def name_of(checkpoint: CheckpointId) -> str:
    """The name of its directory."""
    return "step-{:08d}-{:05d}-{}-{}".format(*checkpoint)


def parse(name: str) -> CheckpointId:
    """Inverse of `name_of`. Raises ValueError for what is no such name."""
    if (match := _NAME.fullmatch(name)) is None:
        raise ValueError(f"{name!r} is no name of a checkpoint")
    version, epoch, job, roles = match.groups()
    return CheckpointId(int(version), int(epoch), job, int(roles))


class Past(NamedTuple):
    """What a job has behind it, by which it knows the checkpoints that it may go on from."""

    job: str = ""
    """Its id; empty as long as it has done no step: then it may be any job's."""
    begun_from: str = ""
    """The name of another job's checkpoint that it began with, if it did."""
    left: Sequence[tuple[int, int]] = ()
    """Epochs that began behind what was there, each with the version that it began with: what is newer, of
    earlier epochs, was given up."""

    def own(self, names: Iterable[str]) -> list[str]:
        """The checkpoints of `names` that are of this past, oldest first."""
        found = {name: parse(name) for name in names}
        lowest: dict[str, int] = {}
        result = []
        for name in sorted(found, key=lambda each: (-found[each].epoch, -found[each].version)):
            version, _, job, _ = found[name]
            # A later epoch has written an older version: the job had gone back behind this one.
            if (not self.job or self._has(found[name])) and version <= lowest.get(job, version):
                lowest[job] = version
                result.append(name)
        return sorted(result, key=found.__getitem__)

    def before(self, names: Iterable[str]) -> list[str]:
        """Other jobs' checkpoints that are no newer than the one that this job began with."""
        if not self.begun_from:
            return []
        version = parse(self.begun_from).version
        return [name for name in names if parse(name).job != self.job and parse(name).version <= version]

    def _has(self, found: CheckpointId) -> bool:
        if found.job == self.job:
            return not any(found.epoch < epoch and found.version > version for epoch, version in self.left)
        if not self.begun_from:
            return False
        began = parse(self.begun_from)
        return found.job == began.job and found <= began and not self.gave_up(found.version)

    def gave_up(self, version: int) -> bool:
        """Whether the job has gone back to before this version, which it began with or after."""
        return any(version > back_to for _, back_to in self.left)


def sizes(names: Iterable[str]) -> set[int]:
    """The numbers of roles of those of `names` that are checkpoints."""
    return {parse(name).roles for name in names if _NAME.fullmatch(name)}


def of_size(names: Iterable[str], roles: int) -> list[str]:
    """Those of `names` that are checkpoints of so many roles, oldest first."""
    found = {name: parse(name) for name in names if _NAME.fullmatch(name)}
    return sorted((name for name in found if found[name].roles == roles), key=found.__getitem__)
