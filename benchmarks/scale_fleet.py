"""Agents of many nodes in one process, which speak the real protocol over real sockets and do nothing else.

They have no workers and no state, only what they tell of them. What they are told is decoded where it
concerns them, and else only looked at: their own CPU time is not what is measured. So it is not the machine
of a real agent (`ft_core.node.machine`) that answers: 25,000 of those, and their plans, would need more
memory and time than the controller, on the same cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from benchmarks.simulated import AGAIN, AT_ONCE, PER_NODE, Client, Layout
from ft_core.node.link.relay import Relay
from ft_core.node.machine import SAME
from ft_core.node.memory.holdings import changed, more_than_versions
from ft_core.protocol import messages as m
from ft_core.protocol.bundle import KIND, unpack
from ft_core.protocol.codec import encode
from ft_core.protocol.groups import roles_in, text_of
from ft_core.protocol.pulses import Seal, sender
from ft_core.protocol.sockets import split_address
from ft_core.protocol.table import Received, hosts_of, pieces
from ft_core.settings import Settings
from ft_core.state.manifest import Segment

STEP = 5.0
"""Seconds."""
COPIED, OPTIMIZER = 0.2, 0.1
"""Of a step: when the copy of the one before is complete, and how long its optimizer takes."""
_EPOCH = re.compile(rb'"epoch":(\d+)')
_ID = re.compile(rb'"id":"([^"]*)"')
_VERSION = re.compile(rb'"version":(\d+|null)')


class Sharded(Layout):
    """Who has what of a job's state: that of the optimizer is sharded over all data-parallel peers."""

    def segments(self, role: int) -> list[tuple[str, range]]:
        """Parameters, and a shard of the optimizer's state: by id, their holders."""
        return [(segment_id(held), held) for held in (self.peers(role), range(role, role + 1))]

    def group(self, role: int) -> m.ReplicaGroup:
        """Its replica of the model."""
        index = role % (self.tensor * self.data) // self.tensor
        return m.ReplicaGroup(index, self.data, m.Redundancy.ADOPTABLE)

    def counts(self, role: int) -> dict[str, int]:
        """Of operations on record, by group."""
        return {f"{text_of(runs)}#0": 20 for runs in self.groups(role)}


@cache
def segment_id(holders: range) -> str:
    """As `state.manifest.Segment`."""
    return Segment(tuple(holders), ()).id


@dataclass
class Told:
    """What the agents of one process were told."""

    plans: dict[int, int] = field(default_factory=dict)
    """By epoch, how many nodes have its plan."""
    last: dict[int, float] = field(default_factory=dict)
    """When the last of them had it."""
    planned_bytes: dict[int, int] = field(default_factory=dict)
    """Of all plans of an epoch."""
    largest: int = 0
    """Message, in bytes."""
    received: int = 0
    given_up: int = 0
    connected: int = 0
    wrong: list[str] = field(default_factory=list)


