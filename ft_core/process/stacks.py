"""Where a process is, seen from outside: stacks of Python where it can be had, and what the kernel says.

A process that holds the interpreter's lock, in C or for ever, answers the signal all the same; one that is
stopped does not. Only the stack of the thread that gets the signal is written, which is the main one: those
of threads that run meanwhile cannot be read safely from there, and the process may be one that is to live.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from msgspec import Struct

from ft_core.process.signals import catches

SIGNAL = signal.SIGRTMIN + 9
NAME = "stacks.txt"
_TOOL = 5.0
"""Seconds that py-spy has."""
_ANSWER = 1.0
"""Seconds that the process itself has."""
_FRAME = re.compile(r'^  File "(.*)", line \d+ in (.*)$', re.MULTILINE)
"""A frame as faulthandler writes it."""
_FRAMES = 100
_TEXT = 512
"""Characters of a path or a name, as faulthandler has them at most."""


Child = Callable[[Callable[[], subprocess.Popen[bytes]]], AbstractContextManager[subprocess.Popen[bytes]]]


class Frame(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One frame of a stack of Python."""

    path: str
    function: str


def register(directory: Path) -> None:
    """In the process that may be asked: on `SIGNAL`, its main thread's stack goes to `NAME` in there."""
    with contextlib.suppress(OSError):  # a full disk; nothing is to be had then
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / NAME).open("a")
        faulthandler.register(SIGNAL, file=file, all_threads=False)


def write(pid: int, directory: Path, target: Path, child: Child) -> str:
    """Put all that can be found out of process `pid`, which has registered `directory`, into `target`.
    Returns it in short, for a log. Takes some seconds at most. `child`: what a process is started with, for
    as long as it runs; see `orphans.child`."""
    kernel = _kernel(pid)
    stopped = "State:\tT" in kernel
    found = "" if stopped else _tool(pid, child) or own(pid, directory)
    if not found:
        found = "a stopped process does not tell its stack\n" if stopped else "its stack cannot be had\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{found}\n{kernel}")
        where = f"more in {target}"
    except OSError as error:
        where = f"not written: {error}"
    return f"where it is ({where}):\n{found.rstrip()}"


def _tool(pid: int, child: Child) -> str:
    """What py-spy says of all threads, if it is there and may."""
    if (tool := shutil.which("py-spy")) is None:
        return ""
    command = [tool, "dump", "--pid", str(pid)]
    try:
        with tempfile.TemporaryFile() as output:
            about = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.DEVNULL}
            with child(lambda: subprocess.Popen(command, **about)) as process:  # type: ignore[call-overload]
                try:
                    code = process.wait(_TOOL)
                except subprocess.TimeoutExpired:
                    process.kill()
                    code = process.wait()
            output.seek(0)
            return "" if code else output.read().decode(errors="replace")
    except OSError:
        return ""


def frames(text: str) -> list[Frame]:
    """The frames of what `own` has brought, the innermost first."""
    found = _FRAME.findall(text)[:_FRAMES]
    return [Frame(path[-_TEXT:], function[:_TEXT]) for path, function in found]


def own(pid: int, directory: Path) -> str:
    """What process `pid`, which has registered `directory`, writes of its main thread: it need not hold the
    interpreter's lock for that. Empty: it is stopped, or in a call that no signal ends. Takes a second."""
    path = directory / NAME
    try:
        if not catches(pid, SIGNAL):  # it would die of it
            return ""
        os.truncate(path, 0)  # it is asked again and again
        os.kill(pid, SIGNAL)
        end = time.monotonic() + _ANSWER
        size = 0
        while time.monotonic() < end:
            time.sleep(0.05)
            size, last = path.stat().st_size, size
            if size and size == last:
                break
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _kernel(pid: int) -> str:
    """What /proc has of it, and may be read."""
    found = []
    for name in ("status", "wchan", "syscall", "stack"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text(errors="replace")
            found.append(f"/proc/{pid}/{name}:\n{text.rstrip()}\n")
    return "\n".join(found)
