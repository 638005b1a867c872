"""What may take for ever, in a thread that the end of this process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ft_core.node.workers import orphans

T = TypeVar("T")

COMMAND = 10.0
"""Seconds that a command may take."""
_MOST = 1 << 16
"""Bytes of what it prints that are read."""


async def aside(call: Callable[[], T]) -> T:
    """What `call` returns, or raises: storage may hang, and a command not end. Raises BlockingIOError where
    there can be no thread at present."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def put(value: T | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, failed = None, None
        try:
            value = call()
        except Exception as error:  # it is raised where this is waited for
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(put, value, failed)

    try:
        threading.Thread(target=run, name="ft-notices", daemon=True).start()
    except RuntimeError as error:
        raise BlockingIOError(errno.EAGAIN, str(error)) from None
    return await done


def printed(command: Sequence[str], environment: Mapping[str, str], limit: float = COMMAND) -> str:
    """What a command prints that ends well. Raises OSError, and ValueError for any other end."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:  # pipes outlive it
        about = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors, "env": dict(environment)}
        with orphans.child(lambda: subprocess.Popen(command, **about)) as process:  # type: ignore[call-overload]
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise TimeoutError(f"{command[0]} has not ended within {limit:g} s") from None
        output.seek(0)
        errors.seek(0)
        if code:
            said = errors.read(_MOST).decode(errors="replace").strip().rpartition("\n")[2]
            raise ValueError(f"{command[0]} ended with code {code}: {said or 'it says nothing'}")
        return output.read(_MOST).decode(errors="replace")
