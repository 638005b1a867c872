"""Phases of a state machine, and which may follow which.

Each machine has one table of that, beside its phases, and one method that changes its phase, by the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

P = TypeVar("P")
Transitions = Mapping[type[P], Mapping[type[P], str]]
"""Phase -> those that may follow it, each with what leads there."""


def follow(table: Transitions[P], now: P, to: P) -> P:
    """Return the phase `to`, which is to follow `now`.

    Raises AssertionError where the table does not have that: a defect of the machine, which ends its process
    like any other.
    """
    if type(to) not in table[type(now)]:  # INV-24 (phases)
        raise AssertionError(f"no transition leads from {now} to {to}")
    return to
