"""Controller and agents, with messages, connections and processes lost on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from core.fleet import Fleet, Node, play
from core.real_agent import RealAgent
from msgspec.structs import replace

from ft_core.control.observe import ctl
from ft_core.errors import TransportError
from ft_core.node import events as e
from ft_core.protocol import messages as m
from ft_core.protocol.messages import Message, NodePlan


def _plan(node: Node) -> NodePlan:
    """The plan that it has begun."""
    assert node.plan is not None
    return node.plan


def test_a_job_begins_with_spares_in_the_places_of_nodes_that_do_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They have died while they started. With too few spares it is said who is missing."""

    async def test(fleet: Fleet) -> None:
        fleet.join("spare")
        assert "no node of rank 2, and no spare" in (await fleet.event("waiting"))["reason"]
        fleet.join("another")
        await fleet.event("resumed")
        assert _plan(fleet["node1"]).roles == {0: "spare", 1: "node1", 2: "another"}

    monkeypatch.setattr("ft_core.control.decide.forming.GRACE", 0.3)
    play(test, tmp_path / "job", nodes=3, ranks=[1])


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
        await fleet.until(lambda: fleet.cluster.nodes["node1"].holdings.epoch == 2)
        fleet["node1"].crash(1)
        await fleet.event("detected", 2)
        fleet["node2"].quiesced()
        decided = await fleet.event("decided", 2)
        assert decided["roles"] == [0, 1] and decided["moved"] == {"0": "node0", "1": "node1"}
        await fleet.event("resumed", 2)
        assert _plan(fleet["node2"]).newcomers == [0, 1]
        assert fleet["node2"].epoch == 2  # one recovery for both

    play(test, tmp_path / "job", nodes=3)


def test_a_worker_dies_between_its_nodes_report_and_the_plan(tmp_path: Path):
    """The plan relies on it. Its agent gives the role to nobody until there is a plan that knows."""

    async def test(fleet: Fleet) -> None:
        agent = RealAgent(fleet.settings, fleet.job_dir, "node1", 1)
        handle, given = agent._handle, []

        def too_late(event: e.Event) -> None:
            plan = event.message if isinstance(event, e.FromController) else None
            if not isinstance(plan, m.SharedPlan):
                handle(event)
                return
            if plan.state.epoch == 2 and not given:
                agent.crash(1)
            handle(event)
            if (worker := agent.machine.crew.of_role(1)) is not None:
                given.append((plan.state.epoch, plan.state.newcomers, worker.pid))

        agent._handle = too_late  # type: ignore[method-assign]
        agent.serve()
        await fleet.event("resumed")
        given.clear()
        fleet["node0"].crash(0)
        await fleet.event("decided", 3)
        await fleet.event("resumed", 2)
        assert [each[:2] for each in given] == [(3, [1])]
        assert [event["roles"] for event in fleet.events("decided")[1:]] == [[0], [1]]
        await agent.end()

    play(test, tmp_path / "job", nodes=2, ranks=[0], replicas=0)


def test_a_hello_is_no_report_while_workers_are_in_their_step(tmp_path: Path):
    """The agent has seen the abort, and connects anew before its worker is quiet."""

    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node1"].quiet = fleet["node2"].quiet = False
        fleet["node0"].crash(0)
        await fleet.until(lambda: fleet["node1"].epoch == 2)
        fleet["node1"].disconnect()
        await fleet.until(lambda: fleet.cluster.nodes["node1"].hello.pid == 2)  # its second connection
        fleet["node2"].quiesced()
        await fleet.until(lambda: fleet.cluster.nodes["node2"].holdings.epoch == 2)
        assert len(fleet.events("decided")) == 1
        fleet["node1"].quiesced()
        await fleet.event("resumed", 2)

    play(test, tmp_path / "job", nodes=3)


