"""Where the members of a communicator find each other: a key-value store per epoch, in role 0's agent.

It does what torch's `TCPStore` does, for those who know the job's secret. torch's own knows no secrets: who
can reach its port can use up its process's memory and descriptors, and can write the addresses that
communicators connect to. The store of an epoch begins with the first worker that asks for it, and is dropped
when the agent hears that the epoch is over; its connections are closed then, which wakes whoever waits.

A worker has one connection per epoch, which all of its threads use at once. Requests have an `id` that the
reply repeats; the reply to a request for keys that are not there yet is sent when they are: nobody looks
again and again. With the keys come those beside them (same path up to the last slash), as gloo asks for one
after the other. A value that came is not asked for again: what is set in an epoch is set once.

In a recovery all roles come here at once, and a group of all of them has one meeting: what a request costs
grows neither with the members of its group nor with those who wait (`benchmarks/rendezvous.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar, assert_never

import msgspec

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.process.refusals import Refusals
from ft_core.protocol import acceptor
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.connection import Connection
from ft_core.protocol.groups import roles_in
from ft_core.protocol.sockets import join_address, listen
from ft_core.protocol.store import (
    MAX_VALUE,
    REQUEST,
    AddTo,
    Answered,
    Ask,
    Asked,
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
T = TypeVar("T")
_NUMBER = re.compile(rb"-?[0-9]{1,19}")

MAX_EPOCH = 1 << 30
"""Bytes of all keys and values of an epoch."""

SHELF = 512 << 10
"""Bytes of values that come together: a message is to stay below 1 MiB."""

AT_ONCE = 256
"""Replies that nothing comes in between."""

_KEY_BYTES = 200
"""What a key takes beside its text, roughly."""


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
        await acceptor.serve(self._socket, self._secret, f"the epochs' stores at {self.address}", self._serve)

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
            try:
                store.join(channel, hello.role)
                await channel.each(partial(store.handle, channel))
            finally:
                store.leave(channel)
        except (AuthenticationError, ProtocolError) as error:
            self._refusals.add(str(error))
        except (ConnectionError, asyncio.CancelledError):
            pass  # the worker is gone or has begun another epoch, or this agent ends
        except Exception as error:
            self._failed(error)
        finally:
            connection.close()


@dataclass
class _Meeting:
    """Where the members of a group meet."""

    came: set[int] = field(default_factory=set)
    waiting: list[tuple[_Channel, int]] = field(default_factory=list)
    """Whom to tell when all have come, each by the number of its request."""


@dataclass
class _Shelf:
    """Values of one place, which are brought together."""

    values: dict[str, bytes] = field(default_factory=dict)
    nbytes: int = 0
    encoded: msgspec.Raw | None = None
    """The values as a message has them, once they were asked for."""


@dataclass
class _Waiter:
    """Somebody who waits for keys."""

    channel: _Channel
    number: int
    keys: list[str]
    missing: int
    """How many of them are not there."""


class _Store:
    """The keys of one epoch, and who waits for some."""

    def __init__(self) -> None:
        self.channels: dict[_Channel, int] = {}
        """With the role of each."""
        self._values: dict[str, bytes] = {}
        self._shelves: dict[str, _Shelf] = {}
        """By key, of those that were set and not added to, where it is."""
        self._room: dict[str, _Shelf] = {}
        """By place, the one that has room."""
        self._bytes = 0
        self._waiting: dict[str, list[_Waiter]] = {}
        self._meetings: dict[str, _Meeting] = {}
        self._roles: dict[int, _Channel] = {}
        self._asks: set[tuple[str, str]] = set()
        """All that was asked: groups and roles."""
        self._asked: dict[int, list[str]] = {}
        """By role that is not here yet, the groups that it is asked to open."""

    def join(self, channel: _Channel, role: int) -> None:
        """A worker has come."""
        self.channels[channel], self._roles[role] = role, channel
        for group in self._asked.pop(role, ()):
            channel.post(Asked(group))

    def leave(self, channel: _Channel) -> None:
        """It has gone."""
        if self._roles.get(role := self.channels.pop(channel)) is channel:
            del self._roles[role]

    def handle(self, channel: _Channel, request: Request) -> None:
        """Serve one request. Raises ProtocolError for what is none here, or more than a store takes."""
        match request:
            case SetKey(key, value):
                self._set(key, value, beside=True)
            case WaitForKeys(number, keys):
                self._wait(channel, number, keys)
            case Meet():
                self._meet(channel, request)
            case Ask(group, roles):
                self._ask(group, roles)
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
                    self._take(len(self._values.pop(key)) + len(key), -1)
                    self._take_down(key)
                channel.post(Answered(number, there))
            case JoinEpoch():
                raise ProtocolError(f"{channel.peer} greets once more")
            case _:
                assert_never(request)

    # -- meetings --------------------------------------------------------------------------------

    def _meet(self, channel: _Channel, request: Meet) -> None:
        group = request.group
        if (meeting := self._meetings.get(group)) is None:
            self._take(len(group))
            meeting = self._meetings[group] = _Meeting()
        if request.ask is not None:
            self._ask(group, request.ask)
        meeting.came.add(self.channels[channel])
        meeting.waiting.append((channel, request.id))
        if len(meeting.came) < request.size:
            return
        waiting, meeting.waiting = meeting.waiting, []
        _by_and_by(lambda to: _post(to[0], Answered(to[1], True)), iter(waiting))

    def _ask(self, group: str, roles: str) -> None:
        """Ask for a group: all members ask the same, and only the first is heard."""
        if (group, roles) in self._asks:
            return
        self._take(len(group) + len(roles))
        self._asks.add((group, roles))
        came = meeting.came if (meeting := self._meetings.get(group)) is not None else ()
        here = []
        for role in (role for run in roles_in(roles) for role in run if role not in came):
            if (channel := self._roles.get(role)) is None:
                self._take(len(group))
                self._asked.setdefault(role, []).append(group)
            else:
                here.append(channel)
        _by_and_by(lambda channel: _post(channel, Asked(group)), iter(here))

    # -- keys ------------------------------------------------------------------------------------

    def _take(self, nbytes: int, things: int = 1) -> None:
        """Count what is kept."""
        self._bytes += things * (nbytes + _KEY_BYTES)
        if self._bytes > MAX_EPOCH:
            raise ProtocolError(f"an epoch's store keeps {MAX_EPOCH} bytes at most")

    def _set(self, key: str, value: bytes, beside: bool = False) -> None:
        before = self._values.get(key)
        more = len(value) - len(before) if before is not None else len(key) + len(value) + _KEY_BYTES
        if len(value) > MAX_VALUE or self._bytes + more > MAX_EPOCH:
            raise ProtocolError(f"{len(value)} bytes for key {key[:200]!r} are too much for an epoch's store")
        self._values[key], self._bytes = value, self._bytes + more
        self._take_down(key)
        if beside:
            self._put(key, value)
        if (waiting := self._waiting.pop(key, None)) is not None:
            _by_and_by(self._came, iter(waiting))

    def _came(self, waiter: _Waiter) -> None:
        """One of its keys."""
        waiter.missing -= 1
        if not waiter.missing:
            with contextlib.suppress(ConnectionError):
                self._wait(waiter.channel, waiter.number, waiter.keys)

    def _put(self, key: str, value: bytes) -> None:
        place = _place(key)
        shelf = self._room.get(place)
        if shelf is None or shelf.nbytes + len(value) > SHELF:
            shelf = self._room[place] = _Shelf()
        shelf.values[key], shelf.encoded = value, None
        shelf.nbytes += len(value)
        self._shelves[key] = shelf

    def _take_down(self, key: str) -> None:
        if (shelf := self._shelves.pop(key, None)) is not None:
            shelf.nbytes -= len(shelf.values.pop(key))
            shelf.encoded = None

    def _add(self, key: str, amount: int) -> int:
        before = self._values.get(key, b"0")
        if not _NUMBER.fullmatch(before):
            raise ProtocolError(f"key {key[:200]!r} of an epoch's store is no number: nothing can be added")
        self._set(key, str(int(before) + amount).encode())
        return int(before) + amount

    def _wait(self, channel: _Channel, number: int, keys: list[str]) -> None:
        missing = [key for key in keys if key not in self._values]
        if not missing:
            channel.post(Values(number, self._found(keys)))
            return
        waiter = _Waiter(channel, number, keys, len(missing))
        for key in missing:
            self._waiting.setdefault(key, []).append(waiter)

    def _found(self, keys: list[str]) -> Any:
        """These, and those beside them: all members of a group ask for the same."""
        shelf = self._shelves.get(keys[0]) if keys else None
        if shelf is None or any(key not in shelf.values for key in keys):
            return {key: self._values[key] for key in keys}
        if shelf.encoded is None:
            shelf.encoded = msgspec.Raw(msgspec.json.encode(shelf.values))
        return shelf.encoded


def _post(channel: _Channel, reply: Reply) -> None:
    with contextlib.suppress(ConnectionError):  # it is gone: whoever serves it notices
        channel.post(reply)


def _by_and_by(step: Callable[[T], None], rest: Iterator[T]) -> None:
    """For each: some now, the others later. The agent has more to do than to answer all roles at once."""
    some = list(islice(rest, AT_ONCE))
    for each in some:
        step(each)
    if len(some) == AT_ONCE:
        asyncio.get_running_loop().call_soon(_by_and_by, step, rest)


def _place(key: str) -> str:
    return key.rpartition("/")[0]
