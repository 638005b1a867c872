"""The agent as a state machine: event in, effects out. No process, no socket, no clock."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Collection
from typing import TypeVar, get_args

import msgspec
import pytest
from core.plans import messages_of, plan
from msgspec.structs import replace

from ft_core.control.decide import compact
from ft_core.node import events as e
from ft_core.node.about import About
from ft_core.node.link import outage
from ft_core.node.machine import FAREWELL, SAME, Agent
from ft_core.node.memory.view import Words
from ft_core.node.phases import Serving
from ft_core.node.termination import ANSWER
from ft_core.node.workers.worker_table import WorkerState, in_words
from ft_core.process.sigterm import ENDED, GRACE
from ft_core.protocol import messages as m
from ft_core.protocol.flight import FlightLog
from ft_core.protocol.table import placed
from ft_core.settings import Command, Settings
from ft_core.state.manifest import Segment, layout

T = TypeVar("T")


class Memory:
    """A node's memory as a dictionary: (role, adopted) -> versions; segment -> versions."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, bool], list[int]] = {}
        self.kept: dict[Segment, list[int]] = {}

    def words(self, worker: int) -> Words:
        return Words(version=7, tag=7, step_s=0.5, waited_s=0.25)

    def roles(self, adopted: bool) -> set[int]:
        return {role for role, of in self.held if of == adopted}

    def versions(self, role: int, adopted: bool = False) -> list[int]:
        return self.held.get((role, adopted), [])

    def segments(self, role: int, adopted: bool = False) -> tuple[Segment, ...]:
        return (segment(role),) if self.versions(role, adopted) else ()

    def replicas(self) -> dict[str, list[int]]:
        return {segment.id: list(versions) for segment, versions in self.kept.items()}

    def holders(self, name: str) -> tuple[int, ...]:
        return next(segment.holders for segment in self.kept if segment.id == name)

    def sent(self, role: int) -> tuple[int, int]:
        return 100, 2

    def xids(self) -> dict[int, int]:
        return {79: 2}

    def room(self, workers: Collection[int], agents: int) -> int:
        return 0

    def gpus(self) -> bool:
        return False

    def device_memory(self, worker: int) -> tuple[int, int]:
        return 0, 0

    def bandwidth(self) -> float:
        return 0.0


def segment(role: int) -> Segment:
    return layout((role,), [("state", "int64", (1,), 8)])


LAYOUT = m.Layout("0", (m.Item("state", "int64", (1,), 0, 8),))
GROUP = m.ReplicaGroup(0, 1, m.Redundancy.ADOPTABLE)


class Node:
    """The machine, and what it has done."""

    def __init__(self, **more: object) -> None:
        about = {"nnodes": 2, "nproc_per_node": 1, "controller": "127.0.0.1:1"} | more
        self.settings = Settings(command=Command("train.py"), **about)  # type: ignore[arg-type]
        self.memory = Memory()
        about = About(
            *("node0", "rack", 0, 42, "127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4", "/tmp/job"),
            environment={"OMP_NUM_THREADS": "1"},
        )
        self.agent = Agent(about, self.settings, self.memory)
        self.now = 0.0
        self.done: list[e.Effect] = []
        """By the last event."""
        self.handle(e.Begin())
        for start in self.effects(e.Start):
            self.handle(e.Forked(start.worker, 1000 + start.worker))
            self.handle(e.WorkerReady(start.worker))
        self.handle(e.Connected())

    def handle(self, event: e.Event, after: float = 0.0) -> list[e.Effect]:
        self.now += after
        done = self.agent.handle(event, self.now)
        report = self.agent.epochs.report
        self.done = [e.ToController(report()) if isinstance(each, e.Report) else each for each in done]
        return self.done

    def hear(self, message: m.ToAgent | m.NodePlan) -> list[e.Effect]:
        messages = messages_of(message) if isinstance(message, m.NodePlan) else [message]
        return [effect for each in messages for effect in self.handle(e.FromController(each))]

    def worker(self, message: m.FromWorker, role: int = 0) -> list[e.Effect]:
        return self.handle(e.FromWorker(self.number(role), message))

    def number(self, role: int = 0) -> int:
        worker = self.agent.crew.of_role(role)
        assert worker is not None
        return worker.number

    def effects(self, kind: type[T]) -> list[T]:
        """Of the last event."""
        return [effect for effect in self.done if isinstance(effect, kind)]

    def said(self, kind: type[T]) -> list[T]:
        """To the controller."""
        return [each.message for each in self.effects(e.ToController) if isinstance(each.message, kind)]

    def told(self, kind: type[T]) -> list[T]:
        """To workers."""
        return [each.message for each in self.effects(e.ToWorker) if isinstance(each.message, kind)]

    def train(self, role: int = 0) -> None:
        """As a worker that has got its role, up to its first step."""
        self.worker(m.Registered(0, [0, 1], False, GROUP, {}), role)
        self.worker(
            m.Restored(self.agent.epochs.epoch, role, 1000 + self.number(role), 0, loaded=False), role
        )

    def greeting(self) -> m.AgentHello:
        self.handle(e.NotConnected("it is gone"))
        self.handle(e.Connected())
        [hello] = self.said(m.AgentHello)
        return hello


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def training() -> Node:
    """Epoch 1, role 0 trains here."""
    node = Node()
    node.hear(plan())
    node.train()
    return node


# -- the controller --------------------------------------------------------------------------------------


def test_a_node_begins_with_a_worker_for_each_device_and_a_standby():
    node = Node(nproc_per_node=2)
    assert [(worker.device, worker.doing) for worker in node.agent.crew] == [
        *((device, WorkerState.IDLE) for device in (0, 1, -1))
    ]


def test_a_greeting_says_who_it_is_and_repeats_what_must_be_known(training: Node):
    training.worker(m.Stepped(1, 0, 1))
    training.worker(m.Trained(1, 0, 1, 0, {"0": [0, 8]}))
    training.worker(m.Configure(training.number(), 3, {"policy": "stop"}))
    hello = training.greeting()
    assert (hello.node, hello.pid, hello.domain, hello.holdings.begun) == ("node0", 42, "rack", "1-x")
    assert {type(said) for said in hello.said} == {m.Restored, m.Stepped, m.Trained, m.Configure}
    training.handle(e.WorkerEnded(training.number(), -9))
    training.now += 60.0
    (lost,) = (said for said in training.greeting().said if isinstance(said, m.WorkerLost))
    assert lost.age == 60.0, "a failure is as old as it is, however late somebody hears of it"
    training.hear(plan(2, newcomers=[0]))
    said = training.greeting().said
    assert {type(each) for each in said} == {m.Trained}, "of a role's former worker nothing is said again"


