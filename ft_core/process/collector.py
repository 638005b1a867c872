"""Python's garbage collector, kept from stopping the job where somebody waits.

It stops a process for as long as it takes to go through everything that is alive: 0.2 s with the imports of a
training script, in a process after the other. `gc.freeze` takes out of it what is there for good.
"""

from __future__ import annotations

import gc

QUIET, LONGEST = 5.0, 120.0
"""Seconds: see `WhenQuiet`."""


def exempt() -> None:
    """What is alive now stays alive, so it need not be gone through again: modules, most of all.

    In a process that others are forked from it spares them, too, and leaves memory shared that a collection
    would write to.
    """
    gc.collect()
    gc.freeze()


class WhenQuiet:
    """No collection while something is going on, and one when nothing is, if something was. Between those
    Python goes through no more than what has come since."""

    def __init__(self) -> None:
        self._pause = Pause()
        self._busy_since: float | None = None
        self._quiet_since = 0.0
        self._due = False

    def tick(self, busy: bool, now: float) -> None:
        """Called often. What goes on for longer than `LONGEST` is no reason any more."""
        if not busy:
            if self._busy_since is not None:
                self._busy_since, self._quiet_since = None, now
            if self._due and now - self._quiet_since >= QUIET:
                self._due = False
                gc.unfreeze()
                exempt()
                self._pause.end()
        elif self._busy_since is None:
            self._busy_since, self._due = now, True
            self._pause.begin()
        elif now - self._busy_since >= LONGEST:
            self._pause.end()

    def close(self) -> None:
        """From now on garbage is collected as before."""
        self._pause.end()


class Pause:
    """No automatic collection from `begin` to `end`. Does nothing where the script collects by itself."""

    def __init__(self) -> None:
        self._under_way = False

    def begin(self) -> None:
        """May be called again while it is under way."""
        if gc.isenabled():
            gc.disable()
            self._under_way = True

    def end(self) -> None:
        """From now on garbage is collected as before."""
        if self._under_way:
            gc.enable()
            self._under_way = False
