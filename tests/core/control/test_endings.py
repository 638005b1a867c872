"""Who has left its script while others wait for it; what a crash means once another role has finished."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from core.control.test_controller_machine import ControlPlane, sent
from core.fleet import Fleet

from ft_core.control.cluster.completion import INTERVAL, apart
from ft_core.control.events import End
from ft_core.node.workers.worker_table import in_words
from ft_core.protocol.messages import Fault, Issued, SendIssued, Suspect, WorkerLost


def test_apart() -> None:
    """Who has left is missed by those that have begun more with it than it was in."""
    world, others, pair = "0-2:1#0", "1-2:1#0", "0-2:1#0/1>2"

    def said(at_end: bool, issued: dict[str, int]) -> Issued:
        return Issued(round=1, epoch=1, role=0, step=4, at_end=at_end, issued=issued, unopened=[])

    def going(**more: int) -> Issued:
        return said(False, more)

    ended = said(True, {world: 9, others: 3, pair: 2})

    assert apart({0: going(**{world: 9}), 1: ended}) is None
    assert apart({0: going(**{world: 10, others: 5}), 2: going(**{world: 10})}) is None, "nobody has left"
    found = apart({0: going(**{world: 10}), 1: ended})
    assert (
        found is not None and "role 1 came to the end" in found and "operation 10 of group 0-2:1#0" in found
    )
    assert apart({2: going(**{pair: 3}), 1: ended}) is not None
    assert apart({0: going(**{pair: 3}), 1: said(True, {})}) is not None
    assert apart({2: going(**{"0-2:1#0/0>2": 3}), 1: ended}) is None, "it is none of theirs"


def test_a_crash_after_another_role_has_finished(tmp_path: Path) -> None:
    """It has not finished: its work is not done, unless all had come to the end of their training."""

    async def job() -> None:
        async with Fleet(tmp_path, nodes=2) as fleet:
            await fleet.event("resumed")
            fleet["node0"].finish(0)
            fleet["node1"].crash(1)
            assert "local work" not in (await fleet.event("detected"))["reason"]
            assert (await fleet.event("decided", 2))["moved"] == {"1": "node1"}

    asyncio.run(job())


def test_a_worker_that_ends_without_a_word(tmp_path: Path) -> None:
    """Exit code 0 is the end of a script only where that was reported."""

    async def job() -> None:
        async with Fleet(tmp_path, nodes=2) as fleet:
            await fleet.event("resumed")
            fleet["node1"].crash(1, code=0)
            assert await fleet.ended() == 1
            assert "of role 1 on node1: exit code 0, in the middle" in fleet.events("stopped")[0]["reason"]

    asyncio.run(job())


@pytest.mark.parametrize("first", ["its end", "what breaks"])
def test_a_worker_that_leaves_in_start_up_while_another_waits_for_it(first: str) -> None:
    """Which of the two is heard of first is chance."""
    job = ControlPlane(nodes=3)
    lost = WorkerLost(role=1, pid=job["node1"].workers.pop(1), exit="exit code 0", code=0, fault=Fault.LEFT)
    broke = Suspect(job.controller.cluster.epoch, 0, "Connection closed by peer")
    said = [("node1", lost), ("node0", broke)]
    for name, message in said if first == "its end" else reversed(said):
        assert job.done is None
        job[name].say(message)
    assert job.done == End(1)
    assert "of role 1 on node1: exit code 0 (os._exit?), and others wait for it: Conn" in job.said[0]


def test_a_worker_that_leaves_before_it_has_connected_to_those_who_wait_for_it() -> None:
    job = ControlPlane(nodes=3)
    job["node1"].say(
        WorkerLost(role=1, pid=job["node1"].workers.pop(1), exit="exit code 0", code=0, fault=Fault.LEFT)
    )
    job.wait(0.1)
    [number] = {question.round for question in sent(job.wait(INTERVAL + 0.2), SendIssued).values()}
    about = {"round": number, "epoch": 1, "step": 0, "at_end": False}
    job["node2"].say(Issued(role=2, issued={"0-2:2#0": 1}, unopened=["0-2:2#0"], **about))
    assert job.done is None, "it is in no such group"
    job["node0"].say(Issued(role=0, issued={"0-2:1#0": 1}, unopened=["0-2:1#0"], **about))
    assert job.done == End(1)
    assert "others wait for it: role 0 to connect group 0-2:1#0" in job.said[0]


def test_a_worker_that_leaves_in_start_up_and_is_not_missed() -> None:
    job = ControlPlane(nodes=2)
    for role in (1, 0):
        agent = job[f"node{role}"]
        about = {"exit": "exit code 0", "code": 0, "fault": Fault.LEFT}
        assert job.done is None
        agent.say(WorkerLost(role=role, pid=agent.workers.pop(role), **about))
    assert job.done == End(0)


def test_how_a_worker_has_ended() -> None:
    assert [in_words(code) for code in (3, -9)] == ["exit code 3", "killed by SIGKILL"]
    assert in_words(-40) == "killed by Real-time signal 6"  # has no name
