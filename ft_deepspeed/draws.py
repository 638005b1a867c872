"""Random states from which a script and its data loaders draw between the engine's calls.

A `DataLoader` that shuffles draws a seed from the process's generator when an iteration begins, and a script
may draw an order of its own there (`torch.randperm`, `numpy.random.permutation`, `random.sample`, or one of a
generator of its own). A newcomer computes nothing for the steps that are done, so its generators are not
where its predecessor's were then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ft_core.state import rng
from ft_deepspeed import patched

KEPT = 4
"""The newest iterators whose states are kept, beside those that are in use."""
DRAWS = 16
"""The script's own draws that are kept. There may be twice as many until some are dropped."""
ALIKE = 4
"""Draws of as much from the same generators (the noise of each step, the order of each epoch) of which the
newest are kept as long as there is room: of older ones little is left in what the script does."""

States = dict[str, dict[str, Any]]
"""By place in the script (after how many steps, and which one there) and generator."""


class Draws:
    """Notes the state before whatever is drawn, or sets it to what a predecessor noted.

    In start-up nothing needs to be set: until its first call a newcomer has done all that its predecessor
    did.
    """

    def __init__(self, position: Callable[[], int]) -> None:
        """`position`: how many steps the script has done; -1 in start-up."""
        self._position = position
        self._at = -1
        """The position of the newest iterator or call, and how many of each there were in it."""
        self._begun = self._called = 0
        self._iterators: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        """Those in use, by where they began."""
        self._begins: States = {}
        self._drawn: States = {}
        self._amounts: dict[str, dict[str, float]] = {}
        """The logarithm of how much was drawn there, by generator."""
        self._returned: tuple[str, dict[str, Any]] | None = None
        """Where the newest call has returned to the script, and with which states."""
        self._left: dict[str, Any] | None = None
        """Those states, as a loader has left them since; None: a call is under way."""
        self._noted: tuple[States, States] = {}, {}
        patched.BEGIN_DATA.wrap(self._beginning)
        patched.BEGIN_DATA_AGAIN.wrap(self._beginning_again)

    def _beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(iterator: Any, *args: Any, **kwargs: Any) -> None:
            self._begins_data(iterator)
            original(iterator, *args, **kwargs)
            self._has_begun()

        return begin

    def _beginning_again(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        def begin_again(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            if not first_iter:  # its processes are kept (`persistent_workers`), and begin their data anew
                self._begins_data(iterator)
            reset(iterator, loader, first_iter)
            self._has_begun()

        return begin_again

    def _begins_data(self, iterator: Any) -> None:
        self._look()
        self._follow_script(called=1)  # that of the step that led there
        place = f"{self._at}.{self._begun}"
        self._begun += 1
        rng.restore(self._noted[0].get(place, {}))
        self._begins[place] = {"torch": torch.get_rng_state()}
        self._iterators[iterator] = place
        used, newest = set(self._iterators.values()), list(self._begins)[-KEPT:]
        self._begins = {at: state for at, state in self._begins.items() if at in used or at in newest}

    def _has_begun(self) -> None:
        if self._left is not None:
            self._left = {**self._left, "torch": torch.get_rng_state()}

    def _look(self) -> None:
        """Has the script drawn since the newest call has returned?"""
        if self._left is None or self._returned is None:
            return
        place, states = self._returned
        if not (moved := rng.moved(self._left, now := rng.capture())):
            return
        drawn = {name: states[name] for name in moved if name in states}
        self._drawn[place] = {**self._drawn.get(place, {}), **drawn}
        amounts = {name: math.log1p(abs(rng.distance(state, now[name]))) for name, state in drawn.items()}
        self._amounts[place] = {**self._amounts.get(place, {}), **amounts}
        if len(self._drawn) > 2 * DRAWS:
            self._thin_out()

    def _thin_out(self) -> None:
        """Drop what is most like newer ones; of those alike the oldest, and of those like no other."""
        places = list(self._drawn)
        unlike = {place: self._unlike(place, places[at + 1 :]) for at, place in enumerate(places)}
        for place in sorted(places, key=lambda place: unlike[place])[: len(places) - DRAWS]:
            del self._drawn[place], self._amounts[place]

    def _unlike(self, place: str, newer: Sequence[str]) -> float:
        """How far what was drawn there is from the last of so many newer ones that are most like it."""
        own = self._amounts[place]
        alike = (other for at in newer if (other := self._amounts[at]).keys() == own.keys())
        found = sorted(sum(abs(own[name] - other[name]) for name in own) for other in alike)
        return found[ALIKE - 1] if len(found) >= ALIKE else math.inf

    def _follow_script(self, called: int) -> None:
        """`called`: how many calls a position counts that is new here."""
        if self._at != (at := self._position()):
            self._at, self._begun, self._called = at, 0, called

    def calls(self) -> None:
        """The script makes a call to the engine."""
        self._look()
        self._follow_script(called=1)  # that of the step that led there
        self._left = None

    def returns(self) -> None:
        """And goes on."""
        self._follow_script(called=0)
        place = f"{self._at}.{self._called}"
        self._called += 1
        rng.restore(self._noted[1].get(place, {}))
        self._left = rng.capture()
        self._returned = place, self._left

    def place(self) -> list[int]:
        """Where the script is."""
        self._follow_script(called=1)
        return [self._at, self._begun, self._called]

    def goes_to(self, place: Sequence[int]) -> None:
        """The script is where another was when `place` was called."""
        self._at, self._begun, self._called = place
        self._left = None

    def state(self) -> list[States]:
        """What of it goes into the envelope."""
        return [dict(self._begins), dict(self._drawn)]

    def follow(self, noted: Sequence[States]) -> None:
        """From here on the script draws as the predecessor's did."""
        begins, drawn = noted
        self._noted = begins, drawn

    def lead(self) -> None:
        """From now on the script leads: what was noted is of no use any more."""
        self._noted = {}, {}
