"""What the controller tries before a job ends, rung after rung: its machine, without a process."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import pytest
from core.control.liveness.test_hang_detector import Hanging
from core.control.test_controller_machine import ControlPlane, lose, lose_all
from core.control.test_controller_machine import tell as tell_plan
from msgspec.structs import replace

from ft_core.control.decide.ladder import Escalation, Rung, next_rung
from ft_core.control.events import End, Terminate
from ft_core.control.liveness import strikes
from ft_core.protocol import messages as m
from ft_core.protocol.flight import FlightLog, FlightRecord

NOTHING: frozenset[int] = frozenset()
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 1\n    f()\nValueError: no\n'


def raises(job: ControlPlane, role: int, fault: m.Fault = m.Fault.EXCEPTION, step: int = 1) -> None:
    """Its worker ends of an error of its script's; whoever is told to end because of that does."""
    name = job.controller.cluster.places[role]
    pid = job[name].workers.pop(role)
    about = {"exit": "exit code 3: ValueError", "code": 3, "traceback": TRACEBACK}
    job[name].say(m.WorkerLost(role, pid, fault=fault, step=step, signature="ValueError", **about))
    ends(job)


def ends(job: ControlPlane) -> None:
    """Workers that are told to, and what their agents say; then all report."""
    for agent in job.agents.values():
        for order in [each for each in agent.heard if isinstance(each, m.KillWorker)]:
            agent.heard.remove(order)
            if (pid := agent.workers.pop(order.role, None)) is not None:
                about = {"exit": "killed", "code": -9, "fault": m.Fault.TERMINATED}
                agent.say(m.WorkerLost(order.role, pid, **about))
    if job.done is None:
        job.all_report()


def rungs(job: ControlPlane) -> list[str]:
    return [record.more["rung"] for record in job.records_of("begins_anew")]


def began(job: ControlPlane) -> tuple[Any, ...]:
    """Version, origin and newcomers of the newest plan."""
    decided = job.records_of("decided")[-1]
    return decided.more["version"], decided.more["origin"], sorted(decided.roles)


@pytest.mark.parametrize(
    ("level", "limit", "about", "expected"),
    [
        (0, 3, {}, Escalation(Rung.ALL, 2)),
        (0, 3, {"incompatible": frozenset({1})}, Escalation(Rung.SOME, 1, frozenset({1}))),
        (1, 3, {"incompatible": frozenset({1})}, Escalation(Rung.ALL, 2)),
        (0, 3, {"memory": False, "incompatible": frozenset({1})}, Escalation(Rung.RESTART, 3)),
        (2, 3, {}, Escalation(Rung.RESTART, 3)),
        (2, 3, {"diverged": True}, Escalation(Rung.RESTART, 3)),
        (3, 3, {"diverged": True}, Escalation(Rung.RESTART, 4, skip_durable=True)),
        (0, 3, {"memory": False, "skip_durable": True}, Escalation(Rung.RESTART, 3, skip_durable=True)),
        (4, 3, {}, Escalation(Rung.RESTART, 5)),
        (5, 3, {}, None),
        (2, 1, {}, Escalation(Rung.RESTART, 3)),
        (0, 0, {}, None),
    ],
)
def test_rungs(level: int, limit: int, about: dict[str, Any], expected: Escalation | None) -> None:
    about = {"incompatible": NOTHING, "memory": True, "diverged": False} | about
    assert next_rung(level, limit, **about) == expected


def test_an_error_that_comes_again() -> None:
    """In place, from memory, from the script's beginning, so often and no more."""
    job = ControlPlane(nodes=2, max_restarts=2)
    job.all_step(1)
    raises(job, 1)
    assert began(job) == (1, "memory", [1]) and not rungs(job)
    raises(job, 1)
    assert began(job) == (1, "memory", [0, 1]) and rungs(job) == ["all"]
    for restart in (1, 2):
        raises(job, 1)
        assert began(job) == (None, "initial", [0, 1]) and rungs(job) == ["all", *restart * ["restart"]]
        assert job["node0"].plan is not None
        assert job["node0"].plan.restart_epoch == job.controller.cluster.epoch
        job.all_step(1)
    raises(job, 1)
    assert job.phase == "saving"
    first, *others = job.said[-1].splitlines()
    expected = r"ftrun: the job stops: after 2 restarts in a row without a new step: worker \d+ of role 1 on "
    assert re.match(expected, first), first
    assert others == ["ValueError: no", "Its traceback is in /job/logs/role-1/stderr.log"]
    assert job.ends() == End(3)
    assert TRACEBACK in job.records_of("stopped")[0].reason


