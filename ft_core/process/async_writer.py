"""What a process writes down or says, written by a thread.

Nobody waits for a disk that is full or hangs, or for a console that is not read: an event loop that waits
cannot answer, and whoever does not answer is taken for dead.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ft_core.process import last_line
from ft_core.process.lines import LOG_CONTEXT

log = logging.getLogger(__name__)

FILE_LIMIT = 256 << 20
"""Bytes that wait for a file. Months of events; they are lost only beyond."""
CONSOLE_LIMIT = 1 << 20
"""Bytes that wait for somebody to read the console."""
_RETRY = 0.5


class AsyncWriter:
    """Writes to a descriptor, in the order of the calls, in a thread of its own.

    What waits beyond `limit` bytes is dropped, and so is what cannot be written.
    """

    def __init__(self, name: str, descriptor: int, limit: int = CONSOLE_LIMIT) -> None:
        self.name = name
        self._descriptor, self._limit = descriptor, limit
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._size = 0
        """Bytes of what waits, and of what is being written."""
        self._lost = 0
        self._closed = False
        threading.Thread(target=self._run, name=f"ft-{name}", daemon=True).start()

    def write(self, text: str) -> None:
        """Whole lines. Never waits."""
        data = text.encode(errors="replace")
        with self._changed:
            if self._size + len(data) > self._limit:
                self._lost += 1
                return
            if self._lost:
                data, self._lost = self._note(self._lost) + data, 0
            self._waiting.append(data)
            self._size += len(data)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written, for so long at most. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._size, seconds)

    def close(self) -> None:
        """Nothing more is to come: the thread ends once everything is written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                data = self._waiting.popleft()
            self._put(data)
            with self._changed:
                self._size -= len(data)
                self._changed.notify_all()

    def _note(self, lost: int) -> bytes:
        return f"ftrun: {lost} messages are missing here: nobody took them\n".encode()

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody is left who could read it
            put(self._descriptor, data)


class FileWriter(AsyncWriter):
    """Appends to a file, which is made with the first line. What cannot be written is tried again and again.

    The file begins and goes on with whole lines, also where a former writer was killed in the middle of one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(path.name, -1, FILE_LIMIT)

    def _note(self, lost: int) -> bytes:
        log.error("%s: %d lines are lost: it could not be written for too long", self._path, lost)
        return b""

    def _put(self, data: bytes) -> None:
        rest, said = memoryview(data), 0
        while rest:
            try:
                if self._descriptor < 0:
                    self._descriptor = _open(self._path)
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                if error.errno != said:
                    log.error(
                        "%s cannot be written (%s): its lines are kept in memory until it can",
                        *(self._path, error.strerror),
                    )
                said = error.errno or -1
                time.sleep(_RETRY)
        if said:
            log.warning("%s is written again; nothing is missing", self._path)


def put(descriptor: int, data: bytes) -> None:
    """Write all of it, however long that takes. Raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # somebody has made it so for all who share it
            select.select([], [descriptor], [])


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(descriptor).st_size:
            with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
                whole = content.rfind(b"\n") + 1
            os.ftruncate(descriptor, whole)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class _LogFile(AsyncWriter):
    """What it does not take is on the console only: a disk that is full costs nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__("log-file", -1)

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._descriptor < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o644)
            put(self._descriptor, data)


class Console(AsyncWriter):
    """This process's stderr; and a file that has what was said there."""

    def __init__(self) -> None:
        super().__init__("console", 2)
        self._file: AsyncWriter | None = None

    def keep(self, path: Path) -> None:
        """In this file, from now on. It is made once there is something to say."""
        self._file = _LogFile(path)

    def _put(self, data: bytes) -> None:
        super()._put(b"\n" + data if last_line.begins() else data)

    def write(self, text: str) -> None:
        """To both."""
        super().write(text)
        if self._file is not None:
            self._file.write(text)

    def flush(self, seconds: float) -> bool:
        """Whether the console has everything; the file is waited for as long."""
        done = super().flush(seconds)
        if self._file is not None:
            self._file.flush(seconds)
        return done

    def close(self) -> None:
        """Close both."""
        super().close()
        if self._file is not None:
            self._file.close()


@cache
def console() -> Console:
    """The console of this process."""
    return Console()


def say(text: str, level: str = "INFO") -> None:
    """To this process's stderr."""
    console().write(LOG_CONTEXT.line(level, text) + "\n")


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        console().write(LOG_CONTEXT.record(record) + "\n")


def log_to_console() -> None:
    """For this process's log and its warnings."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Handler()])
    logging.captureWarnings(True)


class _BesideScript(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(LOG_CONTEXT.record(record), file=sys.stderr)  # whatever the script has made of it


def log_beside_script(packages: Iterable[str]) -> None:
    """What these packages log goes to stderr; how all else is logged is the script's business."""
    handler = _BesideScript()
    for package in packages:
        logger = logging.getLogger(package)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
