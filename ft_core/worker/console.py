"""How workers' output looks on the console: each warning once, however many roles print it, and how often.

In the log files is all of it. Agents that share a console share the job directory: who is the first to make a
file of a warning's name there shows it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from ft_core.process.lines import entry, is_entry

STREAMS = {1: "stdout", 2: "stderr"}
_MANY = 1000
"""Warnings that are told apart; what comes beyond is shown each time."""
_WARNING = re.compile(
    rb"\S+:\d+: \w*Warning:|(?:\[rank\d+\]:\s?)?\[?W\d{4} |(?! )[^\n]{0,200}?\b(?:WARN(?:ING)?\b|"
    rb"[Ww]arning:)|\[transformers\] "
)
"""How the first line of one looks: Python's own, those of torch's C++, those of loggers of any kind, and
transformers', which do not say that they are."""
_OURS = re.compile(
    rb'\d{4}-\d\d-\d\d [\d:,]+ ft [A-Z]+ |\{"time": "[^"]+", "level": "[A-Z]+", "component": "'
)
"""What this engine has to say, about what happens now: each time."""
_VARIES = re.compile(
    rb"^\[rank\d+\]:\s?|W\d{4} [\d:.]+(?: \d+)?|\d{4}-\d\d-\d\d[ T][\d:]+(?:[.,]\d+)?|0x[0-9a-f]+"
)
"""In what a warning differs from itself: when, in which process, at which address."""


class Console:
    """Of one agent."""

    def __init__(
        self,
        logs: Path,
        prefix: str = "",
        json: bool = False,
        local_ranks: Collection[int] = (),
        per_node: int = 1,
    ) -> None:
        """`logs`: the job directory's. `prefix`: of each line. `json`: each line is an object instead.
        `local_ranks`: of the `per_node` roles of a node, those that are shown; empty: all."""
        self._prefix, self._json = f"[{prefix}]: ".encode() if prefix and not json else b"", json
        self._local_ranks, self._per_node = local_ranks, per_node
        self._shown = logs / "warnings-shown"
        self._known: set[str] = set()
        self._left_out: set[tuple[Path, int]] = set()
        """Output whose last line was of a warning that is not shown again: more of it, indented, may come."""
        self._roles: dict[Path, int] = {}

    def dress(self, directory: Path, stream: int, data: bytes) -> bytes:
        """What is shown of whole lines in the log `directory` of a worker."""
        role = self._role(directory) if self._local_ranks else None
        if role is not None and role % self._per_node not in self._local_ranks:
            return b""
        lines = self._news((directory, stream), data.removesuffix(b"\n").split(b"\n"))
        if self._json:
            lines = (self._entry(directory, stream, line).encode() for line in lines)
        return b"".join(b"%s%s\n" % (self._prefix, line) for line in lines)

    def forget(self, directory: Path) -> None:
        """Its worker has ended."""
        self._roles.pop(directory, None)
        self._left_out -= {(directory, stream) for stream in STREAMS}

    def _news(self, output: tuple[Path, int], lines: Iterable[bytes]) -> Iterator[bytes]:
        for line in lines:
            if output in self._left_out and line.startswith(b"  "):
                continue
            self._left_out.discard(output)
            if _WARNING.match(line) and not _OURS.match(line) and not self._is_new(line):
                self._left_out.add(output)
            else:
                yield line

    def _is_new(self, line: bytes) -> bool:
        key = hashlib.sha256(_VARIES.sub(b"", line)).hexdigest()[:16]
        if key in self._known:
            return False
        if len(self._known) < _MANY:
            self._known.add(key)
            with contextlib.suppress(OSError):  # then it may come twice
                self._shown.mkdir(parents=True, exist_ok=True)
                try:
                    os.close(os.open(self._shown / key, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
                except FileExistsError:
                    return False
        return True

    def _entry(self, directory: Path, stream: int, line: bytes) -> str:
        text = line.decode(errors="replace")
        if is_entry(text):
            return text
        about: dict[str, str | int] = {
            "node": directory.parent.name.rpartition("-")[0],
            "stream": STREAMS[stream],
        }
        if (role := self._role(directory)) is not None:
            about |= {"role": role}
        return entry(time.time(), "WARNING" if _WARNING.match(line) else "INFO", "script", about, text)

    def _role(self, directory: Path) -> int | None:
        if directory not in self._roles:
            with contextlib.suppress(OSError, ValueError):  # it has none yet
                self._roles[directory] = int((directory / "role").read_text())
        return self._roles.get(directory)
