"""What GPUs report, and what is done about it."""

from __future__ import annotations

import re

import pytest
from core.test_agent_machine import Node, plan
from core.test_controller_machine import ControlPlane, lose
from harness import ROOT
from msgspec.structs import replace

import mkdocs_reference
from ft_core.control.liveness.xid_table import UNKNOWN, XIDS, Advice, DeviceAction
from ft_core.node import events as e
from ft_core.protocol import messages as m
from ft_core.protocol.messages import Fault, WorkerLost

NEWEST = 172
"""The last number of NVIDIA's catalogue."""
ADVISED = {
    Advice.RESTART_APP: (8, 11, 13, 31, 32, *range(39, 42), *range(69, 73), 94),
    Advice.RESET_GPU: (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 162),
    Advice.RESTART_BM: (79, 160),
    Advice.WORKFLOW: (45, 48, 74, *range(144, 151), 154),
    Advice.IGNORE: (43, 44, 63, 92, 93, 121, 137, 157),
}
"""What NVIDIA's monitor does."""


def test_every_xid_has_a_row() -> None:
    assert list(XIDS) == list(range(1, NEWEST + 1))
    assert UNKNOWN.action is DeviceAction.COUNT


@pytest.mark.parametrize("advice", ADVISED)
def test_the_advice_is_nvidias(advice: Advice) -> None:
    assert {number: XIDS[number].advice for number in ADVISED[advice]} == dict.fromkeys(
        ADVISED[advice], advice
    )


def test_who_does_not_follow_the_advice_says_why() -> None:
    """What has an advice has its action, or a reason; nothing is never done about what needs a reset."""
    usual = {row.advice: row.action for row in XIDS.values() if not row.why}
    assert set(usual) == set(Advice)
    for number, row in XIDS.items():
        assert row.why or row.action is usual[row.advice], number
        if row.advice in (Advice.RESET_GPU, Advice.RESTART_BM):
            assert row.action is not DeviceAction.NOTHING, number


def test_the_page_shows_each() -> None:
    page = (ROOT / "docs" / "device_health.md").read_text()
    shown = mkdocs_reference.on_page_markdown(page)
    rows = [re.split(r" \| ", line.strip("| ")) for line in shown.splitlines() if re.match(r"\| \d", line)]
    found = {int(number): row[1:4] for row in rows for number in row[0].split(", ")}
    assert found == {n: [row.what, row.advice, f"`{row.action}`"] for n, row in XIDS.items()}
    assert all(f"`{action}`" in shown for action in DeviceAction)


def training(nodes: int = 2, spares: int = 1, **settings: object) -> ControlPlane:
    job = ControlPlane(nodes=nodes, spares=spares, **settings)  # type: ignore[arg-type]
    job.all_step(1)
    return job


def fails(job: ControlPlane, role: int, fault: Fault = Fault.DEVICE, device: int = 0, step: int = 1) -> str:
    """The worker of a role does; where the role goes on."""
    agent = job[job.controller.cluster.places[role]]
    agent.say(WorkerLost(role, agent.workers.pop(role), "ended", 1, fault, step=step, device=device))
    job.all_report()
    assert job.phase == "running"
    return job.controller.cluster.places[role]


def test_a_device_that_has_failed_costs_one_recovery() -> None:
    """Its role does not come back to it, and nobody else gets it while there is another."""
    job = training(spares=2)
    assert fails(job, 1) == "node2"
    job.all_step(2)
    assert len(job.records_of("detected")) == 1
    assert fails(job, 0, Fault.NODE, step=2) == "node0", "another device's is as before"
    lose(job, "node0")
    job.all_report()
    assert job.controller.cluster.places == {0: "node3", 1: "node2"}, "node1 has no other device"


def test_where_there_is_no_other_device_it_is_used() -> None:
    job = training(spares=0)
    assert fails(job, 1) == "node1"


def test_what_fails_on_another_device_too_was_not_the_devices_fault() -> None:
    job = training()
    assert fails(job, 1) == "node2" and fails(job, 1) == "node2"
    assert job.controller.cluster.faulted(job.now) == {}


def test_of_a_node_with_several_the_others_are_used() -> None:
    job = training(nproc=2)
    assert fails(job, 3, device=1) == "node2", "role 2 has the other device of its node"
    job.all_step(2)
    assert fails(job, 2, Fault.KILLED, device=0, step=2) == "node1"
    job.all_step(3)
    lose(job, "node0")
    job.all_report()
    places = job.controller.cluster.places
    assert places[2] == "node1" and places[3] == "node2"
    assert sorted((places[0], places[1])) == ["node1", "node2"], "every device has its role, that one too"


def test_its_agent_has_another_device_for_its_role() -> None:
    node = Node(nproc_per_node=2)
    failed = m.FailureRecord("node0", 0, 0, 1, 4, Fault.DEVICE, "", 0.0)
    node.hear(m.KeepStrikes([failed, replace(failed, place="node1", device=1)]))
    node.hear(plan())
    [worker] = node.agent.crew.playing()
    assert worker.device == 1


def test_after_a_while_a_device_is_like_any_other() -> None:
    node = Node(nproc_per_node=2, strike_minutes=1)
    node.hear(m.KeepStrikes([m.FailureRecord("node0", 0, 0, 1, 4, Fault.DEVICE, "", 30.0)]))
    node.handle(e.Tick(), after=31.0)
    node.hear(plan())
    [worker] = node.agent.crew.playing()
    assert worker.device == 0
