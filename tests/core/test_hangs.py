"""Who is to blame for a hang, from flight records: each kind by hand, and many that are drawn."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from benchmarks.hangs_simulated import KINDS, hang
from ft_core.control.hangs.finding import Case, Finding
from ft_core.protocol.flight import FlightGroup, FlightLog, FlightRecord, Kind

S = 10**9
WORLD = "0-3:1#0"


def record(number: int, kind: Kind = "all_reduce", nbytes: int = 64, peer: int = -1, group: int = 0,
           at: float = 10.0, took: float | None = None) -> FlightRecord:  # fmt: skip
    """`took`: None while it is under way."""
    ended = 0 if took is None else int((at + took) * S)
    return FlightRecord(group, number, kind, nbytes, "float32", peer, int(at * S), ended)


def log(role: int, *records: FlightRecord, state: str = "S", at_end: bool = False,
        names: Iterable[str] = (WORLD, "0-3:1#1")) -> FlightLog:  # fmt: skip
    groups = tuple(FlightGroup(number, name) for number, name in enumerate(names))
    return FlightLog(role, 1, 5, 20 * S, state, at_end, groups, records)


def explain(*logs: FlightLog, world: int = 4, held_up: Iterable[int] = ()) -> Finding | None:
    places = {role: f"node{role // 2}+x" for role in range(world)}
    return Case(logs, places, list(held_up)).explain()


DONE = record(6, at=8.0, took=0.5)
IN = record(7)


@pytest.mark.parametrize(
    ("state", "kind", "said"),
    [
        ("T", "stopped", "it is stopped (state T)"),
        ("R", "absent", "it runs, outside of any operation (state R)"),
        ("S", "absent", "it waits for something else (state S)"),
    ],
)
def test_a_role_that_has_not_entered(state: str, kind: str, said: str) -> None:
    found = explain(*(log(role, DONE, IN) for role in range(3)), log(3, DONE, state=state))
    assert found is not None and (found.kind, found.culprits) == (kind, (3,))
    assert found.words == (
        "role 3 (node node1) has not entered all_reduce #7 of group 0-3, which roles 0, 1, 2 wait in for "
        f"10.0 s; {said}; the last it began was all_reduce #6 of group 0-3, 12.0 s ago"
    )
    assert (found.witness in range(3), found.waited, found.usual) == (True, 10.0, 0.5)


def test_through_others() -> None:
    """Role 0 waits for role 1 in a receive, role 1 for role 2 in another, and so on."""
    logs = [log(role, record(3, "recv", peer=role + 1)) for role in range(3)]
    found = explain(*logs, log(3, record(2, "send", peer=2, at=3.0, took=0.1)))
    assert found is not None and found.culprits == (3,) and "recv #3 from role 3 to role 2" in found.words


def test_a_role_that_was_stopped_inside_an_operation() -> None:
    found = explain(*(log(role, DONE, IN) for role in range(3)), log(3, DONE, IN, state="T"))
    assert found is not None and found.culprits == (3,) and "has not ended all_reduce #7" in found.words


@pytest.mark.parametrize(
    ("last", "kind", "said"),
    [
        (log(3, DONE, at_end=True), "left", "it has come to the end of its script"),
        (log(3, DONE, state="D"), "blocked", "it waits for storage or a device"),
        (log(3, DONE, state="t"), "traced", "a debugger holds it"),
        (None, "silent", "its node has not answered"),
    ],
)
def test_nobody_is_accused(last: FlightLog | None, kind: str, said: str) -> None:
    """Where another worker in its place would be no better off."""
    found = explain(*(log(role, DONE, IN) for role in range(3)), *([last] if last else []))
    assert found is not None and (found.kind, found.roles, found.culprits) == (kind, (3,), ())
    assert said in found.words


def test_a_role_that_waits_for_its_copies() -> None:
    found = explain(*(log(role, DONE, IN) for role in range(3)), log(3, DONE), held_up=[3])
    assert found is not None and (found.kind, found.culprits) == ("held up", ())
    assert "for other nodes to have copies of its state" in found.words


def test_all_have_entered() -> None:
    found = explain(*(log(role, DONE, IN) for role in range(4)))
    assert found is not None and (found.kind, found.culprits) == ("transport", ())
    assert "all have entered all_reduce #7 of group 0-3" in found.words


def test_nobody_waits() -> None:
    """Evaluation without an exchange, or a step that is long: nothing is to be explained."""
    assert explain(*(log(role, DONE) for role in range(4))) is None


def test_roles_that_are_away_are_not_waited_for() -> None:
    assert explain(*(log(role, DONE, IN) for role in range(3)), world=3).kind == "transport"  # type: ignore[union-attr]


def test_two_groups_in_opposite_order() -> None:
    """One role has turned them round; the others agree."""
    first, second = record(7, group=0), record(7, group=1)
    found = explain(*(log(role, first) for role in range(3)), log(3, second))
    assert found is not None and (found.kind, found.culprits) == ("circle", (3,))
    assert "role 0 for role 3 in all_reduce #7 of group 0-3, role 3 for role 0" in found.words


def test_two_roles_in_opposite_order_are_both_named() -> None:
    found = explain(log(0, record(7, group=0)), log(1, record(7, group=1)), world=2)
    assert found is not None and (found.kind, found.roles, found.culprits) == ("circle", (0, 1), ())


def test_another_shape() -> None:
    found = explain(*(log(role, DONE, IN) for role in range(3)), log(3, DONE, record(7, nbytes=128)))
    assert found is not None and (found.kind, found.culprits) == ("mismatch", (3,))
    assert (
        "roles 0, 1, 2: all_reduce of 64 bytes" in found.words and "role 3: all_reduce of 128" in found.words
    )


def test_of_two_the_one_that_has_never_done_so() -> None:
    def past(*last: FlightRecord) -> list[FlightRecord]:
        steps = [
            record(2 * step + part, nbytes=64 << part, at=step + part / 2, took=0.1)
            for step in range(4)
            for part in range(2)
        ]
        return [*steps, *last]

    right, wrong = record(8, nbytes=64), record(8, nbytes=128)
    found = explain(log(0, *past(right)), log(1, *past(wrong)), world=2)
    assert found is not None and (found.kind, found.culprits) == ("mismatch", (1,))


def test_drawn_hangs() -> None:
    """Kinds, roles, steps and layouts: the one to blame is found, or is among three, and nobody else is."""
    right = total = 0
    kinds = set()
    for seed in range(240):
        if (drawn := hang(seed)) is None:
            continue
        layout, fault, logs = drawn
        found = Case(logs, {role: f"node{role // 4}" for role in range(layout.roles)}).explain()
        about = f"seed {seed}: {fault} in {layout}: {found}"
        assert found is not None and fault.role in found.roles, about
        assert found.culprits in ((), (fault.role,)), about
        right, total = right + bool(found.culprits), total + 1
        kinds.add(fault.kind)
    assert kinds == set(KINDS) and right >= 0.978 * total > 0.978 * 200, f"{right} of {total}"
