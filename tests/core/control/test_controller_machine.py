"""The controller's state machine: events in, effects out. No process is started, no socket is opened."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace as replaced
from typing import Any, TypeVar

import msgspec
import pytest
from core.simulated_agent import Memory
from msgspec.structs import replace

from ft_core.control import succession
from ft_core.control.cluster.completion import INTERVAL
from ft_core.control.decide.durable_names import AGAIN, PATIENCE
from ft_core.control.events import (
    Admitted,
    Close,
    Disconnected,
    Effect,
    End,
    Event,
    Greeted,
    PrintConsole,
    Pulsed,
    Received,
    Record,
    Refuse,
    Resign,
    Send,
    Terminate,
    Tick,
)
from ft_core.control.liveness import suspicion
from ft_core.control.machine import Controller
from ft_core.control.phases import Forming
from ft_core.control.prestart.attempts import PAUSE, STANDBY_GRACE
from ft_core.leadership.lease import first_epoch
from ft_core.node.memory.holdings import changed, copies_held
from ft_core.process import sigterm
from ft_core.protocol.goodput import Spent
from ft_core.protocol.groups import runs_of, segment_id, text_of
from ft_core.protocol.messages import (
    Abort,
    AgentHello,
    AskRows,
    Completed,
    Configure,
    ConfigureAnswer,
    Configured,
    Counterparts,
    Denied,
    DescribeFlight,
    DescribeRole,
    Drain,
    DurableNames,
    Fault,
    Finished,
    GivenUp,
    Heartbeat,
    Holdings,
    Hosts,
    Idle,
    Inject,
    Injected,
    Issued,
    KeptState,
    KillWorker,
    LeaderHello,
    Leaving,
    Left,
    ListDurable,
    Message,
    NodePlan,
    NodesChanged,
    NodesProbed,
    OperationCounts,
    OtherCommand,
    OtherJob,
    OwnPlan,
    PauseAfterStep,
    PausedAtStep,
    Prepare,
    Prepared,
    ProbeNodes,
    ProbeResult,
    Pulse,
    Redundancy,
    Release,
    ReplicaGroup,
    Restored,
    RestoreFailed,
    RoleBeat,
    RoleFlight,
    RoleHeld,
    RoleLayout,
    RolesStatus,
    SendCounts,
    SendHeartbeat,
    SendIssued,
    SendState,
    SharedPlan,
    Shutdown,
    Stepped,
    Suspect,
    UseSettings,
    Withdraw,
    WorkerLost,
)
from ft_core.protocol.table import Received as PlanParts
from ft_core.protocol.table import pieces, with_news
from ft_core.settings import ANY_RANK, Command, Settings
from ft_core.state.manifest import Segment

M = TypeVar("M", bound=Message)


class Agent:
    """What a node says, when a test has it say so, be it what no agent would say: what is heard, and in which
    order, is what the controller decides by. So it has not the machine of a real agent, which speaks of its
    own accord; the nodes of `core.fleet` have."""

    def __init__(self, job: ControlPlane, name: str, rank: int) -> None:
        self.job, self.name, self.rank = job, name, rank
        self.domain = job.domains.get(name, name)
        self.peer = -1
        self.reports = 0
        """Over this connection, after the greeting."""
        self.heard: list[Message] = []
        self.plan: NodePlan | None = None
        self.parts_heard = PlanParts()
        """Of plans."""
        self.epoch = self.reported = 0
        self.idle = job.settings.nproc_per_node + 1
        self.workers: dict[int, int] = {}
        """Role -> pid."""
        self.versions: dict[int, list[int]] = {}
        self.replicas: dict[str, list[int]] = {}
        self.configured: dict[str, Any] | None = None
        self.silent = False
        self.term = 1
        """The newest that it knows of."""
        self.asked = 0
        """How often others were asked about it."""
        self.step_now = 1
        """Of its roles, as its beats say."""
        self.own_s = self.data_s = 0.0
        self.loss: float | None = None
        self.xids: dict[int, int] = {}
        self.layouts: dict[int, RoleLayout] = {}
        """What its roles have said of their state: repeated with each greeting."""
        self.parts: list[int] = []
        self.draining = False
        self.waited = self.copying = 0.0
        self.copied = 0
        """Bytes of copies that it has sent."""
        self.committed, self.answers = -1, 0
        """What its beats say of its roles, and which question they answer."""

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
                segments=[self.job.segment(role)] if self.versions.get(role) else [],
            )
            for role in here
        }
        memory = Memory(lambda role: Segment(tuple(self.job.holders(role)), ()))
        memory.held, memory.kept = self.versions, self.replicas
        replicas, segments = copies_held(here, memory)
        return Holdings(
            epoch=self.epoch,
            begun=self.begun,
            reported=self.reported,
            parts=self.parts,
            roles=roles,
            replicas=replicas,
            segments=segments,
            idle=self.idle,
            store="store:1",
            master="master:1",
            configured=self.configured,
        )

    def greet(self, said: Collection[Any] = ()) -> list[Effect]:
        """Over a new connection."""
        self.peer, self.reports = next(self.job.peers), 0
        return self.job.happens(Greeted(self.peer, self.hello(said)))

    def hello(self, said: Collection[Any] = ()) -> AgentHello:
        return AgentHello(
            node=self.name,
            term=self.term,
            pid=1,
            node_rank=self.rank,
            domain=self.domain,
            data="data:1",
            holdings=self.holdings(),
            said=[*(self.layouts[role] for role in self.workers if role in self.layouts), *said],
            draining=self.draining,
            job="",
            digest=self.job.settings.digest,
        )

    def say(self, message: Message) -> list[Effect]:
        return self.job.happens(Received(self.peer, message))

    def beat(self) -> list[Effect]:
        sent = {"h2h_bytes": self.copied, "h2h_snapshots": 0, "own_s": self.own_s, "loss": self.loss}
        sent |= {"waited_s": self.waited, "copy_s": self.copying, "data_s": self.data_s}
        beat = {"tag": 1, "committed": self.committed, "step_s": 0.1, **sent}
        roles = {
            role: RoleBeat(pid=pid, step=self.step_now, held=self.versions.get(role, []), **beat)
            for role, pid in self.workers.items()
        }
        about = {"epoch": self.epoch, "begun": self.begun, "idle": self.idle}
        about |= {"xids": self.xids, "answers": self.answers}
        return self.say(Heartbeat(**about, roles=roles, replicas=self.replicas))

    def hangs_up(self) -> list[Effect]:
        peer, self.peer = self.peer, -1
        return self.job.happens(Disconnected(peer))

    def report(self) -> list[Effect]:
        """All workers here have left their step."""
        self.reported, self.reports = self.epoch, self.reports + 1
        return self.say(changed(None, self.holdings(), self.reports - 1))

    def crash(self, role: int) -> WorkerLost:
        pid = self.workers.pop(role)
        about = {"exit": "killed by SIGKILL", "code": -9, "fault": Fault.KILLED}
        return WorkerLost(role=role, pid=pid, **about)

    def step(self, role: int, version: int) -> None:
        """The worker has its state, finishes a step, and what it has is kept here and on the next node."""
        about = {"epoch": self.epoch, "role": role}
        segment = self.job.segment(role)
        layout = {"segments": {segment: self.job.held_by(role)}, "initial": 0, "resumes": self.job.resumes}
        self.layouts[role] = RoleLayout(**about, **layout, adopted=False, group=self.job.group(role))
        self.say(self.layouts[role])
        self.say(Restored(**about, pid=self.workers[role], version=version - 1, loaded=True))
        self.say(Stepped(**about, version=version))
        self.versions[role] = [version - 1, version]
        others = sorted(name for name in self.job.agents if name != self.name)
        if others:
            keeper = self.job.agents[others[role % len(others)]]
            keeper.replicas = {**keeper.replicas, segment: [version - 1, version]}

    def hears(self, message: Message) -> None:
        self.heard.append(message)
        if isinstance(message, Abort):
            self.epoch = max(self.epoch, message.epoch)
        elif isinstance(message, Drain):
            self.draining = message.wanted
        elif isinstance(message, Withdraw):
            for role in message.roles:
                self.workers.pop(role, None)
        elif isinstance(message, Hosts | OwnPlan):
            self.parts_heard.hear(message)
        elif isinstance(message, SharedPlan) and message.state.epoch >= self.epoch:
            # The wire's bytes, as an agent would read them.
            message = msgspec.json.decode(msgspec.json.encode(message), type=SharedPlan)
            plan = self.parts_heard.plan(message, self.plan)
            assert plan is not None, "what it differs from is known"
            self.plan, self.epoch = plan, plan.epoch
            for role, node in plan.roles.items():
                if node == self.name and role not in self.workers:
                    self.workers[role] = next(self.job.pids)
            for role in list(self.workers):
                if plan.roles.get(role) != self.name:
                    del self.workers[role]
        elif isinstance(message, NodesChanged) and self.plan is not None:
            self.plan = with_news(self.plan, message)

    def kept(self) -> list[Hosts | KeptState]:
        """What it answers a controller that asks for the state."""
        assert self.plan is not None
        return [*pieces(self.plan), KeptState(state=self.plan.state)]


class ControlPlane:
    """A controller, and the agents that it hears of."""

    def __init__(
        self,
        nodes: int = 2,
        spares: int = 0,
        nproc: int = 1,
        groups: int = 1,
        job: str = "",
        join: Sequence[int] | None = None,
        domains: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """`groups`: replica groups, of roles in a row; where there are several, each has all the state.
        `job`: its id. `join`: the nodes that are there; default: all. `domains`: of nodes; default: each is
        one."""
        self.id, self.domains = job, domains or {}
        about = {"replicas": 1, "spares": spares, "controller": "host:1", "max_restarts": 0, **settings}
        self.settings = Settings(nodes, nproc, Command("train.py"), **about)
        self.roles = range(self.settings.world_size)
        self.resumes, self.groups = False, groups
        self.redundancy = Redundancy.REPLICATED if groups > 1 else Redundancy.SHARDED
        self.now = 0.0
        self.peers, self.pids, self._names = itertools.count(), itertools.count(1000), itertools.count()
        self.agents: dict[str, Agent] = {}
        self.records: list[Record] = []
        self.recorded_at: list[tuple[float, Record]] = []
        self.spent: tuple[Spent | None, float] = None, 0.0
        """What the job's time went to, as the newest record that says it has it, and when that was."""
        self.done: End | None = None
        self.said: list[str] = []
        self.start_controller()
        for number in range(nodes + spares) if join is None else join:
            self.join(f"node{number}", number if number < nodes else -1)
        self.wait(0.1)

    def start_controller(self, term: int = 1, settled: float = 0.0) -> None:
        """The first, or another in its place."""
        recorded = {record.event: record.epoch for record in self.records}
        about = self.settings, "/job", lambda: f"{next(self._names):x}", recorded, self.id
        spent, at = self.spent
        time = {"spent": spent, "ago": self.now - at, "wall": self.now}
        self.controller = Controller(*about, term=term, settled=settled, **time)

    def group(self, role: int) -> ReplicaGroup:
        index = role * self.groups // self.settings.world_size
        return ReplicaGroup(index=index, groups=self.groups, redundancy=self.redundancy)

    def holders(self, role: int) -> list[int]:
        """The roles that have the same state."""
        apart = self.redundancy is Redundancy.REPLICATED and self.groups > 1
        per = self.settings.world_size // self.groups if apart else self.settings.world_size
        return list(range(role % per, self.settings.world_size, per))

    def held_by(self, role: int) -> str:
        """The same as messages have it."""
        return text_of(runs_of(self.holders(role)))

    def segment(self, role: int) -> str:
        return segment_id(self.holders(role))

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
                self.recorded_at.append((self.now, effect))
                if "spent" in effect.more:
                    self.spent = effect.more["spent"], self.now
            elif isinstance(effect, End):
                self.done = effect
            elif isinstance(effect, PrintConsole):
                self.said.append(effect.text)
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Agents beat, time passes."""
        found = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            if int(self.now / 0.5) > int((self.now - 0.05) / 0.5):
                for agent in [a for a in self.agents.values() if a.peer >= 0 and not a.silent]:
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

    def ends(self) -> End | None:
        """All that is left of its time passes, and nobody writes what is in memory."""
        self.all_report()
        self.wait(self.settings.shutdown_timeout + 0.1)
        return self.done

    def records_of(self, name: str) -> list[Record]:
        return [record for record in self.records if record.event == name]

    @property
    def phase(self) -> str:
        return self.controller.phase.name


def sent(effects: list[Effect], kind: type[M]) -> dict[int, M]:
    """By peer."""
    return {e.peer: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)}


# -- a node dies ---------------------------------------------------------------------------------------


def lose(job: ControlPlane, name: str) -> list[Effect]:
    """A node is no more, and that is noticed."""
    job.agents.pop(name).hangs_up()
    return job.wait(suspicion.RETURN_GRACE + 0.2)


def test_a_node_dies_and_a_spare_takes_its_roles() -> None:
    job = ControlPlane(nodes=2, spares=1)
    assert job.phase == "running" and job["node1"].workers.keys() == {1}
    job.all_step(1)
    dead = job["node1"].peer
    gone = job.agents.pop("node1")
    gone.hangs_up()
    job.wait(suspicion.RETURN_GRACE - 0.1)
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
    plans = sent(job["node2"].report(), SharedPlan)
    assert plans.keys() == {job["node0"].peer, job["node2"].peer}
    changed = plans[job["node2"].peer]
    assert changed.gone == ["node1"] and [host.name for host in changed.changed] == ["node2"]
    plan = job["node2"].plan
    assert plan is not None and plan.roles == {0: "node0", 1: "node2"} and plan.newcomers == [1]
    assert (plan.version, plan.origin) == (1, "memory")
    assert plan.sources == {1: {job.segment(1): ["node2"]}}, "its own roles' alone"
    assert "node1" not in plan.nodes
    assert job.phase == "running"
    assert job.records_of("decided")[1].more["moved"] == {1: "node2"}
    job.all_step(2)
    assert [record.epoch for record in job.records_of("resumed")] == [1, 2]
    peer = next(job.peers)
    gone.peer = peer
    effects = job.happens(Greeted(peer, gone.hello()))
    done = [effect for effect in effects if not isinstance(effect, PrintConsole)]
    assert done[-2:] == [Send(peer, GivenUp()), Close(peer)], "it comes back, too late"


def test_who_reports_by_difference_from_what_was_not_heard_greets_again() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    lose(job, "node1")
    node = job["node0"]
    held, node.reported = node.holdings(), node.epoch
    for report in (changed(held, node.holdings(), 1), changed(None, held, 7)):
        assert node.say(report) == [Close(node.peer)]
    job["node2"].report()
    assert job.phase == "quiescing", "of what it holds nothing is known that counts"
    node.greet()
    assert job.phase == "running" and node.plan is not None and node.plan.version == 1


def test_a_worker_takes_over_from_one_that_died_and_has_the_same() -> None:
    """What its node says by difference is nothing then, though the controller knows of a death."""
    job = ControlPlane(nodes=2, nproc=2)
    job.all_step(1)
    node = job["node0"]
    node.reported = node.epoch
    node.say(changed(None, told := node.holdings(), 0))
    lost = node.crash(0)
    node.say(lost)
    assert not job.controller.cluster.alive(0, "node0") and 0 not in job.controller.cluster.records.roles
    node.workers[0] = next(job.pids)
    node.reported = node.epoch
    node.say(changed(told, node.holdings(), 1))
    assert (
        job.controller.cluster.alive(0, "node0")
        and job.controller.cluster.nodes["node0"].holdings.report.home
    )


def test_a_node_dies_with_its_first_word_on_its_state() -> None:
    """Found by the simulator: what the node had said of its segments was lost with the connection, and the
    job ended though others held all of it."""
    job = ControlPlane(spares=1)
    lost = job.agents["node1"]
    for agent in job.agents.values():
        for role in agent.workers:
            agent.step(role, 1)
            if agent is lost:
                job.controller.cluster.catalogue.forget()  # it did not arrive
    lose(job, "node1")
    job.all_report()
    assert job["spare" if "spare" in job.agents else "node2"].plan.roles == {0: "node0", 1: "node2"}
    assert job.done is None


def test_a_node_dies_without_a_spare_and_another_comes() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    assert job.phase == "waiting"
    [waiting] = job.records_of("waiting")
    assert waiting.roles == (1,) and "survivors hold their state until a node joins" in waiting.reason
    job.wait(60)
    assert len(job.records_of("waiting")) == 1, "it is said once"
    other = job.join("other")
    other.report()
    assert job.phase == "running" and other.plan is not None and other.plan.roles[1] == "other"


def test_a_node_dies_and_the_policy_is_to_stop() -> None:
    job = ControlPlane(nodes=2, policy="stop")
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    assert job.done is None and "policy is stop" in job.said[-1]
    assert job.ends() == End(1)
    assert job["node0"].heard[-1] == Shutdown(code=1)


def test_a_node_dies_and_its_replica_group_leaves() -> None:
    job = ControlPlane(nodes=2, groups=2, policy="shrink")
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    plan = job["node0"].plan
    assert plan is not None and plan.roles == {0: "node0"} and plan.absent == {1: 0}
    assert job.records_of("left")[0].roles == (1,)


def test_a_node_that_comes_back_in_time_was_not_lost() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    job["node1"].hangs_up()
    job.wait(0.2)
    job["node1"].greet()
    job.wait(5)
    assert not job.records_of("detected") and job.phase == "running"


ENDED = "its agent's connection broke, and nothing listens at its address any more (seen from node0)"


def asked_of(job: ControlPlane, effects: list[Effect], name: str = "node0") -> ProbeNodes:
    """What that node is asked."""
    return sent(effects, ProbeNodes)[job[name].peer]


def test_a_node_whose_process_has_ended_is_lost_at_once() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    at, asked = job.now, asked_of(job, job.agents.pop("node1").hangs_up())
    assert asked.nodes == {"node1": "data:1"}
    effects = job["node0"].say(NodesProbed(asked.round, {"node1": "refused"}))
    assert sent(effects, Abort).keys() == {job["node0"].peer, job["node2"].peer} and job.now == at
    [detected] = job.records_of("detected")
    assert detected.reason == f"node node1 lost: {ENDED}" and detected.roles == (1,)
    assert not job.happens(Received(job["node2"].peer, NodesProbed(asked.round, {"node1": "refused"})))


def test_a_spare_whose_process_has_ended_is_lost_at_once() -> None:
    job = ControlPlane(nodes=2, spares=1)
    asked = asked_of(job, job.agents.pop("node2").hangs_up())
    job["node0"].say(NodesProbed(asked.round, {"node2": "refused"}))
    assert [lost.reason for lost in job.records_of("spare_lost")] == [f"node node2: {ENDED}"]


@pytest.mark.parametrize("reach", ["silent", "reached"])
def test_whatever_else_others_find_a_node_has_time_to_come_back(reach: ProbeResult) -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    effects, rounds = job["node1"].hangs_up(), []
    for _ in range(int((suspicion.RETURN_GRACE - 0.01) / 0.05)):
        for asked in sent(effects, ProbeNodes).values():
            rounds.append(asked.round)
            job["node0"].say(NodesProbed(asked.round, {"node1": reach}))
        effects = job.wait(0.05)
    assert rounds[:2] == [1, 2], "the kernel may close what listens a moment later than the connection"
    assert job.phase == "running"
    job.wait(0.2)
    assert job.records_of("detected")[0].reason == "node node1 lost: its agent's connection broke"


def test_a_node_that_is_back_is_not_lost_for_what_others_found() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    asked = asked_of(job, job["node1"].hangs_up())
    job["node1"].greet()
    job["node0"].say(NodesProbed(asked.round, {"node1": "refused"}))
    again = asked_of(job, job["node1"].hangs_up())
    assert job.phase == "running", "that was said of the connection before"
    job["node0"].say(NodesProbed(asked.round, {"node1": "refused"}))
    assert job.phase == "running"
    job["node0"].say(NodesProbed(again.round, {"node1": "refused"}))
    assert job.phase == "quiescing"


def test_what_was_found_of_a_silent_node_is_not_found_of_one_whose_connection_broke() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    job["node1"].silent = True
    asked = asked_of(job, job.wait(5.5))
    for late in (False, True):
        if late:
            job["node1"].hangs_up()
        job["node0"].say(NodesProbed(asked.round, {"node1": "refused"}))
        assert job.phase == "running"


def test_without_anybody_to_ask_a_node_has_time_to_come_back() -> None:
    job = ControlPlane(nodes=1)
    job.all_step(1)
    assert not sent(job["node0"].hangs_up(), ProbeNodes)
    assert not sent(job.wait(0.2), ProbeNodes)
    job["node0"].greet()
    job.wait(1)
    assert job.phase == "running" and not job.records_of("detected")


def test_of_many_nodes_that_are_lost_few_are_asked_each_time() -> None:
    job = ControlPlane(nodes=60)
    job.all_step(1)
    dead = [f"node{number}" for number in range(0, 60, 4)]
    first = [asked for name in dead for asked in sent(job.agents.pop(name).hangs_up(), ProbeNodes).items()]
    assert len(first) == suspicion.WITNESSES * len(dead)
    assert all(len(asked.nodes) == 1 for _, asked in first), "each at once"
    again = sent([*job.wait(0.1), *job.wait(0.05)], ProbeNodes)
    assert again.keys() <= {agent.peer for agent in job.agents.values()}, "of those that are there"
    found = [name for asked in again.values() for name in asked.nodes]
    assert sorted(found) == sorted(3 * dead) and len(again) < len(found), "once to each for all"
    for peer, asked in again.items():
        job.happens(Received(peer, NodesProbed(asked.round, dict.fromkeys(asked.nodes, "refused"))))
    assert set(job.controller.cluster.nodes) == set(job.agents)


def test_more_nodes_than_copies_cover_are_not_waited_for_where_their_processes_have_ended() -> None:
    job = ControlPlane(nodes=3, spares=2)
    job.all_step(1)
    for name in ("node0", "node1"):
        asked = asked_of(job, job.agents.pop(name).hangs_up(), "node2")
        job["node2"].say(NodesProbed(asked.round, {name: "refused"}))
    job.all_report()
    assert job.done == End(1) and not job.records_of("unreachable")


def test_a_node_that_leaves_is_not_taken_for_one_that_was_killed() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    job["node0"].say(Suspect(epoch=1, role=0, reason="connection reset"))
    job["node1"].say(Leaving())
    job["node1"].say(Left())
    assert not sent(job.agents.pop("node1").hangs_up(), ProbeNodes)
    job.wait(0.1)
    assert [lost.reason for lost in job.records_of("detected")] == [
        "node node1 lost: it was told to end (SIGTERM)"
    ]


def test_a_peer_that_saw_it_die_leaves_no_doubt() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    job["node0"].say(Suspect(epoch=1, role=0, reason="connection reset"))
    assert not sent(job.agents.pop("node1").hangs_up(), ProbeNodes)
    assert job.phase == "quiescing"


def test_silence_is_the_loss_of_a_node() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    job["node1"].silent = True
    job.wait(job.settings.silence_limit - 1)
    assert job.phase == "running"
    job.wait(2)
    assert "no heartbeat for 10.0 s" in job.records_of("detected")[0].reason


def silenced(job: ControlPlane, name: str, reach: ProbeResult) -> None:
    """A node that beats regularly is silent from now on, and the others say of it what `reach` says."""
    job.wait(6)
    job[name].silent = True
    for _ in range(60):
        for peer, asked in sent(job.wait(0.1), ProbeNodes).items():
            agent = next(a for a in job.agents.values() if a.peer == peer)
            assert asked.nodes == {name: "data:1"} and agent.name != name
            agent.say(NodesProbed(asked.round, {name: reach}))
            job[name].asked += 1


def test_a_node_that_nobody_reaches_is_lost_sooner() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    silenced(job, "node1", "silent")
    assert job["node1"].asked >= 4
    [detected] = job.records_of("detected")
    assert detected.reason.endswith("no heartbeat for 5.0 s, and node0, node2 cannot reach it either")


def test_a_node_that_others_reach_is_waited_for() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    silenced(job, "node1", "reached")
    job.wait(10)
    assert not job.records_of("detected") and job.phase == "running"
    job["node1"].silent = False
    job.wait(30)
    assert not job.records_of("detected")


def test_steps_that_finish_speak_for_a_node_that_is_not_heard() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    job.wait(1)
    job["node1"].silent = True
    for step in range(2, 32):
        job["node0"].step_now = step
        job.wait(1)
    assert not job.records_of("detected"), "no step could finish without its workers"
    job.wait(12)
    assert "no heartbeat for 10.0 s" in job.records_of("detected")[0].reason


def both_out_of_sight() -> ControlPlane:
    """Two of three nodes, and k = 1: what the third one and the spares have does not suffice."""
    job = ControlPlane(nodes=3, spares=2)
    job.all_step(1)
    for name in ("node0", "node1"):
        job[name].hangs_up()
    job.wait(1)
    job.all_report("node2", "node3", "node4")
    return job


def test_more_nodes_than_copies_cover_are_waited_for() -> None:
    """Found by the simulator: two connections that broke at the same moment ended the job, and both lived."""
    job = both_out_of_sight()
    assert job.done is None and job.phase == "waiting"
    [unreachable] = job.records_of("unreachable")
    assert "nodes node0, node1 cannot be reached" in unreachable.reason
    for name in ("node0", "node1"):
        job[name].greet()
    job.all_report()
    assert job.phase == "running" and job.records_of("decided")[-1].more["moved"] == {}


def test_those_that_do_not_come_back_are_not_waited_for_longer_than_a_silent_node() -> None:
    job = both_out_of_sight()
    job.wait(job.settings.silence_limit - 2)
    assert job.done is None
    job.wait(2)
    assert job.done == End(1)


def test_those_whose_processes_have_ended_are_not_waited_for() -> None:
    job = both_out_of_sight()
    asked = sent(job.wait(1.5), ProbeNodes)[job["node2"].peer]
    assert asked.nodes == {"node0": "data:1", "node1": "data:1"}
    job["node2"].say(NodesProbed(asked.round, {"node0": "refused", "node1": "silent"}))
    job.wait(0.1)
    assert job.done is None
    job["node2"].say(NodesProbed(asked.round, {"node1": "refused"}))
    job.wait(0.1)
    assert job.done == End(1)


def test_one_of_them_that_comes_back_may_suffice() -> None:
    job = both_out_of_sight()
    job["node0"].greet()
    job.all_report("node0")
    assert job.phase == "running" and set(job.records_of("decided")[-1].more["moved"]) == {1}


def answer_probes(job: ControlPlane, seconds: float, *broken: tuple[str, str]) -> int:
    """Nodes say whom they reach: all, but over the `broken` links, which are broken one way. How often."""
    count, end = 0, job.now + seconds
    while job.now < end:
        for peer, asked in sent(job.wait(0.1), ProbeNodes).items():
            name = next(a.name for a in job.agents.values() if a.peer == peer)
            reach: dict[str, ProbeResult] = {
                n: "silent" if (name, n) in broken else "reached" for n in asked.nodes
            }
            job[name].say(NodesProbed(asked.round, reach))
            count += 1
    return count


def broke(nodes: int = 3, spares: int = 1, policy: str = "wait") -> ControlPlane:
    """A job in which a worker has seen its connections break."""
    job = ControlPlane(nodes=nodes, spares=spares, policy=policy)
    job.all_step(1)
    job.wait(1)
    job["node0"].say(Suspect(epoch=1, role=0, reason="connection reset"))
    return job


def test_one_end_of_a_broken_link_is_replaced() -> None:
    job = broke()
    victim = job["node1"].peer
    answer_probes(job, 10, ("node0", "node1"))
    [link] = job.records_of("link")
    assert link.more == {"nodes": ["node0", "node1"], "replaced": "node1"} and link.roles == (1,)
    assert job["node1"].heard[-1] == GivenUp() and victim not in job.controller.cluster.peers
    [detected] = job.records_of("detected")
    assert detected.reason == "node node1 lost: its link to node0 is broken"
    del job.agents["node1"]
    job.all_report()
    assert job.records_of("decided")[-1].more["moved"] == {1: "node3"}


def test_the_end_that_fewer_nodes_reach_is_replaced_and_rather_one_without_a_role() -> None:
    job = broke()
    answer_probes(job, 10, ("node0", "node1"), ("node2", "node0"))
    assert job.records_of("link")[0].more["replaced"] == "node0"
    job = broke()
    answer_probes(job, 10, ("node0", "node3"))
    assert job.records_of("link")[0].more["replaced"] == "node3"
    assert job.records_of("spare_lost")
    [detected] = job.records_of("detected")
    assert detected.roles == () and "all others reach each other (connection reset)" in detected.reason
    job.all_report()
    assert job.records_of("decided")[-1].more["moved"] == {}, (
        "what broke between roles is made anew, by the same workers"
    )


def test_an_end_that_holds_what_nobody_else_does_is_not_replaced() -> None:
    """Its node's copies were on another that is lost, and it has not sent them again."""
    job = broke()
    for agent in job.agents.values():
        agent.replicas = {name: held for name, held in agent.replicas.items() if name != job.segment(1)}
    answer_probes(job, 10, ("node0", "node1"))
    assert job.records_of("link")[0].more["replaced"] == "node0"
    job = broke()
    for agent in job.agents.values():
        agent.replicas = {}
    answer_probes(job, 10, ("node0", "node1"))
    [waiting] = job.records_of("waiting")
    assert "nodes node0 and node1 do not reach each other" in waiting.reason and not job.records_of("link")
    job["node0"].replicas = {job.segment(2): [0, 1]}
    job["node2"].replicas = {job.segment(1): [0, 1]}
    answer_probes(job, 10, ("node0", "node1"))
    assert job.records_of("link")[0].more["replaced"] == "node1"


