"""Who is silent is not dead at once: pauses of the controller and of nodes, and of nodes given up."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from core.fleet import Fleet, Node, play
from core.plans import plan_of
from core.real_agent import RealAgent

from ft_core.process.awake import AwakeClock
from ft_core.protocol import messages as m
from ft_core.settings import Command, Settings, unique

SHORT = {"heartbeat": 0.1, "heartbeats_missed": 5}
"""A limit of silence of half a second."""


def lost(fleet: Fleet) -> list[str]:
    """What the controller has said of nodes that it holds for lost."""
    events = [e for e in fleet.events() if e["event"] == "spare_lost" or " lost: " in e["reason"]]
    return [e["reason"] for e in events]


def test_the_clock_counts_no_more_than_its_bound_between_two_ticks():
    times = iter([100.0, 100.05, 100.1, 163.0, 163.04, 200.0])
    clock = AwakeClock(0.1, lambda: next(times))
    assert [round(clock.tick(), 3) for _ in range(5)] == [0.05, 0.1, 0.2, 0.24, 0.34]
    assert clock.now == pytest.approx(0.34)


def test_a_pause_of_seconds_is_within_the_limit_of_silence():
    settings = Settings(2, 1, Command("train.py"))
    assert settings.silence_limit == 10
    assert Settings(2, 1, Command("train.py"), heartbeat=1.5).silence_limit == 30


def test_a_controller_that_was_stopped_holds_nobody_for_lost(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.stop_controller()
        await fleet.start_controller(process=True)
        await fleet.event("resumed")
        assert fleet._process is not None
        fleet._process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(5)
        fleet._process.send_signal(signal.SIGCONT)
        fleet["node0"].crash(0)
        assert (await fleet.event("decided", 2))["moved"] == {"0": "node0"}
        assert not lost(fleet)

    # A limit of four seconds: the nodes are in this process, which the machine may stall for less.
    play(test, tmp_path / "job", nodes=8, heartbeat=0.4, heartbeats_missed=10)


def test_a_controller_that_was_held_up_holds_nobody_for_lost(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        time.sleep(1)  # in the controller's own loop; the beats that ought to come wait as well
        fleet["node0"].crash(0)
        assert (await fleet.event("decided", 2))["moved"] == {"0": "node0"}
        assert not lost(fleet)

    play(test, tmp_path / "job", nodes=8, **SHORT)


def test_nodes_that_pause_for_less_than_the_limit_are_not_lost_and_one_that_is_silent_is(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        for name in ("node0", "node1", "node2"):
            fleet[name].pause()
        await asyncio.sleep(0.8)  # as 4 s to the default
        for name in ("node0", "node1"):
            fleet[name].go_on()
        await fleet.event("detected")
        assert lost(fleet) == ["node node2 lost: no heartbeat for 2.0 s"]
        await fleet.event("resumed", 2)
        assert len(fleet.events("detected")) == 1

    play(test, tmp_path / "job", nodes=3, spares=1)


def test_a_node_that_was_replaced_comes_back_as_a_spare(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node1"].pause()
        assert (await fleet.event("decided", 2))["moved"] == {"1": "node2"}
        await fleet.event("resumed", 2)
        old = fleet["node1"]
        said = len(old.sent)
        old.go_on()
        name = (await fleet.event("joined", 4))["node"]
        assert name.startswith("node1+") and old.killed
        assert {type(message) for message in old.sent[said:]} <= {m.Heartbeat, m.AgentHello}
        fleet["node2"].die()
        decided = await fleet.event("decided", 3)
        assert decided["moved"] == {"1": name} and fleet[name].domain == "node1"
        await fleet.event("resumed", 3)
        plan = fleet[name].plan
        assert plan is not None and plan.sources[1][fleet.segment(1)] == ["node0"]

    play(test, tmp_path / "job", nodes=2, spares=1, **SHORT)


def test_a_node_that_nobody_has_replaced_goes_on_where_it_was(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        worker = fleet["node1"].worker(1).pid
        fleet["node1"].pause()
        await fleet.event("waiting")
        fleet["node1"].go_on()
        decided = await fleet.event("decided", 2)
        assert decided["roles"] == [] and decided["moved"] == {}
        await fleet.event("resumed", 2)
        assert fleet["node1"].worker(1).pid == worker

    play(test, tmp_path / "job", nodes=2, **SHORT)


def test_a_group_that_was_given_up_comes_back(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node1"].pause()
        await fleet.event("left")
        await fleet.event("resumed", 2)
        fleet["node1"].go_on()
        assert (await fleet.event("given_up"))["node"] == "node1"
        assert (await fleet.event("returned"))["roles"] == [1]
        await fleet.event("resumed", 3)

    play(test, tmp_path / "job", nodes=2, groups=2, policy="shrink", **SHORT)


def test_a_node_given_up_ends_all_that_it_has_started_at_whatever_depth():
    script = """
