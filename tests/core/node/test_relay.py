"""Agents that speak to the controller for others."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core.fleet import Fleet
from core.real_agent import RealAgent
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.control.relays import Branch
from ft_core.errors import ProtocolError
from ft_core.node import events as e
from ft_core.node.link.relay import Relay
from ft_core.protocol import messages as m
from ft_core.protocol.async_channel import AsyncChannel
from ft_core.protocol.bundle import LARGE, Raw, pack, unpack
from ft_core.protocol.codec import BESIDE, MAX_BYTES, encode

PARTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2**32 - 1), max_size=5), st.binary(max_size=20)), max_size=6
)


@given(PARTS)
def test_a_bundle_comes_as_it_was_sent(parts: list[tuple[list[int], bytes]]):
    assert [(list(numbers), body) for numbers, body in unpack(pack(parts), "x").parts] == parts


@given(PARTS.filter(bool), st.data())
def test_a_torn_bundle_is_refused(parts: list[tuple[list[int], bytes]], data: st.DataObject):
    whole = pack(parts)
    cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
    try:
        found = unpack(cut, "x").parts
    except ProtocolError as error:
        assert "torn" in str(error)
    else:
        assert len(found) < len(parts), "it was cut between two"


@settings(max_examples=2000)
@given(st.binary(max_size=60))
def test_what_is_no_bundle_is_refused_and_costs_nothing(junk: bytes):
    try:
        found = unpack(b"m" + junk, "x").parts
    except ProtocolError:
        return
    assert sum(8 + 4 * len(numbers) + len(body) for numbers, body in found) == len(junk)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=60))
def test_what_is_said_to_each_stays_in_order_and_is_sent_once_to_many(said: list[tuple[int, int]]):
    sent: list[bytes] = []
    branch = Branch(SimpleNamespace(post_encoded=sent.append), "")  # type: ignore[arg-type]
    bodies = [bytes([number]) * 3 for number in range(6)]
    expected = defaultdict(list)
    for member, body in said:
        branch.post(member, bodies[body])
        expected[member].append(bodies[body])
    branch.flush()
    assert len(sent) == bool(said)
    heard = defaultdict(list)
    for bundle in sent:
        for numbers, body in unpack(bundle, "x").parts:
            for number in numbers:
                heard[number].append(body)
    assert heard == expected


def test_what_goes_to_all_is_sent_once():
    sent: list[bytes] = []
    branch = Branch(SimpleNamespace(post_encoded=sent.append), "")  # type: ignore[arg-type]
    plan = b"p" * 1000
    for member in range(100):
        branch.post(member, plan)
    branch.flush()
    assert len(sent) == 1 and len(sent[0]) < 1500
    sent.clear()
    table, plan = b"t" * (LARGE * 3 // 2), b"p" * (LARGE * 3 // 2)
    for member in range(100):
        branch.post(member, table)
        branch.post(member, plan)
    branch.flush()
    assert len(sent) == 1 and len(sent[0]) < 4 * LARGE, "what is large as well"


def test_no_bundle_is_larger_than_what_is_taken():
    """Whatever is said: a connection over which more is announced ends."""
    sent: list[bytes] = []
    with pytest.raises(ProtocolError, match="limit"):
        encode("x" * (MAX_BYTES - BESIDE))
    largest, small = bytes(MAX_BYTES - BESIDE), [bytes(1) for _ in range(LARGE - 1)]
    branch = Branch(SimpleNamespace(post_encoded=sent.append), "")  # type: ignore[arg-type]
    for body in [*small, largest, bytes(LARGE), largest]:
        branch.post(1, body)
    branch.flush()
    assert len(sent) > 1

    async def to_the_controller() -> None:
        relay = Relay("127.0.0.1", b"s" * 32, "a relay", sent.append, sent.append)  # type: ignore[arg-type]
        relay.connected(sent.append)
        for body in [*small, largest, largest]:
            relay._queue(1, body, 60.0)
        relay._flush()
        relay._listener.close()

    asyncio.run(to_the_controller())
    assert max(map(len, sent)) <= MAX_BYTES


# -- real agents ------------------------------------------------------------------------------------------

DIRECT = 2


class Job:
    """Of real agents, most of which have no connection with the controller."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.agents: dict[str, RealAgent] = {}

    async def begin(self, nodes: int, spares: int) -> None:
        """Those that come first speak for the others."""
        for number in range(nodes + spares):
            await self.join(number if number < nodes else -1, f"node{number}")
        await self.fleet.event("resumed")

    async def join(self, rank: int, name: str) -> RealAgent:
        agent = self.agents[name] = RealAgent(self.fleet.settings, self.fleet.job_dir, name, rank)
        agent.serve()
        await self.fleet.until(lambda: agent.connected and name in self.fleet.cluster.nodes)
        return agent

    @property
    def members(self) -> list[RealAgent]:
        """Those for which others speak."""
        return [agent for agent in self.agents.values() if agent._uplink._through]

    def relay_of(self, agent: RealAgent) -> RealAgent:
        return next(a for a in self.agents.values() if a._relay.address == agent._uplink._through)

    async def lose(self, agent: RealAgent, said: bool = False) -> None:
        """All at once; or `said` before."""
        del self.agents[agent.node]
        if said:
            agent._uplink.post(m.Left())
            await agent._leave_controller()
        agent._relay._listener.close()
        await agent.end()

    def lost(self) -> list[str]:
        events = [e for e in self.fleet.events() if e["event"] == "spare_lost" or " lost: " in e["reason"]]
        return [e["reason"] for e in events]

    def recover(self, epoch: int) -> Any:
        return self.fleet.event("resumed", epoch)


