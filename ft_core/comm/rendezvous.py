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
import base64
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from ft_core.errors import AuthenticationError, FtError, ProtocolError
from ft_core.process.refusals import Refusals
from ft_core.protocol import door
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.channel import Channel
from ft_core.protocol.codec import ANYTHING, field
from ft_core.protocol.sockets import listen

log = logging.getLogger(__name__)
Message = dict[str, Any]

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
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            channel = await AsyncChannel.accept(reader, writer, self._secret, ANYTHING)
            epoch = field(await channel.recv(), "epoch", int)
            if epoch < self._first:
                return
            store = self._epochs.setdefault(epoch, _Store())
            store.channels.add(channel)
            try:
                while True:
                    store.handle(channel, await channel.recv())
            finally:
                store.channels.discard(channel)
        except (AuthenticationError, ProtocolError) as error:
            self._refusals.add(str(error))
        except (ConnectionError, asyncio.CancelledError):
            pass  # the worker is gone or has begun another epoch, or this agent ends
        except Exception as error:
            self._failed(error)
        finally:
            writer.close()


class _Store:
    """The keys of one epoch, and who waits for some."""

    def __init__(self) -> None:
        self.channels: set[AsyncChannel] = set()
        self._values: dict[str, bytes] = {}
        self._beside: dict[str, list[str]] = {}
        self._bytes = 0
        self._waiting: dict[str, list[tuple[AsyncChannel, int, list[str]]]] = {}

    def handle(self, channel: AsyncChannel, message: Message) -> None:
        """Serve one request. Raises ProtocolError for what is none, or more than a store takes."""
        number, operation = field(message, "id", int), field(message, "op", str)
        if operation == "wait":
            self._wait(channel, number, [str(key) for key in field(message, "keys", list)])
            return
        if operation == "check":
            value: Any = all(key in self._values for key in field(message, "keys", list))
        else:
            key = field(message, "key", str)
            before = self._values.get(key)
            if operation == "set":
                self._set(key, _decoded(message, "value"))
                self._beside.setdefault(_place(key), []).append(key)
                return  # without a reply
            if operation == "meet":
                if self._add(key, 1) == field(message, "size", int):
                    self._set(key + _ALL_THERE, b"")
                self._wait(channel, number, [key + _ALL_THERE])
                return
            if operation == "add":
                value = self._add(key, field(message, "amount", int))
            elif operation == "compare":
                expected, wanted = _decoded(message, "expected"), _decoded(message, "value")
                if before == expected or (before is None and not expected):
                    self._set(key, wanted)
                    before = wanted
                value = _encoded(expected if before is None else before)
            elif operation == "delete":
                value = before is not None
                if before is not None:
                    self._bytes -= len(key) + len(self._values.pop(key)) + _KEY_BYTES
            else:
                raise ProtocolError(f"unknown request {operation[:100]!r} to the store of an epoch")
        channel.post({"id": number, "value": value})

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
        if not before.lstrip(b"-").isdigit():
            raise ProtocolError(f"key {key[:200]!r} of an epoch's store is no number: nothing can be added")
        self._set(key, str(int(before) + amount).encode())
        return int(before) + amount

    def _wait(self, channel: AsyncChannel, number: int, keys: list[str]) -> None:
        missing = next((key for key in keys if key not in self._values), None)
        if missing is None:
            found = [*keys, *(k for key in keys for k in self._beside.get(_place(key), ()))]
            values = {k: _encoded(self._values[k]) for k in found if k in self._values}
            channel.post({"id": number, "values": values})
        else:
            self._waiting.setdefault(missing, []).append((channel, number, keys))