def test_a_link_that_is_broken_once_is_not() -> None:
    job = broke()
    while not answer_probes(job, 0.1, ("node0", "node1")):
        pass
    answer_probes(job, 10)
    assert not job.records_of("link")
    [detected] = job.records_of("detected")
    assert detected.roles == () and "all nodes reach each other (connection reset)" in detected.reason
    job.all_report()
    assert job.records_of("decided")[-1].more["moved"] == {}, "what broke is made anew, by the same workers"


@pytest.mark.parametrize("policy", ["wait", "shrink"])  # which it cannot: there is one replica group
def test_nobody_is_replaced_for_a_link_while_there_is_no_other_node(policy: str) -> None:
    """Found by the simulator: it came back to the same link, without its copies, until the job ended."""
    job = broke(nodes=2, spares=0, policy=policy)
    answer_probes(job, 20, ("node0", "node1"))
    [waiting] = job.records_of("waiting")
    assert "nodes node0 and node1 do not reach each other" in waiting.reason and "--join" in waiting.reason
    assert not job.records_of("link") and not job.records_of("detected") and job.phase == "running"
    answer_probes(job, 10)
    [detected] = job.records_of("detected")
    assert "all nodes reach each other" in detected.reason, "it is mended: what broke is made anew"
    job.all_report()
    assert job.records_of("decided")[-1].more["moved"] == {}