def test_a_new_step_begins_the_count_again() -> None:
    job = ControlPlane(nodes=2, max_restarts=1)
    job.all_step(1)
    for version in (1, 2, 3):
        for _ in range(2):
            raises(job, 1, step=version)
        raises(job, 1, step=version)
        assert job.done is None and rungs(job)[-1] == "restart"
        for step in range(1, version + 2):
            job.all_step(step)
    assert rungs(job) == 3 * ["all", "restart"]


def test_a_step_that_was_done_before_a_restart_is_no_progress() -> None:
    job = ControlPlane(nodes=2, max_restarts=1)
    for version in (1, 2, 3):
        job.all_step(version)
    for _ in range(3):
        raises(job, 1, step=3)
    assert rungs(job) == ["all", "restart"]
    for version in (1, 2, 3):
        job.all_step(version)
    raises(job, 1, step=3)
    assert job.ends() == End(3)


def test_failures_on_the_way_back_are_no_failures_in_vain() -> None:
    """They were counted against the step that had been reached before the restart."""
    job = ControlPlane(nodes=2, max_restarts=1)
    for version in range(1, 20):
        job.all_step(version)
    for _ in range(3):
        raises(job, 1, step=19)
    for version in range(1, 12):
        job.all_step(version)
        job["node0"].say(job["node0"].crash(0))
        job.all_report()
    assert job.done is None and rungs(job) == ["all", "restart"]


def test_who_is_told_to_end_has_not_failed() -> None:
    job = ControlPlane(nodes=2, nproc=2, max_restarts=1)
    job.all_step(1)
    for _ in range(2):
        raises(job, 1)
    assert [record.roles for record in job.records_of("detected")] == [(1,), (1,)]
    assert {strike.role for strike in job.controller.cluster.strikes.value(job.now)} == {1}


def test_the_same_of_all_roles_climbs_one_rung() -> None:
    job = ControlPlane(nodes=2, max_restarts=3)
    job.all_step(1)
    for _ in range(2):
        lost = []
        for role, name in job.controller.cluster.places.items():
            about = {"exit": "exit code 1", "code": 1, "fault": m.Fault.EXCEPTION, "signature": "E"}
            lost.append((name, m.WorkerLost(role, job[name].workers.pop(role), step=1, **about)))
        for name, message in lost:
            job[name].say(message)
        ends(job)
    assert rungs(job) == ["all"] and job.phase == "running"


def test_a_controller_that_is_restarted_goes_on_where_it_was_on_the_ladder() -> None:
    job = ControlPlane(nodes=2, max_restarts=1)
    job.all_step(1)
    for _ in range(3):
        raises(job, 1)
    assert rungs(job) == ["all", "restart"]
    job.all_step(1)
    job.start_controller()
    for agent in job.agents.values():
        agent.greet()
    for answer in job["node0"].kept():
        job["node0"].say(answer)
    job.wait(3)
    assert job.phase == "running"
    raises(job, 1)  # it was not told of the strikes
    raises(job, 1)
    assert job.ends() == End(3)


def test_an_order_to_end_that_was_lost_is_given_again() -> None:
    job = ControlPlane(nodes=2, max_restarts=1)
    job.all_step(1)
    raises(job, 1)
    pid = job["node1"].workers.pop(1)
    about = {"exit": "exit code 3", "code": 3, "fault": m.Fault.EXCEPTION, "step": 1}
    job["node1"].say(m.WorkerLost(1, pid, signature="ValueError", **about))
    job["node0"].heard.clear(), job["node1"].heard.clear()
    job.all_report()
    assert job.phase == "quiescing", "a worker lives that is to begin anew"
    job["node0"].hangs_up()
    job["node0"].greet()
    assert m.KillWorker(role=0) in job["node0"].heard
    ends(job)
    assert began(job) == (1, "memory", [0, 1])


