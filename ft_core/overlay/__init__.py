"""Files as a newcomer's script sees them on its way to where its peers are: see `tree`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NoReturn

from ft_core.overlay.calls import FileCalls
from ft_core.overlay.handover import complete, forget, hand_over, jump
from ft_core.overlay.mounts import is_of_this_machine
from ft_core.overlay.tree import CannotPass, Tree

_KERNELS = ("/dev/", "/proc/", "/sys/")
_PREFIX = "ft-overlay-"
_SLACK = 1.0
"""Seconds by which a file server's clock may be ahead."""


class Overlay:
    """None at first; from `begin` to `end` what the script does to files goes to a layer. Main thread.

    `passes` and `arrives` say where the script is on its way.
    """

    def __init__(self) -> None:
        """Files are as they are."""
        self._calls: FileCalls | None = None
        self._cannot: Callable[[str], NoReturn] | None = None
        self._began = 0.0

    def begin(self, job_dir: Path, place: Path, cannot: Callable[[str], NoReturn]) -> None:
        """The script of a newcomer starts. `job_dir`: where the engine writes, by other ways. `place`: for
        the layer, a directory of this node's.

        `cannot`: called with what the script does that it cannot be kept from harming by, from any thread.
        """
        top = os.path.realpath(job_dir)
        upper = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place)
        _sweep(place)
        tree = Tree(upper, (*_KERNELS, f"{top}/logs/", f"{top}/injected-"))
        self._calls, self._cannot, self._began = FileCalls(tree, cannot), cannot, time.time()

    def passes(self) -> None:
        """From here on the script passes steps that are done."""
        if self._calls is not None:
            self._calls.tree.passing = True

    def read_since(self, since: float, here: bool) -> str:
        """A file that was written after `since` (seconds since 1970), before this process began, and that the
        script has read in start-up; empty: none.

        `here`: whoever began then was on this machine; else what this machine alone has tells nothing.
        """
        if (calls := self._calls) is None:
            return ""
        with calls.real():
            for name, written in calls.tree.read.items():
                if since + _SLACK < written < self._began and (here or not is_of_this_machine(name)):
                    return name
        return ""

    @property
    def repeats(self) -> bool:
        """Whether the script does what was done before, or may have been."""
        calls = self._calls
        return calls is not None and calls.tree.passing

    @property
    def is_passing(self) -> bool:
        """Whether the script does what was done before."""
        return self._calls is not None and self._calls.is_passing

    def gets_on(self) -> None:
        """The script has come to its next call."""
        if self._calls is not None:
            self._calls.gets_on()

    def jumps(self) -> None:
        """The script goes on at a later step, without those between."""
        if (calls := self._calls) is not None:
            with calls.real():
                jump(calls.tree)

    def arrives(self) -> None:
        """The script has passed the last step: what it does until its next pass may have been done before."""
        if (calls := self._calls) is not None and calls.tree.passing:
            calls.settle()
            with calls.real():
                forget(calls.tree)
            calls.tree.notes_removals = True
            calls.completing = lambda: complete(calls.tree)

    def was_done(self) -> None:
        """The script has come to where its predecessor has been: what it has done until there was done, and
        the others' files may be there by now."""
        calls = self._calls
        if calls is not None and calls.completing is not None and not calls.gave_away:
            with calls.real():
                forget(calls.tree)

    def complete(self) -> None:
        """The script makes another call that is no pass, or tells others something: what it has done since is
        to be seen."""
        if self._calls is not None and self._calls.completing is not None:
            self._calls.settle()
            with self._calls.real():
                self._calls.completing()

    def real(self) -> AbstractContextManager[None]:
        """What is done by this thread meanwhile is not the script's."""
        return nullcontext() if self._calls is None else self._calls.real()

    def end(self, whole: bool = False) -> None:
        """The script is where its peers are: files that it has open go on in the real ones.

        `whole`: it has passed all steps since the files were begun.
        """
        if (calls := self._calls) is None:
            return
        self.complete()
        self._calls = None
        calls.close()
        try:
            hand_over(calls.tree, whole)
        except CannotPass as error:
            assert self._cannot is not None
            self._cannot(str(error))
        finally:
            shutil.rmtree(calls.tree.upper, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Layers of processes that are no more."""
    for left in directory.glob(f"{_PREFIX}*"):
        found = re.match(rf"{_PREFIX}(\d+)-", left.name)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            with contextlib.suppress(OSError):
                shutil.rmtree(left)
