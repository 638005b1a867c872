"""What is said of all roles in few words, and of single nodes alone."""

from __future__ import annotations

import random
import zlib

import msgspec
import pytest
from core.plans import job_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.control.decide import compact
from ft_core.control.decide.groups import Groups
from ft_core.control.decide.records import completed
from ft_core.elastic.rules import Start
from ft_core.errors import ProtocolError
from ft_core.protocol import codec
from ft_core.protocol.codec import encode
from ft_core.protocol.groups import GroupId, roles_in, runs_of, segment_id, text_of
from ft_core.protocol.messages import (
    FROM_CONTROLLER,
    Catalogue,
    Counterparts,
    GroupFamily,
    Host,
    Hosts,
    NodeAddress,
    Redundancy,
    ReplicaGroup,
)
from ft_core.protocol.table import changes, hosts_of, pieces, placed


def known(roles: int, tensor: int, stages: int) -> dict[int, compact.Segments]:
    """Parameters of a tensor-parallel rank of a stage, and a shard of the optimizer's state."""
    found: dict[int, compact.Segments] = {}
    for role in range(roles):
        per = roles // stages
        peers = range(role // per * per + role % tensor, (role // per + 1) * per, tensor)
        found[role] = {
            segment_id(held): text_of(runs_of(held)) for held in (list(peers), [role]) if len(held)
        }
    return found


def test_a_regular_catalogue_is_as_short_for_many_roles_as_for_few() -> None:
    sizes = []
    for roles in (1024, 8192):
        catalogue = known(roles, tensor=8, stages=16)
        found = compact.catalogue(catalogue)
        assert not found.others and compact.expanded(found) == catalogue
        sizes.append(len(msgspec.json.encode(found)))
    assert sizes[1] < sizes[0] + 100 and sizes[0] < 400


def test_what_is_not_regular_is_said_in_full() -> None:
    """Names that are not made from holders, segments that not all holders have told of, odd holders."""
    rng = random.Random(7)
    for _ in range(50):
        catalogue: dict[int, compact.Segments] = {}
        for number in range(rng.randrange(12)):
            holders = sorted(rng.sample(range(40), rng.randrange(1, 6)))
            name = segment_id(holders) if rng.random() < 0.7 else f"own-{number}"
            tellers = holders if rng.random() < 0.7 else rng.sample(range(40), 3)
            for role in tellers:
                catalogue.setdefault(role, {})[name] = text_of(runs_of(holders))
        encoded = msgspec.json.encode(compact.catalogue(catalogue))
        assert compact.expanded(msgspec.json.decode(encoded, type=Catalogue)) == catalogue


def test_replica_groups_are_said_by_their_shape() -> None:
    layouts = [
        {role: role % 512 // 8 for role in range(8192)},  # tensor, then data, then pipeline parallel
        {role: role for role in range(1000)},
        {role: 9 - role // 3 for role in range(30)},
        {0: 2, 5: 2, 1: 0, 7: 1},
        {},
    ]
    for of in layouts:
        encoded = msgspec.json.encode(compact.groups(of))
        assert compact.group_of(msgspec.json.decode(encoded, type=list[GroupFamily])) == of
    assert len(msgspec.json.encode(compact.groups(layouts[0]))) < 400


@pytest.mark.parametrize(
    "text", ["", "a", "3-1:1", "1-5:0", "1,", "4294967296", "-1", "1-9999999999:1", "\u0663"]
)
def test_what_are_no_roles_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="are no roles"):
        roles_in(text)


def test_what_is_compressed_is_read_up_to_its_limit() -> None:
    table = Hosts("1-x", [Host(f"node-{i:05}", f"10.0.0.1:{i + 1}", "", f"{i}") for i in range(1000)])
    body = encode(table)
    assert len(body) < len(msgspec.json.encode(table)) / 2
    assert FROM_CONTROLLER.decode(body, "x") == table == FROM_CONTROLLER.decode(bytearray(body), "x")
    bomb = zlib.compress(msgspec.json.encode(Hosts("1-x", [Host("n" * 100, "a:1", "", "0")] * 10_000)))
    for bad in (b"x", body[:-1], body[:40], b"x" + body, zlib.compress(b"{}"), bomb):
        with pytest.raises(ProtocolError, match="x sent what is no message here"):
            FROM_CONTROLLER.decode(bad, "x")


def test_what_is_compressed_is_no_larger_than_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it may become by what it takes."""
    body = encode(Hosts("1-x", [Host(f"node-{i:05}", f"10.0.0.1:{i + 1}", "", f"{i}") for i in range(1000)]))
    monkeypatch.setattr(codec, "MAX_BYTES", 2 * len(body))
    with pytest.raises(ProtocolError, match="torn, or too large"):
        FROM_CONTROLLER.decode(body, "x")


def test_who_is_where_as_a_table_and_by_its_changes() -> None:
    nodes = {f"n{i}": NodeAddress(f"h:{i}", f"n{i}" if i % 2 else "rack") for i in range(5)}
    places = {role: f"n{role // 2}" for role in range(8)}
    hosts = hosts_of(places, nodes)
    assert placed(hosts.values()) == (places, nodes) and hosts["n4"].roles == ""
    [whole] = pieces(job_plan(places, nodes=nodes))
    assert placed(whole.hosts) == (places, nodes)
    later = {**nodes, "new": NodeAddress("h:9", "new")}
    del later["n0"]
    before, now = job_plan(places, nodes=nodes), job_plan({**places, 0: "n4", 1: "n4"}, nodes=later)
    gone, changed = changes(before, now)
    assert gone == ["n0"]
    assert changed == [Host("n4", "h:4", "rack", "0-1:1"), Host("new", "h:9", "", "")]


def test_operations_are_said_to_those_who_lack_some_in_one_of_their_groups() -> None:
    world, pair, other = (str(GroupId.of(roles, 0)) for roles in (range(6), (0, 1), (4, 5)))
    sent = f"{world}/2>3"
    places = {role: f"n{role}" for role in range(6)}
    done = {world: (5, 0), pair: (3, 0), other: (2, 4), sent: (1, 2)}
    counts = {role: {world: 5} for role in range(6)}
    for name, roles in ((pair, (0, 1)), (other, (4, 5)), (sent, (2, 3))):
        for role in roles:
            counts[role][name] = done[name][0]
    records = completed(counts.items())
    assert records.done() == done and records.needed(places, set()) == {}
    records.say(1, {})  # a newcomer
    assert records.needed(places, {1}) == {"n1": {world: (5, 0), pair: (3, 0)}}
    records.say(3, {world: 4, sent: 1})
    found = records.needed(places, {1})
    assert found.keys() == {"n1", "n3"}
    assert found["n3"] == {world: (5, 0), sent: (1, 2)}, "all of a group, where some of it lacks"


@settings(max_examples=200)
@given(st.dictionaries(st.integers(0, 300), st.integers(0, 300), max_size=60))
def test_who_stands_for_whom_is_said_in_few_words(others: dict[int, int]) -> None:
    said = msgspec.json.encode(compact.counterparts(others))
    found = msgspec.json.decode(said, type=Counterparts).expanded()
    assert list(found.items()) == sorted(others.items())


def test_one_in_a_hundred_nodes_takes_its_replica_group_along() -> None:
    """Of 100,096 roles: TP 8, PP 16, so many groups are 16,000 roles. A role each took 14 bytes."""
    groups = Groups(Start(100_096, 16, 100_096))
    for role in range(100_096):
        groups.register(role, ReplicaGroup(role % 6256 // 8, 782, Redundancy.ADOPTABLE))
    away = set(range(0, 782, 6))
    there = [role for role in range(100_096) if role % 6256 // 8 not in away]
    assert len(msgspec.json.encode(compact.counterparts(groups.absent(there)))) < 50_000