ABORTED = (
    m.Abort,
    m.HoldingsChanged,
    m.SharedPlan,
    m.WorkerLost,
    m.Restored,
    m.Stepped,
    m.Reopened,
    m.RoleLayout,
)
ENDING = (m.Completed, m.Release, m.Finished)


@pytest.mark.parametrize("successor", [False, True], ids=["connection", "controller"])
@pytest.mark.parametrize("kind", [*ABORTED, *ENDING])
@pytest.mark.parametrize("node", ["node0", "node1"])
def test_a_message_is_lost_and_said_again(tmp_path: Path, kind: type[Message], successor: bool, node: str):
    """With its connection, or with the controller: before it has sent it to all, or has read it."""

    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        lost = asyncio.Event()

        async def lose(_: Message) -> bool:
            lost.set()
            fleet[node].disconnect()
            if successor:
                await fleet.stop_controller()
                await fleet.start_controller()
            return False

        fleet[node].on(kind, lose)
        fleet["node0"].crash(0)
        if kind in ABORTED and not (kind is m.WorkerLost and node == "node1"):
            await asyncio.wait_for(lost.wait(), 60)
        await fleet.until(lambda: fleet.events("resumed")[-1]["epoch"] == fleet["node2"].epoch > 1)
        for name in ("node0", "node1"):
            assert fleet[name].epoch == fleet["node2"].epoch
            fleet[name].complete(int(name[-1]))
        assert await fleet.ended() == 0
        epochs = [event["epoch"] for event in fleet.events("resumed")]
        assert epochs == sorted(set(epochs))

    play(test, tmp_path / "job", nodes=2, spares=1)


@pytest.mark.parametrize(
    "kind", [m.HoldingsChanged, m.WorkerLost, m.RoleLayout, m.Restored, m.Stepped, m.Completed]
)
def test_what_an_agent_says_while_its_connection_breaks_is_said_again(tmp_path: Path, kind: type):
    async def test(fleet: Fleet) -> None:
        agent = RealAgent(fleet.settings, fleet.job_dir, "node1", 1)
        lost: list[m.FromAgent] = []
        agent.serve()
        tell = agent._uplink.post
        await fleet.event("resumed")

        def lose(message: m.FromAgent) -> None:
            if lost or not isinstance(message, kind):
                tell(message)
            elif agent.connected:
                lost.append(message)
                agent._uplink.hang_up()

        agent._uplink.post = lose  # type: ignore[method-assign]
        agent.crash(1)
        await fleet.event("resumed", 2)
        fleet["node0"].complete(0)
        number = agent.number(1)
        agent.say(number, m.Completed(agent.machine.epochs.epoch, 1, part=1, version=1, last=True))
        await fleet.until(lambda: any(isinstance(each, m.Release) for each in agent.pool.heard[number]))
        assert len(lost) == 1
        await agent.end()

    play(test, tmp_path / "job", nodes=2, ranks=[0], replicas=0)


RETURNING = (
    *(
        m.SendCounts,
        m.OperationCounts,
        m.Prepare,
        m.Prepared,
        m.PauseAfterStep,
        m.PausedAtStep,
        m.SharedPlan,
        m.Abort,
    ),
    m.HoldingsChanged,
)


@pytest.mark.parametrize("successor", [False, True], ids=["connection", "controller"])
@pytest.mark.parametrize("kind", [None, *RETURNING])
def test_a_replica_group_comes_back(tmp_path: Path, kind: type[Message] | None, successor: bool):
    """Also to a restarted controller, which must know that all have stepped, and with any message lost."""

    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node1"].die()
        await fleet.event("left")
        await fleet.event("resumed", 2)
        if successor and kind is None:
            await fleet.stop_controller()
            await fleet.start_controller()
            await fleet.event("controller_restarted")
        spare = fleet.join("spare")

        async def lose(_: Message) -> bool:
            for node in fleet.nodes.values():
                node.disconnect()
            if successor:
                await fleet.stop_controller()
                await fleet.start_controller()
            return False

        if kind is not None:
            (spare if kind in (m.Prepare, m.Prepared) else fleet["node0"]).on(kind, lose)
        await fleet.event("returned")
        await fleet.until(lambda: fleet.events("resumed")[-1]["epoch"] == spare.epoch)
        assert _plan(spare).roles == {0: "node0", 1: "spare"}

    play(test, tmp_path / "job", nodes=2, groups=2, policy="shrink")


