"""What an operator, or a program of the operator's, has to say of nodes: lines `NODE [WHEN] [WHY ...]`.

NODE is a name of this machine, or `*`; WHEN the seconds that are left, counted from when the line is seen
first, or a time such as 2026-12-01T06:00:00Z.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Collection
from pathlib import Path

from ft_core.node.notices.daemon import aside, printed
from ft_core.node.notices.notice import EVERY, Notice, moment, plain

_MOST = 1 << 20
"""Bytes of a file that are read."""
_SECONDS = re.compile(r"\d{1,9}(\.\d+)?")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\S+")


class _Lines:
    """What lines say of this machine."""

    def __init__(self, source: str, names: Collection[str], clock: Callable[[], float]) -> None:
        self._source, self._names, self._clock = source, {*names, "*"}, clock
        self._first: dict[str, float] = {}
        """When lines that are still there were seen first."""

    def read(self, text: str) -> list[Notice]:
        """Raises ValueError for a time that is none."""
        found, seen = [], dict[str, float]()
        for line in text.splitlines():
            words = line.partition("#")[0].split()
            if not words or words[0] not in self._names:
                continue
            seen[line] = self._first.get(line, self._clock())
            when, why = None, words[1:]
            if why and _SECONDS.fullmatch(why[0]):
                when, why = seen[line] + float(why[0]), why[1:]
            elif why and _TIME.fullmatch(why[0]):
                when, why = moment(why[0]), why[1:]
            reason = plain(" ".join(why))
            found.append(Notice(f"{self._source}{': ' * bool(reason)}{reason}", when))
        self._first = seen
        return found


class File:
    """A file, which need not be there yet."""

    every = 1.0

    def __init__(self, path: str, names: Collection[str], clock: Callable[[], float] = time.time) -> None:
        """`names`: what this machine is called. `clock`: seconds of the epoch."""
        self._path, self._lines = Path(path), _Lines(f"file {path}", names, clock)

    async def look(self) -> list[Notice]:
        return self._lines.read(await aside(self._text))

    async def agree(self) -> None:
        """There is nobody to tell."""

    def _text(self) -> str:
        try:
            with self._path.open("rb") as file:
                return file.read(_MOST).decode(errors="replace")
        except FileNotFoundError:
            return ""


class Command:
    """A command that prints such lines, or nothing. It finds this node's name in FT_NODE."""

    every = EVERY

    def __init__(self, command: str, names: Collection[str], clock: Callable[[], float] = time.time) -> None:
        """Raises ValueError for quotes that do not close. `names`: of this machine, the job's name first."""
        self._command = shlex.split(command)
        self._environment = {**os.environ, "FT_NODE": next(iter(names), "")}
        self._lines = _Lines(f"command {self._command[0]}", names, clock)

    async def look(self) -> list[Notice]:
        return self._lines.read(await aside(lambda: printed(self._command, self._environment)))

    async def agree(self) -> None:
        """There is nobody to tell."""
