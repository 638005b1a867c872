"""Which files a machine alone has."""

from __future__ import annotations

import re

_OWN = frozenset("ext2 ext3 ext4 xfs btrfs zfs f2fs tmpfs ramfs overlay".split())
"""File systems on a machine's own disks, or in its memory."""


def is_of_this_machine(name: str) -> bool:
    """Whether no other machine sees the file with this absolute name."""
    found = "", ""
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            fields = line.split(" ")
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
            if f"{name}/".startswith(f"{point.rstrip('/')}/") and len(point) >= len(found[0]):
                found = point, fields[fields.index("-") + 1]
    return found[1] in _OWN