def test_a_tick_is_a_heartbeat(training: Node):
    training.memory.held[0, False] = [6, 7]
    training.handle(e.Tick())
    [beat] = training.said(m.Heartbeat)
    about = beat.roles[0]
    assert (beat.epoch, beat.begun, beat.idle) == (1, "1-x", 1)
    assert (about.pid, about.step, about.held, about.committed) == (1000, 7, [6, 7], -1)


def test_a_heartbeat_says_changes_and_now_and_then_the_same_again(training: Node):
    def beats(after: float) -> int:
        training.handle(e.Tick(), after)
        return len(training.said(m.Heartbeat))

    limit = training.agent.epochs.settings.silence_limit
    assert beats(0.5) == 1 and beats(0.5) == 0
    training.memory.held[0, False] = [6, 7]
    assert beats(0.5) == 1 and beats(0.5) == 0
    assert beats(limit * SAME) == 1 and beats(0.5) == 0
    training.greeting()
    assert beats(0.5) == 1, "who is at the other end may be another controller"


def test_holdings_name_own_roles_former_ones_adopted_ones_and_replicas(training: Node):
    memory = training.memory
    memory.held = {(0, False): [6, 7], (1, False): [5], (2, True): [7]}
    memory.kept = {segment(1): [4], segment(3): [6, 7]}
    holdings = training.greeting().holdings
    assert list(holdings.roles) == [0]
    assert (holdings.roles[0].versions, holdings.roles[0].segments) == ([6, 7], [segment(0).id])
    assert holdings.replicas == {segment(1).id: [4, 5], segment(3).id: [6, 7], segment(2).id: [7]}
    assert holdings.segments == {segment(role).id: str(role) for role in range(4)}


def test_what_will_not_have_to_be_said_in_a_recovery_is_said_before(training: Node):
    memory = training.memory
    training.greeting()
    memory.held[0, False], memory.kept = [6, 7], {segment(3): [6, 7]}
    training.handle(e.Tick(), 1)
    [report] = training.said(m.HoldingsChanged)
    assert isinstance(report.roles, dict) and isinstance(report.replicas, dict) and report.segments
    assert report.reported == 0, "nobody has asked"
    memory.held[0, False], memory.kept = [7, 8], {segment(3): [7]}
    training.handle(e.Tick(), 1)
    assert training.said(m.Heartbeat) and not training.said(m.HoldingsChanged), "of versions heartbeats tell"
    training.hear(m.Abort(2))
    training.worker(m.Quiesced(2, "training", {}))
    [report] = training.said(m.HoldingsChanged)
    assert (report.number, report.reported) == (1, 2)
    assert (report.roles, report.replicas, report.segments) == ([(7, 8)], [(7,)], None)
    hello = training.greeting()
    assert hello.holdings.roles[0].versions == [7, 8], "to who has heard nothing of it, all of it"
    memory.kept[segment(2)] = [8]
    training.handle(e.Tick(), 1)
    assert not training.said(m.HoldingsChanged), "while others wait for a plan it says nothing more"


def test_a_controller_of_another_job_is_said_and_is_no_controller(
    node: Node, caplog: pytest.LogCaptureFixture
):
    """As long as it answers in place of this node's own, that one is away."""
    node.handle(e.NotConnected("it is gone"), 1000)
    for _ in range(3):
        node.handle(e.Connected(1, "old"))
        assert node.said(m.AgentHello)[0].job == "old"
        node.handle(e.NotConnected("it is of job new", other_job=True), outage.ABANDONED / 3 + 1)
    assert "it is of job new; trying again" in caplog.text
    assert node.done == [e.End(1)], "nobody trains here"


def test_a_node_with_another_command_line_leaves_and_says_what_is_different(
    node: Node, training: Node, caplog: pytest.LogCaptureFixture
):
    command = Command("/there/train.py", ["--lr", "1", "--steps", "9", "--ft"])
    other = Settings(2, 1, command, controller="127.0.0.1:1", replicas=0)
    told = m.OtherCommand(json.dumps(other.alike))
    assert node.hear(told) == [e.End(2)]
    assert "node0 leaves" in caplog.text and "replicas is 1 here, and 0 in that job" in caplog.text
    assert "the command has 'train.py' here, and 'train.py --lr 1 --steps 9 --ft' in that job" in caplog.text
    mine = Settings(2, 1, Command("train.py", ["--lr", "2", "--steps", "9", "--ft"]), replicas=0)
    assert mine.differences(other.alike) == {
        "command": "the command has '--lr 2' here, and '--lr 1' in that job"
    }
    caplog.clear()
    assert not training.hear(told), "a node with roles trains on"
    assert "leaves" not in caplog.text and "was started with another command line" in caplog.text


def test_without_a_controller_a_node_warns_and_leaves_if_nobody_trains(
    node: Node, caplog: pytest.LogCaptureFixture
):
    node.handle(e.NotConnected("it is gone"), 1000)
    node.handle(e.NotConnected("refused"), outage.MISSED - 1)
    assert not caplog.text
    node.handle(e.NotConnected("refused"), 2)
    node.handle(e.NotConnected("refused"), 1)
    assert caplog.text.count("no controller answers at 127.0.0.1:1 (refused); trying again") == 1
    node.handle(e.NotConnected("refused"), outage.ABANDONED - 12)
    assert node.agent.phase == Serving()
    node.handle(e.NotConnected("refused"), 1)
    assert node.effects(e.End) == [e.End(1)] and "node0 leaves: nobody trains here" in caplog.text


def test_without_a_controller_training_goes_on(training: Node):
    training.handle(e.NotConnected("it is gone"))
    training.handle(e.NotConnected("refused"), 2 * outage.ABANDONED)
    training.hear(m.Withdraw([0]))  # as if the last role here had gone
    training.handle(e.NotConnected("refused"), outage.ABANDONED)
    assert training.agent.phase == Serving()
    training.handle(e.NotConnected("refused"), 1)
    assert training.effects(e.End) == [e.End(1)]


