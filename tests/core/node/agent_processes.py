"""Real agents with simulated workers, each a process of its own with its pulse: any may be stopped.

As `fleet` is, for tests to which it matters that nothing of one agent runs in another's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from core.fleet import Fleet
from core.real_agent import RealAgent

from ft_core.node.link import pulse
from ft_core.process import parent
from ft_core.protocol import messages as m
from ft_core.settings import Settings, read_secret

_LOOK = 0.02


@dataclass(frozen=True)
class Seen:
    """What an agent says of itself."""

    address: str = ""
    """Where it takes those for which it is to speak."""
    through: str = ""
    """Who speaks for it."""
    others: int = 0
    """How many it speaks for."""
    connected: bool = False
    """Whether it has been heard by the controller, over the connection that it has now."""
    connections: int = 0
    """That it has had."""


@dataclass
class AgentProcess:
    """From outside."""

    name: str
    pipe: Connection
    process: multiprocessing.process.BaseProcess
    seen: Seen = field(default_factory=Seen)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def look(self) -> Seen:
        """What it has said last."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                self.seen = self.pipe.recv()
        return self.seen

    def tell(self, what: str) -> None:
        """`crash` its workers, or have them `finish`."""
        self.pipe.send(what)

    async def stop(self, seconds: float) -> None:
        """It stands still."""
        await stop(self.pid, seconds)


async def stop(pid: int, seconds: float) -> None:
    """A process stands still for so long, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


class Agents:
    """Of a fleet, whose controller is a process as well."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.all: list[AgentProcess] = []
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["core.node.agent_processes"])

    async def __aenter__(self) -> Agents:
        await self.fleet.stop_controller()
        await self.fleet.start_controller(process=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        for agent in self.all:
            agent.process.kill()
        for agent in self.all:
            await asyncio.to_thread(agent.process.join)

    def start(self, name: str, rank: int = -1) -> AgentProcess:
        """One more."""
        pipe, its = self._processes.Pipe()
        process = self._processes.Process(target=_main, args=(its, self.fleet.job_dir, name, rank))
        process.start()
        its.close()
        self.all.append(AgentProcess(name, pipe, process))
        return self.all[-1]

    async def served(self) -> None:
        """Until the controller hears all."""
        await self.fleet.until(lambda: all(agent.look().connected for agent in self.all))

    @property
    def relays(self) -> list[AgentProcess]:
        """Those that speak for others."""
        return [agent for agent in self.all if agent.look().others]

    def behind(self, relay: AgentProcess) -> list[AgentProcess]:
        """For whom it speaks."""
        return [agent for agent in self.all if agent.look().through == relay.seen.address]

    def lost(self) -> list[str]:
        """Nodes that the controller has taken for lost, and why."""
        gone = {"spare_lost", "given_up"}
        events = [e for e in self.fleet.events() if e["event"] in gone or " lost: " in e["reason"]]
        return [event["reason"] for event in events]


# -- its process ------------------------------------------------------------------------------------------


def _main(pipe: Connection, job_dir: Path, node: str, rank: int) -> None:
    parent.expect(os.getppid())
    settings, loop = Settings.read(job_dir), pulse.Loop()
    pulse.start(loop, read_secret(job_dir), node, settings.pulse)
    agent = RealAgent(settings, job_dir, node, rank)
    agent._loop = loop
    os._exit(asyncio.run(_serve(agent, pipe)))


async def _serve(agent: RealAgent, pipe: Connection) -> int:
    agent.serve()
    agent._uplink._loop = agent._loop
    shown, channel, connections = Seen(), None, 0
    while not agent._done.done():
        uplink = agent._uplink
        if uplink._channel is not channel and (channel := uplink._channel) is not None:
            connections += 1
        heard = agent.connected and uplink._leader_watcher.follower._speaker > 0
        seen = Seen(*(agent._relay.address, uplink._through, len(agent._relay._others)), heard, connections)
        if seen != shown:
            pipe.send(shown := seen)
        while pipe.poll():
            _obey(agent, pipe.recv())
        await asyncio.sleep(_LOOK)
    code = agent._done.result()
    assert code is not None, "it is to begin anew"
    await agent._leave_controller()
    return code


def _obey(agent: RealAgent, what: str) -> None:
    for worker in agent.machine.crew.playing():
        if what == "crash":
            agent.pool.signal(worker.number, signal.SIGKILL)
        else:
            agent.say(worker.number, m.Finished(worker.role))
