"""Makes of a worker, which is a child of a fork server, the process that a script finds itself in elsewhere.

A script's own child processes (data loaders, checkpoint writers) depend on it: `multiprocessing` tells a
child how its children are to be started, and with a fork server they would import everything anew.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import sys
import threading
import traceback
from multiprocessing import forkserver, process, resource_tracker
from typing import Any

import torch

_Main = type(process.current_process())
"""The class of a process that nobody has started by `multiprocessing`, as the one that first imports this."""

_PATIENCE = 30.0
"""Seconds that a script which has failed has for its threads and exit handlers; its peers wait meanwhile."""


def begin() -> None:
    """Forget that this process was started by `multiprocessing`, and what it has of its parent's chance."""
    here: Any = process
    tempdir = here._current_process._config.get("tempdir")
    here._current_process, here._parent_process = _Main(), None
    if tempdir:  # it goes with the agent, also where nothing here is ended in order
        here._current_process._config["tempdir"] = tempdir
    multiprocessing.set_start_method(None, force=True)
    # A fork server, and a tracker of what is to be cleaned up, it starts for itself when it needs them.
    _forget(forkserver._forkserver, "_forkserver_alive_fd")
    _forget(resource_tracker._resource_tracker, "_fd")
    torch.default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()  # Python's own does so by itself


def _forget(helper: Any, descriptor: str) -> None:
    """Leave a helper process to whoever has started it: make `helper` what it is before there is one."""
    if (inherited := getattr(helper, descriptor)) is not None:
        os.close(inherited)
    helper.__init__()


def end(code: int, error: BaseException | None = None) -> int:
    """What the interpreter does at a script's end: it shows the error, waits for threads, runs exit handlers,
    writes files.

    `code`: the exit code. One that is not 0 puts an end to waiting. Returns it, or the one that the script's
    own hook for errors has chosen.
    """
    if code:
        watchdog = threading.Timer(_PATIENCE, os._exit, [code])
        watchdog.daemon = True
        with contextlib.suppress(RuntimeError):  # no memory for a thread: few can be waited for
            watchdog.start()
    if error is not None:
        code = _show(error, code)
        traceback.clear_frames(error.__traceback__)  # what the script has there ends with it
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # prints what goes wrong in one, and goes on with the others
    flush()
    return code


def _show(error: BaseException, code: int) -> int:
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as stop:
        return exit_code(stop) or code
    except Exception as wrong:
        for each in (wrong, error):
            sys.__excepthook__(type(each), each, each.__traceback__)
    return code


def exit_code(stop: SystemExit) -> int:
    """The code that the interpreter would end with."""
    return 0 if stop.code is None else stop.code & 0xFF if isinstance(stop.code, int) else 1


def flush() -> None:
    """Write out what is buffered: in files that nobody has closed, in streams, in libraries written in C."""
    # By type, since `isinstance` asks proxies, too.
    files = [o for o in gc.get_objects() if issubclass(type(o), (io.TextIOWrapper, io.BufferedWriter))]
    for file in [sys.stdout, sys.stderr, *files]:
        with contextlib.suppress(
            Exception
        ):  # the script's; closed, None, on a full disk or of its own making
            file.flush()
    ctypes.CDLL(None).fflush(None)
