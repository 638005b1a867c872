"""Standbys that start roles ahead of need: when they are begun, kept, used and ended."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from core.node.test_agent_machine import GROUP, Memory, Node, segment
from core.plans import plan, worker_plan

from ft_core.errors import ConfigError
from ft_core.node import events as e
from ft_core.node.epochs import ANSWERS
from ft_core.node.workers import standby_budget as room
from ft_core.node.workers.standbys import ATTEMPTS, PAUSE, SETTLED, covers, serves
from ft_core.node.workers.worker_table import Worker, WorkerState
from ft_core.protocol import messages as m
from ft_core.settings import AUTO, Command, Settings

OPERATIONS = {"0-1:1#0": 2}


def committed(node: Node, version: int = 1, role: int = 0) -> None:
    """A step is done, and where it must be."""
    node.worker(m.Staged(role, version), role)
    [order] = node.effects(e.Replicate)
    node.handle(e.Replicated(order, ""))


def trained(**more: object) -> Node:
    """Role 0 trains here, and standbys are wanted."""
    node = Node(ready_standbys=1, **more)
    node.hear(plan())
    node.worker(m.Registered(0, [0, 1], False, GROUP, OPERATIONS))
    node.worker(m.Restored(1, 0, 1000, 0, loaded=False))
    node.handle(e.Tick())
    assert not node.effects(e.Start), "it trains only once a step is done"
    committed(node)
    return node


def start(node: Node, after: float = 0.0) -> int:
    """The number of the standby that is begun now; it has connected."""
    node.handle(e.Tick(), after)
    [begun] = node.effects(e.Start)
    node.handle(e.Forked(begun.worker, 1000 + begun.worker))
    node.handle(e.WorkerReady(begun.worker))
    return begun.worker


def ready(node: Node) -> int:
    """The number of the standby that is ready for role 0."""
    number = start(node)
    node.handle(e.FromWorker(number, m.Registered(0, [0, 1], False, GROUP, OPERATIONS)))
    return number


def lose(node: Node) -> None:
    """The worker of role 0 dies, and the epoch ends."""
    node.handle(e.WorkerEnded(node.number(), -9))
    node.hear(m.Abort(2))


def next_epoch(**more: object) -> m.NodePlan:
    about = {"version": 1, "origin": "memory", "newcomers": [0], "completed": {"0-1:1#0": (2, 1)}}
    return plan(2, **(about | more))


def test_a_standby_starts_a_role_that_trains_apart_from_the_epoch():
    node = trained()
    number = start(node)
    assert node.effects(e.SetApart) == [e.SetApart(number, apart=True)]
    [assign] = node.told(m.Assign)
    assert assign.role == 0 and assign.plan.detached and assign.plan.ahead == {0: 0}
    assert assign.plan.origin == "memory" and assign.plan.completed == {"0-1:1#0": (2, 0)}
    node.handle(e.FromWorker(number, m.AskStartupEntries(1, 0, "0-1:1#0", 0)))
    assert [ask.worker for ask in node.effects(e.AskPeer)] == [number]
    node.handle(e.Tick())
    assert not node.effects(e.Start), "one after the other"
    assert not node.agent.epochs.heartbeat().roles[0].ready
    node.handle(e.FromWorker(number, m.Registered(0, [0, 1], False, GROUP, OPERATIONS)))
    assert not node.done, "the job hears nothing of it"
    beat = node.agent.epochs.heartbeat()
    assert beat.roles[0].ready == 1000 + number and beat.idle == 1
    node.handle(e.Tick())
    assert not node.effects(e.Start)


def test_it_takes_the_role_when_its_worker_dies():
    node = trained()
    number = ready(node)
    node.handle(e.WorkerEnded(node.number(), -9))
    assert node.said(m.WorkerLost) and not node.effects(e.Start), "the plain standby stays"
    node.hear(m.Abort(2))
    [report] = node.said(m.HoldingsChanged)
    assert report.idle == 2 and e.ToWorker(number, m.Abort(2)) in node.done
    node.handle(e.FromWorker(number, m.Quiesced(2, "training", OPERATIONS)))
    assert not node.done
    node.memory.held[0, False] = [1]
    node.hear(next_epoch())
    assert node.number() == number and not node.told(m.Assign) and node.told(m.PlanBegins)
    assert e.SetApart(number, apart=False) in node.done
    [bring] = node.effects(e.FetchState)
    assert bring.worker == number
    node.worker(m.Restored(2, 0, 1000, 1, loaded=True))
    [layout] = node.said(m.RoleLayout)
    assert layout.initial is None, "a script begins elsewhere"


def test_one_that_does_not_answer_when_it_is_given_the_role_is_replaced():
    """It is stopped: it stands in no collective, so that nobody is missed there."""
    node = trained()
    number = ready(node)
    node.handle(e.WorkerEnded(node.number(), -9))
    node.hear(m.Abort(2))
    node.memory.held[0, False] = [1]
    node.hear(next_epoch())
    assert node.number() == number
    node.handle(e.Tick(), after=ANSWERS - 1)
    assert not node.effects(e.WriteStacks)
    node.handle(e.Tick(), after=1)
    assert node.effects(e.WriteStacks) == [e.WriteStacks(number, 0, end=True)]
    node.handle(e.Tick(), after=1)
    assert not node.effects(e.WriteStacks), "once"


def test_one_that_answers_is_not():
    node = trained()
    number = ready(node)
    node.handle(e.WorkerEnded(node.number(), -9))
    node.hear(m.Abort(2))
    node.memory.held[0, False] = [1]
    node.hear(next_epoch())
    node.handle(e.FromWorker(number, m.Quiesced(2, "training", OPERATIONS)))
    node.handle(e.Tick(), after=10 * ANSWERS)
    assert not node.effects(e.WriteStacks)


def test_it_stays_through_epochs_in_which_it_is_not_needed():
    node = trained()
    number = ready(node)
    node.hear(m.Abort(2))
    assert not [each for each in node.effects(e.ToWorker) if each.worker == number]
    node.worker(m.Quiesced(2, "training", OPERATIONS))
    assert node.said(m.HoldingsChanged), "nobody waits for it"
    node.hear(next_epoch(newcomers=[1]))
    assert not node.effects(e.Kill)
    node.handle(e.WorkerEnded(node.number(), -9))
    node.hear(m.Abort(3))
    node.hear(plan(3, version=1, origin="memory", newcomers=[0], completed={"0-1:1#0": (2, 1)}))
    assert node.number() == number


@pytest.mark.parametrize(
    "about",
    [
        {"restart_epoch": 2, "version": None, "origin": "initial"},
        {"version": None, "origin": "initial"},
        {"completed": {}},
        {"completed": {"0-1:1#0": (1, 1)}},
    ],
    ids=["started over", "what the script makes", "records are lost", "not all was done"],
)
def test_one_that_cannot_go_on_is_ended_and_another_takes_the_role(about: dict[str, object]):
    node = trained()
    number = ready(node)
    lose(node)
    node.hear(next_epoch(**about))
    assert e.Kill(number) in node.done and node.number() != number and node.told(m.Assign)
    node.handle(e.WorkerEnded(number, -9))
    assert len(node.effects(e.Start)) == 1, "in place of the standby that took the role"


def test_one_whose_role_moves_is_ended():
    node = trained()
    number = ready(node)
    node.hear(next_epoch(roles={0: "node1", 1: "node1"}))
    assert e.Kill(number) in node.done


def test_one_that_is_not_ready_is_ended_with_the_epoch():
    node = trained()
    number = start(node)
    lose(node)
    assert not node.agent.crew.ahead()
    node.handle(e.WorkerEnded(number, -9))
    assert not node.effects(e.Start)


def test_one_that_has_not_begun_is_a_standby_like_any_other():
    node = trained()
    node.handle(e.Tick())
    [begun] = node.effects(e.Start)
    node.handle(e.WorkerEnded(node.number(), -9))
    assert not node.effects(e.Start)
    node.handle(e.WorkerReady(begun.worker))
    worker = node.agent.crew.get(begun.worker)
    assert worker is not None and worker.doing is WorkerState.IDLE


def test_one_that_fails_is_replaced_quietly_and_left_in_the_end(caplog: pytest.LogCaptureFixture):
    node = trained()
    for _ in range(ATTEMPTS):
        number = start(node, PAUSE)
        node.handle(e.WorkerEnded(number, 1))
        assert not node.done, "neither a loss, nor a reason for another standby"
    node.handle(e.Tick(), PAUSE)
    assert not node.effects(e.Start) and "no standby starts role 0 ahead" in caplog.text


def test_one_that_was_ready_and_died_is_started_anew():
    node = trained()
    for _ in range(ATTEMPTS + 1):
        node.now += PAUSE
        node.handle(e.WorkerEnded(ready(node), -9))
        assert not node.said(m.WorkerLost)


def test_what_a_standby_has_done_must_be_done_for_all():
    group = "0-1:1#0"
    assert covers({group: 2}, 0, {group: (3, 1)}) and not covers({group: 2}, 0, {group: (1, 1)})
    assert covers({f"{group}/end": 1}, 0, {}), "that nothing more comes is nothing that is done"
    steps = {f"0+/{group}": 7, f"7/{group}": 1}
    assert covers(steps, 7, {f"0+/{group}": (9, 1)}) and covers(steps, 7, {f"5+/{group}": (9, 1)})
    assert not covers(steps, 7, {f"8+/{group}": (9, 1)}), "what comes next is on record nowhere"
    assert not covers(steps, 7, {f"0+/{group}": (6, 1)}) and not covers(steps, 7, {})
    assert covers(steps, 7, {f"0+/{group}": (7, 1), f"7/{group}": (1, 1)})


def test_a_standby_serves_while_the_job_is_what_it_was():
    began = worker_plan(version=3, origin="memory")
    worker = Worker(1, 0, initial=5, began_with=began)
    assert serves(worker, worker_plan(2, version=6, origin="memory"))
    assert not serves(worker, worker_plan(2, version=4, origin="memory")), "its script is further"
    assert not serves(worker, worker_plan(2, version=6, origin="memory", restart_epoch=2))
    assert not serves(worker, worker_plan(2, version=6, origin="memory", absent={1: 0}))


def test_there_are_as_many_as_there_is_plenty_of_memory_for(tmp_path: Path):
    proc = tmp_path / "proc"
    for pid, own in ((7, 900), (8, 1100)):
        (proc / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "status").write_text(f"VmRSS:  9999999 kB\nRssAnon:\t {own} kB\n")
    for free, agents, more in ((8000, 1, 2), (7999, 1, 1), (8000, 2, 1), (3000, 1, 0)):
        (proc / "meminfo").write_text(f"MemTotal: 99999 kB\nMemAvailable: {free} kB\n")
        assert room.like([7, 8], agents, proc) == more
    assert room.like([7, 9], 1, proc) == 0, "one has ended"


def automatic() -> Node:
    """It trains, and has as many standbys as there is room for."""
    node = Node(ready_standbys=AUTO)
    node.hear(plan())
    node.train()
    committed(node)
    node.handle(e.Tick())
    return node


def test_there_are_none_beside_training_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert not room.gpus(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert room.gpus(tmp_path)
    monkeypatch.setattr(Memory, "gpus", lambda self: True)
    monkeypatch.setattr(Memory, "room", lambda self, workers, agents: 8)
    node = automatic()
    assert not node.effects(e.Start)


def test_automatically_it_is_a_question_of_room(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def room_for(self: Memory, workers: Collection[int], agents: int) -> int:
        asked.append((list(workers), agents))
        return len(asked) - 1

    monkeypatch.setattr(Memory, "room", room_for)
    node = automatic()
    assert not node.effects(e.Start)
    start(node)
    assert asked == [([node.number()], 3)] * 2, "all nodes are at the same address, the spare's too"


def test_a_number_of_standbys_is_none_or_some():
    with pytest.raises(ConfigError, match="--ft-ready-standbys -2: give a number, or auto"):
        Settings(1, 1, Command("x"), replicas=0, ready_standbys=-2).check()


ELSEWHERE = {0: "node1", 1: "node2", 2: "node3"}


def spare(**more: object) -> Node:
    """It guards the first two of three nodes, which train: copies of theirs are here."""
    node = Node(**({"ready_standbys": 1} | more))
    names = [*ELSEWHERE.values(), "node0"]
    nodes = {name: m.NodeAddress(data=f"{name}:1", domain=name) for name in names}
    node.hear(plan(roles=ELSEWHERE, nodes=nodes))
    node.handle(e.Tick())
    assert not node.done[1:], "whether they train cannot be seen yet"
    node.memory.kept[segment(0)] = [1]
    return node


def guard(node: Node, role: int = 0) -> int:
    """The number of the standby that has started this role."""
    node.handle(e.Tick())
    assert node.effects(e.AskRecords) == [e.AskRecords(role, 1, f"{ELSEWHERE[role]}:1")]
    node.handle(e.Tick())
    assert not node.effects(e.AskRecords), "one after the other"
    node.handle(e.RecordsFound(role, 1, OPERATIONS))
    [begun] = node.effects(e.Start)
    node.handle(e.Forked(begun.worker, 1000 + begun.worker))
    node.handle(e.WorkerReady(begun.worker))
    [assign] = node.told(m.Assign)
    assert assign.role == role and assign.plan.detached and assign.plan.completed == {"0-1:1#0": (2, role)}
    node.handle(e.FromWorker(begun.worker, m.AskStartupEntries(1, role, "0-1:1#0", 0)))
    assert [ask.address for ask in node.effects(e.AskPeer)] == [f"{ELSEWHERE[role]}:1"]
    node.handle(e.FromWorker(begun.worker, m.Registered(0, [0, 1], False, GROUP, OPERATIONS)))
    return begun.worker


def moved(epoch: int = 2, **more: object) -> m.NodePlan:
    """Role 0 is played on the spare now."""
    about = {"version": 1, "origin": "memory", "newcomers": [0], "completed": {"0-1:1#0": (2, 1)}}
    return plan(epoch, roles={**ELSEWHERE, 0: "node0"}, **(about | more))


def test_a_spare_starts_the_roles_of_those_it_guards_and_takes_one_over():
    node = spare()
    first, second = guard(node, 0), guard(node, 1)
    node.handle(e.Tick())
    assert not node.effects(e.AskRecords), "it does not guard the third"
    beat = node.agent.epochs.heartbeat()
    assert beat.guarding == [0, 1] and beat.idle == 2, "its other workers are free"
    node.hear(m.Abort(2))
    assert node.said(m.HoldingsChanged) and not node.told(m.Abort), "they take no part"
    node.hear(moved())
    assert node.number(0) == first and not node.told(m.Assign) and node.told(m.PlanBegins)
    assert e.Kill(second) in node.done, "it is no spare any more"
    assert [worker.device for worker in node.agent.crew.idle()] == [-1, -1], "its device is taken"
    assert node.agent.epochs.heartbeat().guarding == []


def test_who_guards_stays_ready_while_others_take_over():
    node = spare()
    first = guard(node, 0)
    node.hear(m.Abort(2))
    node.hear(plan(2, roles={**ELSEWHERE, 2: "node4"}, version=1, origin="memory", newcomers=[2]))
    assert not node.effects(e.Kill)
    node.hear(m.Abort(3))
    node.hear(moved(3))
    assert node.number(0) == first


@pytest.mark.parametrize(
    "about", [{"completed": {}}, {"restart_epoch": 2, "version": None, "origin": "initial"}]
)
def test_a_spare_whose_standby_cannot_go_on_starts_the_role_then(about: dict[str, object]):
    node = spare()
    first = guard(node, 0)
    node.hear(m.Abort(2))
    node.hear(moved(**about))
    assert e.Kill(first) in node.done and node.told(m.Assign) and node.number(0) != first


def test_whom_a_spare_does_not_guard_any_more_it_is_not_ready_for():
    node = spare()
    first = guard(node, 0)
    assert node.agent.epochs.plan is not None
    node.hear(m.NodesChanged(node.agent.epochs.plan.id, {"another": m.NodeAddress("another:1", "another")}))
    node.handle(e.Tick())
    assert node.effects(e.Kill) == [e.Kill(first)], "the first spare by name guards it now"


def test_records_of_an_epoch_that_is_over_start_nobody():
    node = spare()
    node.handle(e.Tick())
    node.hear(m.Abort(2))
    node.handle(e.RecordsFound(0, 1, OPERATIONS))
    assert not node.effects(e.Start)
    node.hear(plan(2, roles=ELSEWHERE, version=1, origin="memory"))
    node.handle(e.Tick())
    assert not node.effects(e.AskRecords), "nobody has done a step of it"
    node.handle(e.Tick(), SETTLED)
    assert node.effects(e.AskRecords)
    node.handle(e.RecordsFound(0, 2, {}, "it is busy"))
    node.handle(e.Tick())
    assert not node.effects(e.AskRecords) and not node.effects(e.Start)
    node.handle(e.Tick(), PAUSE)
    assert node.effects(e.AskRecords)


def test_a_standby_of_a_spare_that_starts_when_the_epoch_is_over_is_ended():
    node = spare()
    node.handle(e.Tick())
    node.handle(e.RecordsFound(0, 1, OPERATIONS))
    [begun] = node.effects(e.Start)
    node.hear(m.Abort(2))
    node.handle(e.WorkerReady(begun.worker))
    assert e.Kill(begun.worker) in node.done


def test_an_unguarded_spare_starts_nothing():
    node = spare(ready_standbys=0)
    node.handle(e.Tick(), SETTLED)
    assert not node.effects(e.AskRecords)


@pytest.mark.parametrize(("free", "guarded"), [(40, 1), (60, 2)])
def test_a_spare_with_gpus_has_one_on_each_and_more_where_they_have_room(
    free: int, guarded: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Memory, "gpus", lambda self: True)
    monkeypatch.setattr(Memory, "room", lambda self, workers, agents: 8)
    monkeypatch.setattr(Memory, "device_memory", lambda self, worker: (free, 100))
    node = spare(ready_standbys=AUTO)
    guard(node, 0)
    node.handle(e.Tick())
    assert len(node.effects(e.AskRecords)) == guarded - 1
