"""The controller's end of a tree of agents: some have a connection with it, and speak for the others
(`node.link.relay`). Each of the others is a peer of its own all the same.

What is said to many of them is sent once to each who speaks for them. That such a one is gone says nothing of
the others: they look for another way, and pulses tell that they live.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import cast, get_args

from ft_core.control.events import Peer
from ft_core.errors import ProtocolError
from ft_core.protocol import messages as m
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.bundle import FULL, OWN, Bundle, pack
from ft_core.settings import Settings

Said = m.FromAgent | m.FromCtl
Other = m.RouteRequest | m.LeavingRelay
"""What is said about the way that something takes."""
Client = AsyncChannel[Said | Other | Bundle]

BEATS = 16
"""How often, within the limit of silence, those that speak for others hear that the controller lives."""
_GATHER = 2.0
"""Seconds until which those that are to speak for others may greet, before the others are sent to them."""
_AGENT = frozenset(get_args(m.FromAgent))


class Branch:
    """An agent that speaks for others."""

    def __init__(self, channel: Client, address: str) -> None:
        """`address`: where it takes them."""
        self.channel, self.address = channel, address
        self.members: dict[int, Peer] = {}
        """The agents that it speaks for, by their numbers there."""
        self._parts: list[tuple[list[int], bytes]] = []
        self._of: dict[int, int] = {}
        """A message, by its identity -> the part that it is in."""
        self._newest: dict[int, int] = {}
        """A member -> the last part that is for it: what is said to it stays in order."""
        self._size = 0

    def post(self, number: int, body: bytes) -> None:
        """Say something to one of them, with the next bundle; nothing: its connection is to end."""
        at = self._of.get(id(body), -1)
        if at <= self._newest.get(number, -1):
            if self._size + len(body) > FULL:
                self.flush()
            at = self._of[id(body)] = len(self._parts)
            self._parts.append(([], body))
            self._size += OWN + len(body)
        self._parts[at][0].append(number)
        self._newest[number] = at

    def flush(self) -> None:
        """Send what is there."""
        if self._parts:
            self._send(pack(self._parts))
            self._parts, self._size = [], 0
            self._of.clear()
            self._newest.clear()

    def beat(self) -> None:
        """Tell that this controller lives."""
        self._send(pack(()))

    def _send(self, bundle: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # its reader notices
            self.channel.post_encoded(bundle)


class Member:
    """The connection with a member of a branch: what a controller needs of `AsyncChannel`."""

    def __init__(self, tree: Tree, branch: Branch, number: int) -> None:
        self._tree, self._branch, self._number = tree, branch, number

    def post_encoded(self, body: bytes) -> None:
        """Send a message, as `AsyncChannel.post_encoded` does; raises nothing."""
        self._branch.post(self._number, body)
        self._tree.post(self._branch)

    def close(self) -> None:
        """End the connection, as `AsyncChannel.close` does."""
        if self._number in self._branch.members:
            self.post_encoded(b"")
            asyncio.get_running_loop().call_soon(self._tree.ended, self._branch, self._number)

    async def drain(self) -> None:
        """Wait until all is sent, as `AsyncChannel.drain` does."""
        await self._branch.channel.drain()


class Tree:
    """All who speak for others, and who goes where."""

    def __init__(
        self,
        settings: Settings,
        enter: Callable[[Member], Peer],
        greeted: Callable[[Peer, m.AgentHello], None],
        heard: Callable[[Sequence[tuple[Peer, m.FromAgent]]], None],
        left: Callable[[Peer], None],
        refused: Callable[[str], None],
    ) -> None:
        """What is called when there is one of the others, when it greets, when some of them have said
        something, and when one is gone; and when somebody says what it may not."""
        self._most = max(settings.direct, math.isqrt(settings.size[0])) if settings.direct else math.inf
        self._silence = settings.silence_limit
        self._enter, self._greeted, self._heard = enter, greeted, heard
        self._left, self._refused = left, refused
        self._said: list[tuple[Peer, m.FromAgent]] = []
        """What is taken in with the next of those calls."""
        self._stay = 0
        """Agents that this controller serves itself, or that were told that it would."""
        self._branches: list[Branch] = []
        self._turns = count()
        self._waiting: set[Branch] = set()
        """Branches for which there is something to send."""
        self._now = 0.0
        """Seconds for which this process was awake: who was stopped itself has heard of nobody's return."""
        self._away: deque[tuple[float, Peer]] = deque()
        """Members whose connection ended for a reason that says nothing of them, and until when they may come
        back."""
        self._over = False
        """Whether the job is over."""
        self._came = 0
        """Agents that have come since then."""

    # -- who goes where ----------------------------------------------------------------------------

    async def place(self, calls: m.RouteRequest) -> str:
        """Where the agent that calls is to go; empty: it stays, until `leaves`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + _GATHER
        while not calls.direct and self._stay >= self._most and not self._over:
            branches = [branch for branch in self._branches if not branch.channel.closing]
            if len(branches) >= self._most or loop.time() >= until:
                if not branches:
                    break
                return branches[next(self._turns) % len(branches)].address
            await asyncio.sleep(_GATHER / 40)
        self._stay += 1
        return ""

    def leaves(self) -> None:
        """An agent that was to stay leaves."""
        self._stay -= 1

    def opens(self, channel: Client, address: str) -> Branch:
        """An agent that stays, and may speak for others, has greeted."""
        branch = Branch(channel, address)
        self._branches.append(branch)
        self._came += self._over
        return branch

    def closes(self, branch: Branch) -> None:
        """An agent that speaks for others is gone. The others, if they do not come back, count as gone as
        well, after a while."""
        self._branches.remove(branch)
        self._waiting.discard(branch)
        members, branch.members = branch.members, {}
        if not self._over:  # else it has told them
            for peer in members.values():
                self._may_return(peer)

    def _may_return(self, peer: Peer) -> None:
        self._away.append((self._now + self._silence, peer))

    def tick(self, now: float) -> None:
        """Seconds for which this process was awake. Who has not come back in time is gone."""
        self._now = now
        while self._away and self._away[0][0] <= now:
            self._left(self._away.popleft()[1])

    async def end(self, there: Callable[[Peer], bool]) -> None:
        """Wait until all have taken what was said last: one that does not, since who speaks for it does not
        pass it on, comes to hear of the job's end. `there`: whether a peer is the job's, and has not come
        anew."""
        self._over = True
        self.flush()
        for branch in self._branches:
            if branch.members:  # who speaks for them reads all, and hangs up
                branch.channel.say_no_more()

        def waiting() -> int:
            away = sum(there(peer) for _, peer in self._away)
            return away + sum(len(branch.members) for branch in self._branches)

        while waiting() > self._came:
            await asyncio.sleep(_GATHER / 40)

    # -- what is said ------------------------------------------------------------------------------

    def hear(self, branch: Branch, bundle: Bundle) -> None:
        """Take in what members say through a branch."""
        for numbers, body in bundle.parts:
            for number in numbers:
                if not body:
                    self.ended(branch, number)
                    continue
                try:
                    self._take(branch, number, m.FROM_CLIENT.decode(body, branch.channel.peer))
                except ProtocolError as error:
                    self._refused(str(error))
                    self._hang_up(branch, number)
                    self.ended(branch, number)
        self._tell()

    def _tell(self) -> None:
        """Pass on what was said until now: what is heard next comes after it."""
        if self._said:
            said, self._said = self._said, []
            self._heard(said)

    def _take(self, branch: Branch, number: int, message: Said | Other) -> None:
        peer = branch.members.get(number)
        if peer is not None and type(message) in _AGENT and type(message) is not m.AgentHello:
            self._said.append((peer, cast(m.FromAgent, message)))
            return
        if isinstance(message, m.LeavingRelay):
            if peer is not None:
                del branch.members[number]
                self._may_return(peer)
            return
        if peer is None:
            if not isinstance(message, m.AgentHello):
                self._hang_up(branch, number)  # unless it has ended: it is to greet
                return
            peer = branch.members[number] = self._enter(Member(self, branch, number))
            self._tell()
            self._greeted(peer, message)
        elif isinstance(message, m.AgentHello):
            raise ProtocolError(f"a node behind {branch.channel.peer} greets twice")
        else:
            raise ProtocolError(f"a node behind {branch.channel.peer} may not send {type(message).__name__}")

    def _hang_up(self, branch: Branch, number: int) -> None:
        branch.post(number, b"")
        self.post(branch)

    def ended(self, branch: Branch, number: int) -> None:
        """The connection of a member has ended."""
        if (peer := branch.members.pop(number, None)) is not None:
            self._tell()
            self._left(peer)

    def post(self, branch: Branch) -> None:
        """A branch has something to send, with what else comes in this turn of the loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.add(branch)

    def flush(self) -> None:
        """Send what is there."""
        waiting, self._waiting = self._waiting, set()
        for branch in waiting:
            branch.flush()

    def beat(self) -> None:
        """Tell all who speak for others that this controller lives; most agents speak for nobody."""
        for branch in self._branches:
            if branch.members:
                branch.beat()