def test_a_spare_that_joins_takes_over_for_an_end_of_a_broken_link() -> None:
    job = broke(nodes=2, spares=0)
    answer_probes(job, 10, ("node0", "node1"))
    job.join("node9")
    answer_probes(job, 10, ("node0", "node1"))
    assert job.records_of("link")[0].more["replaced"] == "node1"


def test_who_would_come_to_the_same_broken_link_takes_no_place() -> None:
    """Found by the simulator: two machines took turns with a role that neither could restore, until the job
    ended."""
    job = broke()
    answer_probes(job, 10, ("node0", "node1"))
    del job.agents["node1"]
    job.all_report()
    assert job.records_of("decided")[-1].more["moved"] == {1: "node3"}
    back = job.join("node1+1")
    for agent in job.agents.values():  # and node0 can be spared by nobody
        agent.replicas = {name: held for name, held in agent.replicas.items() if name != job.segment(0)}
    job["node3"].say(RestoreFailed(epoch=2, role=1, reason="no route to host"))
    job.all_report()
    job.wait(0)
    answer_probes(job, 10, ("node0", "node3"), ("node0", back.name))
    [waiting] = job.records_of("waiting")
    assert "nodes node0 and node3 do not reach each other" in waiting.reason
    assert len(job.records_of("link")) == 1
    answer_probes(job, 10)
    job.all_report()
    decided = job.records_of("decided")[-1]
    assert decided.epoch == 3 and decided.more["moved"] == {}, "the link is mended"


