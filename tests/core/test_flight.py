"""The flight record: what is written, what is read, and what is shown of it."""

from __future__ import annotations

import msgspec
import pytest

from ft_core.protocol.flight import FlightGroup, FlightRecord


def test_a_group_is_called_alike_by_its_members_and_knows_them() -> None:
    assert FlightGroup(3, "0-6:2,7#1").members == (0, 2, 4, 6, 7)
    assert FlightGroup(0, "0-3:3,1-2:1#0").members == (0, 1, 2, 3)
    for name in ("", "dp", "5/0-3:1#0", "0-3:1#0/1>2"):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode([3, name, ""]), type=FlightGroup)


def test_a_record_says_whether_it_is_under_way() -> None:
    record = FlightRecord(0, 0, "send", 8, "float32", 1, 10, 0)
    assert record.under_way and not msgspec.structs.replace(record, ended=11).under_way
