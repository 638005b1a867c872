"""Being without a controller. Training goes on; it rebuilds its view when it is back."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

MISSED = 10.0
"""Seconds without a controller, awake and trying, after which a node says so."""
ABANDONED = 600.0
"""Seconds without a controller after which a node leaves where nobody trains: the job is over, or lost with
its controller."""
_WARN_EVERY = 60.0


class Outage:
    """How long a node has been without a controller. Starts with the node."""

    def __init__(self, node: str, address: str) -> None:
        self._node, self._address = node, address
        self._met = self._of_use = self._warn_at = 0.0
        self.served = False
        """Whether the job's controller has ever been met."""

    def begins(self, now: float) -> None:
        """There was a controller until now."""
        self._met = self._of_use = now

    def warn(self, problem: str, now: float) -> None:
        """Log a problem, once a minute at most: what is tried again all the time fails all the time."""
        if now >= self._warn_at:
            self._warn_at = now + _WARN_EVERY
            log.warning("node %s: %s; trying again", self._node, problem)

    def goes_on(self, trains: bool, now: float, reason: str) -> bool:
        """Another attempt has failed, for this `reason`. Returns whether this node had better leave.

        The end of a job is told to those who are there: who comes, or goes on, after it would wait for ever.
        """
        if trains:
            self._of_use = now
        if now - self._of_use > ABANDONED:
            log.error(
                "node %s leaves: nobody trains here, and for %.0f s there was no controller at %s: the job "
                "is over, or its controller's machine is lost",
                *(self._node, now - self._of_use, self._address),
            )
            return True
        if now - self._met > MISSED:
            self.warn(f"no controller answers at {self._address} ({reason})", now)
        return False
