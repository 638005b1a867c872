"""What a script can tell of the process that it runs in: as JSON, in a file of its own for each rank."""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import IO

import noisy  # noqa: F401
import numpy.random


def told() -> dict[str, object]:
    """All that must be as in a process which nobody has forked."""
    process = multiprocessing.current_process()
    return {
        "start method": multiprocessing.get_start_method(allow_none=True),
        "process": [type(process).__name__, process.name, process.daemon, process._identity],
        "parent": str(multiprocessing.parent_process()),
        "children": len(multiprocessing.active_children()),
        "main": [__name__, sys.modules["__main__"].__file__, str(__spec__), sys.argv[0]],
        "path": sys.path,
        "signals": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
        "warnings": [str(each) for each in warnings.filters],
        "main thread": threading.current_thread() is threading.main_thread(),
        "collects": gc.isenabled(),
        "umask": os.umask(0o22),
        "root logger": [len(logging.getLogger().handlers), logging.getLogger().level],
        "trackers": sum("resource_tracker" in line for line in _children()),
    }


def _children() -> list[str]:
    """The command lines of this process's children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append((path.parent / "cmdline").read_text())
        except OSError:  # it has ended
            pass
    return found


unclosed: list[IO[str]] = []
"""Files that nobody closes; the interpreter's end does."""


def square(number: int) -> int:
    """For processes of the script's own; one that is spawned must find it."""
    return number**2


def main() -> None:
    import torch  # not in those that are spawned

    card = told()
    if (child := os.fork()) == 0:
        sys.exit(3)  # as a plain process's child would, with no word to anybody else
    card["forked"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.environ["QUIET"] = "in processes of this script's own"
    card["spawned"] = multiprocessing.get_context("spawn").Pool(1).map(square, [3])
    card["served"] = multiprocessing.get_context("forkserver").Pool(1).map(square, [3])
    own = [random.random(), numpy.random.rand(), torch.rand(1).item()]
    path = Path(sys.argv[1], os.environ.get("RANK", "plain"))
    threading.Thread(
        target=lambda: (threading.main_thread().join(), path.with_suffix(".thread").touch())
    ).start()
    atexit.register(path.with_suffix(".exit").touch)
    logging.basicConfig(format="as the script wants it: %(message)s", level=logging.INFO)
    logging.info("told")
    logging.getLogger("ft_core.anything").warning("of ftrun's own")
    unclosed.append(path.open("w"))
    unclosed[0].write(json.dumps({"told": card, "own": own}))
    if os.environ.get("RANK", "0") == "0":
        ctypes.CDLL(None).puts(b"printed by C")  # its own buffer, which a process's end empties
    else:
        sys.stdout.close()


if __name__ == "__main__":
    main()
