"""What holds an event loop up: the stacks of all threads, written down while it lasts.

By a thread of its own and not by `faulthandler.dump_traceback_later`, which reads the frames of threads that
run meanwhile: where they are busy, it ends the process within seconds (SIGSEGV; Python 3.11 and 3.12).
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from pathlib import Path

log = logging.getLogger(__name__)


class Stalls:
    """Call `beat` at least every `limit` seconds; `path` has the newest time that this was not done."""

    def __init__(self, path: Path, limit: float) -> None:
        self._path, self._limit = path, limit
        self._beat = threading.Event()
        self._closed = False
        threading.Thread(target=self._watch, name="ft-stalls", daemon=True).start()

    def beat(self) -> None:
        """The event loop goes on: no stall until the next beat is due."""
        self._beat.set()

    def close(self) -> None:
        """Watch no longer: no beat is to come."""
        self._closed = True
        self._beat.set()

    def _watch(self) -> None:
        while not self._closed:
            if not self._beat.wait(self._limit):
                self._write()
                self._beat.wait()
            self._beat.clear()

    def _write(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = [
            f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        ]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("\n".join(stacks))
        except OSError as error:
            log.warning("held up for %.1f s; where could not be written down: %s", self._limit, error)
