"""How many steps there are between two protected versions: `control.period`, alone and in the controller."""

from __future__ import annotations

import pytest
from core.control.test_controller_machine import ControlPlane, lose, restart, tell

from ft_core.control.period import LOOK, MOST, TRIES, WINDOW, ProtectionPeriod
from ft_core.control.prestart.stop import ASK_AGAIN
from ft_core.errors import ConfigError
from ft_core.protocol.messages import NodePlan, PauseAfterStep, PausedAtStep, SendHeartbeat
from ft_core.settings import Command, Settings


@pytest.mark.parametrize(
    ("every", "passed", "steps", "waited", "copying", "found"),
    [
        (1, 100.0, 100, 9.9, 1.5, None),  # not worth an epoch yet
        (1, 100.0, 50, 50.0, 1.9, 3),  # a step takes 1 s, and copies nearly 2
        (1, 30.0, 10, 20.0, 3.0, 4),
        (1, 900.0, 90, 10.5, 1.0, None),  # they keep up, as a rule: something was slow once
        (4, 100.0, 100, 12.0, 1.0, None),
        (MOST, 100.0, 100, 12.0, 500.0, None),
        (1, 100.0, 100, 99.0, 500.0, MOST),
        (4, WINDOW, 1000, 0.0, 1.0, 2),  # the network is faster by now
        (4, WINDOW, 1000, 0.0, 2.0, None),
        (8, WINDOW - 1, 1000, 0.0, 1.0, None),  # that need not last
        (1, WINDOW, 1000, 0.0, 0.0, None),
    ],
)
def test_what_it_is_to_be(
    every: int, passed: float, steps: int, waited: float, copying: float, found: int | None
) -> None:
    assert ProtectionPeriod()._found(every, passed, steps, waited, copying) == found


def slow_copies(job: ControlPlane, step: int, waited: float, copying: float) -> None:
    """All are at that step by now, and have waited so long."""
    job.all_step(step)
    for agent in job.agents.values():
        agent.step_now, agent.waited, agent.copying = step, waited, copying
        agent.beat()


def waits_for_copies(**settings: object) -> ControlPlane:
    """A job whose steps take a second each, and copies three more: all are asked to stop."""
    job = ControlPlane(nodes=2, spares=1, **settings)
    job.all_step(1)
    job.wait(LOOK)
    slow_copies(job, 1, 0.0, 4.0)
    job.wait(LOOK)
    step = 1
    while not asked(job) and step < 20:
        job.wait(0.5)
        if job.now > LOOK + 4.0 * (step + 1):
            step += 1
            slow_copies(job, step, 3.0 * (step - 1), 4.0)
    return job


def asked(job: ControlPlane) -> list[PauseAfterStep]:
    return [message for message in job["node0"].heard if isinstance(message, PauseAfterStep)]


def test_steps_that_wait_for_copies() -> None:
    """All stop at the end of the same step, and go on from it with another period."""
    job = waits_for_copies()
    assert any(isinstance(message, SendHeartbeat) for message in job["node1"].heard)
    [pause] = asked(job)
    assert pause.step == job["node0"].step_now + 2
    job["node0"].say(PausedAtStep(epoch=1, role=0))
    assert job.phase == "running"
    job["node1"].say(PausedAtStep(epoch=1, role=1))
    [record] = job.records_of("period")
    assert record.more["every"] > 1 and not job.records_of("detected")
    job.all_report()
    plan = job["node0"].plan
    assert plan is not None and plan.every == record.more["every"]
    assert job.controller.cluster.redone == 2 * plan.every - 1


@pytest.mark.parametrize("settings", [{"every": 1}, {"policy": "shrink"}])
def test_who_has_said_how_many_they_are(settings: dict[str, object]) -> None:
    job = waits_for_copies(**settings)
    assert not asked(job) and not job.records_of("period")


def test_an_epoch_that_begins_meanwhile_brings_it_along() -> None:
    job = waits_for_copies()
    lose(job, "node1")
    job.all_report()
    plan = job["node0"].plan
    assert plan is not None and plan.epoch == 2 and plan.every > 1
    assert not job.records_of("period")


def next_plan(job: ControlPlane, lost: str, every: int) -> NodePlan:
    """That of the epoch after the loss of a node, when this number is wanted."""
    job.controller.cluster.every = every
    lose(job, lost)
    job.all_report()
    plan = job["node0"].plan
    assert plan is not None
    return plan


def test_while_steps_are_done_again_it_is_not_less_than_when_they_were_done_first() -> None:
    """Who takes a role over looks for the lines of so many steps in the log of the one before it."""
    job = ControlPlane(nodes=2, spares=3)
    job.all_step(1)
    assert next_plan(job, "node1", every=4).every == 4
    job.all_step(2)
    for agent in job.agents.values():  # three steps later nothing newer is protected
        agent.versions = {role: [1] for role in agent.versions}
        agent.replicas = {segment: [1] for segment in agent.replicas}
        agent.step_now = 4
        agent.beat()
    plan = next_plan(job, "node2", every=1)
    assert plan.version == 1 and plan.every == 4
    job.all_step(5)
    plan = next_plan(job, "node3", every=1)
    assert plan.version == 5 and plan.every == 1, "nothing is done again"


def test_roles_that_do_not_stop_are_not_asked_for_ever() -> None:
    job = waits_for_copies()
    job.wait(3 * TRIES * ASK_AGAIN)
    numbers = [message.epoch for message in asked(job)]
    assert numbers == [1] * TRIES + [0], "the last one says that they need not"
    assert job.controller.cluster.every == 1


def test_a_successor_goes_on_with_it() -> None:
    job = waits_for_copies()
    for name, role in (("node0", 0), ("node1", 1)):
        job[name].say(PausedAtStep(epoch=1, role=role))
    job.all_report()
    before = job["node0"].plan
    assert before is not None and before.every > 1
    restart(job, "node0", "node1", "node2")
    job.wait(0.1)
    tell(job)
    job.wait(0.1)
    assert job.controller.cluster.every == before.every


@pytest.mark.parametrize("every", [0, -2, 1001])
def test_numbers_that_are_none(every: int) -> None:
    with pytest.raises(ConfigError, match="--ft-every"):
        Settings(2, 1, Command("train.py"), every=every).check()


def test_a_script_may_say_what_is_left_open() -> None:
    """`--ft-every auto` is the default, whoever writes it; a number is one."""
    given = {"given": ["every"]}
    assert Settings(2, 1, Command("train.py"), **given).configured({"every": 1}, "the script").every == 1
    with pytest.raises(ConfigError, match="--ft-every 2 of ftrun contradicts the script"):
        Settings(2, 1, Command("train.py"), every=2, **given).configured({"every": 1}, "the script")


def test_it_does_not_go_with_groups_that_leave() -> None:
    with pytest.raises(ConfigError, match="shrink"):
        Settings(2, 1, Command("train.py"), every=2, policy="shrink").check()
    Settings(2, 1, Command("train.py"), every=1, policy="shrink").check()
