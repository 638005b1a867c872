"""Megatron's log over recoveries: each iteration once, in the file, in tensorboard and in Weights & Biases.

After a recovery every role does what follows the newest step again (log line, evaluation), and so does the
successor of the role that writes the log. What was printed before is known from this process, or from the
log files of its predecessors.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from types import ModuleType
from typing import Any

from ft_megatron import patched

_LOSS = re.compile(r"\| (?:[\w-]+ )*loss: (-?\d+\.\d+E[-+]\d+|NAN|INF) \|")
"""The first of a line; there may be parts of it behind. Not the loss scale."""


class ProgressLog:
    """What `megatron.training.training` prints on the last rank, and writes to tensorboard."""

    def __init__(
        self,
        training: ModuleType,
        printed_before: Callable[[str], bool],
        is_last: Callable[[], bool],
        tell_loss: Callable[[float], None] = lambda loss: None,
    ) -> None:
        """`printed_before`: whether a worker that has written it before has printed this. `is_last`: whether
        this role is the last, which writes it, or stands in for that. `tell_loss`: is given the loss of each
        line: Megatron has brought it to the host for that, and at no other time is it asked for."""
        self._printed_before, self._is_last = printed_before, is_last
        self.doubtful = 2
        """For how many steps what comes now may have been written by another worker: that of the version that
        it was restored to, and those up to the newest that anyone can have finished."""
        self._printed: set[str] = set()
        self._written: set[tuple[str, int]] = set()
        self._key = self._last = ""
        self._muted = False
        get_tensorboard_writer = training.get_tensorboard_writer

        def printing(original: Callable[[str], None]) -> Callable[[str], None]:
            def print_rank_last(message: str) -> None:
                if self._muted or not is_last():
                    return
                if self._key and self._key in message:
                    if (writer := get_tensorboard_writer()) is not None:
                        writer.flush()  # a successor that finds the line relies on its values
                    self._printed.add(self._key)
                    if (found := _LOSS.search(message)) is not None:
                        tell_loss(float(found[1]))
                original(message)

            return print_rank_last

        def muted(get: Any) -> Any:
            return lambda: None if self._muted else get()

        if (writer := get_tensorboard_writer()) is not None:
            patched.ADD_SCALAR.wrap(self._once_each, of=writer)
        patched.IS_LAST.replace(is_last, of=sys.modules[training.print_rank_last.__module__])
        patched.PRINT.wrap(printing, of=training)
        for patch in patched.WRITERS:
            patch.wrap(muted, of=training)

    def undo(self, iteration: int) -> None:
        """What comes after `iteration` is not done again as it was: lines that it has do not count."""
        found = {key: re.search(r"iteration +(\d+)", key) for key in self._printed}
        self._printed = {key for key, match in found.items() if not match or int(match[1]) <= iteration}
        self._written.clear()
        self._last, self.doubtful = "", 1

    @contextmanager
    def once(self, key: str) -> Iterator[None]:
        """What is printed and written here counts once; `key` is what its line cannot do without."""
        if key != self._last:
            self._written.clear()
        self._key = self._last = key
        doubtful = self.doubtful > 0 and self._is_last()
        self._muted = key in self._printed or (doubtful and self._printed_before(key))
        try:
            yield
        finally:
            self._key, self._muted = "", False

    def _once_each(self, add_scalar: Any) -> Any:
        """`add_scalar`, for a line that a failure interrupts between its values."""

        def add(tag: str, scalar_value: Any, global_step: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._key:
                if (tag, global_step) in self._written:
                    return
                self._written.add((tag, global_step))
            add_scalar(tag, scalar_value, global_step, *args, **kwargs)

        return add


def one_run(secret: bytes) -> None:
    """Have Weights & Biases count all that log in this job, one after the other, as one run."""
    os.environ.setdefault("WANDB_RUN_ID", sha256(b"wandb" + secret).hexdigest()[:16])
    os.environ.setdefault("WANDB_RESUME", "allow")
