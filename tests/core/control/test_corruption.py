"""Holders of the same state who do not have the same: who is wrong, and what all go on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from core.control.test_controller_machine import Agent, ControlPlane
from core.control.test_controller_machine import tell as tell_state
from core.node.test_agent_machine import Node
from core.plans import plan

from ft_core.adapter import StateTensor
from ft_core.control.decide.comparison import Alike, Corrupt, Differ, Incomparable, compare
from ft_core.control.decide.holdings import NodeReport
from ft_core.control.decide.version_choice import choose_version
from ft_core.errors import ConfigError
from ft_core.node import events as e
from ft_core.node.memory.copies import COMPARING
from ft_core.process import inject
from ft_core.protocol import messages as m
from ft_core.protocol.groups import segment_id
from ft_core.state.manifest import CHUNK, Segment
from ft_core.state.memory import SnapshotBuffer
from ft_core.state.snapshot import Snapshotter
from ft_core.worker import bit_flip

GOOD, BAD, OTHER, WORSE = ("0" * 15 + digit for digit in "0123")
SEGMENT = segment_id([0, 1])


def values(*each: str) -> dict[int, str]:
    return dict(enumerate(each))


# -- the rule --------------------------------------------------------------------------------------------


def test_those_who_have_the_same_are_alike() -> None:
    assert compare(values(GOOD, GOOD)) == compare(values(GOOD)) == Alike()


def test_of_two_who_differ_nobody_is_named_before_they_have_done_the_step_again() -> None:
    assert compare(values(GOOD, BAD)) == Differ()
    assert compare(values(GOOD, GOOD), values(GOOD, BAD)) == Alike((1,))
    assert compare(values(GOOD, GOOD), values(BAD, GOOD)) == Alike((0,))


def test_of_more_the_odd_one_is_named() -> None:
    assert compare(values(GOOD, GOOD, BAD, GOOD)) == Differ(odd=2)
    assert compare(values(GOOD, BAD, OTHER)) == compare(values(GOOD, GOOD, BAD, BAD)) == Differ()
    assert compare(values(*[GOOD] * 4), values(GOOD, BAD, BAD, GOOD)) == Alike((1, 2))


def test_who_does_not_come_to_the_same_while_the_others_do_is_wrong_again() -> None:
    assert compare(values(GOOD, OTHER), values(GOOD, BAD)) == Corrupt(1)
    assert compare(values(GOOD, OTHER, GOOD), values(GOOD, BAD, GOOD)) == Corrupt(1)
    assert compare(values(GOOD, GOOD, BAD, GOOD), values(GOOD, BAD, GOOD, GOOD)) == Differ(odd=2), "another"


def test_who_differ_for_a_reason_are_not_compared() -> None:
    assert compare(values(GOOD, BAD), values(GOOD, BAD)) == Incomparable(reproduced=True)


def test_kernels_that_are_not_deterministic_blame_nobody() -> None:
    assert compare(values(GOOD, BAD), values(OTHER, WORSE)) == Incomparable(reproduced=False)
    assert compare(values(GOOD, GOOD), values(BAD, OTHER)) == Alike()
    assert compare(values(*[GOOD] * 3), values(BAD, OTHER, OTHER)) == Alike(), "that two agreed is no proof"


def test_what_is_newer_than_what_was_alike_is_not_gone_on_from() -> None:
    own = {0: m.RoleHeld(True, "training", [5, 6], ["a"])}
    reports = [NodeReport("node0", "node0", own, {})]
    assert choose_version(reports, [0], 0, ()).version == 6
    assert choose_version(reports, [0], 0, (), newest=5).version == 5
    choice = choose_version(reports, [0], 0, (4, 6), newest=4)
    assert (choice.version, choice.origin) == (4, "durable")


# -- what is compared ------------------------------------------------------------------------------------


class State:
    """Weights that two roles hold, and beside them what each may have otherwise."""

    def __init__(self, role: int) -> None:
        both = (0, 1)
        self.weight, self.moment = torch.ones(300_000), torch.full((70,), 0.5)
        self.others = [
            StateTensor("statistic", torch.full((9,), float(role)), both, volatile=True),
            StateTensor("seen", torch.full((9,), role), both),
            StateTensor("kept.counter", torch.full((9,), float(role)), both),
            StateTensor("own", torch.full((9,), float(role)), (role,)),
        ]
        self.role = role

    def tensors(self) -> list[StateTensor]:
        weight = StateTensor("model.weight", self.weight, (0, 1))
        moment = StateTensor("optimizer.0.exp_avg", self.moment, (0, 1))
        return [self.others[0], weight, self.others[1], moment, *self.others[2:]]

    def envelope(self) -> dict[str, int]:
        return {"position": self.role * 100}

    def envelope_holders(self) -> tuple[int, ...]:
        return (0, 1)

    def restore(self, tensors: object, envelope: object) -> None: ...


def sums(state: State, verify: bool = True) -> dict[str, str]:
    """Of its version 1."""
    buffers: list[SnapshotBuffer] = []

    def allocate(slot: int, segments: list[Segment]) -> list[int]:
        buffers.append(SnapshotBuffer.create(segments))
        return buffers[-1].memory.address

    snapshotter = Snapshotter(state, allocate, lambda version: None, verify=verify)
    snapshotter.stage(1)
    snapshotter.wait()
    [shared] = [each for each in buffers[0].segments if len(each.holders) > 1]
    at = {item.name: item.offset for item in shared.items}
    if verify:
        assert at["model.weight"] % CHUNK == 0 and max(at, key=lambda name: at[name]) == "optimizer.0.exp_avg"
    return snapshotter.sums


def test_what_may_differ_is_no_part_of_what_is_compared() -> None:
    first, second = sums(State(0)), sums(State(1))
    assert first == second and len(first) == 1
    assert sums(State(0), verify=False) == {}


@pytest.mark.parametrize("what", inject.FLIPS)
def test_a_bit_that_flips_in_it_shows(what: str) -> None:
    state = State(0)
    before = state.weight.clone(), state.moment.clone()
    bit_flip.flip(state, what)
    assert torch.equal(before[0], state.weight) == (what == "moment")
    assert torch.equal(before[1], state.moment) == (what == "weight")
    assert sums(state) != sums(State(0))


def test_a_flip_needs_something_that_others_hold() -> None:
    state = State(0)
    state.weight = state.moment = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ConfigError, match="this role has no weight that others hold as well"):
        bit_flip.flip(state, "weight")


# -- the controller --------------------------------------------------------------------------------------


def pair() -> ControlPlane:
    """Two roles with the same state, which have done a step."""
    job = ControlPlane(nodes=2, groups=2, verify=True)
    job.all_step(1)
    tell(job, 1, GOOD, GOOD)
    return job


def tell(job: ControlPlane, version: int, *sums: str) -> None:
    """All roles have done it, and say what they have."""
    for agent, value in zip(job.agents.values(), sums, strict=True):
        for role, pid in agent.workers.items():
            agent.versions[role] = [version - 1, version]
            epoch = agent.plan.epoch if agent.plan else 0
            said = m.Checksums(epoch, role, pid, 0, {version: {SEGMENT: value}})
            agent.say(said)


def verified(agent: Agent) -> list[int]:
    return [message.version for message in agent.heard if isinstance(message, m.Verified)]


def test_agents_hear_what_is_alike_once_all_holders_have_said_so() -> None:
    job = pair()
    assert verified(job["node0"]) == verified(job["node1"]) == [1]
    job["node0"].say(m.Checksums(1, 0, job["node0"].workers[0], 0, {2: {SEGMENT: GOOD}}))
    assert job.controller.cluster.versions.verified == 1 and verified(job["node1"]) == [1]
    job["node1"].say(m.Checksums(1, 1, job["node1"].workers[1], 0, {2: {SEGMENT: GOOD}}))
    assert verified(job["node0"]) == verified(job["node1"]) == [1, 2]


def test_who_differ_from_the_beginning_are_not_compared() -> None:
    job = ControlPlane(nodes=2, groups=2, verify=True)
    job.all_step(1)
    tell(job, 0, GOOD, BAD)
    tell(job, 1, GOOD, BAD)
    assert job.phase == "running" and verified(job["node0"]) == [0, 1]
    [said] = job.records_of("not_compared")
    assert "differs as their scripts begin" in said.reason and not job.records_of("detected")


def test_two_who_differ_do_the_step_again_and_who_was_wrong_is_struck() -> None:
    job = pair()
    tell(job, 2, GOOD, BAD)
    assert job.phase == "quiescing"
    [detected] = job.records_of("detected")
    assert (
        detected.more["fault"] is m.Fault.CORRUPTION and "version 2: what roles 0, 1 hold" in detected.reason
    )
    job.all_report()
    assert job.phase == "running" and job.controller.cluster.current_plan.version == 1
    assert not job.records_of("corruption") and not job.controller.cluster.strikes.places()
    tell(job, 2, GOOD, GOOD)
    [found] = job.records_of("corruption")
    assert found.roles == (1,)
    [strike] = job.controller.cluster.strikes.against("node1", job.now)
    assert (strike.fault, strike.device, strike.role, strike.step) == (m.Fault.CORRUPTION, 0, 1, 2)
    assert job.phase == "running" and verified(job["node0"]) == [1, 2]


def test_who_is_wrong_again_is_replaced() -> None:
    job = pair()
    tell(job, 2, GOOD, BAD)
    job.all_report()
    tell(job, 2, GOOD, OTHER)
    assert m.KillWorker(1) in job["node1"].heard and m.KillWorker(0) not in job["node0"].heard
    node = job["node1"]
    node.say(node.crash(1))
    job.all_report()
    assert job.phase == "running" and job.controller.cluster.current_plan.version == 1
    tell(job, 2, GOOD, GOOD)
    assert [record.roles for record in job.records_of("corruption")] == [(1,)]
    assert job.controller.cluster.versions.verified == 2


def test_who_differ_for_a_reason_are_said_once_and_train_on() -> None:
    job = pair()
    tell(job, 2, GOOD, BAD)
    job.all_report()
    tell(job, 2, GOOD, BAD)
    tell(job, 3, GOOD, BAD)
    assert job.phase == "running" and verified(job["node1"]) == [1, 2, 3]
    [said] = job.records_of("not_compared")
    assert "each came to the same" in said.reason
    assert not job.records_of("corruption") and not job.controller.cluster.strikes.places()


def goes_on_from(job: ControlPlane) -> int | None:
    """The version, after the worker of role 1 has died."""
    node = job["node1"]
    node.say(node.crash(1))
    job.all_report()
    return job.controller.cluster.current_plan.version


def test_a_crash_before_all_were_compared_goes_on_from_what_was() -> None:
    job = pair()
    for agent in job.agents.values():
        for role in agent.workers:
            agent.versions[role] = [1, 2]
    job["node0"].say(m.Checksums(1, 0, job["node0"].workers[0], 0, {2: {SEGMENT: GOOD}}))
    assert goes_on_from(job) == 1


def test_what_was_never_compared_is_gone_on_from_where_nothing_else_is_left() -> None:
    """The controller was away for longer than agents wait for it."""
    job = pair()
    for agent in job.agents.values():
        agent.versions = {role: [5, 6] for role in agent.workers}
        agent.replicas = {}
    assert goes_on_from(job) == 6


def test_a_successor_compares_what_agents_say_again() -> None:
    job = pair()
    job.start_controller()
    for name, value in (("node0", GOOD), ("node1", BAD)):
        [(role, pid)] = job[name].workers.items()
        job[name].versions[role] = [1, 2]
        job[name].greet([m.Checksums(1, role, pid, 0, {1: {SEGMENT: GOOD}, 2: {SEGMENT: value}})])
    job.wait(0.1)
    tell_state(job)
    job.wait(0.1)
    detected = job.records_of("detected")[0]
    assert f"roles 0, 1 hold alike (segment {SEGMENT}) differs" in detected.reason
    job.all_report()
    assert job.phase == "running" and job.controller.cluster.current_plan.version == 1


def test_where_nothing_is_held_alike_that_is_said_once() -> None:
    job = ControlPlane(nodes=2, verify=True)
    job.all_step(1)
    job.wait(1)
    [said] = job.records_of("not_compared")
    assert "no two roles hold" in said.reason


# -- an agent --------------------------------------------------------------------------------------------


@pytest.fixture
def training() -> Node:
    node = Node(verify=True)
    node.hear(plan())
    node.train()
    return node


def staged(node: Node, version: int, sums: dict[str, str]) -> list[e.Effect]:
    """The snapshot is whole here, and wherever it must be."""
    node.worker(m.Staged(0, version, sums))
    [order] = node.effects(e.Replicate)
    return node.handle(e.Replicated(order, ""))


def test_what_is_compared_is_committed_once_it_is_alike(training: Node) -> None:
    training.worker(m.Staged(0, 1, {SEGMENT: GOOD}))
    [said] = training.said(m.Checksums)
    assert (said.epoch, said.role, said.versions) == (1, 0, {1: {SEGMENT: GOOD}})
    [order] = training.effects(e.Replicate)
    training.handle(e.Replicated(order, ""))
    assert not training.effects(e.Commit)
    training.hear(m.Verified(1, 1))
    assert [commit.version for commit in training.effects(e.Commit)] == [1]
    assert not [c for c in staged(training, 2, {SEGMENT: BAD}) if isinstance(c, e.Commit)]
    training.hear(m.Verified(2, 2))
    assert not training.effects(e.Commit), "of another epoch"


def test_what_nobody_holds_alike_waits_for_nobody(training: Node) -> None:
    assert [c.version for c in staged(training, 1, {}) if isinstance(c, e.Commit)] == [1]
    assert not training.said(m.Checksums)


def test_training_does_not_stand_for_a_controller_that_is_away(training: Node) -> None:
    staged(training, 1, {SEGMENT: GOOD})
    training.handle(e.NotConnected("it is gone"))
    training.handle(e.Tick())
    assert not training.effects(e.Commit), "as who speaks for it may be, for a moment"
    training.handle(e.Tick(), COMPARING)
    assert [commit.version for commit in training.effects(e.Commit)] == [1]
    training.handle(e.Connected())
    staged(training, 2, {SEGMENT: GOOD})
    training.handle(e.Tick(), COMPARING / 2)
    assert not training.effects(e.Commit)
    training.handle(e.Tick(), COMPARING)
    assert [commit.version for commit in training.effects(e.Commit)] == [2]
    [said] = [each for each in training.greeting().said if isinstance(each, m.Checksums)]
    assert list(said.versions) == [1, 2], "a successor can compare both"


# -- on purpose ------------------------------------------------------------------------------------------


def test_a_flip_is_injected_once(tmp_path: Path) -> None:
    injector = inject.Injector(tmp_path, "1@optimizer:5:moment")
    flipped: list[str] = []
    injector.flip = flipped.append
    for role, step in ((0, 5), (1, 4), (1, 5), (1, 5)):
        injector.point(role, "optimizer", step)
    assert flipped == ["moment"]
    with pytest.raises(ConfigError, match="cannot read '1@d2h:5:weight'"):
        inject.parse("1@d2h:5:weight")