def play(job_dir: Path, test: Any, nodes: int = 6, spares: int = 2, **about: Any) -> None:
    async def run() -> None:
        about.setdefault("heartbeats_missed", 100)
        async with Fleet(job_dir, nodes, spares=spares, ranks=[], direct=DIRECT, **about) as fleet:
            job = Job(fleet)
            try:
                await job.begin(nodes, spares)
                assert len(job.members) == nodes + spares - DIRECT
                await test(job)
            finally:
                for agent in list(job.agents.values()):
                    await agent.end()

    asyncio.run(run())


def test_a_worker_that_is_lost_behind_another_is_replaced(tmp_path: Path):
    async def test(job: Job) -> None:
        victim = next(agent for agent in job.members if agent.machine.crew.playing())
        victim.crash(victim.machine.crew.playing()[0].role)
        await job.recover(2)
        assert not job.lost()

    play(tmp_path / "job", test)


def test_a_node_that_is_lost_behind_another_is_noticed_at_once(tmp_path: Path):
    async def test(job: Job) -> None:
        victim = next(agent for agent in job.members if agent.machine.crew.playing())
        await job.lose(victim)
        await job.recover(2)
        [reason] = job.lost()  # others may have found that it has ended
        assert reason.startswith(f"node {victim.node} lost: its agent's connection broke")

    play(tmp_path / "job", test)


def test_whose_relay_is_lost_goes_elsewhere_and_is_not(tmp_path: Path):
    async def test(job: Job) -> None:
        relay = job.relay_of(job.members[0])
        behind = [agent for agent in job.members if job.relay_of(agent) is relay]
        await job.lose(relay)
        await job.recover(2)
        [reason] = job.lost()
        assert relay.node in reason
        await job.fleet.until(lambda: all(agent.connected for agent in behind))
        assert {agent._uplink._through for agent in behind} != {relay._relay.address}
        victim = behind[-1]
        role = victim.machine.crew.playing()[0].role if victim.machine.crew.playing() else 0
        next(agent for agent in job.agents.values() if agent.machine.crew.of_role(role)).crash(role)
        await job.recover(3)
        assert job.lost() == [reason]

    play(tmp_path / "job", test)


def test_a_new_controller_is_found_through_the_same_relays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ft_core.node.link.relay._WAIT", 60.0)  # whatever the machine does meanwhile

    async def test(job: Job) -> None:
        through = {agent.node: agent._uplink._through for agent in job.agents.values()}
        await job.fleet.stop_controller()
        await asyncio.sleep(0.3)
        await job.fleet.start_controller()
        await job.fleet.until(lambda: len(job.fleet.cluster.nodes) == len(job.agents))
        assert {agent.node: agent._uplink._through for agent in job.agents.values()} == through
        job.agents["node5"].crash(5)
        await job.recover(2)
        assert not job.lost()

    play(tmp_path / "job", test, heartbeats_missed=2000)


