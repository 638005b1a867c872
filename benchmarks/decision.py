"""What a recovery takes of the controller's machine and codec alone, without sockets: CPU seconds by part.

    python -m benchmarks.decision --roles 1024 10240 102400

The real machine hears what simulated agents say, as bytes, decodes it as its shell does, and what it says is
encoded. A job starts and trains, loses a node with a spare for it, and then one in a hundred at once.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from benchmarks.common import finish, parser, table
from benchmarks.scale_fleet import Agent, Fleet, Sharded
from benchmarks.simulated import LAYOUTS, PER_NODE
from ft_core.control.events import Disconnected, Effect, Event, Greeted, Received, Send, Tick
from ft_core.control.machine import Controller
from ft_core.control.phases import Running
from ft_core.control.shell import TICK
from ft_core.process.collector import exempt
from ft_core.protocol.codec import encode
from ft_core.protocol.messages import FROM_CLIENT, AgentHello, Message
from ft_core.settings import Command, Settings

TICKS = 40
"""Of training, before something happens."""


class Wired(Agent):
    """An agent whose connection is a list of bytes."""

    def __init__(self, fleet: Fleet, name: str, rank: int, peer: int) -> None:
        super().__init__(fleet, name, rank)
        self.greeted = True
        self.peer = peer
        self.out: list[bytes] = []

    def send(self, *messages: Message) -> None:
        self.out += map(encode, messages)


class Job:
    """A controller's machine, and all that it hears."""

    def __init__(self, layout: Sharded) -> None:
        nodes = layout.roles // PER_NODE
        spares = 2 + nodes // 50
        self.settings = Settings(
            nodes, PER_NODE, Command("train.py"), controller="127.0.0.1:9", spares=spares
        )
        names = itertools.count()
        self.machine = Controller(self.settings, "/nowhere", lambda: f"{next(names):08x}", {})
        self.fleet = Fleet(layout, self.settings.controller, b"secret", self.settings)
        self.agents: dict[int, Wired] = {}
        for peer in range(nodes + spares):
            rank = peer if peer < nodes else -1
            agent = Wired(self.fleet, f"node-{peer:05}+{peer:06x}", rank, peer)
            self.fleet.nodes[agent.name] = self.agents[peer] = agent
        self.now = 0.0
        self.took: dict[str, float] = {}
        """CPU seconds by part."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done here counts for it."""
        begun = time.process_time()
        yield
        self.took[name] = self.took.get(name, 0.0) + time.process_time() - begun

    def happens(self, name: str, events: Iterable[Event]) -> None:
        """Have the machine handle them, and encode what it says; agents hear it."""
        effects: list[Effect] = []
        with self.part(name):
            for event in events:
                effects += self.machine.handle(event, self.now)
        encoded: dict[int, bytes] = {}
        heard = []
        with self.part("encoding"):
            for effect in effects:
                if isinstance(effect, Send):
                    if (body := encoded.get(id(effect.message))) is None:
                        body = encoded[id(effect.message)] = encode(effect.message)
                    heard.append((effect.peer, body))
        for peer, body in heard:
            if peer in self.agents:
                self.agents[peer].heard(body)

    def hear(self, name: str, last: str = "") -> None:
        """What all agents have said since: it is decoded, and handled. `last`: how the last message's part is
        called."""
        said = [(agent.peer, body) for agent in self.agents.values() for body in agent.out]
        for agent in self.agents.values():
            agent.out.clear()
        with self.part(f"{name}, decoded"):
            events: list[Event] = []
            for peer, body in said:
                message = FROM_CLIENT.decode(body, "an agent")
                if isinstance(message, AgentHello):
                    events.append(Greeted(peer, message))
                else:
                    events.append(Received(peer, cast(Any, message)))
        if last:
            self.happens(name, events[:-1])
            self.happens(last, events[-1:])
        else:
            self.happens(name, events)

    def start(self) -> None:
        """All nodes greet, and all roles do a step."""
        for agent in self.agents.values():
            agent.send(agent._hello())
        self.hear("greetings")
        self.now += 1.0
        self.happens("first plan", [Tick()])
        self.train()

    def train(self) -> None:
        """All roles say that they have their state and have done a step; agents beat, twice."""
        self.hear("progress")
        for _ in range(2):
            self.now += 1.0
            self.fleet.go_on(self.fleet.version)
            for agent in self.agents.values():
                agent.beat()
            self.hear("heartbeat")
        for _ in range(TICKS):
            self.now += TICK
            self.happens("ticks", [Tick()])
        gc.enable()
        exempt()
        gc.disable()

    def recovery(self, lost: list[int]) -> dict[str, float]:
        """These nodes are lost at once."""
        self.took, epoch = {}, self.machine.cluster.epoch
        for peer in lost:
            self.fleet.nodes.pop(self.agents.pop(peer).name)
        self.happens("abort", [Disconnected(peer) for peer in lost])
        self.now += 0.5
        self.happens("abort", [Tick()])
        assert self.machine.cluster.epoch > epoch
        said = sum(len(body) for agent in self.agents.values() for body in agent.out) / len(self.agents)
        self.hear("reports", "decision and plan")
        assert isinstance(self.machine.phase, Running) and self.fleet.plan is not None
        assert {agent.begun for agent in self.agents.values()} == {self.fleet.plan.id}
        found = {**self.took, "all": sum(self.took.values()), "bytes of a report": said}
        self.took = {}
        self.train()
        return found


def measure(roles: int, layout: str) -> dict[str, Any]:
    """One size."""
    gc.disable()
    job = Job(Sharded.of(layout, roles))
    job.start()
    phases = {"start": dict(job.took)}
    phases["a node lost"] = job.recovery([1])
    hundredth = max(1, len(job.agents) // 100)
    phases["1 % of nodes lost"] = job.recovery(list(range(10, 10 + 2 * hundredth, 2)))
    gc.enable()
    return {"roles": job.settings.world_size, "layout": layout, "phases": phases}


def text(rows: list[dict[str, Any]]) -> str:
    """A table of all sizes, with the power of the size by which each figure grows between the last two."""
    lines = []
    for phase in rows[0]["phases"]:
        for name in rows[0]["phases"][phase]:
            values = [row["phases"][phase].get(name, 0.0) for row in rows]
            power = ""
            if len(rows) > 1 and min(values[-2:]) > 0:
                size = math.log(rows[-1]["roles"] / rows[-2]["roles"])
                power = f"N^{math.log(values[-1] / values[-2]) / size:.2f}"
            lines.append([f"{phase}: {name}", *(f"{value:,.3f}" for value in values), power])
    return table(["CPU seconds", *(f"{row['roles']:,} roles" for row in rows), "the last two"], lines)


def main() -> None:
    """Measure, print."""
    p = parser(__doc__)
    p.add_argument("--roles", type=int, nargs="+", default=[1024, 10_240])
    p.add_argument("--layout", choices=LAYOUTS, default="model")
    args = p.parse_args()
    rows = [measure(roles, args.layout) for roles in args.roles]
    finish("decision", args, rows[0] if len(rows) == 1 else {"sizes": rows}, text(rows))


if __name__ == "__main__":
    main()
