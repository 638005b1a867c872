"""Members of many communicators in one process, which ask the store of an epoch what workers ask in a
recovery, over real sockets, and do nothing else.

Of each group that a worker has used it opens `OPENERS` at a time: it meets the others, asks for newcomers
among them, and learns what NCCL says through the store: one address of each root, of which there is one for
128 members (`TORCH_NCCL_RANKS_PER_ROOT`). What gloo says there besides is counted by `benchmarks.rendezvous`,
with real groups.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection

import msgspec

from benchmarks.simulated import AGAIN, AT_ONCE, Client, Layout
from ft_core.comm.process_group import OPENERS
from ft_core.protocol import store as s
from ft_core.protocol.groups import GroupId, runs_of, text_of
from ft_core.protocol.sockets import split_address

PER_ROOT = 128
"""Members of a group for which one of them says an address."""
ADDRESS = bytes(128)
"""An `ncclUniqueId`."""
_REPLY = msgspec.json.Decoder(s.Reply)


def groups_of(layout: Layout, role: int) -> list[Sequence[int]]:
    """The members of each; a group that is another one too is one."""
    found = [runs[0] if len(runs) == 1 else [*chain.from_iterable(runs)] for runs in layout.groups(role)]
    return list({(group[0], group[1], len(group)): group for group in found}.values())


@dataclass
class Seen:
    """What the members of one process have come to."""

    connected: int = 0
    through: int = 0
    """Members all of whose groups are open."""
    last: float = 0.0
    """When the last of them was."""
    longest: float = 0.0
    """Seconds that one waited for one answer."""
    received: int = 0
    """Bytes."""
    largest: int = 0
    """Message, in bytes."""
    lost: list[str] = field(default_factory=list)


class Group:
    """One group, for all members in this process."""

    def __init__(self, members: Sequence[int], newcomers: frozenset[int]) -> None:
        self.members, self.name = members, str(GroupId.of(members, 0))
        new = [role for role in members if role in newcomers]
        self.newcomers = text_of(runs_of(new)) if new else None
        self.roots = range(0, len(members), PER_ROOT)


class Member(Client):
    """One worker's side of it."""

    def __init__(self, seen: Seen, secret: bytes, epoch: int, role: int, groups: list[Group]) -> None:
        super().__init__(secret, "the store")
        self._seen, self._role, self._epoch = seen, role, epoch
        self._left = deque(groups)
        self._asked: dict[int, tuple[str, Group, float]] = {}
        """By request: what it is, the group, and when it was sent."""
        self._number = self._open = 0
        self.greeted = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(exc or ConnectionResetError("it was closed in the handshake"))
        elif self._left or self._open:
            self._seen.lost.append(f"role {self._role}: {exc}")

    def came(self, nbytes: int) -> None:
        """As `Client.came`."""
        self._seen.received += nbytes

    def greets(self) -> None:
        """As `Client.greets`."""
        self._seen.connected += 1
        self.send(s.JoinEpoch(self._epoch, self._role))
        self.greeted.set_result(None)
        self._go_on()

    def leave(self) -> None:
        """At once."""
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _ask(self, what: str, group: Group, request: s.Request) -> None:
        self._asked[request.id] = what, group, time.monotonic()  # type: ignore[union-attr]
        self.send(request)

    def _go_on(self) -> None:
        """Open more groups, as many at a time as workers do."""
        while self._left and self._open < OPENERS:
            self._open += 1
            group = self._left.popleft()
            new = group.newcomers if group.newcomers != str(self._role) else None
            self._ask("met", group, s.Meet(self._next(), group.name, len(group.members), new))
        if not self._open:
            self._seen.through += 1
            self._seen.last = time.monotonic()

    def heard(self, body: bytes) -> None:
        """As `Client.heard`."""
        self._seen.largest = max(self._seen.largest, len(body))
        reply = _REPLY.decode(body)
        if isinstance(reply, s.Asked):
            return  # its groups are open, or about to be
        asked = self._asked.pop(reply.id)
        what, group, since = asked
        self._seen.longest = max(self._seen.longest, time.monotonic() - since)
        if what == "met":
            keys = [f"{group.name}/nccl//{root}" for root in group.roots]
            for root, key in zip(group.roots, keys, strict=True):
                if group.members[root] == self._role:
                    self.send(s.SetKey(key, ADDRESS))
            self._ask("open", group, s.WaitForKeys(self._next(), keys))
        else:
            self._open -= 1
            self._go_on()


def serve(
    layout: Layout,
    newcomers: frozenset[int],
    address: str,
    secret: bytes,
    epoch: int,
    roles: Sequence[int],
    orders: Connection,
) -> None:
    """A process of members. Begins when it is told to, and answers each later word with `Seen`."""

    async def run() -> None:
        seen = Seen()
        groups: dict[int, list[Group]] = {}
        shared: dict[tuple[int, int, int], Group] = {}
        for role in roles:
            for members in groups_of(layout, role):
                place = members[0], len(members), members[1]
                if place not in shared:
                    shared[place] = Group(members, newcomers)
                groups.setdefault(role, []).append(shared[place])
        host, port = split_address(address)
        loop, room = asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE)
        kept: list[Member] = []

        async def connect(role: int) -> None:
            async with room:
                while True:
                    try:
                        _, member = await loop.create_connection(
                            lambda: Member(seen, secret, epoch, role, groups.get(role, [])), host, port
                        )
                        await member.greeted
                        kept.append(member)
                        return
                    except OSError:
                        await asyncio.sleep(AGAIN)

        orders.send("ready")
        await asyncio.to_thread(orders.recv)
        tasks = [asyncio.ensure_future(connect(role)) for role in roles]
        words: asyncio.Queue[object] = asyncio.Queue()

        def read() -> None:
            try:
                words.put_nowait(orders.recv())
            except EOFError:
                words.put_nowait("end")

        loop.add_reader(orders.fileno(), read)
        while await words.get() != "end":
            for task in tasks:
                if task.done():
                    task.result()
            orders.send(seen)
        for member in kept:
            member.leave()

    asyncio.run(run())
