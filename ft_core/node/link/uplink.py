"""An agent's connection with whoever leads the job: its own, or one with another agent that speaks for it.

Which of them is for the controller to say, in answer to a call. An agent remembers who speaks for it, so that
a new controller is asked by few. Where that does not come about, or the other agent has heard nothing of the
controller for too long, though that answers this one, this one asks again; and if who it is then sent to is
of no use either, it asks to be served by the controller itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ft_core.errors import AuthenticationError, ProtocolError
from ft_core.leadership.base import Leader, Leadership
from ft_core.node import events as e
from ft_core.node.link.leader_watcher import LeaderWatcher
from ft_core.node.link.pulse import Loop
from ft_core.node.link.relay import Relay
from ft_core.protocol import handshake
from ft_core.protocol import messages as m
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.bundle import Bundle, OrBundle

log = logging.getLogger(__name__)

_MISREAD, _STABLE = 3, 60.0
"""Connections to the controller in a row, none longer than so many seconds, that end with what cannot be
understood, before this agent fails."""
_RECONNECT, _LATER = 0.05, 1.0
"""Seconds until the next try to connect: fewer, and at most if the controller has more to do than it can."""
_TOLD = OrBundle(m.TO_AGENT)
_LOOKS = 4
"""How often it is looked, in the time in which a word of the controller should have come through another
agent: between two looks every socket is read, so who was stopped itself does not take its own silence for the
other's."""
_SURE = 2
"""Looks after the controller has answered: so many words of it would have come by then. If it does not answer
either, nobody is served better elsewhere."""
_LONGEST = 4 * _LOOKS
"""Looks after which this agent goes elsewhere all the same."""


class _OtherJobError(AuthenticationError):
    """Whoever leads there leads another job."""


class _MisreadError(ProtocolError):
    """What the controller answers cannot be understood."""


T = TypeVar("T")
Channel = AsyncChannel[m.ToAgent | m.UseRelay | m.RelayLives | Bundle]


