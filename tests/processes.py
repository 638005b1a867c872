"""The processes of this machine; zombies are none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    parent: int
    group: int


def running() -> list[Process]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        state, parent, group = tail.split()[:3]
        if state != "Z":
            found.append(Process(int(path.parent.name), head.partition("(")[2], int(parent), int(group)))
    return found


def children(parent: int) -> list[int]:
    """Those that a process has started itself, or taken over."""
    return [process.pid for process in running() if process.parent == parent]


def in_groups(groups: Collection[int]) -> list[Process]:
    return [process for process in running() if process.group in groups]


def alive(pid: int) -> bool:
    return any(process.pid == pid for process in running())