def test_a_link_is_of_no_interest_once_all_who_saw_it_break_are_dead() -> None:
    job = ControlPlane(nodes=3, spares=2)
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    taken = job.records_of("decided")[-1].more["moved"][1]
    job[taken].say(RestoreFailed(epoch=2, role=1, reason="no route to host"))
    lose(job, taken)
    job.all_report()
    assert len(job.records_of("decided")) == 3


def test_nobody_is_asked_about_links_while_steps_go_on() -> None:
    job = broke()
    for step in range(2, 30):
        job["node0"].step_now = step
        assert answer_probes(job, 1) == 0
    assert not job.records_of("detected")
    assert answer_probes(job, 10) > 0 and job.records_of("detected")


def test_a_fetch_that_failed_is_not_decided_on_again_before_links_are_known() -> None:
    job = ControlPlane(nodes=3, spares=2)
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    taken = job.records_of("decided")[-1].more["moved"][1]
    other = next(name for name in ("node3", "node4") if name != taken)
    job[taken].say(RestoreFailed(epoch=2, role=1, reason="no route to host"))
    job.all_report()
    assert len(job.records_of("decided")) == 2
    answer_probes(job, 3, (taken, "node0"), (taken, "node2"))
    assert job.records_of("link")[0].more["replaced"] == taken
    assert job.records_of("decided")[-1].more["moved"] == {1: other}


def test_a_second_node_dies_in_the_recovery() -> None:
    job = ControlPlane(nodes=3, spares=2)
    job.all_step(1)
    lose(job, "node0")
    job["node1"].report()
    lose(job, "node2")
    assert job.controller.cluster.epoch == 2, "one recovery for both"
    job.all_report()
    moved = job.records_of("decided")[1].more["moved"]
    assert moved.keys() == {0, 2} and set(moved.values()) == {"node3", "node4"}


def test_a_spare_dies_and_nobody_stops() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    kept = job.controller.cluster.current_plan
    effects = lose(job, "node2")
    assert {n.nodes["node2"] for n in sent(effects, NodesChanged).values()} == {None}
    assert job.records_of("spare_lost") and job.phase == "running"
    assert "node2" in kept.nodes, "what was sent is not changed"
    assert job.controller.cluster.current_plan == replace(
        kept, nodes=job.controller.cluster.current_plan.nodes
    )


# -- a worker dies -------------------------------------------------------------------------------------


def test_a_worker_dies_and_its_nodes_standby_takes_the_role() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    lost = job["node0"].crash(0)
    job["node0"].say(lost)
    job["node0"].say(lost)
    assert len(job.records_of("detected")) == 1, "what is said twice happens once"
    job.all_report()
    assert job.records_of("decided")[1].more["moved"] == {0: "node0"}


def test_a_worker_dies_on_a_node_without_a_standby() -> None:
    """It has some time to bring one up before the role moves."""
    for comes in (True, False):
        job = ControlPlane(nodes=2, spares=1)
        job.all_step(1)
        job["node0"].idle = 0
        job["node0"].say(job["node0"].crash(0))
        job.all_report()
        assert job.phase == "waiting"
        if comes:
            job.wait(5)
            job["node0"].say(Idle(idle=1))
            assert job.records_of("decided")[1].more["moved"] == {0: "node0"}
        else:
            job.wait(STANDBY_GRACE - 1)
            assert job.phase == "waiting"
            job.wait(2)
            assert job.records_of("decided")[1].more["moved"] == {0: "node2"}


def test_the_users_error_ends_the_job_with_the_end_of_its_traceback() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    traceback = 'Traceback (most recent call last):\n  File "train.py", line 1\n    f()\nValueError: no\n'
    lost = WorkerLost(role=1, pid=7, exit="exit code 1", code=1, fault=Fault.REFUSED, traceback=traceback)
    job["node1"].say(lost)
    assert job.ends() == End(1)
    assert "ValueError: no\nIts traceback is in /job/logs/role-1/stderr.log" in job.said[0]
    assert "line 1" not in job.said[0] and traceback in job.records_of("stopped")[0].reason


def test_a_worker_that_ends_well_before_training_has_ended() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    about = {"exit": "exit code 0", "code": 0, "fault": Fault.LEFT}
    job["node1"].say(WorkerLost(role=1, pid=7, **about))
    assert job.ends() == End(1) and "in the middle of training" in job.said[0]


def test_failures_without_a_new_step_end_the_job() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    for _ in range(9):
        assert job.done is None
        job["node0"].say(job["node0"].crash(0))
        job.all_report()
    assert "8 recoveries in a row without a new step after step 1" in job.said[-1] and job.ends() == End(1)


# -- the controller is restarted -----------------------------------------------------------------------


def restart(job: ControlPlane, *names: str) -> None:
    """Another controller, that these nodes greet."""
    job.start_controller()
    for name in names:
        job[name].greet()


def tell(job: ControlPlane) -> str:
    """Whoever is asked tells the state that it has kept. Returns its name."""
    [name] = [name for name, agent in job.agents.items() if agent.heard[-1:] == [SendState()]]
    for message in job[name].kept():
        job[name].say(message)
    return name