def test_another_secret_ends_a_node_that_was_never_served_and_no_other(
    node: Node, caplog: pytest.LogCaptureFixture
):
    refused = e.NotConnected("another secret", stranger=True, refused=True)
    node.handle(e.NotConnected("it is gone"))
    assert not node.handle(refused)
    assert "whoever answers at 127.0.0.1:1 is not this job's controller: another secret" in caplog.text
    new = Agent(node.agent.about, node.settings, node.memory)
    assert new.handle(refused, 0.0) == [e.End(2)]


def test_settings_that_the_script_brings(training: Node):
    number = training.number()
    question = m.Configure(number, 5, {"policy": "shrink"})
    assert training.worker(question) == [e.ToController(question)]
    training.hear(m.UseSettings({"policy": "shrink"}))
    assert training.said(m.Configured) == [m.Configured({"policy": "shrink"})]
    assert [effect.settings.policy for effect in training.effects(e.UseSettings)] == ["shrink"]
    training.hear(m.ConfigureAnswer(number, 5))
    assert training.done == [e.ToWorker(number, m.ConfigureAnswer(number, 5))]
    hello = training.greeting()
    assert not [said for said in hello.said if isinstance(said, m.Configure)]
    assert hello.holdings.configured == {"policy": "shrink"}
    refused = m.ConfigureAnswer(number, 6, "no")
    assert training.hear(refused) == [e.ToWorker(number, refused)]
    training.hear(m.Abort(2))
    training.hear(plan(2))
    assert training.told(m.PlanBegins)[0].plan.policy == "shrink"


def test_a_successor_of_the_controller_gets_the_state_with_the_nodes_of_now(training: Node):
    added = m.NodeAddress("127.0.0.1:29", "node9")
    training.hear(m.NodesChanged("1-x", {"node9": added, "node2": None}))
    [used] = training.effects(e.UsePlan)
    assert set(used.plan.nodes) == {"node0", "node1", "node9"}
    assert not training.hear(m.NodesChanged("1-other", {"node9": None}))
    training.hear(m.SendState())
    [kept], [table] = training.said(m.KeptState), training.said(m.Hosts)
    assert kept.state.id == table.id == "1-x" and placed(table.hosts) == (used.plan.roles, used.plan.nodes)


def test_of_another_plan_a_node_is_told_what_is_different(training: Node):
    """A spare takes over for a node that is lost; another one is new."""
    before = training.agent.epochs.plan
    assert before is not None
    training.hear(m.Abort(2))
    new = plan(2, version=1, newcomers=[1])
    changed = [m.Host("node2", "127.0.0.1:22", "", "1"), m.Host("node9", "127.0.0.1:29", "rack", "")]
    state = msgspec.structs.replace(new.state, id="2-y")
    other = m.SharedPlan("1-other", ["node1"], changed, state)
    assert not training.hear(other), "it is not known what it differs from: it will be sent again"
    training.hear(m.OwnPlan("2-y", {}, {}, {"0-1:1#0": (3, 0)}))
    training.hear(msgspec.structs.replace(other, base=before.id))
    [used] = training.effects(e.UsePlan)
    assert used.plan.roles == {0: "node0", 1: "node2"}
    assert used.plan.nodes.keys() == {"node0", "node2", "node9"}
    assert used.plan.nodes["node9"].domain == "rack" and used.plan.nodes["node0"] == before.nodes["node0"]
    assert used.plan.completed == {"0-1:1#0": (3, 0)}
    nodes = {"node7": m.NodeAddress("127.0.0.1:27", "node7")}
    training.hear(m.NodesChanged("2-y", nodes, all=True))
    [used] = training.effects(e.UsePlan)
    assert used.plan.nodes.keys() == {"node0", "node2", "node7"}, "these are all without a role"


def test_flight_records_are_read_and_posted(training: Node):
    assert training.hear(m.SendFlight(3)) == [e.ReadFlight(m.SendFlight(3), frozenset(), {0: 0}, 1)]
    log = FlightLog(0, 1, 7, 99, "T", False, (), ())
    assert training.handle(e.FlightRead(m.Flights(3, (log,)))) == [e.ToController(m.Flights(3, (log,)))]
    assert training.hear(m.DescribeFlight(0)) == [e.ReadFlight(m.DescribeFlight(0), frozenset(), {0: 0}, 1)]
    training.hear(m.Abort(2))
    [between] = [each for each in training.hear(m.SendFlight(4)) if isinstance(each, e.ReadFlight)]
    assert between.epoch == -1, "none is under way"


def test_with_a_flight_record_goes_whether_its_role_waits_at_the_end_of_its_script(training: Node):
    def at_end() -> frozenset[int]:
        training.hear(m.SendFlight(3))
        [asked] = training.effects(e.ReadFlight)
        return asked.at_end

    training.worker(m.Completed(1, 0, 1, 4, last=False))
    assert at_end() == {0}
    training.hear(m.Release([4]))
    assert at_end() == frozenset(), "all have come to the end of this part"
    training.worker(m.Completed(1, 0, 2, 6, last=True))
    assert at_end() == {0}
    training.hear(m.Abort(2))
    training.hear(plan(2))
    assert at_end() == frozenset(), "it is done again"
    training.worker(m.Completed(2, 0, 2, 6, last=True))
    training.hear(m.Release([4, 6]))
    training.worker(m.Finished(0))
    assert at_end() == {0}


def test_a_worker_that_hangs_is_looked_at_and_then_ended(training: Node):
    number, pid = training.number(), training.agent.crew.playing()[0].pid
    assert not training.hear(m.Examine(0, pid + 1, end=True)), "it is another by now"
    assert training.hear(m.Examine(0, pid, end=False)) == [e.WriteStacks(number, 0, end=False)]
    assert not training.handle(e.Examined(number, end=False))
    assert training.hear(m.Examine(0, pid, end=True)) == [e.WriteStacks(number, 0, end=True)]
    assert training.handle(e.Examined(number, end=True)) == [e.Kill(number)]
    assert not training.handle(e.Examined(99, end=True)), "it has ended meanwhile"