import os, subprocess
from ft_core.node.workers import orphans
orphans.adopt()
deep = r'setsid sh -c "setsid sleep 1000 & echo \\$!; sleep 1000" & sleep 1000'
child = subprocess.Popen(["sh", "-c", deep], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), orphans.end_all(20), orphans._children(os.getpid()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    *pids, ended, left = done.stdout.split(maxsplit=3)
    assert (ended, left.strip()) == ("True", "set()"), done.stderr
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_another_process_on_the_machine_of_a_lost_node_joins(tmp_path: Path):
    """A machine that was repaired, on which `ftrun` is started again with the same --node-rank."""

    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node1"].die()
        await fleet.event("waiting")
        again = fleet.join(unique("node1"), 1, "node1")
        assert (await fleet.event("decided", 2))["moved"] == {"1": again.name}
        await fleet.event("resumed", 2)

    play(test, tmp_path / "job", nodes=2, **SHORT)


def test_a_node_that_was_replaced_meets_a_restarted_controller_before_the_others(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node1"].pause()
        await fleet.event("resumed", 2)
        await fleet.stop_controller()
        others = [fleet["node0"], fleet["node2"]]
        for node in others:
            node.pause()
        await fleet.start_controller()
        fleet["node1"].go_on()
        await fleet.event("joined", 4)
        for node in others:
            node.go_on()
        await fleet.event("controller_restarted")
        await fleet.until(lambda: fleet["node1"].killed)
        assert (await fleet.event("joined", 7))["node"].startswith("node1+")
        assert [event["epoch"] for event in fleet.events("decided")] == [1, 2]

    play(test, tmp_path / "job", nodes=2, spares=1, **SHORT)


def test_a_node_that_comes_when_the_job_has_just_ended_is_told(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        late, over = fleet.join("late"), asyncio.Event()
        late.delay(m.AgentHello, over.wait())
        await fleet.until(lambda: late.connections)
        for role in range(2):
            fleet[f"node{role}"].complete(role)
        assert await fleet.ended() == 0
        over.set()
        await fleet.until(lambda: late.code is not None)
        assert late.code == 0 and len(fleet.events("joined")) == 2

    play(test, tmp_path / "job", nodes=2)


def test_a_node_without_a_controller_leaves_in_the_end_unless_somebody_trains_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Whoever was given up when the job ended, or joins a job that is over, would wait for ever."""

    async def test(fleet: Fleet) -> None:
        node, spare = (RealAgent(fleet.settings, fleet.job_dir, f"agent{rank}", rank) for rank in (0, -1))
        node.serve()
        spare.serve()
        await fleet.event("resumed")
        await fleet.stop_controller()
        monkeypatch.setattr("ft_core.node.link.outage.MISSED", 0.1)
        monkeypatch.setattr("ft_core.node.link.outage.ABANDONED", 0.3)
        assert await asyncio.wait_for(spare._done, 60) == 1
        assert "agent-1 leaves: nobody trains here" in caplog.text
        await fleet.until(lambda: "node agent0: no controller answers" in caplog.text)
        assert not node._done.done()
        await asyncio.sleep(0.5)  # no controller for much longer than the limit, but somebody trains
        node.crash(0)
        await asyncio.sleep(0.1)
        assert not node._done.done()
        assert await asyncio.wait_for(node._done, 60) == 1
        for agent in (node, spare):
            await agent.end()

    play(test, tmp_path / "job", nodes=1, ranks=[], replicas=0)


def test_a_restarted_controller_waits_for_hellos_that_are_on_their_way(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        await fleet.stop_controller()
        for node in fleet.nodes.values():
            node.pause()
        await fleet.start_controller()
        for node in list(fleet.nodes.values()):
            node.go_on()
            await asyncio.sleep(0.8)
        await fleet.event("controller_restarted")
        assert not lost(fleet) and len(fleet.events("decided")) == 1
        fleet["node0"].crash(0)
        await fleet.event("resumed", 2)

    play(test, tmp_path / "job", nodes=5)


def test_a_restarted_controller_asks_another_node_if_one_does_not_tell_the_plan(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        async def swallow(_: m.Message) -> bool:
            return False

        await fleet.event("resumed")
        await fleet.stop_controller()
        for node in fleet.nodes.values():
            node.on(m.SendState, swallow)
        await fleet.start_controller()
        await fleet.event("controller_restarted")
        fleet["node0"].crash(0)
        assert (await fleet.event("decided", 2))["origin"] == "memory"
        await fleet.event("resumed", 2)

    play(test, tmp_path / "job", nodes=3)


def test_a_controller_of_thousands_of_roles_is_restarted(tmp_path: Path):
    """They all come at once. It reads them all before it judges, and the plan once, or little more."""
    nodes, nproc = 512, 8
    told_plan: list[m.NodePlan] = []

    def told(node: Node) -> None:
        node.began(told_plan[0])
        for role in node.machine.epochs.roles_here():
            node.plays(role, step=100)
            node.memory.held[role] = [99, 100]

    async def test(fleet: Fleet) -> None:
        await fleet.stop_controller()
        roles = {role: f"node{role // nproc}" for role in range(nodes * nproc)}
        told_plan.append(plan_of(fleet.settings, roles, fleet.segment, "127.0.0.1:2"))
        greets = asyncio.Event()
        for number in range(nodes):
            told(fleet.join(f"node{number}"))
            fleet[f"node{number}"].delay(m.AgentHello, greets.wait())
        await fleet.start_controller(process=True)
        await fleet.until(lambda: all(node.connections for node in fleet.nodes.values()), 120)
        greets.set()
        await fleet.event("controller_restarted", seconds=150)
        assert len(fleet.events("joined")) == nodes
        assert not (lost := [event["reason"] for event in fleet.events("detected")]), lost[:3]
        assert not fleet.events("decided")
        asked = [
            node
            for node in fleet.nodes.values()
            if any(isinstance(each, m.SendState) for each in node.received)
        ]
        assert len(asked) < 8

    play(test, tmp_path / "job", nodes=nodes, nproc=nproc, ranks=[], heartbeat=1)
