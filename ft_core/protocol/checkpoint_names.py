"""Names of durable checkpoints: `step-<version>-<epoch>-<job>-<roles>`."""

from __future__ import annotations

import re
from collections.abc import Iterable
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


def sizes(names: Iterable[str]) -> set[int]:
    """The numbers of roles of those of `names` that are checkpoints."""
    return {parse(name).roles for name in names if _NAME.fullmatch(name)}


def of_size(names: Iterable[str], roles: int) -> list[str]:
    """Those of `names` that are checkpoints of so many roles, oldest first."""
    found = {name: parse(name) for name in names if _NAME.fullmatch(name)}
    return sorted((name for name in found if found[name].roles == roles), key=found.__getitem__)
