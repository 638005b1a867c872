"""The memory that a flight record is in, which its worker writes and its agent reads.

    header     the role, the newest epoch, and how often the table was written
    2 tables   groups and their names, as JSON: one is valid while the other is written
    ring       one slot of 64 bytes for each operation, the newest some thousands

A slot begins and ends with the same number, which is written first and last, so who reads it in the opposite
order sees whether it was written meanwhile (on machines that reorder stores: nearly always).
"""

from __future__ import annotations

import struct

HEADER = 4096
ROLE, EPOCH, TABLE = 0, 1, 2
"""Words of the header. The valid table is number `TABLE` modulo 2."""
TABLE_BYTES = 256 << 10
"""The size of each table: a word that says how long its JSON is, and that. A group takes some 60 bytes, more
if its roles follow no rule."""
RING = HEADER + 2 * TABLE_BYTES
SLOTS = 4096
SLOT = struct.Struct("=IIqqqqqiBBBBiI")
"""Number in the ring, group; epoch, number in it, bytes, start, end; peer; kind, type, whether it goes on
apart, whether autograd records; step; number in the ring."""
APART = 54
"""Byte of a slot."""
SIZE = RING + SLOTS * SLOT.size
"""Bytes of all of it."""
NOBODY = -1
"""The role in a header whose worker has none yet."""


def clear(memory: memoryview) -> None:
    """Nobody has written here yet."""
    memory[:8].cast("q")[ROLE] = NOBODY
