"""Workers' output: into files, and from there to the console."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TextIO

OUT, ERR = 1, 2
_INTERVAL = 0.05
_NAMES = {OUT: "stdout.log", ERR: "stderr.log"}


def redirect(streams: int, directory: Path) -> None:
    """Send this process's stdout (1), stderr (2) or both (3) to files in `directory`, line by line.

    On the level of descriptors, so that what libraries written in C print goes there as well.
    """
    for stream, file in ((OUT, sys.stdout), (ERR, sys.stderr)):
        if streams & stream:
            descriptor = os.open(directory / _NAMES[stream], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, stream)
            os.close(descriptor)
            file.reconfigure(line_buffering=True)  # type: ignore[union-attr]


class Tee:
    """Copies what workers' log files gain to this process's own streams."""

    def __init__(self, streams: int, prefix: str) -> None:
        self._streams, self._prefix = streams, prefix
        self._followed: list[tuple[Path, TextIO, list[int]]] = []

    def follow(self, directory: Path) -> None:
        """Begin to copy the files that a worker will make in `directory`."""
        for stream, target in ((OUT, sys.stdout), (ERR, sys.stderr)):
            if self._streams & stream:
                self._followed.append((directory / _NAMES[stream], target, [0]))

    def unfollow(self, directory: Path) -> None:
        """Copy the rest, then forget the worker."""
        self.copy()
        self._followed = [f for f in self._followed if f[0].parent != directory]

    def copy(self) -> None:
        """Copy complete lines that have come since the last call."""
        for path, target, position in self._followed:
            try:
                if path.stat().st_size <= position[0]:
                    continue
                with path.open("rb") as file:
                    file.seek(position[0])
                    data = file.read()
            except OSError:
                continue  # not there yet
            complete = data[: data.rfind(b"\n") + 1]
            position[0] += len(complete)
            for line in complete.decode(errors="replace").splitlines(keepends=True):
                target.write(self._prefix + line)
            target.flush()

    async def run(self) -> None:
        """Copy for as long as the agent lives."""
        while True:
            self.copy()
            await asyncio.sleep(_INTERVAL)