class Fleet:
    """The agents of one process."""

    def __init__(self, layout: Sharded, controller: str, secret: bytes, settings: Settings) -> None:
        self.layout, self.secret, self.digest = layout, secret, settings.digest
        usual = replace(settings, heartbeats_missed=Settings.heartbeats_missed)
        self.every, self.again = usual.pulse, SAME * usual.silence_limit
        self.host, self.port = split_address(controller)
        self.doorstep = {calls: asyncio.Semaphore(AT_ONCE) for calls in (True, False)}
        """Of the controller, and of all who speak for others: those wait for one of their own there."""
        self.restoring = False
        """Whether workers take their time to have their state."""
        self.hush = 0
        """1: nobody trains, so there is no news to beat for; 2: nobody says more than it is asked."""
        self.session = ""
        """Of the controller that agents have met last."""
        self._seal, self._datagrams = Seal(secret), sender(controller)
        self.told = Told()
        self.nodes: dict[str, Agent] = {}
        self.plan: m.NodePlan | None = None
        """The newest, as one of the nodes has it."""
        self.hosts: dict[str, m.Host] = {}
        self.adopted: dict[int, list[int]] = {}
        """Roles that hold what others had alone that are away: which."""
        self.plans = Received()
        self.begun: tuple[int, int] = 2, _steps()
        """The version that an epoch goes on from, and when."""
        self.stopped: int | None = None
        """The version with which the last one has ended, while none is under way."""

    @property
    def version(self) -> int:
        """Steps that all have done: as many in each process."""
        if self.stopped is not None:
            return self.stopped
        version, since = self.begun
        return version + _steps() - since

    def stop(self) -> None:
        """An epoch ends."""
        self.stopped = self.version

    def kill(self, names: list[str]) -> None:
        """These nodes die, some of them here. Who had connections with their workers sees them break."""
        hosts = [host for name in names if (host := self.hosts.get(name)) is not None]
        lost = {role for host in hosts for run in roles_in(host.roles) for role in run}
        near = {other for role in lost for other in self.layout.neighbours(role)} - lost
        for name in names:
            if (agent := self.nodes.pop(name, None)) is not None:
                agent.die()
        for agent in self.nodes.values():
            if seen := near.intersection(agent.roles):
                agent.send(*(m.Suspect(agent.epoch, role, "connection reset by peer") for role in seen))

    def go_on(self, version: int) -> None:
        """The next one begins."""
        self.stopped, self.begun = None, (version + 1, _steps())

    async def beat(self) -> None:
        """For all agents, spread over the time between two beats: what is new, and that they live."""
        parts = 50
        while True:
            for part in range(parts):
                begun = time.monotonic()
                for agent in [] if self.hush > 1 else list(self.nodes.values())[part::parts]:
                    if not self.hush:
                        agent.beat()
                    self._pulse(agent.name)
                await asyncio.sleep(max(0.0, begun + self.every / parts - time.monotonic()))

    def _pulse(self, name: str) -> None:
        """As the process beside an agent."""
        if self.session:
            with contextlib.suppress(OSError):  # nobody listens, while the controller is restarted
                self._datagrams.send(self._seal.pack(m.Pulse(self.session, name, time.monotonic_ns(), 0.0)))


