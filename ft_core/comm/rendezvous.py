"""Where the members of a communicator find each other: a key-value store per epoch, in role 0's agent.

It does what torch's `TCPStore` does, for those who know the job's secret. torch's own knows no secrets: who
can reach its port can use up its process's memory and descriptors, and can write the addresses that
communicators connect to. The store of an epoch begins with the first worker that asks for it, and is dropped
when the agent hears that the epoch is over; its connections are closed then, which wakes whoever waits.

A worker has one connection per epoch, which all of its threads use at once. Requests have an `id` that the
reply repeats; the reply to a request for keys that are not there yet is sent when they are. With the keys
come those beside them (same path up to the last slash), as gloo asks for one after the other. A value that
came is not asked for again: what is set in an epoch is set once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TypeVar, assert_never

from torch import distributed as dist

from ft_core.errors import AuthenticationError, FtError, ProtocolError
from ft_core.process.refusals import Refusals
from ft_core.protocol import door
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.channel import Channel
from ft_core.protocol.connection import Connection
from ft_core.protocol.sockets import join_address, listen
from ft_core.protocol.store import (
    REPLY,
    REQUEST,
    AddTo,
    Answered,
    CheckKeys,
    CompareAndSet,
    DeleteKey,
    JoinEpoch,
    Meet,
    Reply,
    Request,
    SetKey,
    Values,
    WaitForKeys,
)

log = logging.getLogger(__name__)
_Channel = AsyncChannel[Request]
V = TypeVar("V", int, bool, bytes)
_NUMBER = re.compile(rb"-?[0-9]{1,19}")

CONNECT_TIMEOUT = timedelta(seconds=60)
"""For a connection to the epoch's store, and for one answer of it."""

MAX_VALUE = 16 << 20
"""Bytes of one value. The largest are gloo's, some 100 bytes per member of a group."""

MAX_EPOCH = 1 << 30
"""Bytes of all keys and values of an epoch."""

_KEY_BYTES = 200
"""What a key takes beside its text, roughly."""

_ALL_THERE = "/all"
_RETRY = 0.05


