"""What a check of a machine is told and says: shared by `ftctl doctor` and by whoever lets nodes in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Level(StrEnum):
    """How bad it is: `fail` keeps a recovery from working, `warn` makes it slower or harder to understand."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """The answer of one check."""

    name: str
    level: Level
    found: str
    advice: str = ""
    """What to do, and why; empty where all is well."""


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name, Level.OK, found)


def warn(name: str, found: str, advice: str) -> Finding:
    """A recovery works, but slower than it could, or with less left for the next one."""
    return Finding(name, Level.WARN, found, advice)


def fail(name: str, found: str, advice: str) -> Finding:
    """A recovery does not work."""
    return Finding(name, Level.FAIL, found, advice)


def judge(name: str, found: str, advice: str, *, bad: bool, fatal: bool = False) -> Finding:
    """One of the three, for what has two thresholds."""
    return fail(name, found, advice) if fatal else warn(name, found, advice) if bad else ok(name, found)


class Machine(Protocol):
    """What checks of a machine are told; the rest they look up themselves."""

    @property
    def root(self) -> Path:
        """Where its files are; elsewhere in tests."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What the job's processes have."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions that a recovery depends on, by name."""

    @property
    def gpus(self) -> int:
        """How many it has."""

    @property
    def world_size(self) -> int:
        """Workers of the job, 1 where that is not known."""

    @property
    def workers_here(self) -> int:
        """Workers on this machine, without standbys."""


@dataclass(frozen=True)
class ThisMachine:
    """The one that this process is on."""

    environment: Mapping[str, str]
    versions: Mapping[str, str]
    gpus: int
    world_size: int
    workers_here: int
    root: Path = Path("/")


MachineCheck = Callable[[Machine], Iterator[Finding]]
"""Says nothing where it has nothing to look at."""
