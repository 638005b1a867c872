"""Which of this machine's GPUs are the job's, by where they are on the bus."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

LISTED = "/proc/driver/nvidia/gpus"
"""NVIDIA's driver has a directory for each GPU there, called by its place on the bus."""
FILES = "/dev/nvidia"
"""What the files of GPUs are called, but for their numbers."""


def by_bus(
    devices: int, visible: str | None, listed: str = LISTED, files: str = FILES
) -> dict[str, int] | None:
    """Place on the bus -> index, of the `devices` that this node's workers use. None where that is not known.

    `visible`: CUDA_VISIBLE_DEVICES, if it is set. GPUs are numbered in the order of the bus, as CUDA does
    where all are alike; those that this process may not open (a container, or Slurm, keeps them for others)
    have no number. May take as long as a sick driver does.
    """
    if visible is not None and visible.strip() in ("", "-1"):
        return {}
    try:
        found = [bus for bus in sorted(os.listdir(listed)) if _can_be_opened(Path(listed, bus), files)]
    except OSError:
        return None
    if visible is None:
        return {_plain(bus): index for index, bus in enumerate(found[:devices])}
    ids = _ids(found, listed) if "GPU-" in visible else {}
    places: dict[str, int] = {}
    for wanted in visible.split(","):
        bus = _one(wanted.strip(), found, ids)
        if bus is None:
            return None
        places[_plain(bus)] = len(places)
    return {bus: index for bus, index in places.items() if index < devices}


def _one(wanted: str, found: list[str], ids: Mapping[str, str]) -> str | None:
    """The GPU of one entry: its number, or the beginning of its id."""
    if wanted.isdecimal():
        return found[int(wanted)] if int(wanted) < len(found) else None
    those = [bus for known, bus in ids.items() if wanted.startswith("GPU-") and known.startswith(wanted)]
    return those[0] if len(those) == 1 else None


def _can_be_opened(listed: Path, files: str) -> bool:
    """Whether this process can open the device; true also where that cannot be found out."""
    with contextlib.suppress(OSError):
        for line in (listed / "information").read_text(errors="replace").splitlines():
            name, _, number = line.partition(":")
            if name == "Device Minor":
                try:
                    os.close(os.open(f"{files}{number.strip()}", os.O_RDWR | os.O_CLOEXEC))
                except (PermissionError, FileNotFoundError):
                    return False
    return True


def _ids(found: list[str], listed: str) -> dict[str, str]:
    """Id of each GPU -> its PCI address."""
    ids = {}
    for bus in found:
        with contextlib.suppress(OSError):
            for line in Path(listed, bus, "information").read_text(errors="replace").splitlines():
                if line.startswith("GPU UUID:"):
                    ids[line.partition(":")[2].strip()] = bus
    return ids


def _plain(bus: str) -> str:
    """A PCI address without the function, as in the driver's messages."""
    return bus.partition(".")[0].lower()
