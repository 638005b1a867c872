"""Calls that may block for ever, made by helper threads, so that nobody who waits for one has to be woken.

Where a connection is closed in the middle of a message, gloo tells nobody who waits for that message
(`Pair::signalException` leaves out what is in `tx_` and `rx_`), and a wait for a send or a receive cannot be
given a short limit: it closes all connections when it runs out. So a helper waits, and who needs the result
looks every now and then whether it is still wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from ft_core.comm.inner import start
from ft_core.errors import EpochChanged

R = TypeVar("R")

LOOK = 0.1
"""How often (seconds) who waits looks whether what it waits for will ever come."""


class _Helper:
    """A thread that makes one call after the other. Handing one over takes some 10 µs; a new thread takes
    ten times that."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        """None: no more of them."""
        self.done = threading.Lock()
        """Released once the call has returned."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.done.acquire()
        start("apart", self._run)

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                self.result = call()
            except BaseException as error:
                self.error = error
            del call  # what it holds is not kept until the next
            self.done.release()

    def outcome(self) -> Any:
        """What the call has returned, or raised."""
        result, error = self.result, self.error
        self.result = self.error = None
        _idle.append(self)
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return result


_idle: list[_Helper] = []


def apart(call: Callable[[], R], over: Callable[[], bool], what: str) -> R:
    """What `call` returns or raises. EpochChanged once it is `over`, after a moment in which it may still
    return; the call is left where it is then."""
    try:
        helper = _idle.pop()
    except IndexError:
        helper = _Helper()
    helper.calls.put(call)
    was_over = False
    try:
        while not helper.done.acquire(timeout=LOOK):
            if was_over:
                raise EpochChanged(f"an epoch ended during {what}")
            was_over = over()
    except BaseException:  # this, or an error of a signal's handler
        helper.calls.put(None)
        raise
    result: R = helper.outcome()
    return result
