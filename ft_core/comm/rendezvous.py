"""Where the members of a communicator find each other, as workers see it: the store of an epoch.

The agent that serves it does so without torch, which takes a second and 200 MB: see `rendezvous_server`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import TypeVar

from torch import distributed as dist

from ft_core.errors import FtError
from ft_core.protocol.channel import Channel
from ft_core.protocol.groups import Series, runs_of, text_of
from ft_core.protocol.store import (
    MAX_VALUE,
    REPLY,
    AddTo,
    Answered,
    Ask,
    Asked,
    CheckKeys,
    CompareAndSet,
    DeleteKey,
    JoinEpoch,
    Meet,
    Request,
    SetKey,
    Values,
    WaitForKeys,
)

V = TypeVar("V", int, bool, bytes)

CONNECT_TIMEOUT = timedelta(seconds=60)
"""For a connection to the epoch's store, and for one answer of it."""

_RETRY = 0.05


class EpochStore(dist.Store):
    """The store of an epoch as its workers see it, and as torch's C++ does. For any number of threads."""

    def __init__(self, address: str, secret: bytes, epoch: int, role: int) -> None:
        """Raises OSError or AuthenticationError if nobody of this job answers at `address`."""
        super().__init__()
        self._channel = Channel.connect(address, secret, REPLY, CONNECT_TIMEOUT.total_seconds())
        self._channel.send(JoinEpoch(epoch, role))
        self.host = self._channel.own_host
        """This machine's address on the way to the store."""
        self._name = f"the store of epoch {epoch} at {address}"
        self._condition = threading.Condition()
        self._ids = itertools.count()
        self._replies: dict[int, Answered | Values | None] = {}
        """By request that somebody waits for, the reply once it is there."""
        self._asked: deque[str] = deque()
        """Groups that others ask this role to open."""
        self._brought: dict[str, bytes] = {}
        """Values that have come."""
        self._lost = ""
        threading.Thread(target=self._read, name="ft-store", daemon=True).start()

    def close(self) -> None:
        """End it: whoever waits for an answer gets DistStoreError. Any thread."""
        self._channel.abort()

    def _read(self) -> None:
        try:
            while True:
                reply = self._channel.recv()
                with self._condition:
                    if isinstance(reply, Asked):
                        self._asked.append(reply.group)
                    elif reply.id in self._replies:
                        self._replies[reply.id] = reply
                    self._condition.notify_all()
        except (OSError, FtError) as error:
            with self._condition:
                self._lost = str(error) or "the connection was closed"
                self._condition.notify_all()
        finally:
            self._channel.close()

    def _send(self, request: Request) -> None:
        with contextlib.suppress(OSError):  # who waits for a reply hears of it
            self._channel.send(request)

    def _begin(self, request: Callable[[int], Request]) -> int:
        """Send a request, given its number; `_end` waits for its reply."""
        number = next(self._ids)
        with self._condition:
            self._replies[number] = None
        self._send(request(number))
        return number

    def _end(self, number: int, within: timedelta | None, last: bool = True) -> Answered | Values | None:
        """The reply, None when it has not come in time. `last`: it is not waited for again."""
        limit = None if within is None else within.total_seconds()
        with self._condition:
            self._condition.wait_for(lambda: self._lost or self._replies[number] is not None, limit)
            reply = self._replies.pop(number) if last else self._replies[number]
        if reply is None and self._lost:
            raise self._gone()
        return reply

    def _gone(self) -> dist.DistStoreError:
        return dist.DistStoreError(f"{self._name} is gone: {self._lost}")

    def _ask(self, request: Callable[[int], Request], kind: type[V]) -> V:
        reply = self._end(self._begin(request), CONNECT_TIMEOUT)
        if reply is None:
            raise dist.DistStoreError(f"timed out: {self._name} gave no answer in {CONNECT_TIMEOUT}")
        if not isinstance(reply, Answered) or not isinstance(reply.value, kind):
            raise dist.DistStoreError(f"{self._name} answered with {reply}")
        return reply.value

    def meet(
        self,
        name: str,
        members: Collection[int],
        newcomers: Collection[int],
        patience: timedelta,
    ) -> None:
        """Until all members of what is called so have come here. `newcomers` among them are asked to, and
        after `patience` all."""
        first = text_of(runs_of(newcomers)) if newcomers else None
        number = self._begin(lambda number: Meet(number, name, len(members), first))
        if self._end(number, patience, last=False) is None:
            self._send(Ask(name, text_of(runs_of(members))))
        self._end(number, None)

    def next_asked(self) -> Series:
        """Wait without a limit for a group, or a pair in one, that others ask this role to open."""
        with self._condition:
            self._condition.wait_for(lambda: self._lost or self._asked)
            if not self._asked:
                raise self._gone()
            return Series.parse(self._asked.popleft())

    # -- what torch calls --------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key`, without an answer. Raises ValueError for more than `MAX_VALUE` bytes."""
        if len(value) > MAX_VALUE:
            raise ValueError(f"a value of {len(value)} bytes for {key!r}; a store takes {MAX_VALUE}")
        self._send(SetKey(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """The value of `key`, once there is one."""
        with self._condition:
            value = self._brought.get(key)
        if value is None:
            self.wait([key])
            return self.get(key)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of all of these, once there are: one request, as for the addresses of NCCL's roots."""
        self.wait(keys)
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to the number at `key`, which begins at 0. Returns the sum."""
        return self._ask(lambda number: AddTo(number, key, amount), int)

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return self._ask(lambda number: CheckKeys(number, keys), bool)

    def wait(self, keys: list[str], timeout: timedelta | None = CONNECT_TIMEOUT) -> None:
        """Until all of them are there. Raises DistStoreError after `timeout`."""
        with self._condition:
            if all(key in self._brought for key in keys):
                return
        reply = self._end(self._begin(lambda number: WaitForKeys(number, keys)), timeout)
        if reply is None:
            raise dist.DistStoreError(f"timed out: nobody has set {keys} in {self._name} within {timeout}")
        assert isinstance(reply, Values), f"{self._name} answered with {reply}"
        with self._condition:
            self._brought.update(reply.values)

    def fetch(self, keys: list[str], timeout: timedelta) -> dict[str, bytes] | None:
        """The values that these keys have now, of what may be set again and again; None if they are not all
        there within `timeout`."""
        reply = self._end(self._begin(lambda number: WaitForKeys(number, keys)), timeout)
        assert isinstance(reply, Values | None), f"{self._name} answered with {reply}"
        return None if reply is None else reply.values

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` if it has the expected value; returns what it has then."""
        values = _bytes(expected), _bytes(desired)
        return self._ask(lambda number: CompareAndSet(number, key, *values), bytes)

    def delete_key(self, key: str) -> bool:
        """Forget `key`. Returns whether it was there."""
        return self._ask(lambda number: DeleteKey(number, key), bool)

    def has_extended_api(self) -> bool:
        """Whether there are queues, and operations on several keys: no."""
        return False

    def clone(self) -> EpochStore:
        """Itself: requests of several threads do not wait for each other."""
        return self


def connected(address: str, secret: bytes, epoch: int, role: int, wanted: Callable[[], bool]) -> EpochStore:
    """Connect, again and again while `wanted()`, for at most `CONNECT_TIMEOUT`."""
    end = time.monotonic() + CONNECT_TIMEOUT.total_seconds()
    while True:
        try:
            return EpochStore(address, secret, epoch, role)
        except (OSError, FtError) as error:
            if not wanted() or time.monotonic() > end:
                raise dist.DistStoreError(f"no store of epoch {epoch} at {address}: {error}") from error
        time.sleep(_RETRY)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
