from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from core.control.decide.reports import RoleReport

from ft_core.control.decide.holdings import NodeReport
from ft_core.control.decide.role_placement import Assignment, assign
from ft_core.control.decide.version_choice import SOURCES, Choice, choose_version
from ft_core.errors import Unrecoverable

# Two data-parallel peers, one a node: "p" are the parameters, "a" and "b" their optimizer shards.
HOLDERS = {"p": [0, 1], "a": [0], "b": [1]}
SEGMENTS = {0: ("p", "a"), 1: ("p", "b")}


def role(
    number: int, node: str, versions: Iterable[int], stage: str = "training", alive: bool = True
) -> RoleReport:
    assert stage in ("startup", "training")
    segments = SEGMENTS[number] if stage == "training" else ()
    return RoleReport(number, node, alive, stage, tuple(versions), segments)  # type: ignore[arg-type]


def node(name: str, *roles: RoleReport, replicas: Mapping[str, tuple[int, ...]] | None = None) -> NodeReport:
    return NodeReport(name, name, {r.role: r for r in roles}, replicas or {}, HOLDERS)


def choose(*reports: NodeReport, durable: Iterable[int] = (), **more: object) -> Choice:
    return choose_version(reports, range(2), 0, list(durable), **more)  # type: ignore[arg-type]


def test_a_lost_role_is_restored_from_peer_and_replica() -> None:
    choice = choose(node("x", role(0, "x", (4, 5)), replicas={"b": (4, 5)}), node("spare"))
    assert (choice.version, choice.origin) == (5, "memory")
    assert choice.sources[1] == {"p": ["x"], "b": ["x"]}


def test_what_is_adopted_where_it_was_played_is_brought_from_there() -> None:
    """Its node has a snapshot of it, but of a role that it plays: the adopter needs a copy beside its own."""
    reports = [node("x", role(0, "x", (5,)), role(1, "x", (5,))), node("y")]
    assert choose(*reports, placements={0: "x", 1: "x"}).sources == {}
    adopted = choose(*reports, placements={0: "x"}, adopters={1: "x"})
    assert adopted.sources == {1: {"p": ["x"], "b": ["x"]}}


def test_the_newest_version_that_all_can_have() -> None:
    choice = choose(node("x", role(0, "x", (4, 5)), replicas={"b": (3, 4)}))
    assert choice.version == 4


def test_storage_may_have_a_newer_one() -> None:
    """What is left in memory has been left over from former places of the roles."""
    reports = [node("x", role(0, "x", (4, 5)), replicas={"b": (3, 4)})]
    assert (choose(*reports, durable=[2]).version, choose(*reports, durable=[4]).origin) == (4, "memory")
    choice = choose(*reports, durable=[2, 6])
    assert (choice.version, choice.origin) == (6, "durable")


def test_a_dead_workers_memory_counts_and_its_own_node_comes_first() -> None:
    reports = [
        node("x", role(0, "x", (4, 5), alive=False), replicas={"b": (4, 5)}),
        node("y", role(1, "y", (4, 5)), replicas={"a": (4, 5)}),
    ]
    choice = choose(*reports, placements={0: "x", 1: "y"})
    assert choice.sources == {}, "each has a snapshot where it is"
    moved = choose(*reports, placements={0: "y", 1: "y"})
    assert moved.sources[0] == {"p": ["y", "x"], "a": ["y", "x"]}, "it has no snapshot of the role there"


def test_a_survivor_that_fell_behind_fetches_what_it_lacks() -> None:
    choice = choose(
        node("x", role(0, "x", (4, 5)), replicas={"b": (5,)}),
        node("y", role(1, "y", (3, 4)), replicas={"a": (4,)}),
    )
    assert choice.version == 5
    assert choice.sources[1] == {"p": ["x"], "b": ["x"]}


def test_fetches_are_spread_over_the_holders() -> None:
    holders = list(range(8))
    peers = [
        NodeReport(
            f"n{r}", "", {r: RoleReport(r, f"n{r}", True, "training", (7,), ("w",))}, {}, {"w": holders}
        )
        for r in range(4)
    ]
    choice = choose_version(peers, holders, 0, [], placements={r: f"n{r}" for r in range(8)})
    assert choice.sources.keys() == set(range(4, 8)), "the others have snapshots where they are"
    assert Counter(choice.sources[r]["w"][0] for r in range(4, 8)) == {f"n{r}": 1 for r in range(4)}


def test_of_many_holders_a_few_are_named_and_others_for_each_role() -> None:
    names, lost = [f"n{number:03}" for number in range(100)], range(100, 110)
    peers = [
        NodeReport(name, name, {r: RoleReport(r, name, True, "training", (7,), ("w",))})
        for r, name in enumerate(names)
    ]
    catalogue = {role: ["w"] for role in range(110)}
    placements = {**dict(enumerate(names)), **dict.fromkeys(lost, "spare"), 109: "n050"}
    choice = choose_version(peers, range(110), 0, [], placements, catalogue=catalogue)
    found = [choice.sources[role]["w"] for role in lost]
    assert all(len(set(nodes)) == SOURCES for nodes in found)
    assert len({nodes[0] for nodes in found}) == len(found), "nobody is asked by two"
    assert found[-1][0] == "n050", "what is on its own node comes first"


def test_start_up_is_repeated_while_nothing_was_trained() -> None:
    choice = choose(node("x", role(0, "x", (0,))), node("y", role(1, "y", (), "startup")))
    assert (choice.version, choice.origin) == (0, "initial")
    assert choice.sources[1] == {} and choice.sources[0]["a"] == ["x"]
    assert choose(node("x", role(0, "x", (), "startup"))).origin == "initial"


