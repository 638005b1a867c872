"""The tables of phases have no dead rows: each transition is taken, in a schedule or where a test goes there.

That no other is taken the machines see to: they raise.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from core.control.test_controller_machine import ControlPlane, lose
from core.worker.test_worker_machine import REGISTERED, Worker, plan, restore
from msgspec.structs import replace

from ft_core.control import phases, recovery
from ft_core.control.events import LauncherGone
from ft_core.node import machine as agent
from ft_core.node import phases as of_agent
from ft_core.process.transitions import follow
from ft_core.protocol import messages as m
from ft_core.worker import events as e
from ft_core.worker import machine as worker
from ft_core.worker import states

from .hangs import simulate as simulate_hangs
from .schedules import DRAINS, LADDER, RELAYS, simulate
from .test_simulation import processes

Row = tuple[type, type]
TABLES: dict[str, Mapping[Any, Mapping[Any, str]]] = {
    "controller": phases.TRANSITIONS,
    "agent": of_agent.TRANSITIONS,
    "worker": states.TRANSITIONS,
}
FEW = 40
SEEDS = [*range(FEW), *(kind + seed for kind in (DRAINS, RELAYS + LADDER) for seed in range(FEW))]
HANGS = range(FEW)


@contextmanager
def watched() -> Iterator[set[Row]]:
    """The transitions that machines take meanwhile."""
    taken: set[Row] = set()

    def noting(table: Any, now: object, to: object) -> object:
        taken.add((type(now), type(to)))
        return follow(table, now, to)

    with pytest.MonkeyPatch.context() as patch:
        for module in (recovery, agent, worker):
            patch.setattr(module, "follow", noting)
        yield taken


def of_schedule(kind: tuple[Callable[[int], object], int]) -> set[Row]:
    run, seed = kind
    with watched() as taken:
        run(seed)
    return taken


# -- a worker's script does what those of the simulator do not -------------------------------------------


def script(*events: e.Event) -> None:
    """A worker's, after it was given its role."""
    started = Worker().start()
    for event in events:
        started.do(event)


NOT_PROTECTED = e.RunsUnprotected("it wants none")
BEGUN = e.Begins(), e.Registers(REGISTERED)
TRAINING = *BEGUN, e.FromAgent(restore(1)), e.Loaded(0, loaded=False)
ABORT, EXIT = e.FromAgent(m.Abort(2)), e.FromAgent(m.Exit())
SCRIPTS: dict[str, tuple[e.Event, ...]] = {
    "has no training": (e.ScriptDone(), EXIT),
    "is not protected": (NOT_PROTECTED, e.ScriptDone()),
    "comes to its training between two epochs": (ABORT, e.Begins()),
    "is interrupted as it says what it begins with": (e.Begins(), ABORT),
    "is refused, and ends": (e.Begins(), e.ScriptDone()),
    "is refused, and goes on": (e.Begins(), NOT_PROTECTED),
    "loads a corrupt copy": (*BEGUN, e.FromAgent(restore(1)), e.FoundCorrupt(0, 1, "x"), ABORT),
    "is interrupted as it loads": (*BEGUN, e.FromAgent(restore(1)), ABORT),
    "is told of the next epoch before it has unwound": (
        *(*TRAINING, ABORT, e.FromAgent(m.PlanBegins(plan(2))), e.FromAgent(restore(2)), e.Unwound()),
    ),
    "waits for others in vain": (
        *(*TRAINING, e.FromAgent(m.PauseAfterStep(1, 5)), e.StepSafe(5)),
        e.FromAgent(m.PauseAfterStep(0, 0)),
    ),
    "is interrupted as it ends": (*TRAINING, e.PartDone(1, 7, last=True), ABORT),
    "is protected no longer": (*TRAINING, NOT_PROTECTED),
    "is protected no longer, and an epoch ends": (*TRAINING, ABORT, NOT_PROTECTED),
    "goes on with something else": (
        *(*TRAINING, e.PartDone(1, 7, last=True), e.FromAgent(m.Release([7])), NOT_PROTECTED),
    ),
}


# -- a controller meets what schedules seldom bring ------------------------------------------------------


def waiting(**settings: Any) -> ControlPlane:
    """For a node."""
    job = ControlPlane(nodes=2, **settings)
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    job.wait(0.1)
    assert job.phase == "waiting"
    return job


def another_controllers_plan(job: ControlPlane) -> None:
    """A node greets that has begun it."""
    found = job["node0"].plan
    assert found is not None
    job["node0"].plan = replace(found, id="9-other")
    job["node0"].greet()
    assert job.phase == "rebuilding"


def newer_plan_while_it_trains() -> None:
    another_controllers_plan(ControlPlane(nodes=2))


def newer_plan_in_a_recovery() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    lose(job, "node1")
    assert job.phase == "quiescing"
    another_controllers_plan(job)


def newer_plan_while_it_waits() -> None:
    another_controllers_plan(waiting())


def all_begin_anew_while_it_waits() -> None:
    job = waiting(max_restarts=1)
    job["node0"].say(m.Unprotected(0, "it wants none", False))
    assert job.phase == "quiescing"


def the_next_epoch_ends_at_once() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    lose(job, "node1")
    job["node0"].epoch = 9
    job["node0"].beat()
    assert job.phase == "quiescing" and job.controller.cluster.epoch > 9


def nobody_knows_of_the_plan_any_more() -> None:
    job = ControlPlane(nodes=2)
    job.start_controller()
    job["node0"].greet()
    assert job.phase == "rebuilding"
    lose(job, "node0")
    assert job.phase == "forming"
    job.happens(LauncherGone())


def it_ends_while_it_learns() -> None:
    job = ControlPlane(nodes=2)
    job.start_controller()
    job["node0"].greet()
    job.happens(LauncherGone())


def it_ends_in_a_recovery() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    lose(job, "node1")
    job.happens(LauncherGone())


def it_ends_while_it_waits() -> None:
    waiting().happens(LauncherGone())


def what_is_in_memory_is_saved_while_it_waits() -> None:
    job = waiting()
    job["node0"].say(m.Leaving())
    job.wait(0.1)
    assert job.phase == "saving"


MEETINGS = (
    newer_plan_while_it_trains,
    newer_plan_in_a_recovery,
    newer_plan_while_it_waits,
    all_begin_anew_while_it_waits,
    the_next_epoch_ends_at_once,
    nobody_knows_of_the_plan_any_more,
    it_ends_while_it_learns,
    it_ends_in_a_recovery,
    it_ends_while_it_waits,
    what_is_in_memory_is_saved_while_it_waits,
)


def test_each_transition_is_taken() -> None:
    with watched() as taken:
        for events in SCRIPTS.values():
            script(*events)
        for meet in MEETINGS:
            meet()
    kinds = [(simulate, seed) for seed in SEEDS] + [(simulate_hangs, seed) for seed in HANGS]
    with multiprocessing.get_context("fork").Pool(processes()) as pool:
        taken = taken.union(*pool.imap_unordered(of_schedule, kinds, 10))
    dead = [
        f"{machine}: {before.__name__} -> {after.__name__}"
        for machine, table in TABLES.items()
        for before, rows in table.items()
        for after in rows
        if (before, after) not in taken
    ]
    assert not dead, "\n".join(dead)


@pytest.mark.parametrize("machine", TABLES)
def test_each_phase_has_its_row(machine: str) -> None:
    table = TABLES[machine]
    assert {after for rows in table.values() for after in rows} <= table.keys()


def test_what_is_in_no_table_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="no transition leads from Done"):
        follow(phases.TRANSITIONS, phases.Done(0), phases.Running())