def test_the_last_version_is_written_once_however_often_that_is_asked_for(training: Node):
    def asked(version: int = 3) -> m.SaveVersion:
        assert training.agent.epochs.plan is not None
        about = training.agent.epochs.plan.id, 2, version, [0]
        return m.SaveVersion(*about, sources={}, away={}, replicated=False)

    training.hear(m.Abort(2))
    [order] = training.hear(asked())
    assert isinstance(order, e.WriteVersion)
    training.greeting()
    assert not training.hear(asked()), "it is being written"
    answer = e.ToController(m.VersionSaved(2, 0, 3, ""))
    assert training.handle(e.VersionWritten(order, "")) == [answer]
    assert training.hear(asked()) == [answer], "which was lost with the connection, perhaps"
    assert isinstance(training.hear(asked(version=2))[0], e.WriteVersion)


def test_who_was_given_up_becomes_a_spare_and_does_nothing_more(training: Node):
    training.hear(m.GivenUp())
    assert training.done == [e.BecomeSpare()]
    assert not training.handle(e.Tick()) and not training.hear(plan(2))


def test_one_that_is_done_and_is_to_run_once_more_is_replaced(training: Node):
    """All scripts are started again: nobody else would say that it is gone, nor be there in its place."""
    training.worker(m.Finished(0))
    training.hear(m.KillWorker(0))
    done = training.handle(e.WorkerEnded(training.number(), -9))
    lost = [said for effect in done if isinstance(said := getattr(effect, "message", None), m.WorkerLost)]
    assert [each.fault for each in lost] == [m.Fault.TERMINATED]
    assert any(isinstance(effect, e.Start) for effect in done)


def test_ftctl_kills_a_role_or_the_node(training: Node):
    assert training.hear(m.KillWorker(0)) == [e.Kill(training.number())]
    assert not training.hear(m.KillWorker(1))
    assert training.hear(m.KillWorker()) == [e.KillNode()]
    assert training.handle(e.LauncherGone()) == [e.KillNode()]


# -- epochs ----------------------------------------------------------------------------------------------


def test_a_plan_gives_roles_to_idle_workers_and_lets_them_begin(node: Node):
    node.hear(plan())
    assert [type(effect) for effect in node.done] == [
        *(e.UsePlan, e.KeepOnly, e.ShowRest, e.ToWorker, e.ToWorker)
    ]
    [assign], [restore] = node.told(m.Assign), node.told(m.Restore)
    assert (assign.role, assign.plan.began_with.roles, assign.plan.epoch) == (0, 2, 1)
    environment = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "4", "TORCHELASTIC_RUN_ID": "job"}
    assert environment.items() <= assign.env.items()
    assert restore == m.Restore(1, None, [])
    assert not node.hear(plan()), "the same plan again"


def test_a_worker_keeps_its_role_in_the_next_epoch(training: Node):
    number = training.number()
    training.hear(m.Abort(2))
    assert training.done == [
        e.BeginEpoch(2),
        e.Commit(number, -1),
        e.ToWorker(number, m.Abort(2)),
    ]
    training.worker(m.Quiesced(2, "training", {"0-1:1#0": 3}))
    [report] = training.said(m.HoldingsChanged)
    assert (report.reported, report.roles[0].counts) == (2, {"0-1:1#0": 3})
    assert not training.worker(m.Quiesced(2, "training", {})), "it reports once"
    following = plan(2, version=0, origin="memory")
    training.memory.held[0, False] = [0, 1]
    training.hear(following)
    assert e.DropAfter(0) in training.done
    [bring] = training.effects(e.FetchState)
    assert bring == e.FetchState(number, 0, (0,), following)
    copy = m.CopyHere(0, 0, [1, 2, 3, 4], [LAYOUT])
    training.handle(e.StateFetched(bring, (copy,)))
    assert training.done == [e.ToWorker(number, m.Restore(2, 0, [copy]))]
    training.handle(e.StateFetched(bring, failed="no holder"))
    assert training.said(m.RestoreFailed) == [m.RestoreFailed(2, 0, "no holder")]


def test_a_spare_says_what_it_takes_over_and_when_that_trains(node: Node):
    """On its own console. That all roles begin is no news to anybody."""
    node.hear(plan(roles={0: "node1", 1: "node2"}))
    node.hear(m.Abort(2))
    node.hear(plan(2, version=1200, origin="memory", newcomers=[0]))
    assert node.effects(e.Say) == [e.Say("ftrun: this node, node0, takes over role 0, after step 1,200")]
    node.train()
    node.now += 2.5
    node.worker(m.Stepped(2, 0, 1201))
    assert node.effects(e.Say) == [e.Say("ftrun: what this node has taken over trains here, after 2.5 s")]
    node.hear(m.Abort(3))
    node.hear(plan(3, version=1201, origin="memory"))
    assert not node.effects(e.Say)


def test_nobody_obeys_an_older_epoch(training: Node):
    training.hear(m.Abort(3))
    assert not training.hear(m.Abort(2)) and not training.hear(m.Abort(3))
    assert not training.hear(plan(2))
    assert training.agent.epochs.epoch == 3 and training.agent.epochs.plan_epoch == 1


def test_a_plan_that_overtakes_its_abort_begins_all_the_same(training: Node):
    training.hear(plan(2, version=0, origin="memory"))
    assert training.agent.epochs.epoch == 2 and training.told(m.PlanBegins)
    assert not training.hear(m.Abort(2))


def test_a_node_reports_when_the_last_worker_is_quiet_or_gone():
    node = Node(nproc_per_node=2)
    node.hear(plan(roles={0: "node0", 1: "node0"}))
    node.hear(m.Abort(2))
    node.worker(m.Quiesced(2, "startup", {}), 0)
    assert not node.said(m.HoldingsChanged)
    node.handle(e.WorkerEnded(node.number(1), -9))
    assert [type(each.message) for each in node.effects(e.ToController)] == [m.WorkerLost, m.HoldingsChanged]
    assert not node.said(m.HoldingsChanged)[0].roles[1].alive


def test_who_does_not_leave_its_step_is_killed_once_it_is_known_where_it_is(training: Node):
    training.hear(m.Abort(2))
    training.handle(e.Tick(), training.settings.quiesce_timeout - 0.1)
    assert not training.effects(e.WriteStacks)
    training.handle(e.Tick(), 0.2)
    number = training.number()
    assert training.effects(e.WriteStacks) == [e.WriteStacks(number, 0, end=True)]
    training.handle(e.Examined(number, end=True))
    assert training.effects(e.Kill) == [e.Kill(number)]
    training.handle(e.Tick(), 100)
    assert not training.effects(e.WriteStacks)


