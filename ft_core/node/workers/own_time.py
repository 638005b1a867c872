"""What a role does itself in a step: what that takes, less what the role spends in operations of its process
groups, where it waits for others, and less what it waits for its data and for copies. All roles of a job that
trains in step take as long for one, so it is this, and the time for data, that tells who holds the others up.

It is read in the flight record, which the worker writes anyway. An operation that goes on beside other work
counts as waited for from its issue; who comes late issues late, so it still is who has the most time of its
own. With NCCL operations are issued before the device comes to them: there it tells of what holds up the
host, and not of a device that is slow.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ft_core.comm import flight_memory as flight
from ft_core.protocol.flight import UNDER_WAY
from ft_core.state.memory import ControlBlock, Word

EVERY = 1.0
"""Seconds between two looks at a role."""
APART = 0.04
"""Between two looks at any: of a node's roles one at a time is looked at."""
STEPS = 5
"""Steps of which the median counts: one now and then has an evaluation in it, or a checkpoint."""
NOTABLE = 0.01
"""Part of both together by which either must differ from what was told of it to be told anew."""

_SLOTS = np.dtype(
    [
        *(("first", "u4"), ("group", "u4"), ("epoch", "i8"), ("number", "i8"), ("nbytes", "i8")),
        *(
            ("started", "i8"),
            ("ended", "i8"),
            ("peer", "i4"),
            ("about", "u4"),
            ("step", "i4"),
            ("last", "u4"),
        ),
    ]
)
"""The fields of `flight_memory.SLOT`."""
_PLACES = np.arange(flight.SLOTS)


class OwnTime(NamedTuple):
    """Seconds of a step; 0 while not enough is known."""

    computing: float = 0.0
    data: float = 0.0
    """Waiting for them."""


@dataclass
class _Role:
    """What was seen of a worker."""

    looked: float
    epoch: int = -1
    version: int = -1
    seen: deque[OwnTime] = field(default_factory=lambda: deque(maxlen=STEPS))
    told: OwnTime = field(default_factory=OwnTime)


class OwnTimes:
    """The own times of a node's workers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._roles: dict[int, _Role] = {}
        self._looked = float("-inf")

    def of(self, worker: int, control: ControlBlock) -> OwnTime:
        """What is known of it by now."""
        now, role = self._clock(), self._roles.get(worker)
        if role is None:
            self._roles[worker] = role = _Role(now)
        if now - role.looked >= EVERY and now - self._looked >= APART:
            role.looked = self._looked = now
            self._look(role, control)
        return role.told

    def forget(self, worker: int) -> None:
        """Forget a worker that has ended."""
        self._roles.pop(worker, None)

    def _look(self, role: _Role, control: ControlBlock) -> None:
        epoch, version = control.flight[: flight.HEADER].cast("q")[flight.EPOCH], control[Word.VERSION]
        if epoch != role.epoch:
            role.epoch, role.version, role.told = (
                epoch,
                version,
                OwnTime(),
            )  # in this step there is a recovery
            role.seen.clear()
        if version == role.version or (own := own_time(control)) is None:
            return
        role.version = version
        role.seen.append(own)
        found = OwnTime(*(statistics.median(each) for each in zip(*role.seen, strict=True)))
        least = NOTABLE * sum(role.told)
        if len(role.seen) == STEPS and any(
            abs(now - told) > least for now, told in zip(found, role.told, strict=True)
        ):
            role.told = OwnTime(*(float(f"{seconds:.4g}") for seconds in found))


def own_time(control: ControlBlock) -> OwnTime | None:
    """That of the last step; None if its record is not all there, or is being written."""
    version, took = control[Word.VERSION], control[Word.STEP_NS]
    data, copies = control[Word.DATA_NS], control[Word.COPIES_NS]
    if version <= 0 or took <= 0:
        return None
    memory = control.flight
    epoch = memory[: flight.HEADER].cast("q")[flight.EPOCH]
    ring = np.frombuffer(memory[flight.RING : flight.SIZE], _SLOTS)
    # A slot is written from its first word to its last, so it is read the other way.
    last, slots = ring["last"].copy(), ring.copy()
    first = ring["first"]
    whole = (first == last) & (first == slots["first"]) & (first % flight.SLOTS == _PLACES) & (first != 0)
    if control[Word.VERSION] != version:
        return None
    mine = slots[whole & (slots["epoch"] == epoch) & (slots["step"] == version - 1)]
    there = slots[whole]
    if not len(mine):
        if len(there) and there["first"].min() > 1 and there[there["first"].argmin()]["step"] >= version:
            return None  # all of it is overwritten by what came after
        return OwnTime(max(0, took - data - copies) / 1e9, data / 1e9)
    oldest = int(slots["first"][whole].min())
    if int(mine["first"].min()) == oldest > 1:
        return None  # of so long a step the beginning is overwritten
    mine = mine[mine["ended"] != UNDER_WAY]
    order = np.argsort(mine["started"])
    starts, ends = mine["started"][order], mine["ended"][order]
    reached = np.maximum.accumulate(ends)
    starts[1:] = np.maximum(starts[1:], reached[:-1])
    waited = int(np.maximum(ends - starts, 0).sum())
    return OwnTime(max(0, took - waited - data - copies) / 1e9, data / 1e9)
