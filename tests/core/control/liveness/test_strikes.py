"""A node's record: what counts, for how long, what follows from it, and that a successor knows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from core.control.test_controller_machine import ControlPlane, lose, sent
from failing_jobs import little_memory
from msgspec.structs import replace

from ft_core.cli.flags import parser, settings_of
from ft_core.control.decide import role_placement
from ft_core.control.events import Received
from ft_core.control.liveness.strikes import _KEPT, TRIES, Strikes, of_node
from ft_core.errors import ConfigError
from ft_core.node.workers.oom import OomKiller, own_cgroup
from ft_core.protocol.messages import (
    AskRows,
    Denied,
    FailureRecord,
    Fault,
    Forgive,
    Forgiven,
    KeepStrikes,
    Left,
    NodesStatus,
    RoleLayout,
    Suspect,
    WorkerLost,
)

HOUR = 3600.0


def strike(
    place: str = "a", pid: int = 1, fault: Fault = Fault.CRASHED, step: int = 4, role: int = 0
) -> FailureRecord:
    return FailureRecord(place, 0, role, pid, step, fault, "", 0.0)


def test_strikes_are_forgotten_after_their_time_and_at_once_when_forgiven() -> None:
    strikes = Strikes(3, HOUR)
    for pid in range(3):
        assert strikes.add(strike(pid=pid, step=pid), now=100.0 * pid)
    assert strikes.avoided(200.0) == {"a"} == strikes.avoided(HOUR)
    assert strikes.avoided(HOUR + 1) == set() and len(strikes.against("a", HOUR + 1)) == 2
    assert strikes.forgive("a", HOUR + 1) == 2 and not strikes.against("a", HOUR + 1)
    assert Strikes(0, HOUR).avoided(0.0) == set()


def test_a_successor_has_them_with_their_age() -> None:
    first, second = Strikes(2, HOUR), Strikes(2, HOUR)
    first.add(strike(pid=1), 0.0)
    first.add(strike(pid=2, step=5), 1000.0)
    second.take(first.value(3000.0), now=7.0)  # its own clock
    assert second.avoided(7.0) == {"a"} and second.avoided(7.0 + 700) == set()
    assert not second.add(strike(pid=2, step=5), 8.0), "an agent that tells again tells nothing new"


def test_what_follows_a_role_to_another_node_is_not_the_nodes_fault() -> None:
    strikes = Strikes(2, HOUR)
    strikes.add(strike("a", 1), 0.0)
    strikes.add(strike("a", 2), 1.0)
    assert strikes.avoided(1.0) == {"a"}
    strikes.add(strike("b", 3), 2.0)
    assert not strikes.against("a", 2.0) and not strikes.against("b", 2.0)
    strikes.add(strike("b", 4, role=1), 3.0)
    assert [s.pid for s in strikes.against("b", 3.0)] == [4], "another role's"


def test_there_is_an_end_to_what_is_kept() -> None:
    strikes = Strikes(3, HOUR)
    for pid in range(2 * _KEPT):
        strikes.add(strike(f"node{pid}", pid), float(pid) / 1000)
    assert len(strikes.value(1.0)) == _KEPT == len(strikes.places())
    strikes.add(of_node("x", 1, Fault.NODE), 2 * HOUR)
    assert strikes.places() == {"x"}


@pytest.mark.parametrize(
    ("idle", "placed"),
    [
        ({"a": 1, "b": 1}, "b"),
        ({"a": 1, "b": 0}, "a"),  # there is no other
    ],
)
def test_an_avoided_node_is_used_where_there_is_no_other(idle: dict[str, int], placed: str) -> None:
    assert role_placement.assign({0: "a"}, idle, [0], 1, avoided={"a"}).roles == {0: placed}
    assert role_placement.assign({0: "a"}, {"a": 1, "b": 1}, [0], 1).roles == {0: "a"}


def test_roles_are_placed_on_an_avoided_node_when_the_others_are_full() -> None:
    idle = {"a": 2, "b": 1, "c": 0}
    found = role_placement.assign({0: "x", 1: "x"}, idle, [0, 1], 2, avoided={"a"})
    assert sorted(found.roles.values()) == ["a", "b"] and not found.unplaced


# -- in the controller ---------------------------------------------------------------------------------


def crash(job: ControlPlane, role: int, step: int, fault: Fault = Fault.CRASHED) -> str:
    """Its worker crashes wherever it is. Returns where that was, and lets the job go on."""
    node = job.controller.cluster.places[role]
    job[node].say(replace(job[node].crash(role), step=step, fault=fault))
    job.wait(0.1)
    job.all_report()
    return node


def crashes(job: ControlPlane, *steps: int) -> list[str]:
    """Once in each of these steps, which are done in between."""
    where = []
    for step in steps:
        job.all_step(step)
        where.append(crash(job, 0, step))
    return where


def say_kept(job: ControlPlane, name: str, kept: KeepStrikes) -> None:
    """An agent answers a controller that asks for the state: with these strikes."""
    *hosts, state = job[name].kept()
    for message in (*hosts, replace(state, strikes=kept.strikes)):
        job[name].say(message)


def test_a_node_that_fails_often_is_not_used_while_there_is_another() -> None:
    job = ControlPlane(nodes=2, spares=1)
    assert crashes(job, 1, 2, 3) == ["node0", "node0", "node0"]
    assert job.controller.cluster.places[0] == "node2", "the third time it moves"
    [record] = job.records_of("avoided")
    assert record.more == {"node": "node0"} and "ftctl nodes forgive node0" in record.reason
    job.all_step(4)
    lose(job, "node2")
    job.all_report()
    assert job.phase == "running" and job.controller.cluster.places[0] == "node0", "there is no other"


def test_without_another_it_goes_on_where_it_is() -> None:
    job = ControlPlane(nodes=2)
    assert crashes(job, *range(1, 12)) == 11 * ["node0"]
    assert job.done is None and job.phase == "running"


def test_strikes_are_known_to_a_successor() -> None:
    job = ControlPlane(nodes=2, spares=1)
    crashes(job, 1, 2)
    job.wait(600)
    kept = [message for message in job["node1"].heard if isinstance(message, KeepStrikes)][-1]
    assert [s.place for s in kept.strikes] == ["node0", "node0"]
    job.start_controller()
    for name in job.agents:
        job[name].greet()
    job.wait(0.1)
    say_kept(job, "node1", kept)
    job.wait(0.1)
    assert job.phase == "running" and len(job.controller.cluster.strikes.against("node0", job.now)) == 2
    assert crashes(job, 3) == ["node0"]
    assert job.controller.cluster.places[0] == "node2"
    told = [message for message in job["node2"].heard if isinstance(message, KeepStrikes)][-1]
    assert len(told.strikes) == 3, "and tells the agents, for the next"


def test_ftctl_shows_and_forgives() -> None:
    job = ControlPlane(nodes=2, spares=1)
    crashes(job, 1, 2, 3)
    answer = sent(job.happens(Received(99, AskRows("nodes"))), NodesStatus)[99]
    rows = {row.node: row for row in answer.nodes}
    assert [rows[name].avoided for name in ("node0", "node1", "node2")] == [True, False, False]
    assert [s.fault for s in rows["node0"].strikes] == 3 * [Fault.CRASHED] and not rows["node0"].roles
    assert sent(job.happens(Received(99, Forgive("node0"))), Forgiven)[99].strikes == 3
    assert job.records_of("forgiven")[0].more == {"node": "node0"}
    told = sent(job.wait(0.1), KeepStrikes)
    assert {len(message.strikes) for message in told.values()} == {0}, "a successor is not to know them again"
    assert sent(job.happens(Received(99, Forgive("node9"))), Denied)


def test_a_role_that_fails_wherever_it_is_ends_the_job_with_that_as_the_reason() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    where: list[str] = []
    while job.phase != "saving":
        where.append(crash(job, 0, 1))
    assert len(where) == TRIES + 1 and set(where) == {"node0", "node2"}
    assert f"{TRIES} recoveries in a row without a new step after step 1" in job.said[-1]
    assert "Role 0 has failed in this step on each of the nodes node0, node2" in job.said[-1]


def test_a_user_error_that_is_told_again_to_a_successor_is_no_second_one() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    about = {"exit": "exit code 1", "code": 1, "fault": Fault.EXCEPTION, "step": 1, "signature": "x"}
    lost = WorkerLost(role=0, pid=job["node0"].workers.pop(0), **about)
    job["node0"].say(lost)
    job.wait(0.1)
    kept = [message for message in job["node1"].heard if isinstance(message, KeepStrikes)][-1]
    job.start_controller()
    layout = {"adopted": False, "segments": {job.segment(0): job.held_by(0)}, "initial": 0, "resumes": False}
    job["node0"].greet([RoleLayout(epoch=1, role=0, group=job.group(0), **layout), lost])
    job["node1"].greet()
    job.wait(0.1)
    for name in job.agents:
        say_kept(job, name, kept)
    job.wait(0.1)
    job.all_report()
    assert job.done is None and job.phase == "running"
    job["node0"].say(replace(lost, pid=job["node0"].workers.pop(0)))
    assert job.phase == "saving" and "the same again in the step after version 1" in job.said[-1]


def test_deaths_that_a_successor_hears_of_late_are_as_old_as_they_are() -> None:
    job = ControlPlane(nodes=2, nproc=2, spares=1, strikes=2, strike_minutes=1.0)
    job.all_step(1)
    old = {"exit": "killed by SIGSEGV", "code": -11, "fault": Fault.CRASHED, "step": 1, "age": 70.0}
    lost = [WorkerLost(role=role, pid=job["node0"].workers.pop(role), **old) for role in (0, 1)]
    job.start_controller()
    job["node0"].greet(lost)
    for name in ("node1", "node2"):
        job[name].greet()
    job.wait(0.1)
    say_kept(job, "node0", KeepStrikes([]))
    job.wait(0.1)
    job.all_report()
    assert job.phase == "running" and not job.records_of("avoided")
    assert job.controller.cluster.places[0] == job.controller.cluster.places[1] == "node0"


def raises(job: ControlPlane, step: int, signature: str, fault: Fault = Fault.EXCEPTION) -> None:
    """An exception of role 0's."""
    about = {"exit": "exit code 1", "code": 1, "fault": fault, "step": step, "signature": signature}
    job["node0"].say(WorkerLost(role=0, pid=job["node0"].workers.pop(0), **about))
    if job.phase != "saving":
        job.all_report()