class Uplink:
    """One agent's connection to the controller."""

    def __init__(
        self,
        node: str,
        secret: bytes,
        job: str,
        leadership: Leadership,
        relay: Relay,
        loop: Loop,
        patience: float,
        *,
        handle: Callable[[e.Event], None],
        refused: Callable[[str], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """`job`: its id, if that is known before a controller has said it. `relay`: in which this agent
        speaks for others. `patience`: seconds without a word of the controller through another agent, before
        this one looks for another way. `handle` is told what happens."""
        self._node, self._secret, self._job, self._relay, self._loop = node, secret, job, relay, loop
        self._patience, self._handle, self._refused = patience, handle, refused
        self._leader_watcher = LeaderWatcher(leadership, self.hang_up, failed)
        self._channel: Channel | None = None
        self._through = ""
        """Where somebody speaks for it; empty: nobody does."""
        self._named = False
        """Whether the controller has just named that one."""
        self._in_vain = False
        """Whether that one could not reach the controller when it was last asked."""
        self._direct = False
        """Whether the controller is to serve this agent itself: who was to speak for it is of no use, or it
        speaks for others, which will look for it where it was."""
        self._call: asyncio.Task[bool] | None = None
        """Whether the controller answers, as was looked last while nothing was heard of it."""
        self._ends = False

    def post(self, message: m.FromAgent | m.LeavingRelay) -> None:
        """Say something to the controller; nothing happens if there is no connection."""
        if self._channel is not None:
            with contextlib.suppress(ConnectionError):  # it just died: its reader notices
                self._channel.post(message)

    def hang_up(self) -> None:
        """Whoever it is connected to leads no more, or is of no use."""
        if (channel := self._channel) is not None:
            if self._through:  # which is not to take this for the end of the agent
                self.post(m.LeavingRelay())
            channel.close()

    def ends(self) -> None:
        """Let the present connection be the last."""
        self._ends = True

    async def serve(self) -> None:
        """Keep a connection to the controller, until it `ends`. Raises ProtocolError when the controller
        cannot be understood, again and again: connecting once more does not mend that, and the controller
        would wait for this node."""
        misread = 0
        while not self._ends:
            pause, began, failed = _RECONNECT, time.monotonic(), False
            dialed = self._leader_watcher.leader
            if not (leader := dialed.address):
                self._handle(e.NotConnected("nobody leads the job at present"))
                await self._leader_watcher.next()
                continue
            try:
                channel = await self._reach(leader)
            except _MisreadError as error:
                failed = True
                self._handle(e.NotConnected(str(error)))
                self._refused(str(error))
                if misread + 1 >= _MISREAD:
                    raise
            except (AuthenticationError, ProtocolError) as error:
                refused = isinstance(error, AuthenticationError)
                self._handle(e.NotConnected(str(error), stranger=True, refused=refused))
            except OSError as error:
                self._handle(e.NotConnected(str(error)))
                if isinstance(error, TimeoutError):  # each at a time of its own
                    pause = random.uniform(_RECONNECT, _LATER)
            else:
                began = time.monotonic()
                try:
                    await self._listen(channel, dialed)
                except ConnectionError as error:
                    log.debug("node %s: a connection ended (%s)", self._node, error)
                    if self._in_vain:  # as thousands may, since the controller was held up
                        pause = random.uniform(_RECONNECT, _LATER)
                except _OtherJobError as error:
                    pause, self._through = _LATER, ""
                    self._handle(e.NotConnected(str(error), other_job=True))
                except (AuthenticationError, ProtocolError) as error:
                    self._refused(str(error))
                    if self._through:  # it may be to blame, rather than the controller
                        self._in_vain = True
                    else:
                        failed = True
                        if misread + 1 >= _MISREAD and time.monotonic() - began < _STABLE:
                            raise
                self.hang_up()
                self._channel = None
                self._direct = self._relay.disconnected()
                self._handle(e.NotConnected("the connection has ended"))
            if failed:
                misread = misread + 1 if time.monotonic() - began < _STABLE else 1
            await asyncio.sleep(pause)

    # -- a connection ------------------------------------------------------------------------------

    async def _reach(self, leader: str) -> Channel:
        """Raises as `AsyncChannel.connect` if the controller cannot be reached."""
        self._direct |= self._named and self._in_vain
        self._named = False
        if self._through and not self._in_vain and (channel := await self._other(leader)) is not None:
            return channel
        self._in_vain = False
        while True:
            channel = await self._connect(leader, leader, handshake.SECONDS, handshake.PATIENCE)
            try:
                channel.post(m.RouteRequest(self._relay.address, self._direct))
                async with asyncio.timeout(handshake.PATIENCE):
                    answer = await self._while_it_leads(leader, channel.recv())
                if not isinstance(answer, m.UseRelay):
                    raise ProtocolError(f"{leader} does not say who is to speak for this node")
            except BaseException as error:
                channel.close()
                if isinstance(error, AuthenticationError | ProtocolError):
                    raise _MisreadError(str(error)) from error
                raise
            self._through, self._named = answer.relay, True
            if not self._through:
                return channel
            channel.close()
            if (other := await self._other(leader)) is not None:
                return other
            self._direct = True

    async def _other(self, leader: str) -> Channel | None:
        """A connection with who speaks for it; None if that cannot be had."""
        try:
            return await self._connect(self._through, leader, self._patience)
        except (OSError, AuthenticationError, ProtocolError, ValueError, OverflowError) as error:
            log.debug("node %s: nobody speaks for it at %s (%s)", self._node, self._through, error)
            return None

    async def _connect(self, address: str, leader: str, timeout: float, patience: float = 0.0) -> Channel:
        """Raises as `AsyncChannel.connect`."""
        attempt = AsyncChannel.connect(address, self._secret, _TOLD, timeout, patience)
        return await self._while_it_leads(leader, attempt)

    async def _while_it_leads(self, leader: str, wanted: Coroutine[Any, Any, T]) -> T:
        """What is wanted of the leader, which may be stopped. Raises ConnectionAbortedError if somebody else
        leads before that has come about."""
        attempt = asyncio.ensure_future(wanted)
        try:
            while not attempt.done():
                look = asyncio.ensure_future(self._leader_watcher.next())
                await asyncio.wait({attempt, look}, return_when=asyncio.FIRST_COMPLETED)
                look.cancel()
                if not attempt.done() and self._leader_watcher.leader.address not in ("", leader):
                    raise ConnectionAbortedError(f"{leader} leads no more")
            return attempt.result()
        finally:
            attempt.cancel()

    async def _listen(self, channel: Channel, dialed: Leader) -> None:
        """Listen to the controller until the connection ends: raises as `AsyncChannel.recv`."""
        self._channel, follower, leader = channel, self._leader_watcher.follower, dialed.address
        channel.ends_first()
        follower.connected(dialed.term)
        if follower.deposed:
            raise ConnectionAbortedError(f"{leader} leads no more")
        self._handle(e.Connected(max(1, follower.term), self._job))
        self._in_vain = bool(self._through)
        first = await self._first(channel, leader)
        if isinstance(first, m.LeaderHello | m.OtherJob) and first.job != self._job:
            self._is_led(leader, first)
        if isinstance(first, m.OtherCommand):
            self._handle(e.FromController(first))
            raise _OtherJobError(f"the controller at {leader} is of a job with another command line")
        if not isinstance(first, m.LeaderHello):
            raise ProtocolError(f"{channel.peer} does not say in which term it leads")
        self._in_vain = self._named = False
        follower.led_by(first.term)
        self._loop.met(await self._address(first.term, leader), first.session)
        if not self._through:
            self._relay.connected(channel.post_encoded)
        message: m.ToAgent | m.UseRelay | Bundle = first
        while True:
            if not await self._leader_watcher.counts():
                raise ConnectionAbortedError(f"{leader} leads no more, or that is not clear")
            if isinstance(message, m.UseRelay):
                raise ProtocolError(f"{channel.peer} says who is to speak for this node, which did not ask")
            if not isinstance(message, Bundle):
                self._handle(e.FromController(message))
            elif self._through:
                raise ProtocolError(f"{channel.peer} sent messages for others")
            else:
                self._relay.deliver(message)
            message = await self._word(channel, leader)

    def _is_led(self, leader: str, first: m.LeaderHello | m.OtherJob) -> None:
        """The controller says of which job it is. Raises _OtherJobError if that is not this node's."""
        if self._job or isinstance(first, m.OtherJob):
            raise _OtherJobError(
                f"the controller at {leader} is of job {first.job}, and this node of job {self._job}, whose "
                "controller is gone: end this node's ftrun; or, to go on with this job, end that one, and "
                f"start its controller with --rdzv-id {self._job}"
            )
        self._job = first.job

    async def _address(self, term: int, leader: str) -> str:
        """The address of the leader of that term: who speaks for this agent may have heard of a new one
        before."""
        try:
            async with asyncio.timeout(self._leader_watcher.patience):
                while 0 < self._leader_watcher.leader.term < term:
                    await self._leader_watcher.next()
        except TimeoutError:
            raise ConnectionAbortedError(f"it is not clear where the leader of term {term} is") from None
        return self._leader_watcher.leader.address or leader

    async def _first(self, channel: Channel, leader: str) -> m.ToAgent | m.UseRelay | Bundle:
        """What the controller says first. Raises ConnectionError if it says nothing through another agent."""
        try:
            async with asyncio.timeout(handshake.PATIENCE if self._through else None):
                return await self._word(channel, leader)
        except TimeoutError:
            raise ConnectionAbortedError(f"{channel.peer} is not heard by the controller") from None

    async def _word(self, channel: Channel, leader: str) -> m.ToAgent | m.UseRelay | Bundle:
        """What the controller says next. Raises as `_next`."""
        while isinstance(message := await self._next(channel, leader), m.RelayLives):
            pass
        return message

    async def _next(self, channel: Channel, leader: str) -> m.ToAgent | m.UseRelay | m.RelayLives | Bundle:
        """What it is told next. Raises ConnectionError if who speaks for it hears nothing any more, and the
        controller can be talked to."""
        silent = sure = 0
        while silent < _LONGEST and sure < _SURE:
            received = channel.received
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience / _LOOKS):
                    return await channel.recv()
            if channel.received != received:  # of something large
                silent = sure = 0
                self._relay.hears()
            elif self._through:
                silent += 1
                if silent >= _LOOKS:
                    sure = sure + 1 if self._answers(leader, again=silent == _LOOKS) else 0
        self._in_vain = True
        raise ConnectionAbortedError(f"{channel.peer} hears nothing of the controller")

    def _answers(self, leader: str, again: bool) -> bool:
        """Whether the controller is known to answer. Until then it is called; `again`: if it has answered
        before, that was some time ago."""
        call = self._call
        if call is None or (call.done() and (again or not call.result())):
            self._call = asyncio.ensure_future(self._call_up(leader))
            return False
        return call.done()

    async def _call_up(self, leader: str) -> bool:
        """Whether it shakes hands."""
        await asyncio.sleep(random.uniform(0.0, self._patience / 2))  # thousands may hear nothing of it
        try:
            channel = await self._connect(leader, leader, handshake.SECONDS, handshake.PATIENCE)
        except (OSError, AuthenticationError, ProtocolError) as error:
            log.debug("node %s: no answer of %s (%s)", self._node, leader, error)
            return False
        channel.close()
        return True