def test_a_successor_takes_over_what_an_agent_has_kept() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    before = job.controller.cluster
    restart(job, "node0", "node1", "node2")
    assert job.phase == "rebuilding"
    job.wait(0.1)
    tell(job)
    job.wait(0.1)
    assert job.phase == "running" and not job.records_of("detected")
    assert job.controller.cluster.current_plan == before.current_plan
    assert job.records_of("controller_restarted")
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    assert job.records_of("decided")[1].more["moved"] == {0: "node0"}


def test_a_leader_decides_nothing_while_somebody_may_obey_another() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    job.agents.pop("node1")
    job.start_controller(term=2, settled=job.now + 5)
    for name in ("node0", "node2"):
        effects = job[name].greet()
        assert effects[0] == Send(job[name].peer, LeaderHello(2, job.controller._session, ""))
    job.wait(0.1)
    tell(job)
    assert not sent(job.wait(4.5), Abort) and job.phase == "rebuilding"
    assert {abort.epoch for abort in sent(job.wait(1.0), Abort).values()} == {first_epoch(2)}
    job.all_report()
    assert job.records_of("decided")[-1].epoch == first_epoch(2)
    assert job.records_of("decided")[-1].more["moved"] == {1: "node2"}


def test_a_leader_of_a_job_that_has_not_begun_waits_as_well() -> None:
    job = ControlPlane(nodes=2)
    job.agents.clear()
    job.start_controller(term=3, settled=job.now + 5)
    for rank in range(2):
        job.join(f"other{rank}", rank)
    decided = len(job.records_of("decided"))
    job.wait(4.5)
    assert len(job.records_of("decided")) == decided
    job.wait(1.0)
    assert job.records_of("decided")[-1].epoch == first_epoch(3)


def test_a_leader_that_hears_of_a_newer_term_resigns_and_hears_nothing_of_the_node() -> None:
    job = ControlPlane(nodes=2, leadership="etcd://e:1/x")
    job["node0"].term = 4
    assert job["node0"].greet() == [Resign(4)]
    assert job["node0"].peer not in job.controller.cluster.peers


def test_a_controller_that_nobody_elects_resigns_for_nobody() -> None:
    job = ControlPlane(nodes=2)
    job["node0"].term = 2
    refused, closed = job["node0"].greet()
    assert refused == Refuse("node node0 obeys a controller of term 2")
    assert closed == Close(job["node0"].peer)
    assert job["node0"].peer not in job.controller.cluster.peers


def test_an_agent_of_a_former_job_is_told_so_and_changes_nothing() -> None:
    """It has a plan, which a controller that begins would go on from."""
    former = ControlPlane(nodes=2)
    former.all_step(3)
    job = ControlPlane(nodes=2, job="new", join=())
    left = former["node0"].hello()
    for term in (1, 2):
        greeting = replace(left, job="old", term=term)
        refused, told, closed = job.happens(Greeted(7, greeting))
        assert isinstance(refused, Refuse) and "--rdzv-id old" in refused.reason
        assert "node node0 (process 1) is of job old, this is new" in refused.reason
        assert (told, closed) == (Send(7, OtherJob("new")), Close(7))
    assert job.phase == "forming" and not job.controller.cluster.nodes
    for number in range(2):
        job.join(f"node{number}", number)
    job.wait(0.1)
    assert job.records_of("decided")[0].more["origin"] == "initial"


def test_nodes_that_a_job_begins_with_may_have_other_arguments(caplog: pytest.LogCaptureFixture) -> None:
    """As under torchrun: a directory of the node's, say. They are known when such a node comes back, and to a
    controller that takes over."""
    job = ControlPlane(nodes=2, join=[0])
    other = replaced(job.settings, command=Command("train.py", ["--cache=/of/node1"]))

    def greets(name: str, **more: object) -> bool:
        greeting = replace(job["node0"].hello(), node=name, digest=other.digest, **more)
        return not any(isinstance(effect, Refuse) for effect in job.happens(Greeted(70, greeting)))

    assert job.phase == "forming" and greets("node1", node_rank=1)
    assert "node node1 runs another script than others, or has other arguments" in caplog.text
    new = job["node0"].holdings()
    job = ControlPlane(nodes=2)
    job.all_step(1)
    assert not greets("stranger", holdings=new, node_rank=-1)
    assert greets("node1", node_rank=1, holdings=job["node1"].holdings()), "it takes part"
    assert greets("spare", holdings=new, node_rank=-1)
    job = ControlPlane(nodes=2)
    job.all_step(1)
    assert not greets("stranger", holdings=new, node_rank=1), "that one's place is taken"
    lose(job, "node1")
    assert greets("another", holdings=new, node_rank=1)


def test_a_node_that_was_started_with_another_command_line_is_not_let_in() -> None:
    """Even if it says that it is of this job, as who finds the job's directory does."""
    new = ControlPlane(nodes=2, join=[0])["node0"].holdings()
    job = ControlPlane(nodes=2, job="this")
    job.all_step(3)
    settings = job.settings
    for other in (
        replaced(settings, command=Command("train.py", ["--lr", "2"])),
        replaced(settings, command=Command("train.py", module=True)),
        replaced(settings, nproc_per_node=2),
        replaced(settings, replicas=0),
    ):
        greeting = replace(job["node0"].hello(), node="spare", job="this", digest=other.digest, holdings=new)
        refused, told, closed = job.happens(Greeted(7, greeting))
        assert isinstance(refused, Refuse) and "node spare (process 1) was started with" in refused.reason
        assert (told, closed) == (Send(7, OtherCommand(json.dumps(settings.alike))), Close(7))
    assert set(job.controller.cluster.nodes) == {"node0", "node1"} and job.phase == "running"
    for same in (
        replaced(settings, command=Command("/elsewhere/train.py"), durable_dir="/there"),
        replaced(settings, controller="x:1", interfaces=["ib0"], tee=0, hang_limit=1.0, log_format="json"),
    ):
        assert same.digest == settings.digest, "what is a node's own, or the leader's"


def test_an_agent_of_this_job_or_of_none_yet_is_let_in_and_hears_its_id() -> None:
    job = ControlPlane(nodes=2, job="this", join=())
    for peer, known in enumerate(("", "this")):
        agent = Agent(job, f"node{peer}", peer)
        greeting = replace(agent.hello(), job=known)
        assert job.happens(Greeted(peer, greeting))[0] == Send(
            peer, LeaderHello(1, job.controller._session, "this")
        )


def test_a_job_all_of_whose_nodes_are_told_to_end_waits_for_nobody() -> None:
    """Where the leader is elected, SIGTERM to its node is that node's alone."""
    job = ControlPlane(nodes=2, spares=0)
    job.all_step(1)
    job["node0"].say(Leaving())
    assert not job.controller._recovery.leaving
    job["node1"].say(Leaving())
    assert job.controller._recovery.leaving
    for name in ("node0", "node1"):
        job[name].say(Left())
    job.wait(0.2)
    assert job.ends() == End(143) and not job.records_of("detected")


def test_a_node_that_comes_lets_a_job_go_on_whose_other_nodes_were_all_told_to_end() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    for name in ("node0", "node1"):
        job[name].say(Leaving())
    job["node0"].say(Left())
    job.wait(0.2)
    assert job.phase == "running" and not job.records_of("detected"), "node1's workers may handle it"
    told = job["node0"]
    job.join("node2")
    job.wait(0.5)
    assert job.phase == "running", "it may be told to end as well"
    job.wait(0.7)
    assert told.heard[-1] == Shutdown(143)
    del job.agents["node0"]
    [lost] = job.records_of("detected")
    assert lost.reason == "node node0 lost: it was told to end (SIGTERM)" and lost.roles == (0,)
    job.all_report()
    assert job.controller.cluster.places == {0: "node2", 1: "node1"}
    job.all_step(2)
    job.wait(sigterm.GRACE + 1)
    assert job.phase == "running" and job.done is None


def test_a_successor_asks_another_agent_if_one_does_not_tell() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    restart(job, "node0", "node1")
    asked = {effect.peer for effect in job.wait(2.5) if isinstance(effect, Send)}
    assert asked == {job["node0"].peer, job["node1"].peer}


def test_a_failure_during_the_restart_is_found_and_counts_once() -> None:
    """Also where another controller's plan makes it learn once more."""
    job = ControlPlane(nodes=2)
    job.all_step(1)
    lost = job["node0"].crash(0)
    job.start_controller()
    job["node0"].greet([lost])
    job["node1"].greet()
    job.wait(0.1)
    tell(job)
    job.wait(0.1)
    assert job.phase == "quiescing" and len(job.records_of("detected")) == 2
    job.all_report()
    assert job.phase == "running"
    job.all_step(2)
    other = job["node1"].plan
    assert other is not None
    changed = replace(other, epoch=7, id="7-0")
    for name in ("node0", "node1"):
        job[name].plan, job[name].epoch = changed, 7
        job[name].greet()
    assert job.phase == "rebuilding"
    job.wait(0.1)
    tell(job)
    job.wait(0.1)
    assert job.phase == "running" and len(job.records_of("detected")) == 2