@pytest.mark.parametrize("epoch", [1, 5])
def test_an_agent_has_begun_another_controllers_plan(tmp_path: Path, epoch: int):
    """One of the same epoch, or a newer one, that nobody else was sent: all begin one that is newer still."""

    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        node = fleet["node1"]
        node.began(replace(_plan(node), epoch=epoch, id=f"{epoch}-other"))
        node.disconnect()
        assert (await fleet.event("resumed", 2))["epoch"] == epoch + 1
        assert {_plan(n).id for n in fleet.nodes.values()} == {_plan(node).id}

    play(test, tmp_path / "job", nodes=2)


def test_a_failure_at_the_same_step_again_and_again_ends_the_job(tmp_path: Path):
    """Each time a step is done that had been done before. A restarted controller goes on counting."""

    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node0"].step(0)
        fleet["node1"].step(1)  # which is version 2
        for failure in range(1, 10):
            if failure == 5:
                await fleet.stop_controller()
                await fleet.start_controller()
                await fleet.event("controller_restarted")
            for node in fleet.nodes.values():
                for held in (*node.memory.held.values(), *node.memory.kept.values()):
                    held[:] = [0, 1]
            fleet["node0"].crash(0)
            if failure < 9:
                await fleet.until(lambda n=failure: fleet.events("resumed")[-1]["epoch"] == n + 1)  # type: ignore
                assert fleet.events("resumed")[-1]["version"] == 2
        assert await fleet.ended() == 1
        assert "without a new step after step 2" in fleet.events("stopped")[0]["reason"]

    play(test, tmp_path / "job", nodes=2)


