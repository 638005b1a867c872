"""Controller and agents, with messages, connections and processes lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from core.fleet import Fleet

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
