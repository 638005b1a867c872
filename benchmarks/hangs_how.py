"""The ways in which a role hangs: what it does and never comes back from, and how it goes diverged."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable

from torch.utils.data import DataLoader, Dataset

from ft_core.process.inject import ERRORS


def regex() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def deadlock() -> None:
    """Two threads want two locks, in opposite order."""
    one, other, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(first: threading.Lock, second: threading.Lock) -> None:
        with first:
            both.wait()
            second.acquire()

    threading.Thread(target=take, args=(one, other), daemon=True).start()
    take(other, one)


def loader() -> None:
    samples = iter(DataLoader(Counting(), num_workers=1, multiprocessing_context="fork"))
    next(samples)
    os.kill(samples._workers[0].pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    for _ in samples:
        pass


def storage() -> None:
    """A file that has no end."""
    source, _ = os.pipe()
    os.read(source, 1)


class Counting(Dataset[int]):
    """A hundred numbers."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


HANGS: dict[str, Callable[[], object]] = {
    **{kind: ERRORS[kind] for kind in ("stop", "spin", "lock")},
    **{each.__name__: each for each in (regex, deadlock, loader, storage)},
}
ASTRAY = ("skipped", "doubled", "shape", "order")
"""What a role does with an operation that is common to all."""
