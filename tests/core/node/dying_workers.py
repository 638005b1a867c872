"""Workers that do nothing but hold memory, for tests of how their agent notices their end."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading
import time
from pathlib import Path
from typing import Any

from ft_core.protocol import messages as m
from ft_core.protocol.channel import Channel
from ft_core.worker.shell import WorkerShell

ALONE = "the main thread ends alone"
_EXIT = {"x86_64": 60, "aarch64": 93}
"""Number of the system call, which ends a thread."""


def main(socket: str, secret: bytes, job_dir: str, number: int, device: int, command: Any, *_: Any) -> None:
    """In place of `node.workers.entry.main`. `command.target`: how many bytes, or `ALONE`."""
    channel = Channel.connect(socket, secret, m.TO_WORKER, 60)
    channel.settimeout(None)
    shell = WorkerShell(channel, secret, Path(job_dir), number)
    memory = mmap.mmap(-1, 4096 if command.target == ALONE else int(command.target))
    for at in range(0, len(memory), 4096):
        memory[at] = 1
    shell.send(m.Suspect(1, 0, "it is ready"))
    if command.target == ALONE:
        threading.Thread(target=time.sleep, args=[600]).start()
        ctypes.CDLL(None).syscall(_EXIT[platform.machine()], 1)
    time.sleep(600)
    os._exit(2)
