"""Python's garbage collector, kept from stopping the job where somebody waits.

It stops a process for as long as it takes to go through everything that is alive: 0.2 s with the imports of a
training script, in a process after the other. `gc.freeze` takes out of it what is there for good.
"""

from __future__ import annotations

import gc


def exempt() -> None:
    """What is alive now stays alive, so it need not be gone through again: modules, most of all.

    In a process that others are forked from it spares them, too, and leaves memory shared that a collection
    would write to.
    """
    gc.collect()
    gc.freeze()


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
