"""Numbers over time, of bounded size whatever the job's age: the longer it is, the coarser."""

from __future__ import annotations

from collections.abc import Sequence

Sample = tuple[float | None, ...]
"""The first is when, in seconds since 1970."""


class Series:
    """Samples, the oldest first."""

    def __init__(self, most: int, every: float) -> None:
        """`most`: how many samples are kept. `every`: seconds between two, at first."""
        self._most, self.every = most, every
        self.samples: list[Sample] = []

    def begin(self, samples: Sequence[Sample]) -> None:
        """Put samples of an earlier time in front."""
        self.samples = [*samples, *self.samples]
        while len(self.samples) > self._most:
            self.samples = self.samples[::2]

    def add(self, sample: Sample) -> bool:
        """Add a sample. Returns whether it is taken: not, if the last one is hardly older."""
        last = self.samples[-1][0] if self.samples else None
        if last is not None and sample[0] is not None and 0 <= sample[0] - last < 0.9 * self.every:
            return False
        self.samples.append(sample)
        if len(self.samples) > self._most:
            self.samples = self.samples[::2]
            self.every *= 2
        return True
