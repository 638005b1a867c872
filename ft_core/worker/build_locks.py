"""A lock that torch builds extensions under, and whose owner was killed, is taken from it.

torch and DeepSpeed load operations under a lock that is a file (`torch.utils.file_baton`): whoever makes it
removes it, and others wait for as long as it is there. A worker that is killed meanwhile would leave it to
all who start after it, in this job and in others.

Workers write into the file who they are. A lock of somebody else, or of another machine, is waited for as
ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from ft_core import patched
from ft_core.import_hook import after_import

log = logging.getLogger(__name__)


def install(real: Callable[[], AbstractContextManager[None]]) -> None:
    """Once per process. `real`: what is done to files within it is done for real."""

    def patch(_: ModuleType) -> None:
        patched.LOCK.wrap(_signed)
        patched.WAIT_FOR_LOCK.wrap(lambda _: _while_it_lives(real))

    after_import("torch.utils.file_baton", patch)


def _signed(acquire: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def try_acquire(baton: Any) -> bool:
        if not acquire(baton):
            return False
        with open(baton.lock_file_path, "w") as file:
            file.write(_signature(os.getpid()))
        return True

    return try_acquire


def _while_it_lives(real: Callable[[], AbstractContextManager[None]]) -> Callable[[Any], None]:
    def wait(baton: Any) -> None:
        path = baton.lock_file_path
        while os.path.exists(path):
            if (owner := _owner(path)) and _is_dead(owner):
                with real():
                    _take_away(path, owner)
                return
            time.sleep(baton.wait_seconds)

    return wait


def _signature(pid: int) -> str:
    """The machine, number and time of start of a process, which no other has."""
    return f"{socket.gethostname()} {pid} {_started(pid)}"


def _started(pid: int | str) -> str:
    """Empty: it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            found = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if found[0] in "ZX" else found[19]


def _owner(path: str) -> str:
    """Who has signed it; empty: nobody, or not yet."""
    try:
        with open(path) as file:
            found = file.read()
    except OSError:
        return ""
    return found if len(found.split()) == 3 else ""


def _is_dead(owner: str) -> bool:
    host, pid, started = owner.split()
    return host == socket.gethostname() and _started(pid) != started


def _take_away(path: str, owner: str) -> None:
    """Only this owner's: meanwhile somebody else may have done it, and a third may have the lock."""
    aside = f"{path}.{secrets.token_hex(4)}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if _owner(aside) == owner:
            log.warning("took away %s, the lock of a process that was killed: %s", path, owner)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        os.unlink(aside)