def test_who_has_left_its_step_waits_for_the_plan_as_long_as_it_takes(training: Node):
    training.hear(m.Abort(2))
    training.worker(m.Quiesced(2, "training", {}))
    training.handle(e.Tick(), 2 * training.settings.quiesce_timeout)
    assert not training.effects(e.Kill)


def test_a_role_that_moves_away_loses_its_worker_and_once_others_have_made_a_step_its_memory(training: Node):
    """An epoch that ends before its roles have fetched their state leaves all there is of it where it was."""
    training.memory.held[0, False] = [0, 1]
    number, moved = training.number(), {0: "node1", 1: "node1"}
    training.hear(plan(2, version=1, origin="memory", roles=moved))
    assert training.effects(e.Kill) == [e.Kill(number)]
    assert training.effects(e.KeepOnly) == [e.KeepOnly(frozenset([0]), frozenset())]
    assert not training.agent.crew.playing()
    assert training.handle(e.WorkerEnded(number, -9)) == [e.Start(2, 0)], "for the same device; no loss"
    training.hear(plan(3, version=1, origin="memory", roles=moved))
    assert training.effects(e.KeepOnly) == [e.KeepOnly(frozenset([0]), frozenset())]
    training.hear(plan(4, version=2, origin="memory", roles=moved))
    assert training.effects(e.KeepOnly) == [e.KeepOnly(frozenset(), frozenset())]


def test_a_role_whose_worker_has_died_since_the_report_gets_none_by_that_plan(training: Node):
    training.hear(m.Abort(2))
    training.worker(m.Quiesced(2, "training", {}))
    training.handle(e.WorkerEnded(training.number(), -9))
    training.hear(plan(2))
    assert not training.effects(e.ToWorker)


def test_there_may_be_no_idle_worker():
    node = Node()
    for worker in list(node.agent.crew):
        node.handle(e.WorkerEnded(worker.number, -9))
    node.hear(plan())
    assert node.said(m.NoIdleWorker) == [m.NoIdleWorker(1, 0)]


def test_a_standby_takes_the_device_of_whom_it_stands_in_for():
    node = Node(nproc_per_node=2)
    node.hear(plan(roles={0: "node0", 1: "node0"}))
    node.handle(e.WorkerEnded(node.number(1), -9))
    assert node.effects(e.Start) == [e.Start(3, -1)]
    node.hear(m.Abort(2))
    node.worker(m.Quiesced(2, "startup", {}), 0)
    node.hear(plan(2, roles={0: "node0", 1: "node0"}, newcomers=[1]))
    [assign] = node.told(m.Assign)
    assert (assign.role, assign.env["LOCAL_RANK"], node.number(1)) == (1, "1", 2)


def test_scripts_that_start_over_keep_nothing(training: Node):
    training.hear(plan(2, restart_epoch=2))
    assert e.DropAfter(-1) in training.done
    assert not training.greeting().said


def test_state_that_the_script_makes_is_not_brought(training: Node):
    training.hear(m.Abort(2))
    training.hear(plan(2, version=0, origin="initial"))
    assert not training.effects(e.FetchState) and training.told(m.Restore) == [m.Restore(2, 0, [])]
    sources = {0: {segment(0).id: ["node1"]}}
    training.hear(plan(3, version=0, origin="initial", sources=sources))
    assert [bring.held for bring in training.effects(e.FetchState)] == [(0,)]


def test_what_a_role_adopts_is_brought_unless_every_group_has_all(training: Node):
    elastic = {"version": 0, "origin": "memory", "roles": {0: "node0"}, "absent": {1: 0}, "adopting": True}
    training.hear(plan(2, **elastic))
    assert [bring.held for bring in training.effects(e.FetchState)] == [(0, 1)]
    assert training.effects(e.KeepOnly) == [e.KeepOnly(frozenset([0]), frozenset([1]))]
    whole = m.ReplicaGroup(0, 1, m.Redundancy.REPLICATED)
    training.worker(m.Registered(0, [0], False, whole, {}))
    training.hear(plan(3, **elastic))
    assert [bring.held for bring in training.effects(e.FetchState)] == [(0,)]


# -- roles that come back while others train ---------------------------------------------------------------


def test_roles_that_come_back_prepare_ahead_of_their_epoch(node: Node):
    node.hear(plan(roles={1: "node1"}))
    order = m.Prepare(1, [0], m.Counterparts(()), compact.counterparts({0: 1}), {})
    assert not node.hear(msgspec.structs.replace(order, epoch=2)), "of an epoch that is not there"
    node.hear(order)
    [assign] = node.told(m.Assign)
    assert assign.plan.ahead == {0: 1} and assign.plan.origin == "memory" and assign.plan.epoch == 1
    node.worker(m.Registered(0, [], False, GROUP, {"0-1:1#0": 2}))
    assert node.said(m.Prepared) == [m.Prepared(0, {"0-1:1#0": 2})]
    node.hear(order)
    assert node.done == [e.ToController(m.Prepared(0, {"0-1:1#0": 2}))], "said again to whoever asks again"
    node.hear(m.Withdraw([0]))
    assert len(node.effects(e.Kill)) == 1 and not node.greeting().said


def test_what_starts_ahead_ends_with_the_controller_that_wanted_it():
    """A successor would take who has records for one that has none, and its peers would wait for it."""
    node = Node(nproc_per_node=2)
    node.hear(m.LeaderHello(1, "first", "job"))
    node.hear(plan(roles={0: "node0", 1: "node1"}))
    node.train()
    done = {"0-1:1#0": (2, 1)}
    node.hear(m.Prepare(1, [1], m.Counterparts(()), compact.counterparts({1: 1}), done))
    node.worker(m.Registered(0, [], False, GROUP, {"0-1:1#0": 2}), role=1)
    number = node.number(1)
    assert m.Prepared in map(type, node.greeting().said)
    assert not node.hear(m.LeaderHello(1, "first", "job")), "the connection broke, and is there again"
    assert node.hear(m.LeaderHello(1, "second", "job")) == [e.Kill(number)]
    assert node.agent.crew.of_role(0) and m.Prepared not in map(type, node.greeting().said)
    node.hear(plan(2, roles={0: "node0", 1: "node0"}, newcomers=[1]))
    [assign] = node.told(m.Assign)
    assert assign.role == 1 and assign.plan.completed == {} and node.number(1) != number


# -- safe copies -------------------------------------------------------------------------------------------


def staged(node: Node, version: int, role: int = 0) -> e.Replicate:
    node.worker(m.Staged(role, version))
    [order] = node.effects(e.Replicate)
    return order