def test_a_durable_checkpoint_is_gone_on_from() -> None:
    job = ControlPlane(nodes=2, max_restarts=2, durable_dir="/durable", durable_interval=1)
    tell(job, {})
    for version in (1, 2, 3):
        job.all_step(version)
    checkpoints = {2: "step-00000002-00001-1-2"}
    for _ in range(2):
        raises(job, 1, step=3)
    raises(job, 1, step=3)
    tell(job, checkpoints)
    assert began(job) == (2, "durable", [0, 1])
    raises(job, 1, m.Fault.DIVERGED, step=-1)
    tell(job, checkpoints)
    assert began(job) == (None, "initial", [0, 1]), "it cannot go on from that"
    assert job.records_of("starting_over")


def tell(job: ControlPlane, found: dict[int, str]) -> None:
    """Agents say which durable checkpoints there are."""
    for agent in job.agents.values():
        for asked in [each for each in agent.heard if isinstance(each, m.ListDurable)]:
            agent.heard.remove(asked)
            agent.say(m.DurableNames(id=asked.id, names=list(found.values()), error=""))


@pytest.mark.parametrize(
    "fault", [m.Fault.EXITED, m.Fault.LEFT, m.Fault.DIVERGED, m.Fault.MEMORY, m.Fault.EXCEPTION], ids=str
)
@pytest.mark.parametrize("trained", [True, False])
def test_no_error_ends_a_job_the_first_time(fault: m.Fault, trained: bool) -> None:
    job = ControlPlane(nodes=2, max_restarts=1)
    if trained:
        job.all_step(1)
    raises(job, 1, fault, step=1 if trained else -1)
    assert job.phase == "running" and job.done is None


@pytest.mark.parametrize("fault", sorted(strikes.FINAL), ids=str)
def test_what_nobody_wants_to_be_tried_again(fault: m.Fault) -> None:
    job = ControlPlane(nodes=2, max_restarts=3)
    job.all_step(1)
    raises(job, 1, fault)
    assert job.ends() == End(3) and not rungs(job)


def test_a_start_that_fails_alike_again_and_again() -> None:
    """Of a successor: on its own node twice, and elsewhere once."""
    job = ControlPlane(nodes=2, spares=1, strikes=2, max_restarts=1)
    job.all_step(1)
    job["node1"].say(job["node1"].crash(1))
    job.all_report()
    for _ in range(strikes.ALIKE):
        raises(job, 1, step=-1)
        assert not rungs(job)
    raises(job, 1, step=-1)
    assert rungs(job) == ["all"] and began(job) == (1, "memory", [0, 1])
    assert len({strike.place for strike in job.controller.cluster.strikes.value(job.now)}) == 2


def test_recoveries_in_vain() -> None:
    job = ControlPlane(nodes=2, max_restarts=1)
    job.all_step(1)
    for _ in range(strikes.TRIES + 1):
        assert not rungs(job)
        job["node0"].say(job["node0"].crash(0))
        job.all_report()
    ends(job)
    assert rungs(job) == ["all"] and began(job) == (1, "memory", [0, 1])
    assert "8 recoveries in a row without a new step" in job.records_of("begins_anew")[0].reason


@pytest.mark.parametrize("lost", [lambda job: lose_both(job), lose_all], ids=["with", "without a word"])
def test_memory_is_lost(lost: Callable[[ControlPlane], None]) -> None:
    """There is nothing to go on from but what the script begins with: it is said, and done."""
    job = ControlPlane(nodes=2, max_restarts=1)
    job.all_step(1)
    lost(job)
    assert job.done is None and job.phase == "running"
    assert began(job)[:2] == (None, "initial") and job.records_of("starting_over")


def lose_both(job: ControlPlane) -> None:
    for name in ("node0", "node1"):
        job.agents.pop(name).hangs_up()
    for name in ("node2", "node3"):
        job.join(name)
    for _ in range(3):  # it is waited for them, then there is another epoch
        job.wait(12)
        job.all_report()


def test_roles_that_never_meet_again_begin_anew_at_once() -> None:
    """It is proven that they do different things, not which of them is right: nobody waits ten minutes."""
    job = Different(max_restarts=1)
    job.train()
    job.pass_(20)
    assert rungs(job) == ["some"] and job.now < 30
    ends(job)
    assert began(job) == (1, "memory", [0, 1])


