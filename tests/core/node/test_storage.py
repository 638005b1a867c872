"""Storage that hangs holds up what it is asked for, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core.fleet import Fleet
from core.real_agent import RealAgent

from ft_core.node import events as e
from ft_core.protocol import messages as m
from ft_core.state import durable


def test_a_node_whose_storage_hangs_trains_recovers_and_connects_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its controller's address is a name, which is looked up in a thread, too."""
    answers, hanging = threading.Event(), []

    def hangs(*_: Any, **__: Any) -> list[Any]:
        hanging.append(threading.current_thread().name)
        assert answers.wait(60)
        return []

    async def test() -> None:
        where = {"durable_dir": str(tmp_path / "durable"), "durable_interval": 1}
        async with Fleet(tmp_path / "job", nodes=2, ranks=[0], replicas=0, **where) as fleet:
            settings = replace(
                fleet.settings, controller=fleet.settings.controller.replace("127.0.0.1", "localhost")
            )
            agent = RealAgent(settings, fleet.job_dir, "node1", 1)
            agent.serve()
            await fleet.event("resumed")
            monkeypatch.setattr(durable, "complete", hangs)
            monkeypatch.setattr(durable, "save", hangs)
            for number in range(40):
                agent._handle(e.FromController(m.ListDurable(number)))
            await fleet.until(lambda: len(hanging) > 2)
            for epoch in (2, 3):
                agent.crash(1)
                await fleet.event("resumed", epoch)
            assert agent.connected
            agent._uplink.hang_up()
            await fleet.until(lambda: agent.connected)
            agent.crash(1)
            await fleet.event("resumed", 4)
            assert not [e for e in fleet.events("detected") if "node1 lost" in e["reason"]]
            answers.set()
            await agent.end()

    try:
        asyncio.run(test())
    finally:
        answers.set()