def test_a_plan_that_not_all_have_begun_ends_with_the_controller_that_made_it() -> None:
    """What their roles go on from is not among what agents keep."""
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    before = job["node0"].plan
    lose(job, "node1")
    job.all_report()
    assert job.phase == "running" and before is not None
    job["node0"].plan = before  # it has not heard of the new one
    restart(job, "node0", "node2")
    job.wait(0.1)
    tell(job)
    job.wait(0.1)
    assert job.records_of("detected")[-1].reason == "recovery was under way"
    job.all_report()
    assert job.phase == "running"
    assert job["node0"].plan.roles == job["node2"].plan.roles == {0: "node0", 1: "node2"}


def test_of_a_recovery_nodes_are_told_what_has_changed_and_newcomers_where_their_state_is() -> None:
    job = ControlPlane(nodes=4, spares=1)
    job.all_step(1)
    lose(job, "node1")
    heard = {name: len(agent.heard) for name, agent in job.agents.items()}
    job.all_report()
    for name, agent in job.agents.items():
        new = agent.heard[heard[name] :]
        assert not [each for each in new if isinstance(each, Hosts)], "all know of the plan before"
        [shared] = [each for each in new if isinstance(each, SharedPlan)]
        assert (shared.gone, [host.name for host in shared.changed]) == (["node1"], ["node4"])
        own = [each for each in new if isinstance(each, OwnPlan)]
        assert [each.sources.keys() for each in own] == ([{1}] if name == "node4" else [])
    late = job.join("late")
    [whole] = [each for each in late.heard if isinstance(each, Hosts)]
    assert {host.name for host in whole.hosts} >= {"node0", "node2", "node3", "node4"}


def test_a_node_that_died_with_the_controller_is_missed() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    del job.agents["node1"]
    restart(job, "node0", "node2")
    job.wait(0.1)
    tell(job)
    job.wait(succession.GRACE - 0.5)
    assert job.phase == "rebuilding"
    job.wait(1)
    assert job.records_of("detected")[0].reason == "lost while the controller was away"
    job.all_report()
    assert job.records_of("decided")[1].more["moved"] == {1: "node2"}


@pytest.mark.parametrize("racks", [True, False])
def test_a_rack_that_died_with_the_controller_is_missed_as_soon_as_a_node(racks: bool) -> None:
    """Its copies are in another, so nothing would be lost; of two nodes of which that is not known it may."""
    domains = {f"node{at}": f"rack{at // 2}/node{at}" for at in range(6)} if racks else {}
    job = ControlPlane(nodes=4, spares=2, domains=domains)
    job.all_step(1)
    for name in ("node0", "node1"):
        del job.agents[name]
    restart(job, "node2", "node3", "node4", "node5")
    job.wait(0.1)
    tell(job)
    job.wait(succession.GRACE + succession.QUIET + 0.5)
    assert bool(job.records_of("detected")) is racks
    job.wait(job.settings.silence_limit)
    assert job.records_of("detected")


def test_where_nodes_take_long_to_come_back_the_last_ones_have_longer() -> None:
    job = ControlPlane(nodes=4)
    job.all_step(1)
    restart(job, "node0")
    job.wait(0.1)
    tell(job)
    for name in ("node1", "node2"):
        job.wait(succession.QUIET - 0.1)
        job[name].greet()
        job.wait(succession.QUIET - 0.1)
        job.controller.handle(Admitted(), job.now)  # somebody is on his way
    job.wait(succession.QUIET + 2.0)
    assert job.phase == "rebuilding", "it took the others more than four seconds"
    job["node3"].greet()
    job.wait(0.1)
    assert job.phase == "running" and not job.records_of("detected")


def test_a_successor_waits_for_spares_and_their_copies() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    restart(job, "node0", "node1")
    job.wait(0.1)
    tell(job)
    job.wait(succession.GRACE - 0.5)
    assert job.phase == "rebuilding", "all nodes with roles are there, and one that keeps copies is not"
    job["node2"].greet()
    job.wait(0.2)
    assert job.phase == "running" and not job.records_of("detected")


def test_a_spare_that_came_after_the_plan_and_died_with_the_controller_is_retracted() -> None:
    """Or copies would be sent there for ever, and training would wait for them."""
    job = ControlPlane(nodes=2)
    job.all_step(1)
    job.join("spare")
    assert job["node0"].plan is not None and "spare" in job["node0"].plan.nodes
    del job.agents["spare"]
    restart(job, "node0", "node1")
    job.wait(0.1)
    tell(job)
    job.wait(succession.GRACE + 0.2)
    assert job.phase == "running"
    assert "spare" not in job["node0"].plan.nodes and "spare" not in job["node1"].plan.nodes


def test_an_attempt_to_bring_a_group_back_ends_with_the_plan_of_another_controller() -> None:
    """Its roles take part by then: whoever loses one would otherwise be told that nobody notices."""
    job = ControlPlane(nodes=2, groups=2, policy="shrink")
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    job.all_step(2)
    job.join("spare")
    job.wait(0.1)
    assert job.controller._recovery.prestart.attempt is not None
    plan = job["node0"].plan
    assert plan is not None
    roles = {0: "node0", 1: "spare"}
    changed = replace(plan, epoch=5, id="5-0", roles=roles, counterparts=Counterparts(()))
    for name in ("node0", "spare"):
        job[name].plan, job[name].epoch = changed, 5
    job["spare"].workers = {1: 1}
    for name in ("node0", "spare"):
        job[name].greet()
    job.wait(0.1)
    tell(job)
    job.wait(0.1)
    assert job.phase == "running"
    job["spare"].say(job["spare"].crash(1))
    assert job.phase == "quiescing"


# -- replica groups ------------------------------------------------------------------------------------


def test_a_node_that_had_not_begun_the_plan_is_told_again_what_to_prepare() -> None:
    """Found by the simulator: a successor asks a spare to bring a group back before the spare has begun the
    plan; the spare, to which that epoch is nothing, does nothing."""
    job = ControlPlane(nodes=2, groups=2, policy="shrink")
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    job.all_step(2)
    spare = job.join("spare")
    job.wait(0.1)
    effects = job["node0"].say(OperationCounts(role=0, counts={}))
    assert sent(effects, Prepare)[spare.peer].roles == [1]
    assert sent(spare.beat(), Prepare)[spare.peer].roles == [1]
    spare.workers[1] = next(job.pids)
    assert not sent(spare.beat(), Prepare)


def test_newcomers_that_are_ready_have_the_record_of_start_up() -> None:
    """Found by the simulator: the only role that trained is lost while one that comes back is ready; so its
    next worker was told that nobody has done a start-up operation, and waited in the first for ever."""
    job = ControlPlane(nodes=2, groups=2, policy="shrink")
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    job.all_step(2)
    first, second = job.join("spare0"), job.join("spare1")
    job.wait(0.1)
    job["node0"].say(OperationCounts(role=0, counts={"0-1:1#0": 7}))
    first.workers[1] = next(job.pids)
    first.say(Prepared(role=1, counts={"0-1:1#0": 7}))
    second.versions = {0: [1, 2]}
    lose(job, "node0")
    job.all_report()
    assert second.plan is not None and second.plan.roles == {0: "spare1", 1: "spare0"}
    assert second.plan.completed == {"0-1:1#0": (7, 1)}


def lose_all(job: ControlPlane) -> None:
    """All nodes with a role, and the controller."""
    for name in list(job.agents):
        del job.agents[name]
    job.start_controller()
    for rank in (0, 1):
        job.join(f"new{rank}", rank)
    job.wait(0.1)


def test_a_successor_that_finds_nobody_does_not_begin_anew_in_silence() -> None:
    """Found by the simulator: it took the job for one that had not begun, and trained from the first step."""
    job = ControlPlane()
    job.all_step(1)
    lose_all(job)
    assert job.done == End(1) and "lost together" in job.said[-1]
    assert len(job.records_of("decided")) == 1


def test_a_successor_that_finds_nobody_starts_over_where_the_script_resumes() -> None:
    job = ControlPlane()
    job.resumes = True
    job.all_step(1)
    lose_all(job)
    assert [record.epoch for record in job.records_of("decided")] == [1, 2]
    assert job.records_of("starting_over") and job.records_of("resumes")


def lose_all_with_a_role(job: ControlPlane) -> None:
    """And the controller. A spare is left, which knows the first plan and no more."""
    job.all_step(1)
    del job.agents["node0"], job.agents["node1"]
    job["node2"].replicas = {}
    job.start_controller()
    job["node2"].greet()
    job.join("new0")
    job.wait(0.1)
    tell(job)
    job.wait(job.settings.silence_limit - 0.5)
    assert not job.records_of("controller_restarted")  # more are missing than copies cover
    job.wait(1)
    job.all_report()
    job.wait(0.5)


def test_a_successor_that_finds_a_spare_alone_does_not_begin_anew_in_silence() -> None:
    """Found by the simulator: the spare's plan was made before anybody had trained."""
    job = ControlPlane(nodes=2, spares=1, replicas=0)
    lose_all_with_a_role(job)
    assert job.done == End(1) and "lost together" in job.said[-1]
    assert len(job.records_of("decided")) == 1


def names(job: ControlPlane, found: list[str], error: str = "") -> None:
    """All nodes that were asked have looked for durable checkpoints."""
    for agent in job.agents.values():
        for asked in [message for message in agent.heard if isinstance(message, ListDurable)][-1:]:
            agent.say(DurableNames(id=asked.id, names=found, error=error))


def cannot_look(job: ControlPlane) -> None:
    """All nodes try, as often as they are asked, until the job has ended."""
    end = job.now + PATIENCE + 2 * AGAIN
    while job.done is None and job.now < end:
        for agent in job.agents.values():
            for asked in [message for message in agent.heard if isinstance(message, ListDurable)]:
                agent.heard.remove(asked)
                agent.say(DurableNames(id=asked.id, names=[], error="Stale file handle"))
        job.wait(0.5)


