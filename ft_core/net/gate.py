"""TRAIN before STATE: a sender waits while training has the wire, as far as its copies are in time even so.

FFTrainer, section 5.3. Who sends knows nothing of how much training sends, and the counters of an interface
tell all bytes alike. So it listens before it talks: now and then it is silent for a moment, and whatever
then leaves this machine is somebody else's. While it hears that, it waits. What only comes in, from another
stage of a pipeline say, it does not hear. It does not wait where

    no operation is in flight     nobody trains over the wire, whoever uses it
    there is no slack             copies that are late hold up all roles, which costs more than a shared wire
    the way is loopback           nothing is shared

How long sending takes is measured: some snapshots pass without a gate. Between messages a gate costs a look
at the clock. It blocks its thread, so it is nothing for an event loop.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ft_core.net.wire import LOOPBACK, Wire, interface_to
from ft_core.protocol.sockets import split_address

log = logging.getLogger(__name__)

LOOK = 2e-3
"""Seconds of a look at the wire, or more: shorter ones find it quiet in the middle of an exchange."""
LUMPS = 256 << 10
"""Bytes that a busy wire carries in a look: counters go up by what the kernel hands over at once, 64 KB as a
rule, which a slow link takes some ms for."""
TALK = 20e-3
"""Seconds after which a sender listens again."""
QUIET = 0.125
"""As a part of the most that the wire has carried: what is no training. Acknowledgements of what comes in are
a fiftieth."""
_WHISPER = 1e6
"""Bytes a second that are quiet on any wire: pulses, logs."""
DONE_BY = 0.8
"""As a part of a step: when copies are to be elsewhere. The optimizer, which waits for them, is its end."""
FIRST, EVERY = 3, 16
"""Snapshots that pass without a gate: so many of a role's first, and of the later ones one of so many."""


@dataclass(frozen=True)
class Reading:
    """Counters, and when they were read."""

    at: float
    """time.monotonic()"""
    sent: int
    """Bytes that have left by the wire, whoever has sent them."""
    own: int
    """Bytes that the sender has sent, by this wire or another."""


class Ear:
    """What a sender that is silent hears of the wire: a pure function of readings.

    `begins` with the first reading of a silence, `quiet` with each later one.
    """

    def __init__(self) -> None:
        self.most = 0.0
        """Bytes a second that the wire has carried at best, over some time."""
        self._marked: Reading | None = None
        self._talked = self._began = self._last = Reading(0.0, 0, 0)
        self._calm = 0.0

    def begins(self, reading: Reading) -> None:
        """The sender is silent from now on."""
        marked = self._marked
        if marked is None or reading.at - marked.at >= TALK:  # a bucket of tokens passes more in less time
            if marked is not None:
                self.most = max(self.most, (reading.sent - marked.sent) / (reading.at - marked.at))
            self._marked = reading
        self._began = self._last = reading
        self._calm = reading.at

    def quiet(self, reading: Reading) -> bool:
        """Whether nobody else sends, so that the sender may talk again.

        One look is enough after it was alone. Else an exchange is under way, and stands still wherever
        another node's burst is on its way: the wire has to be quiet for as long as a burst takes.
        """
        last = self._last
        if reading.at - last.at < max(LOOK, LUMPS / self.most if self.most else 0.0):
            return False
        self._last = reading
        if (reading.sent - last.sent) / (reading.at - last.at) > max(QUIET * self.most, _WHISPER):
            self._calm = reading.at
            return False
        sent, own = reading.sent - self._talked.sent, reading.own - self._talked.own
        if sent - own > QUIET * sent:
            burst = min(self._calm - self._began.at, own / self.most if self.most else math.inf)
            if reading.at - self._calm < burst:
                return False
        self._talked = reading
        return True


@dataclass(frozen=True)
class Usual:
    """What sending a snapshot takes without a gate."""

    seconds: float
    messages: int


@dataclass(frozen=True)
class Pace:
    """What there is time for in a role's steps."""

    step: float = 0.0
    """Seconds; 0: not known."""
    usual: Usual | None = None
    """None: this snapshot passes without a gate."""

    def slack(self, elapsed: float, messages: int) -> float:
        """Seconds for which a snapshot may be held back whose turn began `elapsed` seconds ago, and of which
        so many messages are sent."""
        if self.usual is None:
            return 0.0
        left = max(0.0, 1 - messages / self.usual.messages)
        return DONE_BY * self.step - elapsed - left * self.usual.seconds


