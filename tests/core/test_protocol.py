"""Controller and agents, with messages, connections and processes lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from core.fleet import Fleet, Message
from core.real_agent import RealAgent

Test = Callable[[Fleet], Awaitable[None]]


def play(test: Test, job_dir: Path, **settings: Any) -> None:
    """Run `test` with a fleet."""

    async def job() -> None:
        async with Fleet(job_dir, **settings) as fleet:
            await test(fleet)

    asyncio.run(job())


@pytest.mark.parametrize("process", [False, True], ids=["task", "process"])
def test_a_worker_a_node_and_a_controller_are_lost_one_after_the_other(tmp_path: Path, process: bool):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node0"].crash(0)
        assert (await fleet.event("decided", 2))["moved"] == {"0": "node0"}
        await fleet.event("resumed", 2)
        fleet["node1"].die()
        decided = await fleet.event("decided", 3)
        assert decided["moved"] == {"1": "node2"} and decided["origin"] == "memory"
        await fleet.event("resumed", 3)
        await fleet.stop_controller()
        await fleet.start_controller(process)
        await fleet.event("controller_restarted")
        fleet["node0"].crash(0)
        await fleet.event("resumed", 4)
        fleet["node0"].finish(0)
        fleet["node2"].finish(1)
        assert await fleet.ended() == 0
        await fleet.until(lambda: fleet["node0"].code == fleet["node2"].code == 0)

    play(test, tmp_path / "job", nodes=2, spares=1)


def test_the_second_worker_of_a_recovery_dies_after_its_node_has_reported(tmp_path: Path):
    """It counts as lost in this decision: its start-up record is gone, and it is a newcomer too."""

    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node2"].quiet = False
        fleet["node0"].crash(0)
        controller = fleet.controller
        assert controller is not None
        await fleet.until(lambda: controller.nodes["node1"].holdings["epoch"] == 2)
        fleet["node1"].crash(1)
        await fleet.event("detected", 2)
        fleet["node2"].quiesced()
        decided = await fleet.event("decided", 2)
        assert decided["roles"] == [0, 1] and decided["moved"] == {"0": "node0", "1": "node1"}
        await fleet.event("resumed", 2)
        assert fleet["node2"].plan["newcomers"] == [0, 1]
        assert fleet["node2"].epoch == 2  # one recovery for both

    play(test, tmp_path / "job", nodes=3)


def test_a_worker_dies_between_its_nodes_report_and_the_plan(tmp_path: Path):
    """The plan relies on it. Its agent gives the role to nobody until there is a plan that knows."""

    async def test(fleet: Fleet) -> None:
        agent = RealAgent(fleet.settings, fleet.job_dir, "node1", 1)
        apply, given = agent._apply, []

        def too_late(plan: Message) -> None:
            if plan["epoch"] == 2 and not given:
                agent.crash(1)
            apply(plan)
            if (worker := agent.pool.of_role(1)) is not None:
                given.append((plan["epoch"], plan["newcomers"], worker.pid))

        agent._apply = too_late  # type: ignore[method-assign]
        agent.serve()
        await fleet.event("resumed")
        given.clear()
        fleet["node0"].crash(0)
        await fleet.event("decided", 3)
        await fleet.event("resumed", 2)
        assert [each[:2] for each in given] == [(3, [1])]
        assert [event["roles"] for event in fleet.events("decided")[1:]] == [[0], [1]]
        await agent.end()

    play(test, tmp_path / "job", nodes=2, ranks=[0])


def test_a_hello_is_no_report_while_workers_are_in_their_step(tmp_path: Path):
    """The agent has seen the abort, and connects anew before its worker is quiet."""

    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node1"].quiet = fleet["node2"].quiet = False
        fleet["node0"].crash(0)
        await fleet.until(lambda: fleet["node1"].epoch == 2)
        fleet["node1"].disconnect()
        controller = fleet.controller
        assert controller is not None
        await fleet.until(lambda: controller.nodes["node1"].about["pid"] == 2)  # its second connection
        fleet["node2"].quiesced()
        await fleet.until(lambda: controller.nodes["node2"].holdings["epoch"] == 2)
        assert len(fleet.events("decided")) == 1
        fleet["node1"].quiesced()
        await fleet.event("resumed", 2)

    play(test, tmp_path / "job", nodes=3)
