"""What process groups and series of operations are called."""

from __future__ import annotations

import pytest

from ft_core.errors import ProtocolError
from ft_core.protocol.groups import Ended, GroupId, RecordCount, Series, Steps, parse

MEMBERS = [(0,), (0, 1), (1, 2, 3), (0, 4, 8, 12), (0, 1, 2, 8, 9, 30), tuple(range(0, 512, 3))]


@pytest.mark.parametrize("members", MEMBERS)
def test_a_group_has_a_text_and_comes_back_from_it(members: tuple[int, ...]) -> None:
    group = GroupId.of(reversed(members), 3)
    assert GroupId.parse(str(group)) == group == GroupId.of(members, 3) != GroupId.of(members, 2)
    assert [role for role in range(600) if role in group] == list(members)


GROUP = GroupId.of(range(4), 1)
TALLIES: dict[str, RecordCount] = {
    "0-3:1#1": Series(GROUP),
    "12/0-3:1#1": Series(GROUP, step=12),
    "0/0-3:1#1": Series(GROUP, step=0),
    "load/0-3:1#1": Series(GROUP, section="load"),
    "0-3:1#1/2>1": Series(GROUP, (2, 1)),
    "12/0-3:1#1/2>1": Series(GROUP, (2, 1), 12),
    "5+/0-3:1#1": Steps(5, Series(GROUP)),
    "0+/0-3:1#1/0>3": Steps(0, Series(GROUP, (0, 3))),
    "0-3:1#1/end": Ended(Series(GROUP)),
    "load/0-3:1#1/2>1/end": Ended(Series(GROUP, (2, 1), section="load")),
}


def test_texts() -> None:
    assert str(GroupId.of((0, 4, 8, 12), 1)) == "0-12:4#1"
    assert {str(what): what for what in TALLIES.values()} == TALLIES
    assert {text: parse(text) for text in TALLIES} == TALLIES
    assert len(set(TALLIES.values())) == len(TALLIES), "they are keys"


@pytest.mark.parametrize(
    "text",
    [
        *("", "0-3:1", "#1", "0-3#1", "3-0:1#1", "0-3:0#1", "0,#1", "-1#0", "x", "0-3:1#1/", "/0-3:1#1"),
        *("0-3:1#1/2", "0-3:1#1/2>", "5+/3/0-3:1#1", "5+/load/0-3:1#1", "5+/0-3:1#1/end", "5/load/0-3:1#1"),
        *("0-3:1#1\n", "٣#0", "1" * 5000 + "#0"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError):
        parse(text)


def test_what_is_asked_for_must_be_of_its_kind() -> None:
    with pytest.raises(ProtocolError, match="not a series"):
        Series.parse("0-3:1#1/end")
    with pytest.raises(ProtocolError, match="not a process group alone"):
        GroupId.parse("12/0-3:1#1")


def test_who_is_needed() -> None:
    assert [role for role in range(6) if Series(GROUP).needs(role)] == [0, 1, 2, 3]
    assert [role for role in range(6) if Series(GROUP, (2, 1)).needs(role)] == [1, 2]