class Listener:
    """Listens to a wire, for all that is sent over it by this process. Any thread."""

    def __init__(self, sent: Callable[[], int], own: Callable[[], int]) -> None:
        """Bytes so far: `sent` by whomever, which may raise OSError, and its `own`."""
        self._sent, self._own, self._ear, self._until = sent, own, Ear(), 0.0
        self._lock = threading.Lock()

    def talks(self) -> bool:
        """Whether the wire was found quiet a moment ago."""
        return time.monotonic() < self._until

    def wait(self, busy: Callable[[], bool], seconds: float) -> None:
        """Until the wire is found quiet, nothing is `busy` with it, or so many seconds are over. Raises
        OSError if the interface is gone."""
        end = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            return
        try:
            if self.talks():
                return
            self._ear.begins(self._reading())
            while busy() and (left := end - time.monotonic()) > 0:
                time.sleep(min(LOOK, left))
                if self._ear.quiet(self._reading()):
                    self._until = time.monotonic() + TALK
                    return
        finally:
            self._lock.release()

    def _reading(self) -> Reading:
        return Reading(time.monotonic(), self._sent(), self._own())


class Turn:
    """A snapshot's way through the gate."""

    def __init__(self, pace: Pace, busy: Callable[[], bool]) -> None:
        """`busy`: whether operations are in flight on this node."""
        self.messages = 0
        self._pace, self._busy = pace, busy
        self._count, self._began = itertools.count(1), time.monotonic()

    def passes(self, listener: Listener | None) -> None:
        """Returns when a message may go by that wire; None: by none."""
        self.messages = next(self._count)
        if listener is None or listener.talks() or not self._busy():
            return
        slack = self._pace.slack(self.elapsed, self.messages - 1)
        if slack > 0:
            with contextlib.suppress(OSError):  # an interface that is gone, as sending is about to find
                listener.wait(self._busy, slack)

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    @property
    def measures(self) -> bool:
        """Whether it is one of those without a gate."""
        return self._pace.usual is None


@dataclass
class _Role:
    """What is known of a role's snapshots."""

    number: int = 0
    step: float = 0.0
    usual: Usual | None = None


class Gates:
    """All of an agent's: what it knows of its roles, and the interfaces that lead to its peers. No lock: the
    event loop may call `begin` and `turn`, threads the rest."""

    def __init__(self, own: Callable[[], int]) -> None:
        """`own`: bytes that the agent has sent so far."""
        self._own = own
        self._roles: dict[int, _Role] = {}
        self._listeners: dict[str, Listener] = {}
        self._ways: dict[str, Listener | None] = {}
        self._told = False

    def begin(self) -> None:
        """There are other peers than before, or other ways to them: what sending takes is measured anew."""
        self._ways, self._roles = {}, {}

    def turn(self, role: int, step: float, busy: Callable[[], bool]) -> Turn:
        """For the next snapshot of a role, whose last step took so many seconds; 0: it is not known."""
        known = self._roles.setdefault(role, _Role())
        # A pause between two steps counts as one; two in a row are rare.
        known.step, shorter = step, min(step, known.step)
        measures = known.usual is None or known.number < FIRST or known.number % EVERY == 0
        known.number += 1
        return Turn(Pace(shorter, None if measures else known.usual), busy)

    def sent(self, role: int, turn: Turn) -> None:
        """That snapshot is elsewhere, all of it."""
        known = self._roles.get(role)
        if known is not None and turn.measures and turn.messages:
            known.usual = Usual(turn.elapsed, turn.messages)

    def to(self, address: str, turn: Turn) -> Callable[[], None]:
        """What the messages of a snapshot to a peer have to call."""
        ways = self._ways
        if address not in ways:
            ways[address] = self._way(address)
        return partial(turn.passes, ways[address])

    def _way(self, address: str) -> Listener | None:
        try:
            name = interface_to(split_address(address)[0])
            if name == LOOPBACK:
                return None
            if name not in self._listeners:  # another thread may find the same
                self._listeners.setdefault(name, Listener(Wire([name]).sent, self._own))
            return self._listeners[name]
        except OSError as error:
            if not self._told:
                log.warning("copies go to %s without regard to training's traffic: %s", address, error)
                self._told = True
            return None
