"""Looks into, and spoils, the memory of other processes of a job; finds where they listen."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
_BLOCK = 64 << 20


@dataclass(frozen=True)
class Snapshot:
    """One of an agent's snapshot buffers: its memory file, the version in it, and all its bytes."""

    path: str
    inode: int
    version: int
    data: bytes


def snapshots(agent: int) -> list[Snapshot]:
    """The snapshot buffers of the roles on this agent's node."""
    found = []
    for name in os.listdir(f"/proc/{agent}/fd"):
        path = f"/proc/{agent}/fd/{name}"
        try:
            if "memfd:ft-snapshot" in os.readlink(path):
                data = Path(path).read_bytes()
                found.append(
                    Snapshot(
                        path, os.stat(path).st_ino, int.from_bytes(data[:8], "little", signed=True), data
                    )
                )
        except FileNotFoundError:
            continue
    return found


def memory_files(pid: int) -> dict[str, int]:
    """How many descriptors and mappings of an agent's memory files a process has, by their names."""
    found: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found["descriptor " + os.readlink(f"/proc/{pid}/fd/{name}").partition(" ")[0]] += 1
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        found["mapping " + " ".join(line.split()[5:6])] += 1
    return {name: count for name, count in sorted(found.items()) if "/memfd:ft-" in name}


def flip_in_file(path: str, offset: int) -> None:
    """Flip one bit."""
    with open(path, "r+b", buffering=0) as file:
        _flip(file, offset)


def flip_in_anonymous_memory(pid: int, pattern: bytes) -> int:
    """Flip a bit of every occurrence of `pattern` in a process's private memory; returns how many."""
    count = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            where, rights, _, _, inode = line.split()[:5]
            if not rights.startswith("rw-p") or inode != "0":
                continue
            low, high = (int(x, 16) for x in where.split("-"))
            for start in range(low, high, _BLOCK):
                try:
                    memory.seek(start)
                    block = memory.read(min(high - start, _BLOCK + len(pattern)))
                except OSError:
                    continue
                at = block.find(pattern)
                while at >= 0:
                    _flip(memory, start + at)
                    count += 1
                    at = block.find(pattern, at + 1)
    return count


def listening_ports(pid: int) -> list[int]:
    """TCP ports that a process listens on."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


def worker_socket(pid: int) -> str:
    """The name of the abstract socket on which an agent waits for its workers."""
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[7].startswith("@ft-") and f"socket:[{fields[6]}]" in links:
            return f"\0{fields[7][1:]}"
    raise LookupError(f"process {pid} has no socket for workers")


def _flip(file: object, offset: int) -> None:
    file.seek(offset)  # type: ignore[attr-defined]
    byte = file.read(1)[0]  # type: ignore[attr-defined]
    file.seek(offset)  # type: ignore[attr-defined]
    file.write(bytes([byte ^ 0x10]))  # type: ignore[attr-defined]
