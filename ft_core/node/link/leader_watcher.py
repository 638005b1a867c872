"""Whom an agent obeys, and the thread that looks who leads the job where its controller is elected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable

from ft_core.leadership.base import Fixed, Leader, Leadership, LeadershipError
from ft_core.leadership.lease import DOUBT, SLACK, Follower, clock, trust
from ft_core.process.parent import gone

log = logging.getLogger(__name__)

_WARN_EVERY = 60.0


class LeaderWatcher:
    """Whom this agent obeys: the leader, as it was found last. For the event loop that it was made in."""

    def __init__(
        self, leadership: Leadership, deposed: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        """`deposed` is called when whoever this agent is connected to is found to lead no more."""
        elected = not isinstance(leadership, Fixed)
        self.patience = trust(leadership.every) if elected else math.inf
        """Seconds after which it has looked again."""
        self.follower = Follower(self.patience)
        self.leader = Leader()
        self._leadership, self._deposed, self._failed = leadership, deposed, failed
        self._loop = asyncio.get_running_loop()
        self._looked = asyncio.Event()
        self._warned = float("-inf")
        if elected:
            threading.Thread(target=self._serve, name="ft-leader-watcher", daemon=True).start()
        else:
            self._take(clock(), leadership.look())

    async def next(self) -> None:
        """Wait until it has looked once more, or should have."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLACK):
                await self._looked.wait()

    async def counts(self) -> bool:
        """Whether what the connection's controller says counts, once that is clear. False: hang up."""
        until = clock() + DOUBT
        while not self.follower.obeys(clock()):
            if self.follower.deposed or clock() > until:
                return False
            await self.next()
        return True

    # -- the thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not gone():
                began = clock()
                try:
                    found = self._leadership.look()
                except LeadershipError as error:
                    if began > self._warned + _WARN_EVERY:
                        self._warned = began
                        log.warning("it is not clear who leads the job: %s", error)
                else:
                    self._loop.call_soon_threadsafe(self._take, began, found)
                time.sleep(self._leadership.every * (0.5 + 0.5 * random.random()))
        except RuntimeError:
            pass  # the loop is closed: this process ends
        except Exception as error:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._failed, error)

    def _take(self, began: float, found: Leader) -> None:
        self.leader = found
        if found.term:
            self.follower.looked(began, found.term)
        if self.follower.deposed:
            self._deposed()
        looked, self._looked = self._looked, asyncio.Event()
        looked.set()