def test_a_successor_that_finds_a_spare_alone_goes_on_from_a_durable_checkpoint() -> None:
    job = ControlPlane(nodes=2, spares=1, replicas=0, durable_dir="/d", durable_interval=1)
    names(job, [])
    lose_all_with_a_role(job)
    names(job, ["step-00000001-00001-1-2"])
    job.wait(0.1)
    decided = job.records_of("decided")[-1].more
    assert (decided["version"], decided["origin"]) == (1, "durable")


def test_a_job_does_not_start_over_where_storage_cannot_be_read() -> None:
    job = ControlPlane(durable_dir="/d", durable_interval=1)
    job.resumes = True
    names(job, [])
    job.all_step(1)
    for agent in job.agents.values():
        agent.versions, agent.replicas = {}, {}
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    cannot_look(job)
    assert job.done == End(1) and "cannot be read: node0: Stale file handle" in job.said[-2]
    assert "no version is whole" in job.said[-1] and not job.records_of("starting_over")


def test_settings_that_a_script_brings_begin_nothing_anew_where_storage_cannot_be_read() -> None:
    job = ControlPlane()
    values = {"durable_dir": "/d", "durable_interval": 1}
    for role in (0, 1):
        job[f"node{role}"].say(Configure(worker=0, id=0, settings=values))
        job[f"node{role}"].say(Configured(configured=values))
    cannot_look(job)
    assert job.done == End(1) and "cannot be read: node0: Stale file handle" in job.said[-1]


def test_where_a_newcomers_script_begins_is_not_where_the_job_did() -> None:
    """Found by the simulator: it loads a checkpoint of its own, and the job counted as one without a step."""
    job = ControlPlane()
    job.all_step(1)
    job["node0"].say(replace(job["node0"].layouts[0], initial=6))
    assert job.controller.cluster.versions.initial == 0 and job.controller.cluster.versions.trained


@pytest.mark.parametrize("version", [6, 1])
def test_a_job_does_not_go_back_to_before_the_scripts_own_checkpoint(version: int) -> None:
    """Its newcomers cannot: they were replaced until the job ended as futile."""
    job = ControlPlane()
    job.all_step(1)
    job["node0"].say(replace(job["node0"].layouts[0], initial=version))
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    if version == 1:
        assert job.records_of("decided")[-1].more["version"] == 1 and not job.records_of("starting_over")
        return
    assert "its own checkpoint of step 6" in job.records_of("starting_over")[-1].reason
    assert KillWorker(role=1) in job["node1"].heard
    job["node1"].say(job["node1"].crash(1))
    job.all_report()
    decided = job.records_of("decided")[-1].more
    assert (decided["version"], decided["origin"]) == (None, "initial")


def end_part(job: ControlPlane, version: int) -> None:
    for role in job.roles:
        job[f"node{role}"].say(Completed(epoch=1, role=role, part=1, version=version, last=False))


def test_a_successor_learns_from_any_agent_which_parts_of_the_script_are_over() -> None:
    """Found by the simulator: of those who had come to the part's end one was lost with the controller, and
    its newcomer waited there for those who had left."""
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    end_part(job, 1)
    assert job["node0"].heard[-1] == Release(parts=[1])
    job["node0"].parts = [1]
    del job.agents["node1"]
    restart(job, "node0", "node2")
    job.wait(0.1)
    tell(job)
    job.wait(succession.GRACE + 0.2)
    job.all_report()
    plan = job["node2"].plan
    assert plan is not None and plan.roles[1] == "node2" and plan.parts == [1]


def test_a_part_of_the_script_is_made_again_where_a_checkpoint_is_of_before_its_end() -> None:
    """Found by the simulator: newcomers passed it, and the rest of its steps were never done."""
    job = ControlPlane(durable_dir="/d", durable_interval=1)
    names(job, [])
    job.all_step(4)
    end_part(job, 4)
    for agent in job.agents.values():
        agent.versions, agent.replicas = {}, {}
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    names(job, ["step-00000003-00001-1-2"])
    plan = job["node1"].plan
    assert plan is not None and plan.version == 3 and plan.parts == []


def test_a_replica_group_comes_back_between_two_steps() -> None:
    job = ControlPlane(nodes=2, groups=2, policy="shrink")
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    job.all_step(2)
    spare = job.join("spare")
    effects = job.wait(0.1)
    assert sent(effects, SendCounts).keys() == {job["node0"].peer}
    prepare = sent(job["node0"].say(OperationCounts(role=0, counts={"0-1:1#0": 3})), Prepare)[spare.peer]
    assert (
        prepare.roles == [1]
        and prepare.surrogates.expanded() == {1: 0}
        and prepare.counterparts.expanded() == {}
    )
    assert prepare.completed == {"0-1:1#0": (3, 0)}
    effects = spare.say(Prepared(role=1, counts={}))
    assert sent(effects, SendHeartbeat).keys() == {job["node0"].peer}
    [hold] = sent(job["node0"].beat(), PauseAfterStep).values()
    assert (hold.epoch, hold.step) == (2, 1 + 2), "two steps after the newest"
    job["node0"].say(PausedAtStep(epoch=2, role=0))
    assert job.phase == "quiescing" and job.records_of("returning")
    job.all_report()
    assert job.records_of("returned")[0].roles == (1,)
    assert spare.plan is not None and spare.plan.roles == {0: "node0", 1: "spare"}


def test_who_comes_back_in_vain_does_not_keep_the_others_from_training() -> None:
    """Where a link stays broken, say. The time to the next attempt doubles until a step is done together."""
    job = ControlPlane(nodes=2, groups=2, policy="shrink")
    job.all_step(1)
    lose(job, "node1")
    for number, pause in enumerate([0.0, PAUSE, 2 * PAUSE]):
        job.all_report()
        job.all_step(2 + number)
        spare = job.join(f"spare{number}")
        assert pause == 0 or not sent(job.wait(pause - 0.5), SendCounts)
        assert sent(job.wait(0.6), SendCounts).keys() == {job["node0"].peer}
        job["node0"].say(OperationCounts(role=0, counts={}))
        spare.say(Prepared(role=1, counts={}))
        job["node0"].beat()
        job["node0"].say(PausedAtStep(epoch=job.controller.cluster.epoch, role=0))
        job.all_report()
        assert spare.plan is not None and spare.plan.roles[1] == spare.name
        if number < 2:
            lose(job, spare.name)
    job.all_step(5)
    assert job.controller._recovery.prestart.pause == PAUSE


def test_a_job_starts_over_while_a_group_is_ready_to_come_back() -> None:
    """Its workers are ended too; no plan has them yet."""
    job = ControlPlane(nodes=2, groups=2, policy="shrink")
    job.resumes = True
    job.all_step(1)
    lose(job, "node1")
    job.all_report()
    job.all_step(2)
    spare = job.join("spare")
    job.wait(0.1)
    job["node0"].say(OperationCounts(role=0, counts={}))
    spare.workers[1] = next(job.pids)
    spare.say(Prepared(role=1, counts={}))
    for agent in job.agents.values():
        agent.versions, agent.replicas = {}, {}
    lost = job["node0"].crash(0)
    job["node0"].say(lost)
    job.all_report()
    assert job.records_of("starting_over")
    assert KillWorker(role=1) in spare.heard


def test_a_group_is_lost_before_anybody_has_trained_anew() -> None:
    """The job has started over: what a role makes by itself nobody else has."""
    job = ControlPlane(nodes=2, groups=2, policy="shrink")
    job.resumes, job.redundancy = True, Redundancy.ADOPTABLE
    job.all_step(1)
    for agent in job.agents.values():
        agent.versions, agent.replicas = {}, {}
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    assert job.records_of("starting_over")
    job["node1"].say(job["node1"].crash(1))
    job.all_report()
    assert job.controller.cluster.script.restart_epoch and job.phase == "running"
    lose(job, "node1")
    job.all_report()
    assert job.phase == "waiting" and "not been copied yet" in job.records_of("waiting")[0].reason


# -- the rest ------------------------------------------------------------------------------------------


def test_sigterm_to_a_node_is_its_loss_and_to_the_job_its_end() -> None:
    job = ControlPlane(nodes=2, spares=1)
    job.all_step(1)
    job["node1"].say(Left())
    told = job.agents.pop("node1")
    assert Shutdown(code=143) in sent(job.wait(0.2), Shutdown).values() and not told.hangs_up()
    assert "told to end (SIGTERM)" in job.records_of("detected")[0].reason
    job.all_report()
    job.all_step(2)
    job.happens(Terminate())
    job["node0"].say(Left())
    job.agents.pop("node0")
    job.wait(0.2)
    assert job.phase == "running", "others may handle it"
    job["node2"].say(Left())
    job.wait(0.2)
    assert job.ends() == End(143)


def test_ftctl_does_not_wait_for_ever() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    ctl = next(job.peers)
    [asked] = job.happens(Received(ctl, DescribeRole(role=1)))
    assert asked == Send(job["node1"].peer, DescribeRole(role=1))
    answers = sent(job.wait(6), Denied)
    assert "does not answer" in answers[ctl].error
    [status] = sent(job.happens(Received(ctl, AskRows("roles"))), RolesStatus).values()
    assert [(row.role, row.node) for row in status.roles] == [(0, "node0"), (1, "node1")] and not status.more
    [killed, injected] = job.happens(Received(ctl, Inject(role=1)))[1:]
    assert killed == Send(job["node1"].peer, KillWorker(role=1)) and injected == Send(ctl, Injected(killed=1))