class EpochStore(dist.Store):
    """The store of an epoch as its workers see it, and as torch's C++ does. For any number of threads."""

    def __init__(self, address: str, secret: bytes, epoch: int) -> None:
        """Raises OSError or AuthenticationError if nobody of this job answers at `address`."""
        super().__init__()
        self._channel = Channel.connect(address, secret, ANYTHING, CONNECT_TIMEOUT.total_seconds())
        self._channel.send({"epoch": epoch})
        self._name = f"the store of epoch {epoch} at {address}"
        self._condition = threading.Condition()
        self._ids = itertools.count()
        self._replies: dict[int, Message | None] = {}
        """By request that somebody waits for, the reply once it is there."""
        self._brought: dict[str, str] = {}
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
                    if reply["id"] in self._replies:
                        self._replies[reply["id"]] = reply
                        self._condition.notify_all()
        except (OSError, FtError) as error:
            with self._condition:
                self._lost = str(error) or "the connection was closed"
                self._condition.notify_all()
        finally:
            self._channel.close()

    def _send(self, number: int, op: str, request: Message) -> None:
        with contextlib.suppress(OSError):  # who waits for a reply hears of it
            self._channel.send({"id": number, "op": op, **request})

    def _begin(self, op: str, **request: Any) -> int:
        """Send a request; `_end` waits for its reply."""
        number = next(self._ids)
        with self._condition:
            self._replies[number] = None
        self._send(number, op, request)
        return number

    def _end(self, number: int, within: timedelta | None, last: bool = True) -> Message | None:
        """The reply, None when it has not come in time. `last`: it is not waited for again."""
        limit = None if within is None else within.total_seconds()
        with self._condition:
            self._condition.wait_for(lambda: self._lost or self._replies[number] is not None, limit)
            reply = self._replies.pop(number) if last else self._replies[number]
        if reply is None and self._lost:
            raise dist.DistStoreError(f"{self._name} is gone: {self._lost}")
        return reply

    def _ask(self, op: str, **request: Any) -> Any:
        reply = self._end(self._begin(op, **request), CONNECT_TIMEOUT)
        if reply is None:
            raise dist.DistStoreError(f"timed out: {self._name} gave no answer in {CONNECT_TIMEOUT}")
        return reply["value"]

    def meet(self, key: str, size: int, patience: timedelta, late: Callable[[], None]) -> None:
        """Until `size` members have come here. Calls `late` once, if that takes longer than `patience`."""
        number = self._begin("meet", key=key, size=size)
        if self._end(number, patience, last=False) is None:
            late()
        self._end(number, None)

    def next(self, key: str) -> str:
        """Wait without a limit for `key`, and return its value."""
        self.wait([key], None)
        return self.get(key).decode()

    # -- what torch calls --------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set `key`."""
        if len(value) > MAX_VALUE:
            raise ValueError(f"a value of {len(value)} bytes for {key!r}; a store takes {MAX_VALUE}")
        self._send(next(self._ids), "set", {"key": key, "value": _encoded(value)})

    def get(self, key: str) -> bytes:
        """The value of `key`, once there is one."""
        with self._condition:
            value = self._brought.get(key)
        if value is None:
            self.wait([key])
            return self.get(key)
        return base64.b64decode(value)

    def add(self, key: str, amount: int) -> int:
        """Add to the number at `key`, which begins at 0. Returns the sum."""
        return int(self._ask("add", key=key, amount=amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return bool(self._ask("check", keys=keys))

    def wait(self, keys: list[str], timeout: timedelta | None = CONNECT_TIMEOUT) -> None:
        """Until all of them are there. Raises DistStoreError after `timeout`."""
        with self._condition:
            if all(key in self._brought for key in keys):
                return
        reply = self._end(self._begin("wait", keys=keys), timeout)
        if reply is None:
            raise dist.DistStoreError(f"timed out: nobody has set {keys} in {self._name} within {timeout}")
        with self._condition:
            self._brought.update(reply["values"])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` if it has the expected value; returns what it has then."""
        values = {"expected": _encoded(expected), "value": _encoded(desired)}
        return base64.b64decode(self._ask("compare", key=key, **values))

    def delete_key(self, key: str) -> bool:
        """Forget `key`. Returns whether it was there."""
        return bool(self._ask("delete", key=key))

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


def _encoded(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def _decoded(message: Message, name: str) -> bytes:
    try:
        return base64.b64decode(field(message, name, str), validate=True)
    except ValueError as error:
        raise ProtocolError(f"field {name!r} of a request to the store of an epoch: {error}") from None