def arrived(order: e.Replicate, failed: str = "") -> e.Replicated:
    return e.Replicated(order, failed)


def test_a_snapshot_is_committed_when_it_is_safe(training: Node):
    order = staged(training, 1)
    assert order == e.Replicate(training.number(), 0, 1, 1, (0, 1))
    assert training.handle(arrived(order)) == [e.Commit(training.number(), 1)]
    older = staged(training, 2), staged(training, 3)
    for order in reversed(older):
        training.handle(arrived(order))
    assert training.done == [e.Commit(training.number(), 3)], "the word does not go back"


def test_a_snapshot_that_was_loaded_is_made_safe_again(training: Node):
    training.hear(plan(2, version=1, origin="memory"))
    training.worker(m.Restored(2, 0, 1000, 1, loaded=True))
    assert [order.version for order in training.effects(e.Replicate)] == [1]


def test_the_commit_word_goes_by_the_oldest_of_what_a_worker_holds(training: Node):
    training.hear(plan(2, version=0, origin="memory", roles={0: "node0"}, absent={1: 0}, adopting=True))
    own, adopted = staged(training, 1), staged(training, 1, role=1)
    training.handle(arrived(own))
    assert training.done == [e.Commit(training.number(), -1)]
    training.handle(arrived(adopted))
    assert training.done == [e.Commit(training.number(), 1)]


def test_what_cannot_be_replicated_is_tried_again(training: Node, caplog: pytest.LogCaptureFixture):
    order = staged(training, 1)
    training.handle(arrived(order, "it is gone"))
    assert training.done == [e.ToController(m.Suspect(1, 0, "it is gone"))]
    training.handle(e.Tick())
    assert not training.effects(e.Replicate)
    training.handle(e.Tick(), training.settings.heartbeat)
    assert training.effects(e.Replicate) == [order]
    assert not training.handle(arrived(order, "it is gone")) and "training waits" in caplog.text
    training.handle(e.Tick(), training.settings.heartbeat)
    assert training.handle(arrived(order)) == [e.Commit(training.number(), 1)]


@pytest.mark.parametrize("failed", ["", "stale"])
def test_what_arrives_after_its_epoch_counts_for_nothing(failed: str, training: Node):
    order = staged(training, 1)
    training.hear(m.Abort(2))
    assert not training.handle(arrived(order, failed))
    assert not training.worker(m.Staged(0, 2)), "nor is what is staged between two epochs sent"
    training.handle(e.Tick(), 10)
    assert not training.effects(e.Replicate)


def test_a_corrupt_copy_is_struck_off_and_the_role_cannot_be_restored(training: Node):
    training.worker(m.CorruptCopy(1, 0, "chunk 3"))
    assert training.effects(e.InvalidateCopy) == [e.InvalidateCopy(1, 0, adopted=True)]
    assert training.said(m.RestoreFailed) == [m.RestoreFailed(1, 0, "chunk 3")]


@pytest.fixture
def durable() -> Node:
    node = Node(durable_dir="/durable", durable_interval=2)
    node.hear(plan())
    node.train()
    return node


def test_what_the_state_is_is_told_also_by_who_needs_no_memory_for_it(durable: Node):
    """Found by the simulator: after two restores from storage, the controller never learnt that it trains."""
    durable.memory.held[0, False] = [2]
    durable.worker(m.Restored(1, 0, 1000, 2, loaded=True))
    [layout] = durable.said(m.RoleLayout)
    assert layout.role == 0 and layout.segments == {segment(0).id: "0"}


def test_every_so_often_what_is_safe_is_written(durable: Node):
    durable.handle(arrived(staged(durable, 1)))
    assert not durable.effects(e.WriteDurable)
    durable.handle(arrived(staged(durable, 2)))
    [write] = durable.effects(e.WriteDurable)
    assert (write.role, write.version, write.replicated) == (0, 2, False)
    durable.now += 1.5
    durable.handle(e.DurableDone(0, 1, 2, (0, 1)))
    assert durable.said(m.DurableWritten) == [m.DurableWritten(role, 1, 2, 1.5) for role in (0, 1)]


def test_one_at_a_time_is_written_and_what_is_not_is_said(durable: Node, caplog: pytest.LogCaptureFixture):
    durable.handle(arrived(staged(durable, 2)))
    durable.handle(arrived(staged(durable, 4)))
    [failed] = durable.said(m.DurableFailed)
    assert failed.version == 4 and "that of step 2 is still being written" in failed.reason
    durable.handle(e.DurableDone(0, 1, 2, failed="disk full"))
    assert durable.done == [e.ToController(m.DurableFailed(0, 2, "disk full"))] and "disk full" in caplog.text
    durable.handle(arrived(staged(durable, 6)))
    assert len(durable.effects(e.WriteDurable)) == 1


def test_from_a_durable_checkpoint_on_nothing_that_was_in_memory_counts(durable: Node):
    """Found by reading: a copy of the same version, of a past that was done again, was used in its place."""
    durable.hear(plan(2, version=2, origin="durable", durable="step-2"))
    assert durable.effects(e.DropAfter) == [e.DropAfter(-1)]


def test_what_was_read_is_not_written_again(durable: Node):
    durable.hear(plan(2, version=2, origin="durable", durable="step-2"))
    durable.worker(m.Restored(2, 0, 1000, 2, loaded=True))
    [order] = durable.effects(e.Replicate)
    durable.handle(arrived(order))
    assert durable.effects(e.Commit) and not durable.effects(e.WriteDurable)


def test_a_version_of_which_the_worker_has_died_is_written_all_the_same(durable: Node):
    order = staged(durable, 2)
    durable.handle(e.WorkerEnded(durable.number(), -9))
    durable.handle(arrived(order))
    assert len(durable.effects(e.WriteDurable)) == 1


# -- workers -----------------------------------------------------------------------------------------------


def test_memory_for_a_snapshot_is_announced_before_the_worker_has_it(training: Node):
    request = m.Allocate(9, 0, 1, [LAYOUT])
    training.worker(request)
    assert [type(effect) for effect in training.done] == [e.ToController, e.Reserve]
    [layout_said] = training.said(m.RoleLayout)
    assert (layout_said.segments, layout_said.initial, layout_said.group) == ({segment(0).id: "0"}, 0, GROUP)
    assert training.effects(e.Reserve) == [e.Reserve(training.number(), request, adopted=False, again=True)]