class Stores:
    """The agent's side: the stores of the epochs that are not over."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._secret = secret
        self._socket = listen(host)
        port = self._socket.getsockname()[1]
        self.address = join_address(host, port)
        self.loop: asyncio.AbstractEventLoop
        self._refusals = Refusals(lambda reason: log.warning("the epochs' stores: %s", reason))
        self._first = 0
        self._epochs: dict[int, _Store] = {}

    async def serve(self, failed: Callable[[Exception], None]) -> None:
        """For ever. `failed` is told of errors that no connection explains."""
        self._failed, self.loop = failed, asyncio.get_running_loop()
        await door.serve(self._socket, f"the epochs' stores at {self.address}", self._serve)

    @classmethod
    def in_thread(cls, host: str, secret: bytes) -> Stores:
        """Served by a thread of their own, for a process that is no agent."""
        stores = cls(host, secret)
        serve = stores.serve(lambda error: log.error("a store", exc_info=error))
        threading.Thread(target=asyncio.run, args=(serve,), name="ft-stores", daemon=True).start()
        return stores

    def begin(self, epoch: int) -> None:
        """Epochs before this one are over."""
        self._first = max(self._first, epoch)
        for over in [number for number in self._epochs if number < self._first]:
            for channel in self._epochs.pop(over).channels:
                channel.close()

    async def _serve(self, connection: Connection) -> None:
        try:
            channel = await AsyncChannel.accept(connection, self._secret, REQUEST)
            hello = await channel.recv()
            if not isinstance(hello, JoinEpoch):
                raise ProtocolError(f"{channel.peer} did not greet, but sent {type(hello).__name__}")
            epoch = hello.epoch
            if epoch < self._first:
                return
            store = self._epochs.setdefault(epoch, _Store())
            store.channels.add(channel)
            try:
                await channel.each(partial(store.handle, channel))
            finally:
                store.channels.discard(channel)
        except (AuthenticationError, ProtocolError) as error:
            self._refusals.add(str(error))
        except (ConnectionError, asyncio.CancelledError):
            pass  # the worker is gone or has begun another epoch, or this agent ends
        except Exception as error:
            self._failed(error)
        finally:
            connection.close()


class _Store:
    """The keys of one epoch, and who waits for some."""

    def __init__(self) -> None:
        self.channels: set[_Channel] = set()
        self._values: dict[str, bytes] = {}
        self._beside: dict[str, list[str]] = {}
        self._bytes = 0
        self._waiting: dict[str, list[tuple[_Channel, int, list[str]]]] = {}

    def handle(self, channel: _Channel, request: Request) -> None:
        """Serve one request. Raises ProtocolError for what is none here, or more than a store takes."""
        match request:
            case SetKey(key, value):
                self._set(key, value)
                self._beside.setdefault(_place(key), []).append(key)
            case WaitForKeys(number, keys):
                self._wait(channel, number, keys)
            case Meet(number, key, size):
                if self._add(key, 1) == size:
                    self._set(key + _ALL_THERE, b"")
                self._wait(channel, number, [key + _ALL_THERE])
            case AddTo(number, key, amount):
                channel.post(Answered(number, self._add(key, amount)))
            case CheckKeys(number, keys):
                channel.post(Answered(number, all(key in self._values for key in keys)))
            case CompareAndSet(number, key, expected, wanted):
                before = self._values.get(key)
                if before == expected or (before is None and not expected):
                    self._set(key, wanted)
                    before = wanted
                channel.post(Answered(number, expected if before is None else before))
            case DeleteKey(number, key):
                there = key in self._values
                if there:
                    self._bytes -= len(key) + len(self._values.pop(key)) + _KEY_BYTES
                channel.post(Answered(number, there))
            case JoinEpoch():
                raise ProtocolError(f"{channel.peer} greets once more")
            case _:
                assert_never(request)

    def _set(self, key: str, value: bytes) -> None:
        before = self._values.get(key)
        more = len(value) - len(before) if before is not None else len(key) + len(value) + _KEY_BYTES
        if len(value) > MAX_VALUE or self._bytes + more > MAX_EPOCH:
            raise ProtocolError(f"{len(value)} bytes for key {key[:200]!r} are too much for an epoch's store")
        self._values[key], self._bytes = value, self._bytes + more
        for waiter in self._waiting.pop(key, ()):
            with contextlib.suppress(ConnectionError):  # it is gone: whoever serves it notices
                self._wait(*waiter)

    def _add(self, key: str, amount: int) -> int:
        before = self._values.get(key, b"0")
        if not _NUMBER.fullmatch(before):
            raise ProtocolError(f"key {key[:200]!r} of an epoch's store is no number: nothing can be added")
        self._set(key, str(int(before) + amount).encode())
        return int(before) + amount

    def _wait(self, channel: _Channel, number: int, keys: list[str]) -> None:
        missing = next((key for key in keys if key not in self._values), None)
        if missing is None:
            found = [*keys, *(k for key in keys for k in self._beside.get(_place(key), ()))]
            channel.post(Values(number, {k: self._values[k] for k in found if k in self._values}))
        else:
            self._waiting.setdefault(missing, []).append((channel, number, keys))


class EpochStore(dist.Store):
    """The store of an epoch as its workers see it, and as torch's C++ does. For any number of threads."""

    def __init__(self, address: str, secret: bytes, epoch: int) -> None:
        """Raises OSError or AuthenticationError if nobody of this job answers at `address`."""
        super().__init__()
        self._channel = Channel.connect(address, secret, REPLY, CONNECT_TIMEOUT.total_seconds())
        self._channel.send(JoinEpoch(epoch))
        self._name = f"the store of epoch {epoch} at {address}"
        self._condition = threading.Condition()
        self._ids = itertools.count()
        self._replies: dict[int, Reply | None] = {}
        """By request that somebody waits for, the reply once it is there."""
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
                    if reply.id in self._replies:
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

    def _end(self, number: int, within: timedelta | None, last: bool = True) -> Reply | None:
        """The reply, None when it has not come in time. `last`: it is not waited for again."""
        limit = None if within is None else within.total_seconds()
        with self._condition:
            self._condition.wait_for(lambda: self._lost or self._replies[number] is not None, limit)
            reply = self._replies.pop(number) if last else self._replies[number]
        if reply is None and self._lost:
            raise dist.DistStoreError(f"{self._name} is gone: {self._lost}")
        return reply

    def _ask(self, request: Callable[[int], Request], kind: type[V]) -> V:
        reply = self._end(self._begin(request), CONNECT_TIMEOUT)
        if reply is None:
            raise dist.DistStoreError(f"timed out: {self._name} gave no answer in {CONNECT_TIMEOUT}")
        if not isinstance(reply, Answered) or not isinstance(reply.value, kind):
            raise dist.DistStoreError(f"{self._name} answered with {reply}")
        return reply.value

    def meet(self, key: str, size: int, patience: timedelta, late: Callable[[], None]) -> None:
        """Until `size` members have come here. Calls `late` once, if that takes longer than `patience`."""
        number = self._begin(lambda number: Meet(number, key, size))
        if self._end(number, patience, last=False) is None:
            late()
        self._end(number, None)

    def next(self, key: str) -> str:
        """Wait without a limit for `key`, and return its value."""
        self.wait([key], None)
        return self.get(key).decode()

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

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
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


def connected(address: str, secret: bytes, epoch: int, wanted: Callable[[], bool]) -> EpochStore:
    """Connect, again and again while `wanted()`, for at most `CONNECT_TIMEOUT`."""
    end = time.monotonic() + CONNECT_TIMEOUT.total_seconds()
    while True:
        try:
            return EpochStore(address, secret, epoch)
        except (OSError, FtError) as error:
            if not wanted() or time.monotonic() > end:
                raise dist.DistStoreError(f"no store of epoch {epoch} at {address}: {error}") from error
        time.sleep(_RETRY)


def _place(key: str) -> str:
    return key.rpartition("/")[0]


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
