from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from ft_core.state.manifest import Segment
from ft_core.state.placement import replica_nodes, sender, survives


def unique(role: int) -> Segment:
    return Segment((role,), ())


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("nodes", [4, 5, 8])
def test_every_node_keeps_as_many_copies_as_it_sends(nodes: int, replicas: int) -> None:
    role_nodes = {r: f"n{r}" for r in range(nodes)}
    targets = {r: replica_nodes(unique(r), role_nodes, {}, replicas) for r in range(nodes)}
    assert targets[0] == [f"n{r}" for r in range(1, replicas + 1)]
    assert Counter(n for t in targets.values() for n in t) == {n: replicas for n in role_nodes.values()}
    assert all(survives(unique(r), role_nodes, {}, t) == replicas for r, t in targets.items())


def test_first_copy_goes_to_the_next_data_parallel_peer() -> None:
    # PP 2 x DP 4, one role a node: roles 0-3 are stage 0, 4-7 stage 1.
    role_nodes = {r: f"n{r}" for r in range(8)}
    stage = range(4)
    assert replica_nodes(unique(3), role_nodes, {}, 1, ring=stage) == ["n0"]
    assert replica_nodes(unique(2), role_nodes, {}, 2, ring=stage) == ["n3", "n0"]
    # The peers give three further domains; the fourth copy needs a node of the other stage.
    assert replica_nodes(unique(1), role_nodes, {}, 4, ring=stage) == ["n2", "n3", "n0", "n4"]


def test_peers_on_one_node_do_not_make_state_redundant() -> None:
    role_nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    stage = Segment((0, 1), ())
    assert replica_nodes(stage, role_nodes, {}, 1, ring=(0, 1)) == ["b"]
    assert sender(stage, role_nodes) == 0
    assert replica_nodes(Segment((0, 2), ()), role_nodes, {}, 1) == []


def test_racks_mirror_each_other() -> None:
    role_nodes = {r: f"n{r}" for r in range(9)}
    racks = {f"n{r}": "xyz"[r // 3] for r in range(9)}
    for replicas in (1, 2):
        targets = {r: replica_nodes(unique(r), role_nodes, racks, replicas) for r in range(9)}
        assert Counter(n for t in targets.values() for n in t) == {n: replicas for n in role_nodes.values()}
        assert all(survives(unique(r), role_nodes, racks, t) == replicas for r, t in targets.items())


def test_too_few_domains_give_what_there_is() -> None:
    role_nodes = {0: "a", 1: "b", 2: "c"}
    racks = {"a": "x", "b": "x", "c": "y"}
    nodes = replica_nodes(unique(0), role_nodes, racks, 2)
    assert nodes == ["c"]
    assert survives(unique(0), role_nodes, racks, nodes) == 1
    assert replica_nodes(unique(0), {0: "a"}, {}, 1) == []


def test_no_copy_where_none_is_asked_for() -> None:
    assert replica_nodes(unique(0), {0: "a", 1: "b"}, {}, 0, ring=(0, 1)) == []


def test_sender_of_an_unplaced_segment() -> None:
    assert sender(Segment((1, 3), ()), {3: "b"}) == 3
    with pytest.raises(ValueError):
        sender(unique(0), {})


def test_spares_keep_what_the_others_cannot() -> None:
    """All of a node goes to the same one, and as few do as suffice."""
    one = {0: "a", 1: "a"}
    assert [replica_nodes(unique(r), one, {}, 1, spares=["s", "t"]) for r in one] == [["s"], ["s"]]
    assert replica_nodes(unique(0), one, {}, 2, spares=["s", "t"]) == ["s", "t"]
    assert replica_nodes(unique(0), one, {"s": "rack", "t": "rack"}, 2, spares=["s", "t"]) == ["s"]
    assert replica_nodes(unique(0), one, {"a": "rack", "s": "rack"}, 1, spares=["s", "t"]) == ["t"]
    two = {0: "a", 1: "b"}
    assert replica_nodes(unique(0), two, {}, 1, spares=["s"]) == ["b"]
    assert [replica_nodes(unique(r), two, {}, 2, spares=["s", "t"]) for r in two] == [["b", "s"], ["a", "t"]]
    assert replica_nodes(unique(0), one, {}, 0, spares=["s"]) == []


def test_of_a_long_ring_only_the_next_ones_are_looked_at() -> None:
    class Ring(Sequence[int]):
        """Data-parallel peers of a large job; counts how many are looked at."""

        looks = 0

        def __len__(self) -> int:
            return 100_000

        def __contains__(self, role: object) -> bool:
            return True

        def index(self, role: int, *_: int) -> int:
            return role

        def __getitem__(self, at: int) -> int:  # type: ignore[override]
            self.looks += 1
            return at

    ring = Ring()
    places = {role: f"n{role}" for role in range(100_000)}
    assert replica_nodes(Segment((99_998,), ()), places, {}, 3, ring) == ["n99999", "n0", "n1"]
    assert ring.looks < 8