@pytest.mark.parametrize("code", [-9, 1])
def test_a_worker_that_ends_is_told_of_and_replaced(code: int, training: Node):
    training.handle(e.WorkerEnded(training.number(), code, 4))
    how = ("killed by SIGKILL", code, m.Fault.KILLED) if code < 0 else ("exit code 1", code, m.Fault.EXITED)
    assert training.said(m.WorkerLost) == [m.WorkerLost(0, 1000, *how, 4, 0, epoch=1)]
    assert training.effects(e.Start) == [e.Start(2, -1)]


def test_a_signal_without_a_name_is_told_too():
    assert in_words(-40) == f"killed by {signal.strsignal(40)}"


def test_what_a_worker_says_that_has_no_role_any_more_is_not_heard(training: Node):
    number = training.number()
    training.hear(m.Withdraw([0]))
    assert not training.handle(e.FromWorker(number, m.Stepped(1, 0, 1)))
    training.handle(e.WorkerEnded(number, -9))
    assert not training.handle(e.FromWorker(number, m.Stepped(1, 0, 1)))


def test_words_for_all_workers_are_passed_on(training: Node):
    number = training.number()
    words: list[m.ToAgent] = [m.Release([3]), m.SendCounts(), m.SendIssued(3), m.PauseAfterStep(1, 4)]
    for word in words:
        assert training.hear(word) == [e.ToWorker(number, word)]  # type: ignore[arg-type]


def test_a_newcomer_asks_the_agent_of_who_knows(training: Node):
    number = training.number()
    asked = m.AskStartupEntries(4, 1, "0-1:1#0", 0)
    assert training.worker(asked) == [e.AskPeer(number, asked, "127.0.0.1:21")]
    training.worker(m.AskProgress(5, 7))
    assert training.done == [e.ToWorker(number, m.Refused(5, "role 7 is on no node that is known here"))]


def test_who_knows_is_asked_by_its_agent(training: Node):
    question = m.AskProgress(8, 0)
    assert training.handle(e.PeerAsks(question)) == [e.ToWorker(training.number(), question)]
    answer = m.Progress(8, 3, {})
    assert training.worker(answer) == [e.AnswerPeer(8, answer)]
    assert training.handle(e.PeerAsks(m.AskProgress(9, 1))) == [
        e.AnswerPeer(9, "role 1 has no worker on node node0"),
    ]


PASSED_ON: list[m.FromRole] = [
    m.Restored(1, 0, 1000, 1, loaded=True),
    m.Stepped(1, 0, 1),
    m.Reopened(1, 0),
    m.PausedAtStep(1, 0),
    m.Unprotected(0, "it is plain", so_far=False),
    m.Suspect(1, 0, "connection reset"),
    m.Completed(1, 0, 1, 3, last=False),
    m.Finished(0),
    m.Trained(1, None, 1, 0, m.Dealt({}, [], 8)),
    m.OperationCounts(0, {}),
    m.Issued(1, 1, 0, 3, False, {}, []),
    m.Configure(0, 1, {"policy": "stop"}),
]


@pytest.mark.parametrize("said", PASSED_ON, ids=lambda said: type(said).__name__)
def test_what_a_worker_says_to_the_controller_goes_on_as_it_is(training: Node, said: m.FromRole):
    effects = training.worker(said)
    if isinstance(said, m.Unprotected | m.Finished):  # a role's next worker may say the same
        said = replace(said, epoch=1)
    assert e.ToController(said) in effects
    assert isinstance(said, m.OperationCounts | m.Issued) or said in training.greeting().said


def test_these_are_all_that_are_passed_on():
    assert {type(said) for said in PASSED_ON} == set(get_args(m.FromRole))


@pytest.mark.parametrize("said", PASSED_ON, ids=lambda said: type(said).__name__)
def test_a_worker_speaks_for_itself(training: Node, said: m.FromRole):
    number, who = training.number(), "worker" if isinstance(said, m.Configure) else "role"
    assert training.worker(msgspec.structs.replace(said, **{who: 1})) == [e.Kill(number)]
    training.handle(e.WorkerEnded(number, -9))
    [lost] = training.said(m.WorkerLost)
    name = f"{type(said).__name__} in the name of another worker"
    assert (lost.role, lost.fault) == (0, m.Fault.ENGINE) and lost.exit.endswith(name)


# -- the end -----------------------------------------------------------------------------------------------


def test_at_the_end_of_the_job_workers_whose_scripts_are_done_may_end(training: Node):
    number = training.number()
    training.worker(m.Finished(0))
    training.hear(m.Shutdown(0))
    assert training.done == [e.ToWorker(number, m.Exit())]
    assert training.handle(e.WorkerEnded(number, 0)) == [e.End(0)]
    assert not training.handle(e.Tick())


def test_the_end_waits_for_nobody_else(training: Node):
    training.hear(m.Shutdown(3))
    assert training.effects(e.End) == [e.End(3)]
    slow = Node()
    slow.hear(plan())
    slow.worker(m.Finished(0))
    slow.hear(m.Shutdown(0))
    assert not slow.handle(e.Tick(), FAREWELL - 1)
    assert slow.handle(e.Tick(), 1) == [e.End(0)]


def end_of(node: Node, how: Callable[[Node], int]) -> list[e.Effect]:
    return node.handle(e.WorkerEnded(how(node), -signal.SIGTERM))


@pytest.mark.parametrize("refused", [True, False])
def test_sigterm_is_passed_on_until_it_is_taken(refused: bool, training: Node):
    """Once the controller says that the job needs this node, or says nothing."""
    number = training.number()
    training.handle(e.Terminate())
    assert training.done == [e.ToController(m.Leaving())]
    assert not training.handle(e.Terminate()), "it comes again and again"
    assert not training.handle(e.Tick(), ANSWER - 0.1) or not training.effects(e.Signal)
    if refused:
        training.hear(m.Drain(wanted=False))
    else:
        training.handle(e.Tick(), 0.2)
    assert training.effects(e.Signal) == [e.Signal(number, even_so=True)]
    training.handle(e.Tick())
    assert training.effects(e.Signal) == [e.Signal(number, even_so=True)]
    training.handle(e.Signalled(number))
    training.handle(e.Tick())
    assert not training.effects(e.Signal)
    training.handle(e.NotConnected("it is gone"))
    training.handle(e.Connected())
    assert training.said(m.Leaving), "another controller must know too"


