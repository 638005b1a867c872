"""Workers' output: into files, and from there to the console."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import io
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from ft_core.process import last_line
from ft_core.process.async_writer import put
from ft_core.process.lines import LOG_CONTEXT
from ft_core.worker.console import Console

log = logging.getLogger(__name__)

OUT, ERR = 1, 2
_INTERVAL, _QUIET = 0.05, 0.2
"""Seconds between two looks at workers' files: at first, and at most while nothing comes. Each takes a tenth
of a millisecond from training."""
_PIECE = 1 << 20
_TAIL = 1 << 18
"""Bytes at the end of a predecessor's output in which a line is looked for."""
_NAMES = {OUT: "stdout.log", ERR: "stderr.log"}


# -- in a worker -------------------------------------------------------------------------------


def redirect(streams: int, directory: Path) -> None:
    """Send this process's stdout (1), stderr (2) or both (3) to files in `directory`, line by line.

    On the level of descriptors, so that what libraries written in C print goes there as well. The directory
    is made. A disk that is full costs output, and no training: what cannot be written is counted, and what
    has no file goes where the agent's own output goes.
    """
    for stream, name in ((OUT, "stdout"), (ERR, "stderr")):
        if not streams & stream or not redirected(stream, directory):
            continue
        before, raw = getattr(sys, name), _Raw(stream, name)
        unbuffered = isinstance(before.buffer, io.RawIOBase)
        file = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=True,
            write_through=unbuffered,
        )
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def redirected(stream: int, directory: Path) -> bool:
    """Have that descriptor stand for the stream's file in `directory`, which is made, if that can be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(directory / _NAMES[stream], flags, 0o644)
    except OSError as error:
        name = _NAMES[stream].partition(".")[0]
        text = f"ftrun: no log file for a worker's {name}, which is shown here ({error})"
        print(LOG_CONTEXT.line("WARNING", text), file=sys.stderr)
        return False
    os.dup2(descriptor, stream)
    os.close(descriptor)
    return True


class _Raw(io.FileIO):
    """What the file does not take is lost, and the script does not hear of it."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._lost = 0
        self.name = f"<{name}>"

    def write(self, data: Any) -> int:
        try:
            if self._lost:
                super().write(f"\nftrun: {self._lost} bytes of output are missing here\n".encode())
                self._lost = 0
            return super().write(data)
        except OSError as error:
            if error.errno == errno.EBADF:  # the script has closed it
                raise
            self._lost += memoryview(data).nbytes
            return memoryview(data).nbytes


def take_over(directory: Path, role: int, started_over: int) -> list[Path]:
    """A worker with its logs in `directory` plays `role`: make that known, for operators and successors.

    Returns the directories of those who have played it before, since the epoch `started_over`, in which all
    scripts were begun anew.
    """
    logs, own = directory.parent.parent, f"{directory.parent.name}/{directory.name}"
    found = played(logs, role, started_over)
    try:
        with players(logs, role).open("a") as file:
            file.write(f"{started_over} {own}\n")
        (directory / "role").write_text(f"{role}\n")
        link = logs / f"role-{role}"
        link.unlink(missing_ok=True)
        link.symlink_to(own)
    except OSError as error:
        _lines_may_come_twice(logs, role, error)
    return found


def played(logs: Path, role: int, started_over: int | None) -> list[Path]:
    """Log directories of the workers that have played `role` since the epoch `started_over`; None: of all.

    Nobody, where that cannot be read.
    """
    try:
        lines = [line.split() for line in players(logs, role).read_text().splitlines()]
        return [logs / name for epoch, name in lines if started_over in (None, int(epoch))]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # storage that fails, or a line half written when its node died
        _lines_may_come_twice(logs, role, error)
        return []


def _lines_may_come_twice(logs: Path, role: int, error: Exception) -> None:
    text = f"ftrun: {logs}/role-{role}: {error}; lines may come twice on the console"
    print(LOG_CONTEXT.line("WARNING", text), file=sys.stderr)


def printed(text: str, directories: Iterable[Path]) -> bool:
    """Whether a worker with its logs in one of these directories has printed `text`, of late."""
    for directory in directories:
        try:
            with (directory / _NAMES[OUT]).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                if text.encode() in file.read():
                    return True
        except OSError:
            continue  # on a node that is gone, together with its lines
    return False


def players(logs: Path, role: int) -> Path:
    """The file that names the log directories of all workers that have played `role`, one a line."""
    return logs / f"role-{role}.workers"


# -- in an agent -------------------------------------------------------------------------------


class Tee:
    """Copies what workers' log files gain to this process's own streams, in a thread.

    A console that nobody reads, or storage that hangs, holds up the copying and nothing else.
    """

    def __init__(self, streams: int, console: Console, failed: Callable[[Exception], None]) -> None:
        """`failed` is told, in the event loop that is running now, of an error that ends the thread."""
        self._copier = Copier(streams, console)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._failed, self._loop = failed, asyncio.get_running_loop()
        self._over: concurrent.futures.Future[None] = concurrent.futures.Future()
        threading.Thread(target=self._run, name="ft-tee", daemon=True).start()

    def follow(self, directory: Path) -> None:
        """Begin to copy the files that a worker will make in `directory`."""
        self._orders.put(partial(self._copier.follow, directory))

    def unfollow(self, directory: Path) -> None:
        """The worker has ended: copy the rest, and forget it."""
        self._orders.put(partial(self._copier.unfollow, directory))

    def succeed(self, players: Path) -> None:
        """Somebody here takes over from those whom the file names: copy the rest of what they printed."""
        self._orders.put(partial(self._copier.succeed, players))

    async def close(self, seconds: float) -> bool:
        """No worker is left: copy what they have printed last. Returns whether that was done in time."""
        self._orders.put(self._close)
        done, _ = await asyncio.wait([asyncio.wrap_future(self._over)], timeout=seconds)
        return bool(done)

    def _close(self) -> None:
        self._copier.close()
        self._over.set_result(None)

    def _run(self) -> None:
        pause = _INTERVAL
        try:
            while not self._over.done():
                with contextlib.suppress(queue.Empty):
                    self._orders.get(timeout=pause if self._copier.shows else None)()
                pause = _INTERVAL if self._copier.copy() else min(2 * pause, _QUIET)
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the event loop is over as well
                self._loop.call_soon_threadsafe(self._failed, error)


