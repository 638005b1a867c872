"""Megatron's log over recoveries: each iteration once, in the file, in tensorboard and in Weights & Biases.

After a recovery every role does what follows the newest step again (log line, evaluation), and so does the
successor of the role that writes the log. What was printed before is known from this process, or from the
log files of its predecessors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

_TAIL = 1 << 18
"""Bytes at the end of a predecessor's log in which a line is looked for."""


class ProgressLog:
    """What `megatron.training.training` prints on the last rank, and writes to tensorboard."""

    def __init__(self, training: ModuleType, predecessors: list[Path]) -> None:
        """`predecessors`: log directories of the workers that have played this role before."""
        self._predecessors = predecessors
        self._printed: set[str] = set()
        self._written: set[str] = set()
        self._key = ""
        self._mute_print = self._mute_writers = False
        self._purged = not predecessors
        original = training.print_rank_last

        def print_rank_last(message: str) -> None:
            if self._mute_print:
                return
            original(message)
            if self._key and self._key in message:
                self._printed.add(self._key)

        def muted(get: Any) -> Any:
            return lambda: None if self._mute_writers else get()

        self._writer = training.get_tensorboard_writer
        training.print_rank_last = print_rank_last  # type: ignore[attr-defined]
        training.get_tensorboard_writer = muted(training.get_tensorboard_writer)  # type: ignore[attr-defined]
        training.get_wandb_writer = muted(training.get_wandb_writer)  # type: ignore[attr-defined]

    @contextmanager
    def once(self, key: str, iteration: int) -> Iterator[None]:
        """What is printed and written here counts once; `key` is what its line cannot do without."""
        if not self._purged:
            self._purge(iteration)
        self._key = key
        self._mute_print = key in self._printed or self._printed_before(key)
        self._mute_writers = key in self._written
        try:
            yield
            if (writer := self._writer()) is not None and not self._mute_writers:
                writer.flush()  # a successor counts on what comes before its iteration
            self._written.add(key)
        finally:
            self._key, self._mute_print, self._mute_writers = "", False, False

    def _printed_before(self, key: str) -> bool:
        for directory in self._predecessors:
            try:
                with (directory / "stdout.log").open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                    if key.encode() in file.read():
                        return True
            except OSError:
                continue  # on a node that is gone, together with its lines
        return False

    def _purge(self, iteration: int) -> None:
        """Have tensorboard disregard what predecessors have written from this iteration on.

        That is what it has session starts for: see `purge_step` of torch's SummaryWriter.
        """
        self._purged = True
        if (writer := self._writer()) is None:
            return
        from tensorboard.compat.proto import event_pb2

        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        events = writer._get_file_writer().event_writer
        events.add_event(event_pb2.Event(step=iteration, file_version="brain.Event:2"))
        events.add_event(event_pb2.Event(step=iteration, session_log=start))


def one_run(secret: bytes) -> None:
    """Have Weights & Biases count all that log in this job, one after the other, as one run."""
    os.environ.setdefault("WANDB_RUN_ID", sha256(b"wandb" + secret).hexdigest()[:16])
    os.environ.setdefault("WANDB_RESUME", "allow")