class Agent(Client):
    """One simulated agent, and its connection."""

    def __init__(self, fleet: Fleet, name: str, rank: int) -> None:
        super().__init__(fleet.secret, "the controller")
        self.fleet, self.name, self.rank = fleet, name, rank
        self.roles: list[int] = []
        self.epoch = self.reported = 0
        self.begun = ""
        self.killed = self.greeted = False
        self._starting: list[int] = []
        """Roles that come back while others train."""
        self._pieces: list[bytes] = []
        """Messages about who is where, of the plan that comes next."""
        self._own_bytes = self._version = 0
        self._said: list[m.SaidAgain] = []
        self._reported: tuple[m.Holdings | None, int] = None, 0
        """What it has said of what it holds, over this connection, and how often since it greeted."""
        self._prepared: tuple[int, m.Holdings, int, bytes] | None = None
        """The report of an epoch: which, what it says, its number, its bytes."""
        self._shaken: asyncio.Future[None]
        """Of the newest connection: whether it stands, or has ended before."""
        self._relay: Relay | None = None
        """In which it speaks for others, or would."""
        self._serving: asyncio.Future[None] | None = None
        self._through = ""
        """Where another speaks for it."""
        self._calls = self._led = False
        """Whether it asks the controller who does; whether that has answered its greeting."""
        self._sent_away = self._in_vain = False
        """Whether it was told who does; whether that one had no connection with the controller."""
        self._beat: tuple[float, object] = 0.0, None
        """When it has beaten last, and what it said."""

    async def connect(self) -> None:
        """Until there is a connection: with who speaks for it, or with the controller, by turns (see
        `node.link.uplink`)."""
        loop, fleet = asyncio.get_running_loop(), self.fleet
        while not self.killed:
            self._shaken, self._calls = loop.create_future(), not self._through or self._in_vain
            self._sent_away = self._in_vain = False
            where = (fleet.host, fleet.port) if self._calls else split_address(self._through)
            try:
                async with fleet.doorstep[self._calls]:
                    await loop.create_connection(lambda: self, *where)
                    await self._shaken
                return
            except OSError:
                self._in_vain = not self._calls
                if not self._sent_away:
                    await asyncio.sleep(AGAIN)

    def die(self) -> None:
        """All at once."""
        self.killed = True
        self._stop_relaying()
        if self._transport is not None:
            self._transport.abort()

    # -- the connection --------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        self.fleet.told.connected -= self._led
        self._transport, self._frames, self.greeted = None, None, False
        if self._relay is not None:
            self._relay.disconnected()
        self._in_vain = not self._led and not self._calls
        self._led = False
        if not self._shaken.done():
            self._shaken.set_exception(ConnectionResetError())  # `connect` tries again
        elif not self.killed:
            asyncio.get_running_loop().call_later(AGAIN, self._again)

    def _again(self) -> None:
        task = asyncio.ensure_future(self.connect())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)

    def came(self, nbytes: int) -> None:
        """As `Client.came`."""
        self.fleet.told.received += nbytes

    def greets(self) -> None:
        """As `Client.greets`."""
        if not self._calls:
            self._greet()
            return
        if self._relay is None:
            fleet = self.fleet
            wrong = fleet.told.wrong.append
            self._relay = Relay(
                "127.0.0.1", fleet.secret, self.name, lambda _: None, lambda error: wrong(repr(error))
            )
            self._serving = asyncio.ensure_future(self._relay.serve())
            direct = False
        else:
            direct = True
        self.send(m.RouteRequest(self._relay.address, direct))

    def _greet(self) -> None:
        self._shaken.set_result(None)
        self.greeted = True
        self.send(self._hello())

    def _answered(self, relay: str) -> None:
        """Who is to speak for it; empty: nobody."""
        self._through, self._sent_away = relay, bool(relay)
        if relay:
            self._stop_relaying()
            assert self._transport is not None
            self._transport.close()
        else:
            self._greet()

    def _stop_relaying(self) -> None:
        if self._relay is not None and self._serving is not None:
            self._relay.disconnected()
            self._serving.cancel()
        self._relay = self._serving = None

    def _led_by(self, session: str) -> None:
        self.fleet.session, self._led = session, True
        self.fleet.told.connected += 1
        if self._relay is not None and not self._through:
            frames, transport = self._frames, self._transport
            assert frames is not None and transport is not None
            self._relay.connected(lambda body: transport.write(frames.pack(body)))

    # -- what it says ----------------------------------------------------------------------------

    def _hello(self) -> m.AgentHello:
        where = f"10.{self.rank >> 16 & 255}.{self.rank >> 8 & 255}.{self.rank & 255}:40001"
        held = self._holdings()
        self._reported = held, 0
        return m.AgentHello(
            self.name, 1, 1, self.rank, self.name, where, held, self._said, False, "", self.fleet.digest
        )

    def _report(self, if_changed: bool = False) -> None:
        """As an agent does: by difference. `if_changed`: only if that is more than versions."""
        now, (before, number) = self._holdings(), self._reported
        report = changed(before, now, number)
        if not if_changed or more_than_versions(report):
            self._reported = now, number + 1
            self.send(report)

    def prepare(self) -> None:
        """Have the report ready that the next epoch begins with: as many machines would take no time."""
        epoch, (before, number) = self.epoch, self._reported
        if before is not None:
            self.epoch = self.reported = epoch + 1
            now = self._holdings()
            self._prepared = epoch + 1, now, number, encode(changed(before, now, number))
            self.epoch = self.reported = epoch

    def _say_what_is_prepared(self) -> bool:
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[0] != self.epoch or prepared[2] != self._reported[1]:
            return False
        self._reported = prepared[1], prepared[2] + 1
        self.send_encoded(prepared[3])
        return True

    def _holdings(self) -> m.Holdings:
        layout, version = self.fleet.layout, self.fleet.version
        trained = self.begun != ""
        roles: dict[int, m.RoleHeld] = {}
        segments: dict[str, range] = {}
        for role in self.roles:
            found = dict(layout.segments(role))
            segments |= found
            held = [version - 1, version] if trained else []
            roles[role] = m.RoleHeld(True, "training", held, list(found), layout.counts(role))
        replicas = {}
        for name, holders in self._kept() if trained else ():
            replicas[name], segments[name] = [version - 1, version], holders
        return m.Holdings(
            epoch=self.epoch,
            begun=self.begun,
            reported=self.reported,
            parts=[],
            roles=roles,
            replicas=replicas,
            segments={name: text_of([held]) for name, held in segments.items()},
            idle=self._idle(),
            store="10.0.0.1:40002",
            master="10.0.0.1:40003",
            configured=None,
        )

    def _kept(self) -> list[tuple[str, range]]:
        """Segments of which it keeps copies, those of the roles of the node before it, and what its own have
        adopted."""
        before = [(role - PER_NODE) % self.fleet.layout.roles for role in self.roles]
        adopted = [away for role in [*before, *self.roles] for away in self.fleet.adopted.get(role, ())]
        return [self.fleet.layout.segments(role)[1] for role in [*before, *adopted]]

    def _idle(self) -> int:
        """Workers without a role."""
        return PER_NODE + 1 - len(self.roles or self._starting)

    def beat(self) -> None:
        """A heartbeat, if there is news. Of a step there are three: its end, its copy, its optimizer."""
        if not self.greeted:
            return
        version, into = self.fleet.version, time.monotonic() % STEP / STEP
        copied, optimizer = into > COPIED, into > 1 - OPTIMIZER
        now, before = time.monotonic(), self._beat
        news = version, copied, optimizer, self.epoch, self.begun, (*self.roles, *self._starting)
        if news == before[1] and now - before[0] < self.fleet.again:
            return
        self._beat = now, news
        trained = [version - 1, version] if copied else [version - 1]
        tag = -1 if optimizer else version
        beats = {
            role: m.RoleBeat(role + 1, version, tag, trained, trained[-1], STEP, 0.0, 0, 0)
            for role in self.roles
        }
        starting = {role: m.RoleBeat(role + 1, 0, 0, [], -1, 0.0, 0.0, 0, 0) for role in self._starting}
        replicas = {name: trained for name, _ in self._kept()}
        self.send(m.Heartbeat(self.epoch, self.begun, beats | starting, self._idle(), replicas))
        if not self.fleet.restoring:
            self._report(if_changed=True)

    # -- what it is told -------------------------------------------------------------------------

    def heard(self, body: bytes) -> None:
        """As `Client.heard`."""
        told = self.fleet.told
        told.largest = max(told.largest, len(body))
        if body[:1] == KIND:
            assert self._relay is not None
            self._relay.deliver(unpack(body, self.name))
            return
        if body[:1] != b"{":
            self._pieces.append(body)
            return
        match body[9 : body.index(b'"', 9)]:
            case b"OwnPlan":
                self._own_bytes = len(body)
            case b"SharedPlan":
                self._plan(body)
            case b"Abort":
                if (epoch := _number(_EPOCH, body)) > self.epoch:
                    self.epoch = self.reported = epoch
                    self.fleet.stop()
                    if not self._say_what_is_prepared():
                        self._report()
            case b"SendState":
                plan = self.fleet.plan
                assert plan is not None
                self.send(*pieces(plan), m.KeptState(plan.state))
            case b"ProbeNodes":
                asked = msgspec.json.decode(body, type=m.ProbeNodes)
                self.send(m.NodesProbed(asked.round, dict.fromkeys(asked.nodes, "reached")))
            case b"GivenUp":
                told.given_up += 1
                self.die()
            case b"Shutdown":
                told.wrong.append(f"{self.name}: {body[:200]!r}")
                self.die()
            case b"LeaderHello":
                self._led_by(msgspec.json.decode(body, type=m.LeaderHello).session)
            case b"UseRelay":
                self._answered(msgspec.json.decode(body, type=m.UseRelay).relay)
            case b"SendCounts" | b"Prepare" | b"SendHeartbeat" | b"PauseAfterStep" | b"Withdraw" as kind:
                self._return(kind, body)
            case b"RelayLives" | b"NodesChanged" | b"KeepStrikes" | b"Release":
                pass
            case kind:
                told.wrong.append(f"{self.name} was sent {kind!r}")

    def _plan(self, body: bytes) -> None:
        fleet, name = self.fleet, _ID.search(body)
        assert name is not None
        epoch, begun = _number(_EPOCH, body), name[1].decode()
        told = fleet.told
        if begun == self.begun:
            return
        told.plans[epoch] = told.plans.get(epoch, 0) + 1
        told.last[epoch] = time.monotonic()
        size = len(body) + self._own_bytes + sum(map(len, self._pieces))
        told.planned_bytes[epoch] = told.planned_bytes.get(epoch, 0) + size
        self.epoch, self.begun = epoch, begun
        if fleet.plan is None or fleet.plan.id != begun:
            for piece in self._pieces:
                fleet.plans.hear(m.FROM_CONTROLLER.decode(piece, "the controller"))  # type: ignore[arg-type]
            shared = m.FROM_CONTROLLER.decode(body, "the controller")
            assert isinstance(shared, m.SharedPlan)
            plan = fleet.plans.plan(shared, fleet.plan)
            assert plan is not None
            fleet.plan = plan
            fleet.hosts = hosts_of(plan.roles, plan.nodes)
            fleet.adopted = {}
            for away, by in plan.adopted.items():
                fleet.adopted.setdefault(by, []).append(away)
            fleet.go_on(max(2, _number(_VERSION, body)))
        self._pieces, self._own_bytes = [], 0
        host = fleet.hosts.get(self.name)
        self.roles = [role for run in roles_in(host.roles) for role in run] if host and host.roles else []
        self._starting = []
        self._version = _number(_VERSION, body)
        if not fleet.restoring:
            self.train()

    def _return(self, kind: bytes, body: bytes) -> None:
        """Replica groups come back: what takes a worker its time takes none here."""
        fleet = self.fleet
        if kind == b"SendCounts":
            self.send(*(m.OperationCounts(role, fleet.layout.counts(role)) for role in self.roles))
        elif kind == b"Prepare":
            found = m.FROM_CONTROLLER.decode(body, "the controller")
            assert isinstance(found, m.Prepare)
            if not self._starting:
                self._starting = found.roles
                self.send(*(m.Prepared(role, fleet.layout.counts(role)) for role in found.roles))
        elif kind == b"SendHeartbeat":
            self._beat = 0.0, None
            self.beat()
        elif kind == b"PauseAfterStep" and (epoch := _number(_EPOCH, body)):
            self.send(*(m.PausedAtStep(epoch, role) for role in self.roles))
        elif kind == b"Withdraw":
            fleet.told.wrong.append(f"{self.name}: {body[:200]!r}")

    def train(self) -> None:
        """Its workers have their state of the newest plan, and do a step."""
        self._said = list(self._progress(self._version))
        if self.greeted:
            self.send(*self._said)

    def _progress(self, version: int) -> Iterator[m.OfRole]:
        """Its workers have their state, and have done a step."""
        layout = self.fleet.layout
        for role in self.roles:
            segments = {name: text_of([held]) for name, held in layout.segments(role)}
            yield m.RoleLayout(self.epoch, role, False, segments, 0, False, layout.group(role))
            for away in self.fleet.adopted.get(role, ()):
                (name, holders) = layout.segments(away)[1]
                yield m.RoleLayout(self.epoch, away, True, {name: text_of([holders])}, None, False, None)
            yield m.Restored(self.epoch, role, role + 1, version, True)
            yield m.Reopened(self.epoch, role)
            yield m.Stepped(self.epoch, role, version + 1)