def test_failures_with_a_new_step_between_them_end_no_job(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        for failure in range(12):
            await fleet.event("resumed", failure + 1)
            assert fleet.events("resumed")[-1]["version"] == failure + 1
            fleet["node0"].crash(0)
        await fleet.event("resumed", 13)

    play(test, tmp_path / "job", nodes=2)


def test_nobody_is_said_to_hold_the_state_when_no_node_is_left(tmp_path: Path):
    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        fleet["node0"].die()
        assert "survivors hold their state" in (await fleet.event("waiting"))["reason"]
        fleet["node1"].die()
        reason = (await fleet.event("waiting", 2))["reason"]
        assert "survivors" not in reason and "no node is left, and no checkpoint" in reason

    play(test, tmp_path / "job", nodes=2)


def test_a_spare_keeps_the_copies_that_one_node_cannot(tmp_path: Path):
    """It may come later than the plan, go, and come again; once the node is lost, the job goes on there."""

    async def test(fleet: Fleet) -> None:
        async def agent(name: str, node_rank: int = -1) -> RealAgent:
            agents[name] = RealAgent(fleet.settings, fleet.job_dir, name, node_rank)
            agents[name].serve()
            return agents[name]

        def held(node: RealAgent) -> list[list[int]]:
            return list(node.store.replicas.versions().values())

        agents: dict[str, RealAgent] = {}
        node = await agent("node", 0)
        await fleet.event("resumed")
        first = await agent("first")
        await fleet.until(lambda: "first" in node.nodes)
        node.step()
        await fleet.until(lambda: held(first) == [[2], [2]])
        await first.end()
        await fleet.event("spare_lost")
        await fleet.until(lambda: "first" not in node.nodes)
        node.step()
        await fleet.until(lambda: node.committed() == [3, 3])  # nobody is there to wait for
        others = [await agent(name) for name in ("other", "second")]
        await fleet.until(lambda: {"other", "second"} <= node.nodes)
        node.step()
        await fleet.until(lambda: node.committed() == [4, 4])
        assert [held(spare) for spare in others] == [[[4], [4]], []]

        def shown() -> list[list[dict[str, list[int]]]]:
            return [list(row.replicas.values()) for row in ctl.roles(fleet.cluster)]

        await fleet.until(lambda: shown() == [[{"other": [4]}]] * 2)
        await node.end()
        decided = await fleet.event("decided", 2)
        assert (decided["origin"], decided["version"]) == ("memory", 4)
        assert decided["moved"] == {"0": "other", "1": "other"}
        await fleet.event("resumed", 2)
        for spare in others:
            await spare.end()

    play(test, tmp_path / "job", nodes=1, nproc=2, spares=2, ranks=[], replicas=1)


def test_copies_that_cannot_be_sent_are_tried_again_and_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """And not at once: as a rule the receiver is lost, and the epoch's end about to be announced."""

    async def test(fleet: Fleet) -> None:
        agent = RealAgent(fleet.settings, fleet.job_dir, "node1", 1)
        replicate, refused = agent.replicator.replicate, Counter[int]()

        def refuse(role: int, version: int, *about: Any) -> None:
            refused[version] += 1
            if refused[version] < 4:
                raise TransportError("no route")
            replicate(role, version, *about)

        agent.replicator.replicate = refuse  # type: ignore[method-assign]
        agent.serve()
        await fleet.until(lambda: bool(agent.machine.crew.playing()) and agent.committed() == [1])
        await fleet.event("suspected", len(refused))
        assert len(fleet.events("suspected")) == len(refused)
        told.update(refused)
        await agent.end()

    told = Counter[int]()
    play(test, tmp_path / "job", nodes=2, ranks=[0], replicas=0, heartbeat=0.05)
    warnings = sorted(m for m in caplog.messages if "replicated" in m)
    for version, warning in zip(sorted(told), warnings, strict=True):
        assert f"node1: role 1, version {version} is not replicated yet" in warning and "no route" in warning


def test_nobodys_own_suspicion_tells_against_him(tmp_path: Path):
    """Who sees a peer's connection break, and then loses the controller's for a moment, is not lost."""

    async def test(fleet: Fleet) -> None:
        await fleet.event("resumed")
        node = fleet["node1"]
        node.post(m.Suspect(epoch=1, role=1, reason="connection reset"))
        await fleet.event("suspected")
        back = asyncio.Event()
        node.delay(m.AgentHello, back.wait())
        node.disconnect()
        controller = fleet.controller
        assert controller is not None
        await fleet.until(lambda: fleet.cluster.nodes["node1"].liveness.gone_since is not None)
        ticks = controller.clock.now
        await fleet.until(lambda: controller.clock.now > ticks + 0.1)
        back.set()
        await fleet.until(lambda: fleet.cluster.nodes["node1"].liveness.gone_since is None)
        assert not fleet.events("detected") and fleet["node0"].epoch == 1

    play(test, tmp_path / "job", nodes=2)


@pytest.mark.parametrize("resumes", [False, True], ids=["without", "with"])
def test_advice_suits_a_script_with_checkpoints_of_its_own(tmp_path: Path, resumes: bool):
    """Memory does not suffice. `resumes`: then the script is started again, else the job stops."""

    async def test(fleet: Fleet) -> None:
        fleet.resumes = resumes
        await fleet.event("resumed")
        fleet["node0"].die()
        await fleet.event("waiting")
        fleet["node1"].die()
        await fleet.event("waiting", 2)
        fleet.join("node2")
        fleet.join("node3")
        found = await fleet.event("state_restored" if resumes else "stopped", 2 if resumes else 1)
        if not resumes:
            assert "--save" in found["reason"] and "--ft-durable-interval" in found["reason"]
        for event in fleet.events():
            assert not resumes or "--ft-durable-interval" not in event["reason"]

    play(test, tmp_path / "job", nodes=2)