def test_a_flight_record_is_passed_on_from_the_agent_of_the_role_to_who_has_asked() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    first, second, other = next(job.peers), next(job.peers), next(job.peers)
    question, record = DescribeFlight(role=1), RoleFlight(role=1, log=None)
    for ctl in (first, second):
        assert job.happens(Received(ctl, question)) == [Send(job["node1"].peer, question)]
    job.happens(Received(other, DescribeRole(role=1)))
    assert job["node1"].say(record) == [Send(first, record), Send(second, record)]
    assert job["node1"].say(record) == []
    [denied] = job.happens(Received(first, DescribeFlight(role=7)))
    assert denied == Send(first, Denied(error="role 7 has no live node"))


def test_settings_that_contradict_another_nodes_end_the_job_with_the_reason() -> None:
    job = ControlPlane(nodes=2)
    job["node0"].configured = {"replicas": 0}
    job["node1"].configured = {"replicas": 1}
    restart(job, "node0")
    assert job.controller.cluster.settings.replicas == 0
    job["node1"].greet()
    assert job.done == End(1) and "only one set for the whole job" in job.said[0]


def test_fewer_spares_than_the_script_wants(caplog: pytest.LogCaptureFixture) -> None:
    job = ControlPlane(nodes=1, replicas=0)
    job.join("node1")
    question = Configure(worker=0, id=0, settings={"spares": 3})
    effects = job["node0"].say(question)
    told = sent(effects, UseSettings)
    assert told == {job[name].peer: UseSettings(settings={"spares": 3}) for name in ("node0", "node1")}
    [warning] = caplog.messages
    assert "asks for 3 spares; there are 1" in warning
    assert "ftrun --join host:1 --job-dir /job" in warning and "--spares" in warning
    answer = Send(job["node0"].peer, ConfigureAnswer(worker=0, id=0))
    assert job["node0"].say(Configured(configured={"spares": 3})) == [answer]
    assert job["node0"].say(question) == [answer] and len(caplog.messages) == 1


def test_who_has_left_while_another_waits_is_found() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    job["node0"].say(Completed(epoch=1, role=0, part=1, version=1, last=True))
    effects = job.wait(INTERVAL + 0.2)
    [round] = {question.round for question in sent(effects, SendIssued).values()}
    about = {"round": round, "epoch": 1, "step": 4, "unopened": []}
    job["node0"].say(Issued(**about, role=0, at_end=True, issued={"0-1:1#0": 5}))
    assert job.done is None
    job["node1"].say(Issued(**about, role=1, at_end=False, issued={"0-1:1#0": 6}))
    assert job.ends() == End(1) and "role 0 came to the end of its script after step 4" in job.said[0]


def test_a_pulse_counts_once_for_a_node_that_is_there_and_for_this_controller() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    sight = job.controller.cluster.nodes["node0"].liveness
    session = job.controller._session

    def pulse(session: str, node: str, number: int) -> None:
        assert job.controller.handle(Pulsed([Pulse(session, node, number, 0.0)]), job.now) == []

    pulse("another", "node0", 9)
    pulse(session, "nobody", 9)
    assert sight.pulses == -1 and sight.pulsed == -math.inf
    pulse(session, "node0", 5)
    first = sight.pulsed
    job.now += 1.0
    for number in (5, 4):  # somebody says it again
        pulse(session, "node0", number)
    assert sight.pulsed == first < job.now
    job["node0"].greet()
    assert job.controller.cluster.nodes["node0"].liveness.pulses == 5, "of the same controller"
    pulse(session, "node0", 6)
    assert job.controller.cluster.nodes["node0"].liveness.pulsed == job.now


def test_all_come_to_the_end() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    for role in range(2):
        effects = job[f"node{role}"].say(Completed(epoch=1, role=role, part=1, version=1, last=True))
    assert [release.parts for release in sent(effects, Release).values()] == [[1], [1]]
    job["node0"].say(Finished(role=0))
    job["node1"].say(job["node1"].crash(1))
    assert job.done == End(0) and "only local work left" in job.records_of("detected")[0].reason
    late = Agent(job, "late", -1)
    job.agents["late"] = late
    effects, peer = late.greet(), late.peer
    assert effects == [
        Send(peer, LeaderHello(1, job.controller._session, "")),
        Send(peer, Shutdown(code=0)),
        Close(peer),
    ]


def test_nodes_without_a_number_take_the_places_that_nobody_has() -> None:
    """At once, and in the order in which they come; those that are too many stand by."""
    job = ControlPlane(nodes=4, join=[0])
    job.join("c", ANY_RANK)
    job.join("b", ANY_RANK)
    job.wait(1.0)
    assert isinstance(job.controller.phase, Forming)
    job.join("d", 1)
    job.join("e", ANY_RANK)
    job.wait(1.0)
    assert job.controller.cluster.places == {0: "node0", 1: "d", 2: "c", 3: "b"}
    assert "e" in job.controller.cluster.nodes and not [text for text in job.said if "--node-rank" in text]


def test_two_nodes_with_one_number_are_said() -> None:
    job = ControlPlane(nodes=3)
    assert not [text for text in job.said if "--node-rank" in text]
    job.join("other", 1)
    [said] = [text for text in job.said if "--node-rank" in text]
    assert said == (
        "ftrun: node1 and other were all started with --node-rank 1: one trains, the others stand by"
    )
    job.join("a spare", 3)
    job.join("another spare", 3)
    job.join("who joins", -1)
    job.join("who joins as well", -1)
    assert [text for text in job.said if "--node-rank" in text] == [said]


def away(job: ControlPlane, name: str) -> None:
    """That node is lost, and the job goes on without its replica group."""
    lose(job, name)
    job.all_report()
    job.all_step(2)


def start_ahead(job: ControlPlane, role: int) -> Agent:
    """A node joins on which that role starts, until it is ready for its state."""
    spare = job.join("spare")
    job.wait(0.1)
    for each in list(job["node0"].workers) + [r for r in (1,) if r != role and "node1" in job.agents]:
        job[f"node{each}"].say(OperationCounts(role=each, counts={}))
    spare.workers[role] = next(job.pids)
    spare.say(Prepared(role=role, counts={}))
    assert job.controller._recovery.prestart.places() == {role: "spare"}
    return spare


def test_the_place_of_a_role_that_comes_back_is_taken() -> None:
    """Else two roles had one device: that of the node that was ready for one of them."""
    job = ControlPlane(nodes=2, groups=2, policy="shrink")
    job.all_step(1)
    away(job, "node1")
    spare = start_ahead(job, 1)
    spare.idle, spare.replicas = 1, {job.segment(0): [1, 2]}
    other = job.join("other")
    lose(job, "node0")
    job.all_report()
    assert other.plan is not None and other.plan.roles == {0: "other", 1: "spare"}


def test_who_was_ready_and_takes_no_part_has_not_come_back() -> None:
    job = ControlPlane(nodes=3, groups=3, policy="shrink")
    job.all_step(1)
    away(job, "node2")
    spare = start_ahead(job, 2)
    for agent in job.agents.values():
        agent.idle = 0
        agent.beat()
    lose(job, "node1")
    job.all_report()
    assert job["node0"].plan is not None and job["node0"].plan.roles == {0: "node0"}
    job["node0"].say(Restored(epoch=job["node0"].epoch, role=0, pid=1, version=2, loaded=True))
    job.wait(2 * job.settings.return_limit)
    assert job.phase == "running" and not job.records_of("not_returning") and spare.plan is not None


def test_a_node_that_is_gone_could_not_read_checkpoints_for_nobody() -> None:
    """What it has said of storage is no reason to end the job of those who can read it."""
    job = ControlPlane(nodes=2, spares=1, replicas=0, durable_dir="/d", durable_interval=1, join=(0, 1))
    job["node1"].say(DurableNames(id=0, names=[], error="stale file handle"))
    assert job.phase == "forming"
    lose(job, "node1")
    job.join("node2", 1)
    job.wait(0.1)
    names(job, [])
    assert job.phase == "running" and job.done is None


def test_the_last_role_that_never_trains_lets_the_others_go() -> None:
    """They wait at the end of training for all; it has none of it."""
    job = ControlPlane(nodes=2)
    job["node0"].say(Completed(epoch=1, role=0, part=1, version=1, last=True))
    assert sent(job["node1"].say(Finished(role=1)), Release).keys() == {job["node0"].peer, job["node1"].peer}


def test_that_workers_are_missing_is_said_where_all_nodes_are_there() -> None:
    job = ControlPlane(nodes=2)
    job.all_step(1)
    job["node0"].idle = 0
    job["node0"].say(job["node0"].crash(0))
    job.all_report()
    assert job.phase == "waiting" and not job.records_of("waiting")
    job.wait(STANDBY_GRACE + 1)
    [record] = job.records_of("waiting")
    assert record.reason.startswith("no worker for roles [0] (lost nodes: none)")


def test_who_starts_ahead_of_need_and_is_never_ready_does_not_keep_others_from_it() -> None:
    job = ControlPlane(nodes=2, groups=2, policy="shrink")
    job.all_step(1)
    away(job, "node1")
    spare = job.join("spare")
    job.wait(0.1)
    job["node0"].say(OperationCounts(role=0, counts={}))
    spare.workers[1] = next(job.pids)
    job.wait(job.settings.hang_limit + 1)
    assert "were not ready elsewhere" in job.records_of("not_returning")[0].reason
