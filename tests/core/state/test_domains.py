"""Failure domains at several levels: nodes in racks, racks in rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from ft_core.protocol.domains import shared, within
from ft_core.state import exposure
from ft_core.state.domains import NestedDomains, Target
from ft_core.state.manifest import Segment
from ft_core.state.placement import WARDS, Places, all_left, replica_nodes, survives


def racks(sizes: Sequence[int], row: int = 100) -> dict[str, str]:
    """Nodes in racks of these sizes, so many of which are a row."""
    found: dict[str, str] = {}
    for rack, size in enumerate(sizes):
        for _ in range(size):
            found[f"n{len(found)}"] = f"row{rack // row}/rack{rack}/n{len(found)}"
    return found


def nested(domains: Mapping[str, str], spares: Sequence[str] = ()) -> NestedDomains:
    return NestedDomains([node for node in domains if node not in spares], spares, domains)


def places(domains: Mapping[str, str], spares: Sequence[str] = (), guarded: bool = False) -> Places:
    """A role on each node that is no spare."""
    hosts = [node for node in domains if node not in spares]
    return Places(dict(enumerate(hosts)), domains, spares, guarded)


def unique(role: int) -> Segment:
    return Segment((role,), ())


def kept(found: NestedDomains, domains: Mapping[str, str], copies: int) -> Counter[str]:
    """How many copies each node keeps."""
    return Counter(target.node for node in domains for target in found.targets(node, copies))


def test_what_a_domain_is_in() -> None:
    assert within("row/rack/node") == ("row", "row/rack", "row/rack/node")
    assert within("rack") == ("rack",)
    assert (shared("row/rack/node"), shared("rack")) == ("row/rack", "rack")


def test_one_word_is_one_level() -> None:
    for domains in ({}, {"a": "x", "b": "y"}):
        assert Places({0: "a", 1: "b"}, domains).nested is None
    found = Places({0: "a", 1: "b"}, {"a": "x/a"}).nested
    assert found is not None and found.levels == 2
    assert (found.at("a", 0), found.at("a", 1), found.at("b", 0), found.at("b", 1)) == ("x", "x/a", "b", "b")


def test_a_copy_is_in_another_rack_and_each_node_keeps_as_many_as_it_sends() -> None:
    domains = racks([4, 4, 4, 4], row=2)
    found = nested(domains)
    assert found.levels_apart(1) == [0], "rows are wider than racks"
    assert kept(found, domains, 1) == dict.fromkeys(domains, 1)
    assert found.targets("n0", 1) == [Target("n8", 0)]
    # Three copies cannot be in three rows: of the second one on they are in other racks.
    assert found.levels_apart(2) == [0, 1]
    assert kept(found, domains, 2) == dict.fromkeys(domains, 2)


def test_with_one_rack_copies_are_on_other_nodes() -> None:
    domains = racks([3])
    found = nested(domains)
    assert found.levels_apart(1) == [2]
    assert kept(found, domains, 1) == dict.fromkeys(domains, 1)
    assert found.levels_apart(5) == [2, 2], "there are no more nodes"


@pytest.mark.parametrize(
    ("sizes", "level", "most"),
    [
        ([9, 7], 1, 2),  # two of the first rack's have to share
        ([10, 6], 1, 2),
        ([8, 7, 1], 1, 1),
        ([2, 2, 2], 1, 1),
        ([15, 1], 2, 1),  # one node would have to keep what 15 send
        ([11, 5], 2, 1),
    ],
)
def test_racks_of_different_sizes(sizes: list[int], level: int, most: int) -> None:
    domains = racks(sizes)
    found = nested(domains)
    assert found.levels_apart(1) == [level]
    assert max(kept(found, domains, 1).values()) == most


def test_who_keeps_what_stays_when_another_node_takes_a_place() -> None:
    domains = racks([4, 4, 4, 4])
    before = nested(domains)
    after = {("x" if n == "n5" else n): ("row0/rack3/x" if n == "n5" else d) for n, d in domains.items()}
    found = nested(after)
    changed = [node for node in domains if node != "n5" and before.targets(node, 1) != found.targets(node, 1)]
    assert changed == ["n13"], "it sent its copies to the one that is gone"
    assert found.targets("n13", 1)[0].node != "x", "which is in its rack"


def test_spares_of_another_rack_keep_copies_where_there_are_enough() -> None:
    domains = racks([4, 2])
    found = nested(domains, ["n4", "n5"])
    assert found.levels_apart(1) == [1]
    keep = Counter(found.targets(f"n{node}", 1)[0].node for node in range(4))
    assert keep == {"n4": 2, "n5": 2}
    assert nested(racks([5, 2]), ["n5", "n6"]).levels_apart(1) == [2], "that would be too much for two"
    only = nested(racks([1, 1]), ["n1"])
    assert only.targets("n0", 2) == [Target("n1", 1)]


def test_any_layout_has_its_copies_apart() -> None:
    """At the level that is promised, whatever is where; and nobody keeps much more than others."""
    dice = random.Random(12)
    for _ in range(400):
        count, copies, scattered = dice.randint(1, 20), dice.randint(1, 3), dice.random() < 0.5
        rows, each = dice.randint(1, 3), dice.randint(1, 6)
        names = [f"n{number}" for number in range(count)]
        spares = [f"s{number}" for number in range(dice.randint(0, 3))]
        domains = {}
        for at, node in enumerate([*names, *spares]):
            rack = dice.randrange(each) if scattered else at * each // (count + len(spares))
            domains[node] = f"row{rack % rows}/rack{rack}/{node}"
        found = NestedDomains(names, spares, domains)
        load: Counter[str] = Counter()
        for node in names:
            targets = found.targets(node, copies)
            assert len(targets) == min(copies, count + len(spares) - 1)
            assert [target.level for target in targets] == found.levels_apart(copies)
            for at, (keeper, level) in enumerate(targets):
                others = [node, *(target.node for target in targets[:at])]
                assert found.at(keeper, level) not in {found.at(other, level) for other in others}
                load[keeper] += 1
        assert max(load.values(), default=0) <= 2 * copies + 1
        where = Places(dict(enumerate(names)), domains, spares)
        for level, about in enumerate(exposure.levels(where, copies)):
            if level >= min(found.levels_apart(copies), default=found.levels):
                assert about.at_risk == []


def test_what_peers_hold_is_sent_to_racks_that_have_none_of_it() -> None:
    domains = racks([2, 2])
    where = places(domains)
    assert replica_nodes(Segment((0, 1), ()), where, 1) == ["n2"], "both are in one rack"
    assert replica_nodes(Segment((0, 2), ()), where, 1) == []
    assert replica_nodes(unique(0), where, 0) == []
    for role in range(4):
        nodes = replica_nodes(unique(role), where, 2)
        assert len(nodes) == 2 and survives(unique(role), where.role_nodes, domains, nodes) == 2


def test_any_segment_is_in_as_many_domains_as_can_be() -> None:
    dice = random.Random(13)
    for _ in range(300):
        sizes = [dice.randint(1, 4) for _ in range(dice.randint(2, 5))]
        where, copies = places(racks(sizes, row=dice.randint(1, 5))), dice.randint(1, 2)
        assert where.nested is not None
        roles = sorted(where.role_nodes)
        segment = Segment(tuple(sorted(dice.sample(roles, dice.randint(1, len(roles))))), ())
        nodes = {where.role_nodes[role] for role in segment.holders}
        chosen = replica_nodes(segment, where, copies)
        assert not nodes & set(chosen) and len(chosen) == len(set(chosen)) <= copies
        for number, level in enumerate(where.nested.levels_apart(copies), start=2):
            assert len({where.nested.at(node, level) for node in (*nodes, *chosen)}) >= number


def test_guards_are_in_other_racks_than_their_wards() -> None:
    domains = racks([3, 3]) | {"s": "row0/rack0/s", "t": "row0/rack1/t"}
    where = places(domains, ["s", "t"], guarded=True)
    assert {node: where.guard(node) for node in domains if node not in "st"} == {
        **{"n0": "t", "n1": "t", "n2": None},
        **{"n3": "s", "n4": "s", "n5": None},
    }
    assert where.wards("s") == ["n3", "n4"]
    assert replica_nodes(unique(0), where, 1) == ["t"]
    assert replica_nodes(unique(2), where, 1) == ["n5"]
    alone = places(racks([4]) | {"s": "row0/rack0/s"}, ["s"], guarded=True)
    assert len(alone.wards("s")) == WARDS
    elsewhere = places(racks([2, 2]) | {"s": "row0/rack1/s"}, ["s"], guarded=True)
    assert elsewhere.wards("s") == ["n0", "n1"]
    same = places(racks([1, 1]) | {"s": "row0/rack0/s"}, ["s"], guarded=True)
    assert same.wards("s") == ["n0", "n1"], "rather one of the same rack than none"
    assert replica_nodes(unique(0), same, 1) == ["n1"], "but not for the copies"


def test_whether_all_is_left_elsewhere() -> None:
    where = places(racks([2, 2]))
    assert all_left(where, ["n0", "n1"], 1) and all_left(where, ["n2", "n3"], 1)
    assert not all_left(where, ["n0", "n2"], 1), "which keeps its copies"
    assert all_left(where, ["n0", "n3"], 1) and all_left(where, [], 1)
    flat = Places({0: "a", 1: "b", 2: "c"}, {"a": "x", "b": "x"})
    assert all_left(flat, ["a", "b"], 1) and not all_left(flat, ["a", "c"], 1)


def test_a_hundred_thousand_roles() -> None:
    """Each node is looked at a few times, not once for each other one."""

    class Counted(NestedDomains):
        looks = 0

        def at(self, node: str, level: int) -> str:
            self.looks += 1
            return super().at(node, level)

    domains = racks([16] * 781, row=24)
    found = Counted(list(domains), [], domains)
    assert found.levels_apart(2) == [0, 0]
    assert found.looks < 20 * len(domains)
