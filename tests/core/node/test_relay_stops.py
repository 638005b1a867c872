"""Agents that speak for others, as processes: any may stand still, and so may the controller."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from core.fleet import Fleet
from core.node.agent_processes import Agents, stop

NODES, SPARES = 6, 2


def play(job_dir: Path, test: Callable[[Agents], Awaitable[None]], heartbeats_missed: int = 60) -> None:
    async def run() -> None:
        about = {"replicas": 0, "heartbeat": 0.2, "heartbeats_missed": heartbeats_missed, "direct": SPARES}
        async with Fleet(job_dir, NODES, spares=SPARES, ranks=[], **about) as fleet, Agents(fleet) as agents:
            spares = [agents.start(f"spare{number}") for number in range(SPARES)]
            await agents.served()
            for number in range(NODES):
                agents.start(f"node{number}", number)
            await fleet.event("resumed")
            await agents.served()
            assert agents.relays == spares
            await test(agents)

    asyncio.run(run())


async def ends(agents: Agents, but: int | None = None) -> None:
    """All, with the job's exit code; but for the process of that number."""
    for agent in agents.all:
        agent.tell("finish")
    there = [agent for agent in agents.all if agent.pid != but]
    await agents.fleet.until(lambda: all(agent.process.exitcode is not None for agent in there))
    assert [agent.process.exitcode for agent in there] == [0] * len(there)


def test_whoever_stands_still_for_a_while_nobody_is_lost(tmp_path: Path):
    async def test(agents: Agents) -> None:
        dice, fleet = random.Random(7), agents.fleet
        for turn in range(6):
            assert fleet._process is not None
            pids = [fleet._process.pid, *(relay.pid for relay in agents.relays), dice.choice(agents.all).pid]
            await asyncio.gather(*(stop(pid, dice.uniform(0.1, 3)) for pid in dice.sample(pids, 2)))
            agents.all[SPARES + turn].tell("crash")
            await fleet.event("resumed", turn + 2)
        await agents.served()
        assert not agents.lost()
        await ends(agents)

    play(tmp_path / "job", test)


def test_others_find_at_once_that_an_agent_was_killed(tmp_path: Path):
    """Behind another, too, and whether or not those who find it are."""

    async def test(agents: Agents) -> None:
        victim = agents.behind(agents.relays[0])[0]
        victim.process.kill()
        await agents.fleet.until(lambda: agents.lost())
        [reason] = agents.lost()
        assert reason.startswith(f"node {victim.name} lost") and "nothing listens at its address" in reason

    play(tmp_path / "job", test)


def test_a_controller_that_stands_still_is_waited_for_at_the_relays(tmp_path: Path):
    """They would all greet anew at once."""

    async def test(agents: Agents) -> None:
        fleet, before = agents.fleet, {agent.name: agent.look().connections for agent in agents.all}
        assert fleet._process is not None
        await stop(fleet._process.pid, 0.4 * fleet.settings.silence_limit)
        agents.all[-1].tell("crash")
        await fleet.event("resumed", 2)
        assert {agent.name: agent.look().connections for agent in agents.all} == before

    play(tmp_path / "job", test, heartbeats_missed=100)


def test_a_relay_that_stands_still_for_ever_holds_up_neither_the_job_nor_its_end(tmp_path: Path):
    async def test(agents: Agents) -> None:
        relay = agents.relays[0]
        behind = agents.behind(relay)
        assert behind
        os.kill(relay.pid, signal.SIGSTOP)
        await agents.fleet.until(lambda: relay.name in " ".join(agents.lost()))
        await agents.fleet.until(lambda: not agents.behind(relay))
        await agents.served()
        agents.all[-1].tell("crash")
        await agents.fleet.event("resumed", 2)
        assert len(agents.lost()) == 1
        await ends(agents, but=relay.pid)

    play(tmp_path / "job", test)


def test_a_job_that_ends_while_a_relay_stands_still_is_over_for_all(tmp_path: Path):
    async def test(agents: Agents) -> None:
        relay = agents.relays[0]
        behind = agents.behind(relay)
        assert behind
        os.kill(relay.pid, signal.SIGSTOP)
        await ends(agents, but=relay.pid)

    play(tmp_path / "job", test)