def test_a_relay_that_hears_nothing_of_the_controller_is_left(tmp_path: Path):
    """Its own connection looks well: nothing gets through, as on a network that is cut."""

    async def test(job: Job) -> None:
        relay = job.relay_of(job.members[0])
        behind = [agent for agent in job.members if job.relay_of(agent) is relay]
        relay._relay.deliver = lambda bundle: None  # type: ignore[method-assign]
        relay._relay._flush = lambda: None  # type: ignore[method-assign]
        await job.fleet.until(
            lambda: (
                all(
                    agent.connected and job.relay_of(agent) is not relay
                    for agent in behind
                    if agent in job.members
                )
                and not relay._relay._others
            )
        )
        assert not job.lost()

    play(tmp_path / "job", test)


def test_a_relay_that_says_something_large_is_not_left(tmp_path: Path):
    """It takes longer than a member waits for a word, and comes all the same."""

    async def test(job: Job) -> None:
        member = job.members[0]
        relay, patience = job.relay_of(member)._relay, member._uplink._patience
        handle, heard = member._handle, []
        member._uplink._handle = lambda event: (heard.append(event), handle(event))  # type: ignore[assignment, method-assign]
        slowly = []
        for channel in relay._others.values():
            channel.post_encoded = lambda _: None  # type: ignore[method-assign]
            frame = channel._frames.pack(encode(m.RelayLives()) + b" " * (1 << 20))
            pieces = [frame[at : at + len(frame) // 16] for at in range(0, len(frame), len(frame) // 16)]
            slowly.append(_slowly(channel, pieces, patience / 8))
        await asyncio.gather(*slowly)
        assert not any(isinstance(event, e.NotConnected) for event in heard)

    play(tmp_path / "job", test, heartbeats_missed=80)


async def _slowly(channel: AsyncChannel[bytes], pieces: list[bytes], pause: float) -> None:
    for piece in pieces:
        channel._connection.write(piece)
        await asyncio.sleep(pause)
    del channel.post_encoded


def test_a_job_that_ends_while_a_relay_hears_nothing_is_over_for_those_behind_it(tmp_path: Path):
    async def test(job: Job) -> None:
        relay = job.relay_of(job.members[0])
        behind = [agent for agent in job.members if job.relay_of(agent) is relay]
        assert relay._uplink._channel is not None
        relay._uplink._channel._connection.transport.pause_reading()
        for agent in job.agents.values():
            for worker in agent.machine.crew.playing():
                agent.say(worker.number, m.Finished(worker.role))
        assert await job.fleet.ended() == 0
        await job.fleet.until(lambda: all(agent._done.done() for agent in behind))
        assert [agent._done.result() for agent in behind] == [0] * len(behind)

    play(tmp_path / "job", test)


def test_who_cannot_reach_its_relay_is_served_by_the_controller(tmp_path: Path):
    async def test(job: Job) -> None:
        for agent in job.agents.values():
            if agent not in job.members:
                agent._relay._listener.close()
                agent._relay.serve = lambda: None  # type: ignore[assignment, method-assign]
        late = await job.join(-1, "late")
        assert not late._uplink._through and late._uplink._direct

    play(tmp_path / "job", test)


def test_who_leaves_its_relay_by_itself_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As all do after a while in which the controller said nothing."""
    monkeypatch.setattr("ft_core.node.link.uplink._RECONNECT", 1.0)  # longer than those that broke off have

    async def test(job: Job) -> None:
        members = job.members
        for agent in members:
            agent._uplink.hang_up()
        await job.fleet.until(lambda: not any(agent.connected for agent in members))
        await job.fleet.until(lambda: all(agent.connected for agent in members))
        members[-1].crash(members[-1].machine.crew.playing()[0].role)
        await job.recover(2)
        assert not job.lost()

    play(tmp_path / "job", test, nodes=8, spares=0)


def test_a_relay_that_talks_nonsense_is_left(tmp_path: Path):
    """It, and not the controller, is to blame: no node ends over that."""

    async def test(job: Job) -> None:
        relay = job.relay_of(job.members[0])
        behind = [agent for agent in job.members if job.relay_of(agent) is relay]
        relay._relay._lives = b'{"type":"Nonsense"}'
        await job.fleet.until(lambda: not relay._relay._others)
        await job.fleet.until(lambda: all(agent.connected for agent in behind))
        assert not job.lost()

    play(tmp_path / "job", test)


def test_a_relay_that_is_told_to_end_lets_others_go_at_once(tmp_path: Path):
    """Or they would wait for the end of its process."""

    async def test(job: Job) -> None:
        relay = job.relay_of(job.members[0])
        behind = [agent for agent in job.members if job.relay_of(agent) is relay]
        await job.lose(relay, said=True)
        await job.fleet.until(lambda: all(agent.connected for agent in behind))
        assert not any(agent._uplink._through == relay._relay.address for agent in behind)
        assert all(event.startswith(f"node {relay.node}") for event in job.lost())

    play(tmp_path / "job", test)


def test_who_waits_at_a_relay_is_heard_by_the_next_controller_as_well(monkeypatch: pytest.MonkeyPatch):
    """That the relay has a connection is over before they have noticed."""
    monkeypatch.setattr("ft_core.node.link.relay._WAIT", 60.0)  # whatever the machine does meanwhile

    async def test() -> None:
        sent: list[bytes] = []
        relay = Relay("127.0.0.1", b"s" * 32, "a relay", sent.append, sent.append)  # type: ignore[arg-type]
        serving = asyncio.create_task(relay.serve())
        channel = await AsyncChannel.connect(relay.address, b"s" * 32, Raw())
        channel.post_encoded(b"hello")
        async with asyncio.timeout(60):
            while not relay._there._waiters:
                await asyncio.sleep(0.01)
        relay.connected(sent.append)
        relay.disconnected()
        await asyncio.sleep(0.05)
        assert not relay._others
        relay.connected(sent.append)
        async with asyncio.timeout(60):
            while not sent:
                await asyncio.sleep(0.01)
        assert unpack(sent[0], "x").parts == [((0,), b"hello")]
        serving.cancel()

    asyncio.run(test())


@pytest.mark.parametrize("address", ["", "nonsense", ":80", "host:0", "host:x", "host:\u00b2"])
def test_an_address_that_is_none_is_refused(address: str):
    body = encode(m.RouteRequest("127.0.0.1:80", direct=False)).replace(b"127.0.0.1:80", address.encode())
    with pytest.raises(ProtocolError):
        m.FROM_CLIENT.decode(body, "x")


def test_a_relay_says_that_its_controller_is_away(tmp_path: Path):
    async def test(job: Job) -> None:
        member, heard = job.members[0], []
        handle = member._handle
        member._handle = member._uplink._handle = lambda event: (heard.append(event), handle(event))  # type: ignore[assignment, method-assign]
        await job.fleet.stop_controller()
        await job.fleet.until(lambda: any(isinstance(event, e.NotConnected) for event in heard))
        await job.fleet.start_controller()
        await job.fleet.until(lambda: len(job.fleet.cluster.nodes) == len(job.agents))

    play(tmp_path / "job", test)


def test_who_has_not_called_may_not_speak_for_others(tmp_path: Path):
    """And what others behind a relay may not say is refused; it costs only them their connection."""

    async def test(job: Job) -> None:
        fleet = job.fleet
        hello = stranger_hello()
        channel = await AsyncChannel.connect(fleet.settings.controller, fleet.secret, m.FROM_CONTROLLER)
        channel.post(hello)
        channel.post_encoded(pack([([0], b"{}")]))
        with pytest.raises(ConnectionError):
            while True:
                await channel.recv()
        relay = next(agent for agent in job.agents.values() if agent._relay._others)
        number = max(relay._relay._others)
        others = len(relay._relay._others)
        relay._relay._send(pack([([number], b'{"type":"AskStatus"}'), ([number + 7], b"{}"), ([9999], b"")]))  # type: ignore[misc]
        await fleet.until(
            lambda: any("may not send AskStatus" in event["reason"] for event in fleet.events())
        )
        await fleet.until(lambda: len(relay._relay._others) == others and number not in relay._relay._others)
        assert relay.connected

    play(tmp_path / "job", test)


def stranger_hello() -> m.AgentHello:
    nothing = m.Holdings(
        epoch=0,
        begun="",
        reported=0,
        parts=[],
        roles={},
        replicas={},
        segments={},
        idle=0,
        store="",
        master="",
        configured=None,
    )
    return m.AgentHello("stranger", 1, 1, -1, "stranger", "127.0.0.1:1", nothing, [], draining=False, job="")