class Copier:
    """What a tee does.

    How far a file is copied is noted beside it: a worker that takes a role over does not print again what
    its predecessor's log has, so what the predecessor's agent has not copied, its own agent must.
    """

    def __init__(self, streams: int, console: Console) -> None:
        self._streams, self._console = [s for s in (OUT, ERR) if streams & s], console
        self._followed: dict[Path, dict[int, int]] = {}
        """Log directory -> stream -> how much of its file is copied."""
        self._begun: dict[tuple[Path, int], int] = {}
        """Where a line begins that the last look has found without an end."""
        self._complained = False

    def follow(self, directory: Path) -> None:
        self._followed[directory] = dict.fromkeys(self._streams, 0)

    def unfollow(self, directory: Path) -> None:
        for stream, position in self._followed.pop(directory, {}).items():
            self._finish(directory, stream, position)
        self._console.forget(directory)

    def _finish(self, directory: Path, stream: int, position: int) -> None:
        """Copy what is left of a worker that has ended."""
        self._copy(directory, stream, position, ended=True)
        self._begun.pop((directory, stream), None)
        self._put(stream, self._console.finish(directory, stream))

    def succeed(self, players: Path) -> None:
        """Go on with the logs of workers that have ended, wherever they ran, if these can be seen."""
        try:
            found = [line.split()[-1] for line in players.read_text().splitlines()]
        except FileNotFoundError:
            return
        except (OSError, ValueError, IndexError) as error:
            self._complain(players, error)
            return
        self.rest(players.parent / name for name in found)

    def rest(self, directories: Iterable[Path]) -> None:
        """Copy what is left in the logs of workers that have ended."""
        for directory in directories:
            if directory not in self._followed:
                for stream in self._streams:
                    self._finish(directory, stream, 0)
                self._console.forget(directory)

    @property
    def shows(self) -> bool:
        """Whether anything is to be copied at all."""
        return bool(self._streams)

    def copy(self) -> bool:
        """Copy what has come since the last call. Returns whether that was anything.

        A line without an end is copied once a second look has found it so: it is one that is written over,
        as a progress bar is, and not one of which half was there.
        """
        news = False
        for directory, positions in self._followed.items():
            for stream, position in positions.items():
                positions[stream] = self._copy(directory, stream, position, ended=False)
                news |= positions[stream] > position
        return news

    def close(self) -> None:
        """No worker is left: copy what they have printed last."""
        for directory in list(self._followed):
            self.unfollow(directory)

    def _copy(self, directory: Path, stream: int, position: int, ended: bool) -> int:
        """From `position` on, or where another agent has come to. Returns how far it is copied now."""
        path = directory / _NAMES[stream]
        try:
            size, note = path.stat().st_size, _Note(path)
            if size < position and not ended:  # it is cut, so that it does not grow for ever
                position = 0
                note.write(position)
            if size <= position:
                return position
            with path.open("rb") as file:
                position = max(position, note.read())
                file.seek(position)
                while data := file.read(_PIECE):
                    whole, last = data.rfind(b"\n") + 1, len(data) < _PIECE
                    if not last:
                        data = data[:whole] or data
                    elif not ended and not self._may_go_on(directory, stream, position, whole, len(data)):
                        data = data[:whole]
                    if data:
                        self._put(stream, self._console.dress(directory, stream, data))
                        position += len(data)
                        note.write(position)
                    if last:
                        break
                    file.seek(position)
        except FileNotFoundError:
            pass  # not there yet, or on a node that is gone
        except OSError as error:
            self._complain(path, error)
        return position

    def _may_go_on(self, directory: Path, stream: int, position: int, whole: int, size: int) -> bool:
        """Whether what is read from `position` on, whole lines and the beginning of another, may be shown."""
        output = directory, stream
        before = self._begun.pop(output, None)
        if self._console.whole_lines:
            return False
        if whole == size or (not whole and self._console.unfinished(*output)):
            return True
        if before == position + whole:
            return True
        self._begun[output] = position + whole
        return False

    def _put(self, stream: int, shown: bytes) -> None:
        if shown:
            with contextlib.suppress(OSError):  # nobody is there who could read it
                put(stream, shown)
            if self._console.shares_line(stream):
                last_line.begins() if shown.endswith(b"\n") else last_line.leave_open()

    def _complain(self, path: Path, error: Exception) -> None:
        if not self._complained:
            log.warning("%s: %s; workers' output may be missing on the console", path, error)
        self._complained = True


class _Note:
    """How many bytes of a log file are copied, in a file of its own that outlives the agent."""

    def __init__(self, log: Path) -> None:
        self._path = log.with_suffix(".copied")

    def read(self) -> int:
        try:
            with self._path.open("rb") as file:
                return int(file.read(20))
        except (FileNotFoundError, ValueError):
            return 0

    def write(self, position: int) -> None:
        """In place: never torn, never empty. Where it cannot be, another agent may copy something twice."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, b"%020d" % position, 0)
            finally:
                os.close(descriptor)
