"""The controller's state machine: events in, effects out. No process is started, no socket is opened."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from ft_core.control import machine
from ft_core.control.events import (
    Close,
    Disconnected,
    Effect,
    End,
    Event,
    Greeted,
    Received,
    Record,
    Say,
    Send,
    Tick,
)
from ft_core.control.machine import Controller
from ft_core.protocol.messages import (
    Abort,
    AgentHello,
    Heartbeat,
    Holdings,
    JobState,
    KeptState,
    Message,
    NodePlan,
    Redundancy,
    ReplicaGroup,
    Restored,
    RoleBeat,
    RoleHeld,
    RoleLayout,
    Stepped,
    WorkerLost,
)
from ft_core.settings import Command, Settings

M = TypeVar("M", bound=Message)


class Agent:
    """What a node says, when a test has it say so."""

    def __init__(self, job: Job, name: str, rank: int) -> None:
        self.job, self.name, self.rank = job, name, rank
        self.peer = -1
        self.heard: list[Message] = []
        self.plan: NodePlan | None = None
        self.epoch = self.reported = 0
        self.idle = job.settings.nproc_per_node + 1
        self.workers: dict[int, int] = {}
        """Role -> pid."""
        self.versions: dict[int, list[int]] = {}
        self.replicas: dict[str, list[int]] = {}

    @property
    def begun(self) -> str:
        return self.plan.id if self.plan is not None else ""

    def holdings(self) -> Holdings:
        here = [role for role, node in self.plan.roles.items() if node == self.name] if self.plan else []
        roles = {
            role: RoleHeld(
                alive=role in self.workers,
                stage="training" if self.versions.get(role) else "startup",
                versions=self.versions.get(role, []),
                segments=[f"{role}x1-0"] if self.versions.get(role) else [],
            )
            for role in here
        }
        segments = {segment: [int(segment.partition("x")[0])] for segment in self.replicas}
        segments |= {f"{role}x1-0": [role] for role, versions in self.versions.items() if versions}
        return Holdings(
            epoch=self.epoch,
            begun=self.begun,
            reported=self.reported,
            roles=roles,
            replicas=self.replicas,
            segments=segments,
            idle=self.idle,
            store="store",
            master="master:1",
            configured=None,
        )

    def greet(self, said: Collection[Any] = ()) -> list[Effect]:
        """Over a new connection."""
        self.peer = next(self.job.peers)
        hello = AgentHello(
            node=self.name,
            pid=1,
            node_rank=self.rank,
            domain=self.name,
            data="data",
            holdings=self.holdings(),
            said=list(said),
        )
        return self.job.happens(Greeted(self.peer, hello))

    def say(self, message: Message) -> list[Effect]:
        return self.job.happens(Received(self.peer, message))

    def beat(self) -> list[Effect]:
        beat = {"tag": 1, "held": [], "committed": -1, "step_s": 0.1, "waited_s": 0.0}
        roles = {
            role: RoleBeat(pid=pid, step=1, h2h_bytes=0, h2h_snapshots=0, **beat)
            for role, pid in self.workers.items()
        }
        about = {"epoch": self.epoch, "begun": self.begun, "idle": self.idle}
        return self.say(Heartbeat(**about, roles=roles, replicas=self.replicas))

    def hangs_up(self) -> list[Effect]:
        peer, self.peer = self.peer, -1
        return self.job.happens(Disconnected(peer))

    def report(self) -> list[Effect]:
        """All workers here have left their step."""
        self.reported = self.epoch
        return self.say(self.holdings())

    def crash(self, role: int) -> WorkerLost:
        pid = self.workers.pop(role)
        about = {"exit": "killed by SIGKILL", "crashed": True, "code": -9, "traceback": ""}
        return WorkerLost(role=role, pid=pid, **about)

    def step(self, role: int, version: int) -> None:
        """The worker has its state, finishes a step, and what it has is kept here and on the next node."""
        about = {"epoch": self.epoch, "role": role}
        layout = {"segments": {f"{role}x1-0": [role]}, "initial": 0, "resumes": self.job.resumes}
        group = ReplicaGroup(index=0, groups=1, redundancy=Redundancy.SHARDED)
        self.say(RoleLayout(**about, **layout, adopted=False, group=group))
        self.say(Restored(**about, pid=self.workers[role], version=version - 1, loaded=True))
        self.say(Stepped(**about, version=version))
        self.versions[role] = [version - 1, version]
        others = sorted(name for name in self.job.agents if name != self.name)
        if others:
            keeper = self.job.agents[others[role % len(others)]]
            keeper.replicas = {**keeper.replicas, f"{role}x1-0": [version - 1, version]}

    def hears(self, message: Message) -> None:
        self.heard.append(message)
        if isinstance(message, Abort):
            self.epoch = max(self.epoch, message.epoch)
        elif isinstance(message, NodePlan) and message.epoch >= self.epoch:
            # The wire's bytes, as an agent would read them.
            self.plan = msgspec.json.decode(msgspec.json.encode(message), type=NodePlan)
            self.epoch = message.epoch
            for role, node in message.roles.items():
                if node == self.name and role not in self.workers:
                    self.workers[role] = next(self.job.pids)
            for role in list(self.workers):
                if message.roles.get(role) != self.name:
                    del self.workers[role]

    def kept(self) -> KeptState:
        assert self.plan is not None
        return KeptState(state=msgspec.json.decode(self.plan.state, type=JobState), nodes=self.plan.nodes)


class Job:
    """A controller, and the agents that it hears of."""

    def __init__(self, nodes: int = 2, spares: int = 0, nproc: int = 1, **settings: Any) -> None:
        about = {"replicas": 1, "spares": spares, "controller": "host:1", **settings}
        self.settings = Settings(nodes, nproc, Command("train.py"), **about)
        self.resumes = False
        self.now = 0.0
        self.peers, self.pids, self._names = itertools.count(), itertools.count(1000), itertools.count()
        self.agents: dict[str, Agent] = {}
        self.records: list[Record] = []
        self.done: End | None = None
        self.said: list[str] = []
        self.start_controller()
        for number in range(nodes + spares):
            self.join(f"node{number}", number if number < nodes else -1)
        self.wait(0.1)

    def start_controller(self) -> None:
        """The first, or another in its place."""
        recorded = {record.event: record.epoch for record in self.records}
        self.controller = Controller(self.settings, "/job", lambda: f"{next(self._names):x}", recorded)

    def join(self, name: str, rank: int = -1) -> Agent:
        self.agents[name] = Agent(self, name, rank)
        self.agents[name].greet()
        return self.agents[name]

    def __getitem__(self, name: str) -> Agent:
        return self.agents[name]

    def happens(self, event: Event) -> list[Effect]:
        effects = self.controller.handle(event, self.now)
        by_peer = {agent.peer: agent for agent in self.agents.values()}
        for effect in effects:
            if isinstance(effect, Send) and effect.peer in by_peer:
                by_peer[effect.peer].hears(effect.message)
            elif isinstance(effect, Record):
                self.records.append(effect)
            elif isinstance(effect, End):
                self.done = effect
            elif isinstance(effect, Say):
                self.said.append(effect.text)
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Agents beat, time passes."""
        found = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            if int(self.now / 0.5) > int((self.now - 0.05) / 0.5):
                for agent in [agent for agent in self.agents.values() if agent.peer >= 0]:
                    agent.beat()
            found += self.happens(Tick())
        return found

    def all_step(self, version: int) -> None:
        for agent in list(self.agents.values()):
            for role in sorted(agent.workers):
                agent.step(role, version)

    def all_report(self, *names: str) -> None:
        for name in names or list(self.agents):
            if self.agents[name].reported < self.agents[name].epoch:
                self.agents[name].report()

    def records_of(self, name: str) -> list[Record]:
        return [record for record in self.records if record.event == name]

    @property
    def phase(self) -> str:
        return self.controller.phase.name


