from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from ft_core.protocol.domains import domain_of
from ft_core.state import placement
from ft_core.state.manifest import Segment
from ft_core.state.placement import Places, sender, survives


def unique(role: int) -> Segment:
    return Segment((role,), ())


def replica_nodes(
    segment: Segment,
    role_nodes: Mapping[int, str],
    domains: Mapping[str, str],
    replicas: int,
    ring: Sequence[int] | None = None,
    spares: Sequence[str] = (),
) -> list[str]:
    places = Places(role_nodes, domains, spares)
    return placement.replica_nodes(segment, places, replicas, None if ring is None else places.ring(ring))


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


def test_a_guard_keeps_the_copies_of_its_wards_before_others() -> None:
    where = {role: f"n{role}" for role in range(6)}
    places = Places(where, {}, ["s", "t"], guarded=True)
    assert [places.guard(f"n{role}") for role in where] == ["s", "t", "s", "t", None, None]
    assert places.wards("s") == ["n0", "n2"] and places.wards("n1") == [] and places.wards("u") == []
    ring = places.ring(tuple(where))
    kept = [placement.replica_nodes(unique(role), places, 1, ring) for role in where]
    assert kept == [["s"], ["t"], ["s"], ["t"], ["n5"], ["n0"]]
    assert placement.replica_nodes(unique(0), places, 2, ring) == ["s", "n1"]
    assert placement.replica_nodes(unique(0), places, 0, ring) == []
    assert placement.replica_nodes(Segment((0, 1), ()), places, 1, ring) == [], "what peers have is not sent"
    together = Places(where, {"s": "rack", "n0": "rack"}, ["s"], guarded=True)
    assert placement.replica_nodes(unique(0), together, 1, ring) == ["n1"], "they would be lost together"
    assert Places(where, {}, ["s"]).guard("n0") is None


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


def one_by_one(
    source: int, covered: set[str], ring: Sequence[int], where: Mapping[int, str], domains: Mapping[str, str]
) -> list[str]:
    """In words: from one role to the next, around the ring; in each domain that has no copy yet, the node
    that stands where the sender's does in its own."""

    def members(domain: str) -> list[str]:
        nodes = dict.fromkeys(where[r] for r in ring if r in where)
        return [node for node in nodes if domain_of(node, domains) == domain]

    at = next((i for i, r in enumerate(ring) if r > source), 0)
    at = ring.index(source) + 1 if source in ring else at
    chosen, home = [], where[source]
    own = members(domain_of(home, domains))
    for node in [where[r] for r in [*ring[at:], *ring[:at]] if r in where]:
        if (domain := domain_of(node, domains)) not in covered:
            covered.add(domain)
            other = members(domain)
            mirrored = domain != node and home in own
            chosen.append(other[own.index(home) % len(other)] if mirrored else node)
    return chosen


def test_what_is_known_of_a_ring_beforehand_gives_what_looking_at_each_role_does() -> None:
    """Roles in any order on nodes of any domains, labelled or not, some of them nowhere."""
    rng = random.Random(16)
    seen = set()
    for _ in range(400):
        world, nodes = rng.randint(1, 24), rng.randint(1, 12)
        scattered = rng.random() < 0.5
        where = {r: f"n{rng.randrange(nodes) if scattered else r * nodes // world}" for r in range(world)}
        racks = rng.randint(1, 4)
        labels = [f"rack{rng.randrange(racks) if scattered else n * racks // nodes}" for n in range(nodes)]
        domains = {f"n{n}": label for n, label in enumerate(labels) if rng.random() < 0.8}
        ring: Sequence[int] = range(rng.randrange(2), world, rng.randint(1, 3))
        if scattered:
            ring = rng.sample(range(world + 3), rng.randint(1, world))
        role = rng.randrange(world)
        covered = {domain_of(where[role], domains)}
        expected = one_by_one(role, covered, ring, where, domains)
        if rest := one_by_one(role, covered, sorted(where), where, domains):
            expected += rest
        places = Places(where, domains)
        shared = places.ring(ring)  # of all that are in it, as the planner has it
        placement.replica_nodes(unique(min(where)), places, 2, shared)
        assert placement.replica_nodes(unique(role), places, len(expected), shared) == expected
        for k in range(len(expected)):
            assert placement.replica_nodes(unique(role), places, k, shared) == expected[:k]
        seen.add((bool(rest), role in ring))
    assert len(seen) == 4


def test_of_whole_domains_each_ring_is_looked_at_once() -> None:
    """Sending to them is placed for every role of it."""

    class Nodes(dict[int, str]):
        looks = 0

        def get(self, role: int, default: object = None) -> str | None:  # type: ignore[override]
            self.looks += 1
            return super().get(role)

    world = 4096
    where = Nodes({role: f"n{role // 8}" for role in range(world)})
    domains = {f"n{node}": f"rack{node // 64}" for node in range(world // 8)}
    places = Places(where, domains)
    ring = places.ring(range(0, world, 8))
    for role in range(0, world, 8):
        opposite = (role // 8 + 64) % (world // 8)
        assert placement.replica_nodes(unique(role), places, 1, ring) == [f"n{opposite}"]
    assert where.looks < 8 * world // 8, "a few times each"
