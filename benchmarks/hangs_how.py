"""The ways in which a role hangs: what it does and never comes back from."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
from collections.abc import Callable

from torch.utils.data import DataLoader, Dataset


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def spin() -> None:
    while True:
        pass


def lock() -> None:
    library = ctypes.PyDLL(None)  # which keeps the interpreter's lock
    while True:
        library.sleep(3600)


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


HANGS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (stop, spin, lock, regex, deadlock, loader, storage)
}
