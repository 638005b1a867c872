"""What nodes say by difference, and the controller adds up, is what it would be if all were said and counted
anew."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from core.control.decide import plain
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.control.cluster.roles_by_node import hosts_now
from ft_core.control.decide import version_choice
from ft_core.control.decide.holdings import NodeReport
from ft_core.control.decide.inventory import NodeInventory
from ft_core.control.decide.records import completed
from ft_core.errors import Unrecoverable
from ft_core.node.memory.holdings import changed, more_than_versions
from ft_core.protocol import messages as m
from ft_core.protocol.codec import encode
from ft_core.protocol.groups import GroupId
from ft_core.protocol.table import Received

SEEDS = st.integers(0, 1 << 32)


def held_by(draw: random.Random, names: list[str], roles: int) -> dict[str, m.Holdings]:
    """What nodes hold: as they should, but for some. Two roles share their parameters."""
    newest = draw.randrange(2, 5)
    sound, per_node = draw.random(), max(1, roles // max(1, len(names) - 1))

    def versions() -> list[int]:
        if draw.random() < sound:
            return [newest - 1, newest]
        return sorted(draw.sample(range(newest + 2), draw.randrange(3)))

    found = {}
    for number, name in enumerate(names):
        here: dict[int, m.RoleHeld] = {}
        for role in range(number * per_node, min(roles, (number + 1) * per_node)):
            training = draw.random() < 0.5 + sound / 2
            segments = [f"p{role // 2}", f"s{role}"] if training else []
            counts = {str(GroupId.of(range(roles), 0)): draw.choice([3, 3, 3, 2])} if training else {}
            stage: m.Stage = "training" if training else "startup"
            alive = draw.random() < 0.9
            held = versions() if training or draw.random() < 0.1 else []
            here[role] = m.RoleHeld(alive, stage, held, segments, counts)
        if draw.random() < 0.1:  # it has not begun the newest plan
            here[draw.randrange(roles)] = m.RoleHeld(True, "training", versions(), ["p0", "odd"], {})
        kept = draw.sample([f"s{role}" for role in range(roles)], draw.randrange(roles))
        kept = (
            kept if draw.random() < 0.5 else [f"s{(number * per_node + i) % roles}" for i in range(per_node)]
        )
        replicas = {name: versions() for name in kept}
        holders = {name: name[1:] for name in replicas}
        epochs = draw.randrange(9), "", draw.randrange(9), [7] * draw.randrange(2)
        found[name] = m.Holdings(*epochs, here, replicas, holders, draw.randrange(3), "x", "x", None)
    return found


def held(name: str, *said: m.Holdings) -> NodeInventory:
    """As the controller has it: what was said first, and by difference, over the wire."""
    found = NodeInventory(m.AgentHello(name, 1, 1, 0, f"of {name}", "x", said[0], [], False, "", ""))
    for number, (before, now) in enumerate(pairwise(said)):
        message = m.FROM_CLIENT.decode(encode(changed(before, now, number)), "a node")
        assert isinstance(message, m.HoldingsChanged) and found.change(message)
    return found


def full(name: str, said: m.Holdings) -> NodeReport:
    return NodeReport(name, f"of {name}", said.roles, said.replicas)


def outcome(choose: Any, *arguments: Any, **more: Any) -> object:
    try:
        return choose(*arguments, **more)
    except Unrecoverable as error:
        return str(error)


@given(SEEDS)
@settings(max_examples=1500)
def test_the_choice_is_that_of_looking_at_every_role(seed: int) -> None:
    draw = random.Random(seed)
    roles = draw.randrange(1, 9)
    names = [f"n{i}" for i in range(draw.randrange(1, 6))]
    first, now = held_by(draw, names, roles), held_by(draw, names, roles)
    per_node = max(1, roles // max(1, len(names) - 1))
    places = {role: names[min(role // per_node, len(names) - 1)] for role in range(roles)}
    places |= {role: draw.choice(names) for role in range(roles) if draw.random() < 0.1}
    previous = dict(places)
    places |= {role: draw.choice(names) for role in range(roles) if draw.random() < 0.1}
    alive = [name for name in names if draw.random() < 0.9]
    catalogue = {role: [f"p{role // 2}", f"s{role}"] for role in range(roles) if draw.random() < 0.9}
    about = list(places), draw.choice([0, 2, None]), draw.choice([(), (1, 2), (9,)])
    more = {
        "placements": places,
        "previous": previous,
        "reached": draw.choice([None, 3]),
        "catalogue": catalogue,
    }
    wanted = outcome(plain.choose_version, [full(name, now[name]) for name in alive], *about, **more)
    assert wanted == outcome(
        version_choice.choose_version, [full(name, now[name]) for name in alive], *about, **more
    )
    told = [held(name, first[name], now[name]).report for name in alive]
    for report in told:
        report.home = list(report.roles) == [role for role, name in previous.items() if name == report.node]
    assert wanted == outcome(version_choice.choose_version, told, *about, **more)


def but_for_said(told: tuple[int, Any, Any]) -> object:
    """With the versions of now."""
    role, own, versions = told
    return role, own.alive, own.stage, own.segments, own.counts, list(versions)


@given(SEEDS)
@settings(max_examples=500)
def test_what_is_said_by_difference_is_what_is_held(seed: int) -> None:
    draw = random.Random(seed)
    said = [held_by(draw, ["n0", "n1", "n2"], 6)["n0"] for _ in range(draw.randrange(1, 4))]
    for _ in range(draw.randrange(3)):  # nothing but versions
        version = draw.randrange(5, 9)
        last = {
            r: m.RoleHeld(h.alive, h.stage, [version], h.segments, h.counts)
            for r, h in said[-1].roles.items()
        }
        copies = {name: [version] for name in said[-1].replicas}
        said.append(m.Holdings(9, "", 9, [], last, copies, said[-1].segments, 2, "x", "x", None))
        assert not more_than_versions(changed(said[-2], said[-1], 0))
    found, whole = held("n0", *said), held("n0", said[-1])
    assert list(map(but_for_said, found.report.each_role())) == list(
        map(but_for_said, whole.report.each_role())
    )
    names = "epoch", "begun", "reported", "parts", "idle", "segments"
    assert [getattr(found, name) for name in names] == [getattr(whole, name) for name in names]
    for each in (found, whole):
        assert {s: list(at) for s, at in each.report.each_copy()} == said[-1].replicas
    assert found.counts() == whole.counts() and set(found.versions()) == set(whole.versions())
    for role, own in said[-1].roles.items():
        assert found.alive(role) == own.alive
    assert found.all_alive == all(own.alive for own in said[-1].roles.values())
    assert found.newest == max(whole.versions(), default=-1)
    assert found.report.ids == whole.report.ids


def test_a_report_of_what_was_not_said_before_is_not_understood() -> None:
    said = held_by(random.Random(1), ["n0", "n1"], 4)["n0"]
    found = held("n0", said, said)
    assert not found.change(changed(said, said, 0)) and not found.change(changed(said, said, 2))
    of_others = {role: own for role, own in said.roles.items() if role}
    two = m.Holdings(0, "", 0, [], {**said.roles, 9: said.roles[0]}, {}, {}, 1, "x", "x", None)
    assert len(said.roles) > 2 and len(of_others) > 1
    each = m.HoldingsChanged(1, 0, "", 0, [], 1, [(1,)] * (len(said.roles) - 1), [], None)
    assert not found.change(each)
    assert found.change(changed(None, two, 1)) and list(found.roles) == list(two.roles)


def test_a_worker_that_died_counts_no_more_until_its_node_reports_another() -> None:
    said = held_by(random.Random(1), ["n0", "n1"], 4)["n0"]
    found = held("n0", said)
    role = next(role for role, own in said.roles.items() if own.alive)
    found.worker_died(role)
    assert not found.alive(role) and not found.all_alive and role not in found.counts()
    assert not found.report.roles[role].alive
    assert found.change(changed(said, said, 0))
    assert found.alive(role) and found.report.roles[role].alive


@given(SEEDS)
@settings(max_examples=800)
def test_records_that_are_added_up_are_those_of_all_roles(seed: int) -> None:
    draw = random.Random(seed)
    roles = draw.randrange(2, 8)
    groups = [range(roles), *(sorted(draw.sample(range(roles), 2)) for _ in range(3))]
    names = {f"{GroupId.of(group, 0)}{more}": list(group) for group in groups for more in ("", "/end")}
    names |= {f"{GroupId.of(groups[0], 0)}/1>0": [0, 1]}
    records, counts = completed([]), dict[int, dict[str, int]]()
    for _ in range(draw.randrange(12)):
        role = draw.randrange(roles)
        mine = [name for name, members in names.items() if role in members and draw.random() < 0.9]
        counts[role] = {name: draw.choice([0, 1, 2, 2, 2, 2]) for name in mine if draw.random() < 0.95}
        records.say(role, counts[role])
        if draw.random() < 0.3:
            records.prepare(2)
    places = {role: f"n{role // 2}" for role in range(roles) if draw.random() < 0.9}
    for role in [role for role in counts if role not in places]:
        records.say(role, counts.pop(role))
        records.say(role, {})
    done = plain.completed(sorted(counts.items()))
    assert {name: count for name, (count, _) in records.done().items()} == {
        n: c for n, (c, _) in done.items()
    }
    for name, (count, role) in records.done().items():
        assert counts[role][name] == count
    needed = records.needed(places, set(range(roles)) - records.roles)
    wanted = plain.operations_needed(records.done(), counts.items(), places)
    assert needed == wanted


@pytest.mark.parametrize("seed", range(50))
def test_who_is_where_is_kept_up_to_date(seed: int) -> None:
    draw = random.Random(seed)
    places = {role: f"n{draw.randrange(4)}" for role in range(10)}
    hosts = hosts_now({}, {}, places)
    for _ in range(4):
        before, places = places, {**places, **{draw.randrange(10): f"n{draw.randrange(6)}" for _ in range(3)}}
        if draw.random() < 0.3:
            del places[draw.choice(list(places))]
        hosts = hosts_now(before, hosts, places)
        assert hosts == {
            n: [r for r in sorted(places) if places[r] == n] for n in sorted(set(places.values()))
        }


def test_a_table_that_is_said_again_replaces_what_was_heard_of_it() -> None:
    """A spare was lost before the plan came that the table was for."""
    there, gone = m.Host("node0", "a:1", "", "0"), m.Host("node1", "b:1", "", "")
    received = Received()
    received.hear(m.Hosts("1-x", [there, gone]))
    received.hear(m.Hosts("1-x", [there]))
    assert received.all_hosts("1-x") == [there]


def test_a_table_in_pieces() -> None:
    first, second = m.Host("node0", "a:1", "", "0"), m.Host("node1", "b:1", "", "1")
    received = Received()
    received.hear(m.Hosts("1-x", [first]))
    received.hear(m.Hosts("1-x", [second], 1))
    assert received.all_hosts("1-x") == [first, second]
    received.hear(m.Hosts("1-x", [second], 1))
    assert not received.all_hosts("1-x"), "a piece was lost, and it is asked for again"
