"""Random states that data loaders drew their seeds from.

A `DataLoader` that shuffles draws a seed from the process's generator when an iteration begins. A newcomer
computes nothing for the steps that are done, so its generator is not where its predecessor's was then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ft_deepspeed import patched

KEPT = 4
"""Iterators whose states are kept: the one that training draws from, and evaluation's, with room."""


class Loaders:
    """Notes the state at the beginning of every iteration, or sets it to what a predecessor noted."""

    def __init__(self) -> None:
        self._begun = 0
        self._states: dict[int, torch.Tensor] = {}
        self._noted: dict[int, torch.Tensor] = {}
        patched.BEGIN_DATA.wrap(self._beginning)
        patched.BEGIN_DATA_AGAIN.wrap(self._beginning_again)

    def _beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(iterator: Any, *args: Any, **kwargs: Any) -> None:
            self._begin()
            original(iterator, *args, **kwargs)

        return begin

    def _beginning_again(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        def begin_again(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            if not first_iter:  # its processes are kept (`persistent_workers`), and begin their data anew
                self._begin()
            reset(iterator, loader, first_iter)

        return begin_again

    def _begin(self) -> None:
        if (noted := self._noted.get(self._begun)) is not None:
            torch.set_rng_state(noted)
        self._states[self._begun] = torch.get_rng_state()
        self._states.pop(self._begun - KEPT, None)
        self._begun += 1

    def state(self) -> dict[int, torch.Tensor]:
        """What of it goes into the envelope."""
        return dict(self._states)

    def follow(self, noted: dict[int, torch.Tensor]) -> None:
        """From here on iterations begin as the predecessor's did."""
        self._noted = noted

    def lead(self) -> None:
        """From now on the script leads: what was noted is of no use any more."""
        self._noted = {}