def test_a_newcomer_that_was_still_starting_is_restored_again() -> None:
    choice = choose(
        node("x", role(0, "x", (4, 5)), replicas={"b": (5,)}),
        node("y", role(1, "y", (), "startup")),
    )
    assert (choice.version, choice.origin) == (5, "memory")


def test_a_job_whose_memory_is_gone_does_not_start_from_scratch() -> None:
    with pytest.raises(Unrecoverable, match="role 0: nobody knows"):
        choose_version([NodeReport("spare", "spare")], range(2), 0, [], reached=9)
    choice = choose_version([NodeReport("spare", "spare")], range(2), 0, [6, 3])
    assert (choice.version, choice.origin) == (6, "durable")


def test_the_fall_back_is_the_newest_durable_checkpoint() -> None:
    choice = choose(node("x", role(0, "x", (8, 9))), durable=[2, 7])
    assert (choice.version, choice.origin) == (7, "durable")
    assert [(x.role, x.segment, x.held) for x in choice.lost] == [(1, "b", ())]


def test_older_memory_is_preferred_to_a_checkpoint() -> None:
    reports = [node("x", role(0, "x", (4, 5)), replicas={"b": (4,)})]
    assert choose(*reports, durable=[2]).version == 4


def test_the_error_says_what_was_lost_and_where() -> None:
    with pytest.raises(Unrecoverable) as error:
        choose(node("x", role(0, "x", (8, 9)), replicas={"b": (7,)}), previous={0: "x", 1: "y"})
    assert "role 1: segment b is held only at version 7 (the role ran on y)" in str(error.value)
    assert "version 9 is not complete" in str(error.value)


def test_a_role_that_nobody_remembers_is_not_taken_for_recoverable() -> None:
    forgetful = replace(node("x", role(0, "x", (8, 9))), segments={"a": [0]})
    with pytest.raises(Unrecoverable, match="role 1: nobody knows what it held"):
        choose(forgetful)


PLACES = {0: "x", 1: "x", 2: "y", 3: "y"}


def test_a_dead_worker_is_restarted_where_its_memory_is() -> None:
    assert assign(PLACES, {"x": 1, "y": 0, "s": 2}, [1], 4) == Assignment(PLACES)


def test_roles_of_a_dead_node_go_to_one_spare() -> None:
    found = assign(PLACES, {"x": 2, "s": 1, "t": 3, "u": 2}, [2, 3], 4)
    assert found == Assignment({0: "x", 1: "x", 2: "u", 3: "u"})


def test_of_equal_spares_the_one_that_has_copies_takes_over() -> None:
    copies = {2: ["t", "x"], 3: ["t"]}
    assert assign(PLACES, {"x": 2, "s": 3, "t": 3}, [2, 3], 4, copies).roles == {
        0: "x",
        1: "x",
        2: "t",
        3: "t",
    }
    assert assign(PLACES, {"x": 2, "s": 3, "t": 1}, [2, 3], 4, copies).roles == {
        0: "x",
        1: "x",
        2: "s",
        3: "s",
    }


def test_of_equal_spares_the_one_whose_rack_has_fewest_roles_takes_over() -> None:
    idle = {"x": 2, "s": 2, "t": 2, "u": 2}
    domains = {"x": "a/b/x", "s": "a/b/s", "t": "a/c/t", "u": "d/e/u"}
    assert assign(PLACES, idle, [2, 3], 4, domains=domains).roles == {0: "x", 1: "x", 2: "u", 3: "u"}
    del idle["u"]
    assert assign(PLACES, idle, [2, 3], 4, domains=domains).roles == {0: "x", 1: "x", 2: "t", 3: "t"}
    copies = {2: ["s"]}
    assert assign(PLACES, idle, [2], 4, copies, domains=domains).roles[2] == "s", "it has what is needed"


def test_nodes_of_a_lost_rack_do_not_all_go_to_the_same_one() -> None:
    places = {0: "x", 1: "y", 2: "v", 3: "w"}
    idle = {"v": 0, "w": 0, "s": 1, "t": 1, "u": 1}
    domains = {"v": "b/v", "w": "b/w", "s": "b/s", "t": "c/t", "u": "d/u"}
    assert assign(places, idle, [0, 1], 1, domains=domains).roles == {0: "t", 1: "u", 2: "v", 3: "w"}


def test_they_are_spread_when_no_spare_has_room() -> None:
    assert assign(PLACES, {"s": 1, "x": 1}, [2, 3], 4).roles == {0: "x", 1: "x", 2: "s", 3: "x"}


def test_a_live_node_without_idle_workers_hands_its_role_over() -> None:
    assert assign(PLACES, {"x": 0, "y": 0, "s": 2}, [0, 2, 3], 4).unplaced == (0,)
    assert assign(PLACES, {"x": 0, "y": 0, "s": 2}, [0], 4).roles[0] == "s"


def test_a_shortage_names_the_roles() -> None:
    found = assign(PLACES, {"x": 0}, [2, 3], 4)
    assert found.unplaced == (2, 3)
    assert found.roles == {0: "x", 1: "x"}


def test_a_standby_is_not_a_spare():
    # x has two devices and two roles: its idle worker is there for its own crashes only.
    assert assign(PLACES, {"x": 1}, [2, 3], 2).unplaced == (2, 3)
    assert assign(PLACES, {"x": 1}, [1], 2).roles[1] == "x"


def test_a_role_that_never_had_a_snapshot_makes_the_initial_state_itself() -> None:
    # Role 1 died in start-up: its peer's snapshot names the segment they share, but not its own shard.
    found = choose(node("x", role(0, "x", (0,))), reached=0, catalogue={0: SEGMENTS[0]})
    assert (found.version, found.origin, found.sources[1]) == (0, "initial", {})