def _steps() -> int:
    return int(time.monotonic() / STEP)


_tasks: set[asyncio.Future[None]] = set()


def _number(pattern: re.Pattern[bytes], body: bytes) -> int:
    found = pattern.search(body)
    return int(found[1]) if found is not None and found[1] != b"null" else 0


def serve(
    layout: Sharded,
    controller: str,
    secret: bytes,
    settings: Settings,
    names: dict[str, int],
    orders: Connection,
) -> None:
    """A process of agents, which obeys `orders`: `start`, `kill` nodes, have others `join`, `told`."""

    async def run() -> None:
        fleet = Fleet(layout, controller, secret, settings)
        first = layout.roles // PER_NODE
        for name, rank in names.items():
            fleet.nodes[name] = Agent(fleet, name, rank if rank < first else -1)
        beats: asyncio.Future[None] | None = None
        inbox: asyncio.Queue[Any] = asyncio.Queue()

        def read() -> None:
            try:
                inbox.put_nowait(orders.recv())
            except EOFError:
                inbox.put_nowait(("end", None))

        asyncio.get_running_loop().add_reader(orders.fileno(), read)
        while True:
            order, argument = await inbox.get()
            if order == "start":
                beats = asyncio.ensure_future(fleet.beat())
                for agent in fleet.nodes.values():
                    agent._again()
            elif order == "restoring":
                fleet.restoring = argument
                for agent in [] if argument else fleet.nodes.values():
                    agent.train()
            elif order == "hush":
                fleet.hush = argument
                if fleet.hush > 1:
                    fleet.stop()
                    for agent in fleet.nodes.values():
                        agent.prepare()
            elif order == "kill":
                fleet.kill(argument)
            elif order == "join":
                for name in argument:
                    fleet.nodes[name] = Agent(fleet, name, -1)
                    fleet.nodes[name]._again()
            elif order == "told":
                orders.send(fleet.told)
            else:
                assert beats is not None
                beats.cancel()
                return

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
