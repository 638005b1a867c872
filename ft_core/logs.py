"""Workers' output: into files, and from there to the console."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

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
    """Copies what workers' log files gain to this process's own streams.

    How far a file is copied is noted beside it: a worker that takes a role over does not print again what
    its predecessor's log has, so what the predecessor's agent has not copied, its own agent must.
    """

    def __init__(self, streams: int, prefix: str) -> None:
        self._streams, self._prefix = [s for s in (OUT, ERR) if streams & s], prefix
        self._followed: dict[Path, dict[int, int]] = {}
        """Log directory -> stream -> the length of its file when it was last looked at."""

    def follow(self, directory: Path) -> None:
        """Begin to copy the files that a worker will make in `directory`."""
        self._followed[directory] = dict.fromkeys(self._streams, 0)

    def unfollow(self, directory: Path) -> None:
        """The worker has ended: copy the rest, and forget it."""
        self._followed.pop(directory, None)
        self.rest([directory])

    def rest(self, directories: Iterable[Path]) -> None:
        """Copy what is left in the logs of workers that have ended, wherever they ran, if it can be seen."""
        for directory in directories:
            for stream in self._streams:
                self._copy(directory, stream, ended=True)

    def copy(self) -> None:
        """Copy complete lines that have come since the last call."""
        for directory, seen in self._followed.items():
            for stream, length in seen.items():
                with contextlib.suppress(OSError):  # not there yet
                    if (now := (directory / _NAMES[stream]).stat().st_size) > length:
                        seen[stream] = now
                        self._copy(directory, stream, ended=False)

    def close(self) -> None:
        """No worker is left: copy what they have printed last."""
        for directory in list(self._followed):
            self.unfollow(directory)

    async def run(self) -> None:
        """Copy for as long as the agent lives."""
        while True:
            self.copy()
            await asyncio.sleep(_INTERVAL)

    def _copy(self, directory: Path, stream: int, ended: bool) -> None:
        path, target = directory / _NAMES[stream], sys.stdout if stream == OUT else sys.stderr
        with contextlib.suppress(OSError), path.open("rb") as file, _Note(path) as note:
            file.seek(note.position)
            data = file.read()
            if not ended:
                data = data[: data.rfind(b"\n") + 1]
            if data:
                for line in data.decode(errors="replace").removesuffix("\n").split("\n"):
                    target.write(f"{self._prefix}{line}\n")
                target.flush()
                note.position += len(data)


class _Note:
    """How many bytes of a log file are copied, in a file of its own that outlives the agent."""

    def __init__(self, log: Path) -> None:
        self._descriptor = os.open(log.with_suffix(".copied"), os.O_RDWR | os.O_CREAT, 0o644)

    def __enter__(self) -> _Note:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def position(self) -> int:
        return int(os.pread(self._descriptor, 20, 0) or 0)

    @position.setter
    def position(self, value: int) -> None:
        os.pwrite(self._descriptor, b"%020d" % value, 0)  # in place: never torn, never empty
