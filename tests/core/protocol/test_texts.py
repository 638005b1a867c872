"""Texts in messages: what one process says, all others can use."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ft_core.protocol import checkpoint_names
from ft_core.protocol import messages as m
from ft_core.protocol.sockets import join_address, split_address


def taken(kind: Any, text: str) -> bool:
    try:
        msgspec.convert(text, kind)
    except msgspec.ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    "address",
    ["h:1", "10.0.0.1:65535", "gpt-node-0-0.gpt:29400", "[::1]:80", "[fe80::1%e0]:9", "a_b:60000"],
)
def test_an_address_is_such_as_can_be_connected_to(address: str) -> None:
    assert taken(m.Address, address) and join_address(*split_address(address)) == address


@pytest.mark.parametrize(
    "address",
    [
        *("h:99999", "h:65536", "h:0", "h:01", "h:1\n", "h:-1", "h:", ":1", "h", "", "h\0:1", "h h:1"),
        *("\N{ARABIC-INDIC DIGIT ONE}:1", "h:\N{ARABIC-INDIC DIGIT ONE}", f"{'h' * 64}:1", "a..b:1", ".:1"),
        *("[]:1", "[::1:1", "[::1]", "[::1%]:1", f"{'a.' * 200}a:1", "unix:/tmp/s", "h:1:1", "\x1b[2J:1"),
    ],
)
def test_and_nothing_else_is_one(address: str) -> None:
    """A node with such a one is refused: those who were asked about it later would fail of it."""
    assert not taken(m.Address, address)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"round": 1, "nodes": {"node0": address}, "type": "ProbeNodes"}, m.ProbeNodes)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"data": address, "domain": "x"}, m.NodeAddress)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(["node0", address, "", "0"], m.Host)


@pytest.mark.parametrize("address", ["h:65536", "h:99999", "h:\N{ARABIC-INDIC DIGIT ONE}", "h:", "h", ":1"])
def test_what_a_person_gives_is_checked_as_well(address: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        split_address(address)


def test_names_of_checkpoints_lead_nowhere_else() -> None:
    name = "step-00000002-00001-0a1b2c3d-4"
    assert taken(m.CheckpointName, name) and checkpoint_names.name_of(checkpoint_names.parse(name)) == name
    for other in (f"{name}/../../x", f"../{name}", f"{name}\n", "step-1-", f"{name}-", "step-1-1-a/b-4"):
        assert not taken(m.CheckpointName, other), other


@pytest.mark.parametrize("kind", [m.Roles, m.Session, m.PlanId, m.JobId, m.Address, m.CheckpointName])
def test_no_text_ends_with_a_line(kind: Any) -> None:
    for text in ("0-3:1", "1a", "1-a", "x:1", "step-1-1-a-4"):
        assert not taken(kind, text + "\n")
