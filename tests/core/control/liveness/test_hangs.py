"""Who is to blame for a hang, from flight records: each kind by hand, and many that are drawn."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from benchmarks.hangs_simulated import KINDS, hang
from ft_core.control.liveness.hangs.finding import Case, Finding
from ft_core.control.liveness.hangs.operations import roles_in_words
from ft_core.protocol.flight import FlightGroup, FlightLog, FlightRecord, Kind

S = 10**9
WORLD = "0-3:1#0"


def record(number: int, kind: Kind = "all_reduce", nbytes: int = 64, peer: int = -1, group: int = 0,
           at: float = 10.0, took: float | None = None, step: int = -1,
           apart: bool = False) -> FlightRecord:  # fmt: skip
    """`took`: None while it is under way."""
    ended = 0 if took is None else int((at + took) * S)
    return FlightRecord(group, number, kind, nbytes, "float32", peer, int(at * S), ended, step, apart)


def log(role: int, *records: FlightRecord, state: str = "S", at_end: bool = False,
        names: Iterable[str] = (WORLD, "0-3:1#1"), backend: str = "gloo") -> FlightLog:  # fmt: skip
    groups = tuple(FlightGroup(number, name, "", backend) for number, name in enumerate(names))
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


def steps(*of_each: tuple[int | Kind, ...]) -> list[FlightRecord]:
    """Operations that have ended, of each step: by their size, or their kind."""
    found: list[FlightRecord] = []
    for step, operations in enumerate(of_each):
        for each in operations:
            found.append(operation(len(found), each, step, at=len(found) / 100, took=0.001))
    return found


def operation(number: int, each: int | Kind, step: int, at: float = 10.0, took: float | None = None,
              grad: bool = False) -> FlightRecord:  # fmt: skip
    kind, size = ("all_reduce", each) if isinstance(each, int) else (each, 0)
    return msgspec.structs.replace(record(number, kind, size, at=at, took=took, step=step), grad=grad)  # type: ignore[arg-type]


def begun(past: list[FlightRecord], each: int | Kind, step: int, grad: bool = False) -> list[FlightRecord]:
    """One more after that, which is under way."""
    return [*past, operation(len(past), each, step, grad=grad)]


STEP = 64, 128, 256
PAST = steps(*[STEP] * 6)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (128, 512),  # of another shape, in the middle of a step
        (128, 256),  # left out
        (128, 64),  # done twice
    ],
)
def test_of_two_the_one_that_has_never_done_so(right: int, wrong: int) -> None:
    past = steps(*[STEP] * 6, (64,))
    found = explain(log(0, *begun(past, right, 6)), log(1, *begun(past, wrong, 6)), world=2)
    assert found is not None and (found.kind, found.culprits) == ("mismatch", (1,))


@pytest.mark.parametrize(
    ("usual", "new"),
    [
        (64, 8),  # an evaluation before the next step, or an operation of another shape
        (64, "barrier"),
    ],
)
def test_of_two_what_is_new_between_two_steps_accuses_nobody(usual: int, new: int | Kind) -> None:
    """The other one may have left out all of an evaluation that comes for the first time."""
    found = explain(log(0, *begun(PAST, usual, 6)), log(1, *begun(PAST, new, 6)), world=2)
    assert found is not None and (found.kind, set(found.roles), found.culprits) == ("mismatch", {0, 1}, ())


def test_of_two_in_what_is_new_to_both_nobody_is_accused() -> None:
    """In an evaluation that comes for the first time: one did something twice, or the other left it out."""
    past = steps(*[STEP] * 6, (*STEP, "barrier", 64))
    found = explain(log(0, *begun(past, 64, 6)), log(1, *begun(past, 8, 6)), world=2)
    assert found is not None and (found.kind, found.culprits) == ("mismatch", ())


def test_of_two_the_one_that_brings_another_shape_to_the_forward_pass() -> None:
    """It is no evaluation, since autograd records."""
    found = explain(log(0, *begun(PAST, 64, 6, grad=True)), log(1, *begun(PAST, 8, 6, grad=True)), world=2)
    assert found is not None and (found.kind, found.culprits) == ("mismatch", ())
    past = [msgspec.structs.replace(each, grad=each.nbytes == 64) for each in PAST]
    found = explain(log(0, *begun(past, 64, 6, grad=True)), log(1, *begun(past, 8, 6, grad=True)), world=2)
    assert found is not None and (found.kind, found.culprits) == ("mismatch", (1,))


def test_of_two_that_have_no_past_nobody_is_accused() -> None:
    found = explain(log(0, record(0, nbytes=64)), log(1, record(0, nbytes=128)), world=2)
    assert found is not None and (found.kind, set(found.roles), found.culprits) == ("mismatch", {0, 1}, ())


def test_who_begins_a_step_otherwise_than_all_others() -> None:
    """Pairs of their own: of one of them the others show what is usual in this very step."""
    names = [("0-1:1#0",), ("0-1:1#0",), ("2-3:1#0",), ("2-3:1#0",), ("4-5:1#0",), ("4-5:1#0",)]
    logs = [log(role, *begun(PAST, 8 if role == 3 else 64, 6), names=names[role]) for role in range(6)]
    found = explain(*logs, world=6)
    assert found is not None and (found.kind, found.culprits) == ("mismatch", (3,))


def test_many_roles_are_named_briefly() -> None:
    assert roles_in_words(range(512)) == "roles 0-511"
    assert roles_in_words(range(0, 64, 8)) == "roles 0-56 by 8"
    few = [each for role in range(0, 1000, 10) for each in (role, role + 1, role + 3)]
    assert roles_in_words(few).endswith(" more") and len(roles_in_words(few)) < 100


def test_a_size_that_a_role_has_never_had() -> None:
    """Where sizes may differ: it shows only where they never have."""
    inside = [log(role, *begun_all(2048 + 512 * (role == 2))) for role in range(4)]
    found = explain(*inside)
    assert found is not None and (found.kind, found.culprits) == ("mismatch", (2,))
    assert "role 2: all_to_all of 2560 bytes" in found.words
    ragged = [
        log(role, *begun_all(2048 + 512 * (role == 2), [64 * n for n in range(40)])) for role in range(4)
    ]
    found = explain(*ragged)
    assert found is not None and (found.kind, found.culprits) == ("transport", ())


def begun_all(nbytes: int, before: Iterable[int] = (2048,) * 40) -> list[FlightRecord]:
    """An all-to-all that is under way, after others."""
    past = [record(n, "all_to_all", size, at=n / 100, took=0.001) for n, size in enumerate(before)]
    return [*past, record(len(past), "all_to_all", nbytes)]


def test_who_has_begun_an_operation_does_not_wait_in_it() -> None:
    """Gradients behind the backward pass: role 0 has not come to wait for role 1, which waits for it."""
    first, second = record(7, group=0, apart=True), record(7, group=1)
    found = explain(log(0, first, state="R"), log(1, second), world=2)
    assert found is not None and (found.kind, found.culprits) == ("absent", (0,))
    found = explain(log(0, first), log(1, first), world=2)
    assert found is None, "nobody waits"


def test_a_device_is_at_one_operation_after_the_other() -> None:
    """The hosts have run ahead and issued all; role 3 has issued the first two in the opposite order."""
    names = (WORLD, "0-3:1#1", "0-3:1#2")
    a, b, c = (record(7, group=group, at=10 + group) for group in range(3))
    ahead = [log(role, a, b, c, names=names, backend="nccl", state="R") for role in range(3)]
    found = explain(*ahead, log(3, b, a, c, names=names, backend="nccl", state="R"))
    assert found is not None and (found.kind, found.culprits) == ("circle", (3,))
    found = explain(*ahead, log(3, a, names=names, backend="nccl", state="R"))
    assert found is not None and found.kind == "transport" and "all_reduce #7 of group 0-3" in found.words
    done = log(3, record(6), record(7, took=0.1), names=names, backend="nccl", state="R")
    found = explain(*ahead, done)
    assert found is not None and found.culprits == ()


def test_a_receive_from_anybody_waits_for_all() -> None:
    """It is not idle; who could send, and does nothing, is."""
    waits = record(0, "recv", peer=-1)
    logs = [log(0, waits), log(1, record(7)), log(2, record(7))]
    found = explain(*logs, log(3))
    assert found is not None and found.culprits == (3,)
    found = explain(log(0, waits), log(1, record(7)), world=2)
    assert found is not None and found.culprits == () and "from any role to role 0" in found.words


def test_drawn_hangs() -> None:
    """Kinds, roles, steps and layouts: the one to blame is found, or is among three, and nobody else is."""
    right = named = total = 0
    kinds = set()
    for seed in range(20_000, 20_200):
        if (drawn := hang(seed)) is None:
            continue
        layout, fault, logs = drawn
        found = Case(logs, {role: f"node{role // 4}" for role in range(layout.roles)}).explain()
        assert found is not None and found.culprits in ((), (fault.role,)), f"seed {seed}: {fault}: {found}"
        right, named, total = right + bool(found.culprits), named + (fault.role in found.roles), total + 1
        kinds.add(fault.kind)
    assert kinds == set(KINDS) and total > 150
    assert named >= 0.99 * total and right >= 0.978 * total, f"{right}, {named} of {total}"
