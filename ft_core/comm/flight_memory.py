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
DTYPES = (
    *("", "bfloat16", "bits16", "bits1x8", "bits2x4", "bits4x2", "bits8", "bool", "complex128", "complex32"),
    *("complex64", "float16", "float32", "float4_e2m1fn_x2", "float64", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int1", "int16", "int2", "int3", "int32", "int4"),
    *("int5", "int6", "int64", "int7", "int8", "qint32", "qint8", "quint2x4", "quint4x2", "quint8", "uint1"),
    *("uint16", "uint2", "uint3", "uint32", "uint4", "uint5", "uint6", "uint64", "uint7", "uint8"),
)
"""Torch's names by the number that stands for them in a slot; "": none, or one that is not among them."""
NOBODY = -1
"""The role in a header whose worker has none yet."""


def clear(memory: memoryview) -> None:
    """Nobody has written here yet."""
    memory[:8].cast("q")[ROLE] = NOBODY
