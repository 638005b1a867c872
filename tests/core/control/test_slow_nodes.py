"""What becomes of a role that is slow: `control.slow_nodes`, in the controller's machine."""

from __future__ import annotations

from typing import Any

import pytest
from core.control.prestart.test_drain import commit, known, start, stop
from core.control.test_controller_machine import ControlPlane
from msgspec.structs import replace

from ft_core.control.events import Received, Tick
from ft_core.control.liveness.stragglers import LOOKS
from ft_core.control.liveness.strikes import SLOW_AGAIN
from ft_core.errors import ConfigError
from ft_core.protocol.messages import (
    AskStatus,
    DeviceFinding,
    Forgive,
    JobStatus,
    KeepStrikes,
    Shutdown,
    Symptom,
)
from ft_core.settings import Settings

NAMED = LOOKS + 3
"""Seconds."""


def training(nodes: int = 2, spares: int = 1, **settings: Any) -> ControlPlane:
    """All do a step each half second, and each its part of it as fast."""
    job = ControlPlane(nodes=nodes, spares=spares, groups=nodes, **settings)
    job.all_step(1)
    for agent in job.agents.values():
        agent.own_s = 0.3
    return job


def train(job: ControlPlane, seconds: float) -> None:
    end = job.now + seconds
    while job.now < end:
        for agent in job.agents.values():
            agent.step_now += 1
        job.wait(0.5)


def move(job: ControlPlane, role: int, off: str, to: str) -> None:
    """It starts there, and all change over between two steps."""
    start(job, role, on=to)
    job[to].step_now, job[to].own_s = job[off].step_now, 0.3
    stop(job, *job.roles)
    job.all_report()
    job.all_step(job[off].step_now + 1)
    job.wait(0.1)
    known(job)
    commit(job, job[off].step_now + 1)
    job.wait(1)


def named(job: ControlPlane) -> list[tuple[int, str, str, bool]]:
    return [
        (record.roles[0], record.more["node"], record.more["part"], record.more["over"])
        for record in job.records_of("straggler")
    ]


def test_who_is_slow_is_named_once_and_once_when_it_is_over() -> None:
    job = training()
    train(job, 5)
    job["node1"].own_s = 0.36
    train(job, NAMED)
    assert named(job) == [(1, "node1", "compute", False)]
    assert any("role 1 on node1 is slow: it computes longer" in said for said in job.said)
    effects = job.happens(Received(next(job.peers), AskStatus()))
    [status] = [e.message for e in effects if isinstance(getattr(e, "message", None), JobStatus)]
    assert [(slow.role, slow.node, slow.part, slow.score) for slow in status.slow] == [
        (1, "node1", "compute", 1.2)
    ]
    train(job, 60)
    assert len(named(job)) == 1
    job["node1"].own_s = 0.3
    train(job, NAMED)
    assert named(job)[1:] == [(1, "node1", "compute", True)]
    assert not job.records_of("draining") and not job.records_of("not_drained")


def test_nobody_looks_where_it_is_not_wanted() -> None:
    job = training(straggler="off")
    job["node1"].own_s = 3.0
    train(job, 2 * NAMED)
    assert not named(job) and not job.controller.view.numbers(job.now, job.now).stragglers
    with pytest.raises(ConfigError, match="--ft-straggler 'often': give off, report, replace"):
        Settings(1, 1, job.settings.command, replicas=0, straggler="often").check()


def test_its_node_is_taken_out_between_two_steps() -> None:
    job = training(straggler="replace")
    job["node1"].data_s = 0.2
    train(job, NAMED)
    assert named(job) == [(1, "node1", "data", False)]
    [begun] = job.records_of("draining")
    assert begun.more == {"node": "node1"} and "it waits longer for its data" in begun.reason
    [avoided] = job.records_of("avoided")
    assert "node node1 is taken out, as role 1 was slow there" in avoided.reason
    assert any(isinstance(message, KeepStrikes) for message in job["node0"].heard)
    move(job, 1, off="node1", to="node2")
    assert job["node1"].heard[-1] == Shutdown(code=0, drained=True)
    assert job.records_of("moving") and not job.records_of("detected")
    assert named(job)[1:] == [(1, "node1", "data", True)]


def test_a_role_that_is_slow_wherever_it_is_moves_once_an_hour() -> None:
    job = training(spares=2, straggler="replace")
    job["node1"].own_s = 0.6
    train(job, NAMED)
    move(job, 1, off="node1", to="node2")
    del job.agents["node1"]
    job["node2"].own_s = 0.6
    train(job, 2 * NAMED)
    assert len(job.records_of("draining")) == 1
    [stays] = job.records_of("not_drained")
    assert (
        stays.more == {"node": "node2"}
        and "node1 was taken out for a slow role within the last hour" in stays.reason
    )
    train(job, SLOW_AGAIN)
    assert len(job.records_of("draining")) == 2


def test_another_controller_knows_who_was_moved() -> None:
    job = training(spares=2, straggler="replace")
    job["node1"].own_s = 0.6
    train(job, NAMED)
    move(job, 1, off="node1", to="node2")
    del job.agents["node1"]
    job["node2"].own_s = 0.6
    job.start_controller()
    for agent in job.agents.values():
        agent.greet()
    [kept] = [message for message in job["node0"].heard if isinstance(message, KeepStrikes)][-1:]
    *hosts, state = job["node0"].kept()
    for message in (*hosts, replace(state, strikes=kept.strikes)):
        job["node0"].say(message)
    job.wait(3.0)
    job.all_step(job["node0"].step_now)
    train(job, 2 * NAMED)
    assert job.phase == "running" and named(job)[-1] == (1, "node2", "compute", False)
    assert len(job.records_of("draining")) == 1


@pytest.mark.parametrize("unfit", ["none", "avoided", "slow"])
def test_nobody_moves_to_where_it_is_no_better(unfit: str) -> None:
    job = training(spares=1 if unfit == "avoided" else 0, nodes=4, straggler="replace")
    if unfit == "avoided":
        job["node4"].say(DeviceFinding(Symptom.XID, 79, 0, "", ""))
    if unfit == "slow":
        job["node2"].own_s = 0.9
    job["node1"].own_s = 0.6
    train(job, NAMED)
    assert not job.records_of("draining")
    stay = {record.more["node"] for record in job.records_of("not_drained")}
    assert stay == (set() if unfit == "slow" else {"node1"})  # where many are slow nobody is
    for _ in range(200):
        job.happens(Tick())
    train(job, 30)
    assert len(job.records_of("not_drained")) == len(stay), "said once"
    if unfit == "none":  # until there is room
        job.join("node9")
        job["node9"].beat()
        train(job, 2)
        assert job.records_of("draining")


def test_who_was_looked_at_may_be_slow_again() -> None:
    job = training(spares=1, straggler="replace")
    job["node1"].own_s = 0.6
    train(job, NAMED)
    assert job.controller.cluster.avoided(job.now) == {"node1"}
    job.happens(Received(next(job.peers), Forgive("node1")))
    assert not job.controller.cluster.avoided(job.now)


def test_nobody_is_looked_at_while_roles_start_beside_them() -> None:
    job = training(straggler="replace")
    job["node1"].own_s = 0.6
    train(job, NAMED)
    assert len(named(job)) == 1 and job.controller._recovery.prestart.attempt is not None
    job["node0"].own_s = 3.0
    train(job, NAMED)
    assert len(named(job)) == 1
