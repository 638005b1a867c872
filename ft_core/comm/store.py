"""What torch has for the store of the default process group, and so of all others: keys that all roles share.

Process groups do not need one here, but scripts and libraries may. What is set goes to the store of the
epoch (`rendezvous`), which ends with it. So each role keeps what its script has set, and sets that again in
the next one; the script of a newcomer does so by itself, on its way from where it begins. Who waits for a key
waits over any number of epochs.

A counter cannot be had so: what a lost worker has added, or has got for it, nobody knows. It can be used
until a worker is lost, and is refused afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

from torch import distributed as dist

from ft_core.comm.apart import LOOK
from ft_core.comm.rendezvous import EpochStore
from ft_core.errors import ConfigError

T = TypeVar("T")


class Epochs(Protocol):
    """What a store needs of the communicators of its process, see `process_group.Communicators`."""

    aborted: int

    def script_epoch(self) -> int:
        """The live epoch, waited for if the script may wait. Raises EpochChanged."""


class SharedStore(dist.Store):
    """The keys of all roles' scripts. For any number of threads."""

    timeout: timedelta
    """How long who gives no time waits; `set_timeout` of torch's sets it."""

    def __init__(self, epochs: Epochs) -> None:
        """Nothing is set yet."""
        super().__init__()
        self.counts = True
        """Whether counters can be used: all workers have been there from the beginning."""
        self._epochs = epochs
        self._own: dict[str, bytes] = {}
        """What this role has set."""
        self._counters: set[str] = set()
        self._condition = threading.Condition()
        self._epoch = -1
        self._store: EpochStore | None = None

    def joins(self, epoch: int, store: EpochStore) -> None:
        """There is the store of an epoch: what this role has set is set there."""
        with self._condition:
            for key, value in self._own.items():
                store.set(_name(key), value)
            self._epoch, self._store = epoch, store
            self._condition.notify_all()

    # -- what torch calls --------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key` for all. Of a key that several roles have set, any of their values may be there in the
        next epoch. Raises ValueError for more than `protocol.store.MAX_VALUE` bytes."""
        with self._condition:
            if self._store is not None:
                self._store.set(_name(key), value)
            self._own[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        """The value of `key`, once there is one. Raises as `wait`."""
        return self._fetch([key], self.timeout)[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of all of these, once there are. Raises as `wait`."""
        found = self._fetch(keys, self.timeout)
        return [found[key] for key in keys]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all of them are there. Raises DistStoreError after `timeout`, EpochChanged in a protected
        step whose epoch is over, ConfigError where one is a counter that a failure has ended."""
        self._fetch(keys, timeout or self.timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there. At the beginning of an epoch some may not yet be."""
        names = list(map(_name, keys))
        return self._ask(lambda store: store.check(names))

    def add(self, key: str, amount: int) -> int:
        """Add to the number at `key`, which begins at 0. Returns the sum. Raises ConfigError after a
        failure."""
        self._counts([key])
        return self._ask(lambda store: store.add(_name(key), amount), [key])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` if it has the expected value; returns what it has then. Raises ConfigError after a
        failure."""
        self._counts([key])
        return self._ask(lambda store: store.compare_set(_name(key), expected, desired), [key])

    def delete_key(self, key: str) -> bool:
        """Forget `key`. Returns whether it was there. What another role has set is there again in the next
        epoch."""
        with self._condition:
            self._own.pop(key, None)
        return self._ask(lambda store: store.delete_key(_name(key)))

    deleteKey = delete_key  # noqa: N815 - what torch's C++ calls it

    def has_extended_api(self) -> bool:
        """Whether there are queues, and operations on several keys: no."""
        return False

    # -- the stores of epochs ----------------------------------------------------------------------

    def _counts(self, keys: list[str]) -> None:
        """These are used as counters."""
        with self._condition:
            self._counters.update(keys)
            for key in keys:
                self._own.pop(key, None)

    def _check_counters(self, keys: Sequence[str]) -> None:
        if not self.counts and (lost := self._counters.intersection(keys)):
            raise ConfigError(
                f"the script has counted (add, compare_set) at {', '.join(map(repr, sorted(lost)))} in "
                "torch's default store, and a worker was lost: what that one did to it is not known. Use a "
                "collective in its place"
            )

    def _fetch(self, keys: list[str], timeout: timedelta) -> dict[str, bytes]:
        end = time.monotonic() + timeout.total_seconds()
        names = list(map(_name, keys))

        def fetch(store: EpochStore) -> dict[str, bytes] | None:
            return store.fetch(names, timedelta(seconds=max(0, end - time.monotonic())))

        found = self._ask(fetch, keys, end)
        if found is None:
            raise dist.DistStoreError(f"wait timeout after {timeout}: nobody has set {keys} in torch's store")
        return {key: found[name] for key, name in zip(keys, names, strict=True)}

    def _ask(
        self, question: Callable[[EpochStore], T], keys: Sequence[str] = (), end: float | None = None
    ) -> T:
        """The answer of the epoch's store, over as many epochs as it takes, until `end`."""
        end = time.monotonic() + self.timeout.total_seconds() if end is None else end
        while True:
            epoch = self._epochs.script_epoch()
            self._check_counters(keys)
            with self._condition:
                if self._epoch != epoch:
                    self._condition.wait(LOOK)
                store = self._store if self._epoch == epoch else None
            if store is not None:
                try:
                    return question(store)
                except dist.DistStoreError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(LOOK)  # it is gone, and its epoch soon over
            elif time.monotonic() > end:
                raise dist.DistStoreError(f"epoch {epoch} has no store after {self.timeout}")


def _name(key: str) -> str:
    """What the store of an epoch knows it by: values of one place come together, so each has its own."""
    return f"script/{key}/"