def test_errors_of_two_steps_in_turn_are_not_the_same_until_one_comes_again() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(4)
    raises(job, 4, "one")
    job.all_step(5)
    raises(job, 5, "other")
    assert job.done is None
    raises(job, 4, "one")
    assert job.phase == "saving" and "the same again in the step after version 4" in job.said[-1]


def test_an_error_that_a_device_made_a_script_raise_is_not_the_scripts_own() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(4)
    raises(job, 4, "one", Fault.DEVICE)
    raises(job, 4, "one")
    assert job.phase == "running"
    raises(job, 4, "one")
    assert job.phase == "saving" and "the same again in the step after version 4" in job.said[-1]


def test_a_node_that_was_not_lost_after_all_has_no_strike() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    agent = job["node1"]
    lose(job, "node1")
    assert len(job.controller.cluster.strikes.against("node1", job.now)) == 1
    job.agents["node1"] = agent
    agent.greet()
    assert not job.controller.cluster.strikes.against("node1", job.now)


def test_a_node_that_ends_because_it_was_told_to_has_no_strike() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    job["node1"].say(Left())
    job.wait(0.2)
    assert job.records_of("detected") and not job.controller.cluster.strikes.against("node1", job.now)


# -- flags, and the kernel's word ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [("3/60", (3, 60.0)), ("5/0.5", (5, 0.5)), ("0", (0, 60.0)), ("3", None), ("3/0", None)],
)
def test_the_flag(text: str, found: tuple[int, float] | None, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    args = parser().parse_args(["--ft-strikes", text, str(script)])
    if found is None:
        with pytest.raises(ConfigError, match="give N/MINUTES"):
            settings_of(args)
        return
    settings = settings_of(args)
    assert (settings.strikes, settings.strike_minutes) == found


EATER = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
eaten = []
while True: eaten.append(b"." * (1 << 24))
"""


def test_the_oom_killer_is_known_when_it_comes() -> None:
    with little_memory() as cgroup:
        if cgroup is None:
            pytest.skip("no cgroup can be made here")
        by_count, by_log = OomKiller(cgroup, "/nowhere"), OomKiller()
        victim = subprocess.Popen([sys.executable, "-c", EATER, str(cgroup)])
        assert victim.wait(60) == -signal.SIGKILL
        assert not os.access("/dev/kmsg", os.R_OK) or by_log.ended(victim.pid)
        assert by_count.ended(victim.pid) and not by_count.ended(victim.pid)


def test_the_oom_killer_is_known_by_the_cgroups_count(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\nhigh 0\noom 3\noom_kill 3\noom_group_kill 0\n")
    killer = OomKiller(tmp_path, str(tmp_path / "none"))
    assert not killer.ended(7)
    events.write_text("oom 5\noom_kill 5\n")
    assert killer.ended(7) and killer.ended(8) and not killer.ended(9)
    assert not OomKiller(tmp_path / "elsewhere", str(tmp_path / "none")).ended(7)


def test_the_oom_killer_is_known_by_the_kernels_log(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("3,1,1,-;Out of memory: Killed process 6 (python)\n")
    killer = OomKiller(tmp_path, str(log))
    assert not killer.ended(6), "that was before"
    with log.open("a") as file:
        file.write("3,2,2,-;Memory cgroup out of memory: Killed process 7 (python) total-vm:1kB\n")
        file.write("3,3,2,-;Memory cgroup out of memory: Killed process 8 (python) total-vm:1kB\n")
    assert killer.ended(8) and killer.ended(7) and not killer.ended(9)


def test_the_cgroup_of_a_process(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    for line, where in (("0::/job/1\n", "job/1"), ("5:cpu:/x\n4:memory:/job/1\n", "memory/job/1")):
        (tmp_path / where).mkdir(parents=True)
        membership.write_text(line)
        assert own_cgroup(membership, tmp_path) == tmp_path / where
    membership.write_text("0::/elsewhere\n")
    assert own_cgroup(membership, tmp_path) == tmp_path


def test_links_that_fail_again_count_against_the_node() -> None:
    """Nobody has to be replaced for one: all open their communicators anew. Said again, it is the same."""
    job = ControlPlane(nodes=2)
    job.all_step(1)
    counted = []
    for _ in range(3):
        epoch = job.controller.cluster.epoch
        for _ in range(2):
            job["node1"].say(Suspect(epoch=epoch, role=1, reason="COMM_ERROR", by_link=True))
        counted.append(len(job.controller.cluster.strikes.against("node1", job.now)))
        job.controller.cluster.epoch = epoch + 1  # the next one, in which it fails again
    assert counted == [0, 1, 2]
    assert {strike.fault for strike in job.controller.cluster.strikes.against("node1", job.now)} == {
        Fault.LINK
    }
