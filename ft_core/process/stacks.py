"""Where a process is, seen from outside: stacks of Python where it can be had, and what the kernel says.

A process that holds the interpreter's lock, in C or for ever, answers the signal all the same; one that is
stopped does not. Only the stack of the thread that gets the signal is written, which is the main one: those
of threads that run meanwhile cannot be read safely from there, and the process may be one that is to live.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from ft_core.process.signals import catches

SIGNAL = signal.SIGRTMIN + 9
NAME = "stacks.txt"
_TOOL = 5.0
"""Seconds that py-spy has."""
_ANSWER = 1.0
"""Seconds that the process itself has."""


def register(directory: Path) -> None:
    """In the process that may be asked: on `SIGNAL`, its main thread's stack goes to `NAME` in there."""
    with contextlib.suppress(OSError):  # a full disk; nothing is to be had then
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / NAME).open("a")
        faulthandler.register(SIGNAL, file=file, all_threads=False)


def write(pid: int, directory: Path, target: Path) -> str:
    """Put all that can be found out of process `pid`, which has registered `directory`, into `target`.
    Returns it in short, for a log. Takes some seconds at most."""
    kernel = _kernel(pid)
    stopped = "State:\tT" in kernel
    found = "" if stopped else _tool(pid) or _own(pid, directory)
    if not found:
        found = "a stopped process does not tell its stack\n" if stopped else "its stack cannot be had\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{found}\n{kernel}")
        where = f"more in {target}"
    except OSError as error:
        where = f"not written: {error}"
    return f"where it is ({where}):\n{found.rstrip()}"


def _tool(pid: int) -> str:
    """What py-spy says of all threads, if it is there and may."""
    if (tool := shutil.which("py-spy")) is None:
        return ""
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_TOOL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _own(pid: int, directory: Path) -> str:
    """What the process writes itself."""
    path = directory / NAME
    try:
        before = path.stat().st_size
        if not catches(pid, SIGNAL):  # it would die of it
            return ""
        os.kill(pid, SIGNAL)
        end = time.monotonic() + _ANSWER
        size = before
        while time.monotonic() < end:
            time.sleep(0.05)
            size, last = path.stat().st_size, size
            if size > before and size == last:
                break
        with path.open() as file:
            file.seek(before)
            return file.read()
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