def test_a_successor_is_sent_the_signal_only_once_it_handles_it(training: Node):
    training.handle(e.Terminate())
    training.hear(m.Drain(wanted=False))
    training.handle(e.WorkerEnded(training.number(), -9))
    training.hear(m.Abort(2))
    training.hear(plan(2, newcomers=[0]))
    training.handle(e.Tick())
    assert training.effects(e.Signal) == [e.Signal(training.number(), even_so=False)]


def test_a_node_that_is_drained_keeps_the_signal_to_itself(training: Node):
    training.handle(e.Terminate())
    training.hear(m.Drain(wanted=True))
    training.handle(e.Tick(), 100)
    assert not training.effects(e.Signal)
    training.hear(m.Shutdown(0, drained=True))
    assert training.effects(e.End) == [e.End(ENDED)], "its ftrun was told to end"
    assert training.agent.drained


def test_a_drain_that_fails_after_sigterm_lets_the_workers_have_it(training: Node):
    training.handle(e.Terminate())
    training.hear(m.Drain(wanted=True))
    training.hear(m.Drain(wanted=False))
    assert training.effects(e.Signal) == [e.Signal(training.number(), even_so=True)]


def test_a_node_alone_does_not_ask_whether_it_may_end():
    node = Node()
    alone = plan(roles={0: "node0"})
    node.handle(e.Connected())
    node.hear(replace(alone, nodes={"node0": alone.nodes["node0"]}))
    node.handle(e.Terminate())
    assert node.effects(e.Signal)


def test_a_notice_is_told_until_it_is_taken_back(training: Node):
    training.handle(e.Noticed("the end", 30.0))
    assert training.said(m.Notice) == [m.Notice("the end", 30.0)]
    training.handle(e.Tick(), 10)
    training.handle(e.NotConnected("it is gone"))
    training.handle(e.Connected())
    assert training.said(m.Notice) == [m.Notice("the end", 20.0)], "another controller must know too"
    training.hear(m.Drain(wanted=True))
    training.handle(e.Noticed("", None))
    assert training.said(m.Notice) == [m.Notice("", None)]
    training.handle(e.Connected())
    assert not training.said(m.Notice)


@pytest.mark.parametrize("given", [False, True])
def test_workers_that_handle_sigterm_have_a_time_that_was_given(given: bool):
    """Then their node leaves, so that what is in memory can be written in the time that is left."""
    node = Node(shutdown_timeout=20.0, given=["shutdown_timeout"] * given)
    node.hear(plan(roles={0: "node0"}))
    node.handle(e.Terminate())
    node.handle(e.Tick(), 19)
    assert not node.said(m.Left)
    node.handle(e.Tick(), 2)
    assert node.said(m.Left) == [m.Left()] * given
    assert not node.effects(e.End), "what it holds may be wanted"
    node.handle(e.Tick(), 20)
    assert not node.effects(e.End)
    node.handle(e.Tick(), GRACE)
    assert node.effects(e.End) == [e.End(ENDED)] * given


def test_a_node_whose_workers_die_of_sigterm_leaves_with_the_last():
    node = Node(nproc_per_node=2)
    node.hear(plan(roles={0: "node0", 1: "node0"}))
    node.handle(e.Terminate())
    assert not end_of(node, lambda n: n.number(0)), "no loss, no successor"
    end_of(node, lambda n: n.number(1))
    assert node.done == [e.ToController(m.Left())], "what it holds may be wanted"
    node.hear(m.Shutdown(ENDED))
    assert node.done == [e.End(ENDED)]


@pytest.mark.parametrize("alone", [False, True])
def test_a_node_that_has_left_waits_for_the_controllers_word_and_not_for_ever(training: Node, alone: bool):
    training.handle(e.Terminate())
    end_of(training, lambda n: n.number(0))
    assert training.done == [e.ToController(m.Left())]
    if alone:
        training.handle(e.NotConnected("it is gone"))
    else:
        training.handle(e.Tick(), training.settings.shutdown_timeout + GRACE - 1)
        assert not training.effects(e.End)
        training.handle(e.Tick(), 1)
    assert training.effects(e.End) == [e.End(ENDED)]


def test_who_outlives_a_peer_that_sigterm_has_ended_has_a_while():
    node = Node(nproc_per_node=2)
    node.hear(plan(roles={0: "node0", 1: "node0"}))
    node.handle(e.Terminate())
    end_of(node, lambda n: n.number(0))
    node.handle(e.Tick(), GRACE - 1)
    assert not node.effects(e.End)
    node.handle(e.Tick(), 1)
    assert e.ToController(m.Left()) in node.done
    node.hear(m.Shutdown(ENDED))
    assert node.done[-1] == e.End(ENDED)


@pytest.mark.parametrize("first", [e.Terminate(), e.NotConnected("refused")])
def test_a_node_that_waits_for_its_controller_ends_on_sigterm(node: Node, first: e.Event):
    """Also where that is away for a moment only: nobody trains here."""
    second = e.NotConnected("it is gone") if isinstance(first, e.Terminate) else e.Terminate()
    node.hear(plan(roles={0: "node1", 1: "node2"}))
    node.handle(first)
    assert not node.effects(e.End), "a spare asks whether it may"
    node.handle(second)
    assert node.effects(e.End) == [e.End(ENDED)]


def test_a_node_of_a_job_that_has_not_begun_ends_on_sigterm(node: Node):
    node.handle(e.Terminate())
    assert node.done == [e.ToController(m.Leaving()), e.ToController(m.Left()), e.End(ENDED)]


def test_who_trains_while_the_controller_is_away_does_not_end_but_its_workers(training: Node):
    training.handle(e.NotConnected("it is gone"))
    training.handle(e.Terminate())
    assert training.effects(e.Signal) and not training.effects(e.End)


def test_a_node_whose_place_another_has_says_so(node: Node, caplog: pytest.LogCaptureFixture):
    node.hear(plan(roles={0: "node1", 1: "node2"}))
    assert "node0 was started with --node-rank 0, and stands by as a spare" in caplog.text
    caplog.clear()
    node.hear(plan(2, roles={0: "node1", 1: "node2"}))
    assert not caplog.text, "once"


def test_a_node_that_trains_has_its_place(training: Node, caplog: pytest.LogCaptureFixture):
    assert "stands by" not in caplog.text