def test_without_restarts_they_are_waited_for_as_long_as_any_hang() -> None:
    job = Different(hang_limit=60)
    job.train()
    job.pass_(50)
    assert not rungs(job) and job.done is None
    job.pass_(30)
    assert job.phase == "saving" and job.ends() == End(1)


class Different(Hanging):
    """Of three roles two do what nobody has ever done, each something else; the third waits in neither."""

    def log(self, role: int, closely: Collection[int] = ()) -> Any:
        found = super().log(role, closely)
        if role == 2:
            return found
        now = int((self.now + 100) * 10**9)
        kind = ("all_reduce", "broadcast")[role]
        since = int((100 + self.since) * 10**9)
        mine = FlightRecord(0, 7, kind, 64, "float32", -1, since, 0)
        kept = [record for record in found.records if record.number != 7]
        return FlightLog(
            role, found.epoch, 1, now, "S", False, found.groups, (*kept, mine), found.moved, False
        )


def test_a_job_that_is_told_to_end_climbs_no_ladder() -> None:
    job = ControlPlane(nodes=2, max_restarts=3)
    job.all_step(1)
    job.happens(Terminate())
    raises(job, 1, m.Fault.EXITED)
    assert job.ends() == End(3) and not rungs(job)


def test_a_script_without_fault_tolerance_is_started_again() -> None:
    job = ControlPlane(nodes=2, max_restarts=1)
    job["node0"].say(m.Unprotected(role=0, reason="it is plain", so_far=False))
    job["node0"].say(job["node0"].crash(0))
    ends(job)
    assert rungs(job) == ["restart"] and began(job) == (None, "initial", [0, 1])
    job["node0"].say(m.Unprotected(role=0, reason="it is plain", so_far=False))
    lose(job, "node1")
    assert job.done == End(1) and "the job is not protected: it is plain" in job.said[-1]


def leaves(role: int) -> m.Unprotected:
    return m.Unprotected(role, reason="it does something else", so_far=False)


def test_a_script_that_goes_on_with_something_else_begins_with_what_it_has_saved() -> None:
    """It has trained: neither memory nor a durable checkpoint has what it does now."""
    job = ControlPlane(nodes=2, max_restarts=1, durable_dir="/durable", durable_interval=2)
    tell(job, {})
    job.all_step(5)
    job["node0"].say(leaves(0))
    job["node0"].say(job["node0"].crash(0))
    job["node1"].say(leaves(1))  # before it hears that it is to end
    ends(job)
    assert rungs(job) == ["restart"] and began(job) == (None, "initial", [0, 1])
    assert not job.controller.view.numbers(0.0, 0.0).unprotected


def test_what_is_said_again_of_workers_that_were_replaced_counts_no_more() -> None:
    """Their agent has yet to begin the plan: it repeats what it had said before."""
    job = ControlPlane(nodes=2, max_restarts=3)
    job.all_step(5)
    lost = replace(job["node1"].crash(1), step=5, epoch=1)
    job["node0"].say(replace(leaves(0), epoch=1))
    job["node1"].say(lost)
    ends(job)
    assert rungs(job) == ["restart"]
    for again in (replace(leaves(0), epoch=1), m.Finished(0, epoch=1)):
        job["node0"].greet([again])
    assert not job.controller.view.numbers(0.0, 0.0).unprotected
    assert not job.controller._recovery.completion.finished
    job.start_controller()
    job["node0"].greet([replace(leaves(0), epoch=1)])
    job["node1"].greet([lost])
    job.wait(0.1)
    tell_plan(job)
    job.wait(0.2)
    assert job.phase == "running" and len(job.records_of("detected")) == 1
    job["node0"].say(replace(leaves(0), epoch=job.controller.cluster.epoch))
    assert job.controller.view.numbers(0.0, 0.0).unprotected


def test_a_script_goes_on_with_something_else_as_an_epoch_ends() -> None:
    """The one that has takes part in no other epoch: nobody waits for it."""
    job = ControlPlane(nodes=2, max_restarts=1)
    job.all_step(5)
    job["node0"].say(job["node0"].crash(0))
    assert job.phase == "quiescing" and not rungs(job)
    job["node1"].say(leaves(1))
    ends(job)
    assert rungs(job) == ["restart"] and began(job) == (None, "initial", [0, 1])
