"""How workers' output looks on the console: each warning once, however many roles print it, and how often.

In the log files is all of it. Agents that share a console share the job directory: who is the first to make a
file of a warning's name there shows it. A line that is not finished, such as a progress bar, is shown as far
as it is; whole lines of others are not put behind it.
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


Output = tuple[Path, int]
"""One output of a worker: its log directory, and the stream."""


class Console:
    """What the workers of one agent have written, on its terminal."""

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
        self._left_out: set[Output] = set()
        """Output whose last line was of a warning that is not shown again: more of it, indented, may come."""
        self._roles: dict[Path, int] = {}
        self._unfinished: dict[Output, bool] = {}
        """Output whose last line is not finished, and whether that line is shown."""
        self._at: dict[object, Output] = {}
        """Where output goes -> whose unfinished line was written there last."""
        self._places = _places()

    @property
    def whole_lines(self) -> bool:
        """Whether nothing is shown of a line before its end."""
        return self._json

    def unfinished(self, directory: Path, stream: int) -> bool:
        """Whether that output's last line is not finished."""
        return (directory, stream) in self._unfinished

    def shares_line(self, stream: int) -> bool:
        """Whether that stream goes where this process's own errors go."""
        return self._places[stream] == self._places[2]

    def dress(self, directory: Path, stream: int, data: bytes) -> bytes:
        """What is shown of output in the log `directory` of a worker. A line that has no end yet goes on with
        the next call."""
        role = self._role(directory) if self._local_ranks else None
        if role is not None and role % self._per_node not in self._local_ranks:
            return b""
        output = directory, stream
        if self._json:
            news = self._news(output, data.removesuffix(b"\n").split(b"\n"))
            return b"".join(self._entry(directory, stream, line).encode() + b"\n" for line in news)
        *lines, rest = data.split(b"\n")
        parts: list[bytes] = []
        if lines and (shown := self._unfinished.pop(output, None)) is not None:
            head = lines.pop(0)
            parts += [self._bars(head), b"\n"] if shown else []
        parts += [b"%s%s\n" % (self._prefix, self._bars(line)) for line in self._news(output, lines)]
        whole = bool(parts)
        if rest:
            if output not in self._unfinished:
                self._unfinished[output] = not (output in self._left_out and rest.startswith(b"  "))
                parts += [self._prefix] if self._unfinished[output] else []
            parts += [self._bars(rest)] if self._unfinished[output] else []
        return self._below(output, b"".join(parts), whole, bool(rest))

    def _bars(self, line: bytes) -> bytes:
        """What is written over a line has the prefix as well."""
        return line.replace(b"\r", b"\r" + self._prefix) if self._prefix else line

    def _below(self, output: Output, shown: bytes, whole: bool, goes_on: bool) -> bytes:
        """Whole lines are not put behind the unfinished line of another output."""
        place = self._places[output[1]]
        other = self._at.get(place)
        if not shown:
            return shown
        if other is not None and other != output and whole:
            shown = b"\n" + shown
        if goes_on:
            self._at[place] = output
        elif whole:
            self._at.pop(place, None)
        return shown

    def finish(self, directory: Path, stream: int) -> bytes:
        """Nothing more comes of this output: what ends its last line, if that needs it."""
        output, place = (directory, stream), self._places[stream]
        shown = self._unfinished.pop(output, False)
        if self._at.get(place) == output:
            del self._at[place]
            return b"\n" if shown else b""
        return b""

    def forget(self, directory: Path) -> None:
        """Its worker has ended."""
        self._roles.pop(directory, None)
        self._left_out -= {(directory, stream) for stream in STREAMS}

    def _news(self, output: Output, lines: Iterable[bytes]) -> Iterator[bytes]:
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


def _places() -> dict[int, object]:
    """Where each stream of this process goes: what is the same for two is one terminal, or file."""
    found: dict[int, object] = {}
    for stream in STREAMS:
        try:
            about = os.fstat(stream)
            found[stream] = about.st_dev, about.st_ino
        except OSError:
            found[stream] = stream
    return found
