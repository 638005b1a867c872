"""The lines of an `events.jsonl`, which may grow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ft_core.errors import ConfigError

OVER = ("finished", "stopped")
"""Events that end a job."""

_LATEST = 1 << 36
"""Seconds since 1970 that are no time at which anything has happened: the year 4147."""


class Tail:
    """A file of events, which may grow."""

    def __init__(self, path: Path, last: int | None = None) -> None:
        """From the beginning; or so many bytes, at most, before its end. Raises ConfigError if there is none,
        and OSError."""
        self.path = path
        self.number = 0
        """The number of the line that was read last."""
        self.over = False
        """Whether the job is, by what was read."""
        self._part = b""
        try:
            self._file: BinaryIO = path.open("rb")
        except FileNotFoundError:
            raise ConfigError(
                f"{path.parent} has no events.jsonl: no controller has run with this directory"
            ) from None
        if last is not None and (size := os.fstat(self._file.fileno()).st_size) > last:
            self._file.seek(size - last)
            self._file.readline()  # part of one

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def lines(self) -> Iterator[str]:
        """Those that there are by now, and were not read yet; what has no end yet is no line."""
        for part in self._file:
            self._part += part
            if not self._part.endswith(b"\n"):
                continue
            line, self._part = self._part.decode(errors="replace"), b""
            self.number += 1
            self.over |= any(f'"event": "{name}"' in line for name in OVER)
            yield line


def parsed(line: str) -> dict[str, Any] | None:
    """An event, or None."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if is_event(event) else None


def is_event(found: Any) -> bool:
    """Whether it has what all have."""
    try:
        texts, numbers = (found["event"], found["reason"]), (found["time"], found["epoch"])
        roles = found["roles"]
    except (TypeError, KeyError):
        return False
    fits = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
    fits = fits and 0 <= found["time"] < _LATEST
    fits = fits and isinstance(roles, list) and all(isinstance(role, int) for role in roles)
    return fits and all(isinstance(each, str) for each in texts)
