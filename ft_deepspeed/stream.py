"""The training data as an endless stream: what all ranks of a `DistributedSampler` take, in order."""

from __future__ import annotations

import copy
from typing import Any

KEPT = 2
"""Epochs whose order is kept in memory: this one, and that of samples which are dealt again."""

KNOWN = 4
"""Epochs of which it is kept what the script set them to."""


class Stream:
    """Position -> index in the dataset. An epoch has as many positions as all ranks read of it.

    An epoch of the stream has the order of the epoch that the script had set when it began (`set_epoch`).
    """

    def __init__(self, batches: Any, epochs: dict[int, int]) -> None:
        """`batches`: a BatchSampler over a DistributedSampler. `epochs`: number -> as the script had it."""
        self._sampler: Any = batches.sampler
        self._epochs = epochs
        self._orders: dict[int, list[int]] = {}
        each = self._sampler.num_samples
        self.whole = batches.drop_last
        """Whether what does not fill a batch at the end of an epoch is left out."""
        if self.whole:
            each -= each % batches.batch_size
        self.length = each * self._sampler.num_replicas
        """Positions in an epoch."""

    def covers(self, batches: Any) -> bool:
        """Whether `batches` are of these data."""
        return bool(batches.sampler.dataset is self._sampler.dataset)

    def begin(self, batches: Any, position: int) -> int:
        """The script begins an epoch: the position at which it ends, if `position` is the next."""
        self._sampler = batches.sampler
        number = position // self.length
        self._epochs.setdefault(number, self._sampler.epoch)
        for old in [n for n in self._epochs if n <= number - KNOWN]:
            del self._epochs[old]
        return (number + 1) * self.length

    def index(self, position: int) -> int:
        """Which sample of the dataset it is."""
        number, place = divmod(position, self.length)
        epoch = self._epoch(number)
        if (order := self._orders.get(epoch)) is None:
            while len(self._orders) >= KEPT:
                del self._orders[min(self._orders)]
            order = self._orders[epoch] = self._order(epoch)
        return order[place]

    def _epoch(self, number: int) -> int:
        if number not in self._epochs:  # it is drawn from before the script begins it, or long after
            nearest = min(self._epochs, key=lambda known: abs(known - number))
            self._epochs[number] = self._epochs[nearest] + number - nearest
        return self._epochs[number]

    def _order(self, epoch: int) -> list[int]:
        everything = copy.copy(self._sampler)
        everything.epoch = epoch
        everything.rank, everything.num_replicas = 0, 1
        everything.num_samples = everything.total_size
        return list(everything)