def sent(effects: list[Effect], kind: type[M]) -> dict[int, M]:
    """By peer."""
    return {e.peer: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)}


# -- a node dies ---------------------------------------------------------------------------------------


def test_a_node_dies_and_a_spare_takes_its_roles() -> None:
    job = Job(nodes=2, spares=1)
    assert job.phase == "running" and job["node1"].workers.keys() == {1}
    job.all_step(1)
    dead = job["node1"].peer
    job.agents.pop("node1").hangs_up()
    job.wait(machine.RETURN_GRACE - 0.1)
    assert job.phase == "running", "it may come back"
    effects = job.wait(0.2)
    assert Close(dead) in effects
    assert {peer: abort.epoch for peer, abort in sent(effects, Abort).items()} == {
        job[name].peer: 2 for name in ("node0", "node2")
    }
    assert job.records_of("detected")[0].roles == (1,)
    assert job.phase == "quiescing"
    job["node0"].report()
    assert not job.records_of("decided")[1:], "nothing is decided before all have reported"
    effects = job["node2"].report()
    plans = sent(effects, NodePlan)
    assert plans.keys() == {job["node0"].peer, job["node2"].peer}
    plan = plans[job["node2"].peer]
    assert plan.roles == {0: "node0", 1: "node2"} and plan.worker.newcomers == [1]
    assert (plan.worker.version, plan.worker.origin) == (1, "memory")
    assert plan.sources == {1: {"1x1-0": ["node2"]}}, "its own roles' alone"
    assert "node1" not in plan.nodes
    assert job.phase == "running"
    assert job.records_of("decided")[1].more["moved"] == {1: "node2"}
    job.all_step(2)
    assert [record.epoch for record in job.records_of("resumed")] == [1, 2]


def test_a_node_dies_without_a_spare_and_another_comes() -> None:
    job = Job(nodes=2)
    job.all_step(1)
    job.agents.pop("node1").hangs_up()
    job.wait(0.4)
    job.all_report()
    assert job.phase == "waiting"
    [waiting] = job.records_of("waiting")
    assert waiting.roles == (1,) and "survivors hold their state until a node joins" in waiting.reason
    job.wait(60)
    assert len(job.records_of("waiting")) == 1, "it is said once"
