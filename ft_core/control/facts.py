"""What is known of the job and its nodes: the controller's soft state, all of which it was told by agents."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from msgspec.structs import replace

from ft_core.control import compact, decision
from ft_core.control.events import Effect, Peer, Send
from ft_core.control.groups import Groups
from ft_core.control.strikes import Strikes, place
from ft_core.control.suspicion import Sight
from ft_core.leadership.lease import first_epoch
from ft_core.protocol.messages import (
    AgentHello,
    Catalogue,
    Counts,
    Heartbeat,
    Holdings,
    Host,
    Message,
    NodeAddress,
    Origin,
    Plan,
    RoleBeat,
    RoleLayout,
)
from ft_core.settings import Settings

ALL_IS_LOST = (
    "the controller and all nodes with a role were lost together, and with them the state of the job; what "
    "is left is its newest checkpoint, if it has one"
)

Operations = dict[str, tuple[int, int]]
"""By group, how many start-up operations are done, and a role that has their record."""


def epoch_of(plan: str) -> int:
    """The epoch of a plan's id; 0 of none."""
    return int(plan.partition("-")[0] or 0)


@dataclass
class Node:
    """A live agent. No other process has had its name: it stands for all that the process holds."""

    peer: Peer
    hello: AgentHello
    sight: Sight
    holdings: Holdings
    idle: int
    begun: str
    """The plan that it had begun when it was heard last."""
    unheard: list[Message]
    """What was said before it could be understood."""
    beats: Mapping[int, RoleBeat] = field(default_factory=dict)
    replicas: Mapping[str, list[int]] = field(default_factory=dict)
    planned: float = float("-inf")
    """When a plan was sent over this connection last."""
    hosts: list[Host] = field(default_factory=list)
    """What it has said of who is where, before it says what it keeps."""

    @classmethod
    def of(cls, peer: Peer, hello: AgentHello, now: float) -> Node:
        """The node that greets at `now`, by its greeting."""
        held = hello.holdings
        return cls(peer, hello, Sight(now), held, held.idle, held.begun, list(hello.said))

    @property
    def name(self) -> str:
        """No other node of the job has it, nor will have."""
        return self.hello.node

    @property
    def greeted_with(self) -> str:
        """The plan that it had when it greeted."""
        return self.hello.holdings.begun

    @property
    def address(self) -> NodeAddress:
        """Where others reach its memory, as plans say it."""
        return NodeAddress(data=self.hello.data, domain=self.hello.domain)

    def report(self, held: Holdings) -> None:
        """It has said, in a report, what it holds now."""
        self.holdings, self.idle, self.begun = held, held.idle, held.begun

    def beat(self, beat: Heartbeat) -> None:
        """It has said how far its roles are."""
        self.idle, self.begun, self.beats, self.replicas = beat.idle, beat.begun, beat.roles, beat.replicas

    def configured(self, values: Mapping[str, Any]) -> None:
        """It uses these settings."""
        self.holdings = replace(self.holdings, configured=dict(values))

    def worker_died(self, role: int) -> None:
        """Though it may have reported in this epoch that it lives."""
        if (held := self.holdings.roles.get(role)) is not None:
            roles = {**self.holdings.roles, role: replace(held, alive=False)}
            self.holdings = replace(self.holdings, roles=roles)


@dataclass
class Facts:
    """What is known of the job."""

    settings: Settings
    """Those that the script has brought are in them."""
    job_dir: str
    groups: Groups
    term: int = 1
    """That this controller leads in."""
    nodes: dict[str, Node] = field(default_factory=dict)
    peers: dict[Peer, Node] = field(default_factory=dict)
    """The same by their connections."""
    gone: set[str] = field(default_factory=set)
    """Those of them whose connections are no more."""
    epoch: int = 0
    plan: Plan | None = None
    """The newest that was begun. It says which nodes there are now; nothing else of it changes."""
    _hosted: tuple[dict[int, str], dict[str, list[int]]] = field(default_factory=lambda: ({}, {}))
    """The plan's places, and the same by node."""
    _late: tuple[int, list[str]] = field(default_factory=lambda: (0, []))
    """Of an epoch, the nodes that had not reported when it was looked last."""
    catalogue: dict[int, compact.Segments] = field(default_factory=dict)
    """Role -> its segments and their holders: what is lost without a trace must still be missed."""
    _compact: Catalogue | None = None
    """The same for plans, once it was asked for."""
    initial: int | None = None
    """The version that the script makes by itself; known once a role has reached training."""
    reached: int = 0
    """The newest version that any role is known to have had."""
    resumes: bool = False
    """Whether the script, started again, goes on from a checkpoint of its own."""
    begins_at: int = 0
    """The version that the script, started again, is known to begin with."""
    resumed: int = 0
    """The newest epoch in which all roles have finished a step, as far as it is written down."""
    started_over: int = 0
    """The newest epoch in which all scripts were started again."""
    start: tuple[int | None, Origin] = (None, "initial")
    """Version and origin that the job began with."""
    strikes: Strikes = field(init=False)
    """What has failed where."""
    parts: list[int] = field(default_factory=list)
    """Of the script, that every role has come to the end of: with which version."""
    futile: int = 0
    """Failures since any step was done that is newer than the goal; and that, the newest before them."""
    goal: int = 0

    def __post_init__(self) -> None:
        self.strikes = Strikes(self.settings.strikes, 60 * self.settings.strike_minutes)

    @property
    def places(self) -> dict[int, str]:
        """Where the plan has its roles: empty before the first."""
        return self.plan.roles if self.plan is not None else {}

    @property
    def plan_epoch(self) -> int:
        """0 before the first plan."""
        return self.plan.epoch if self.plan is not None else 0

    @property
    def plan_id(self) -> str:
        """Empty before the first."""
        return self.plan.id if self.plan is not None else ""

    @property
    def begun(self) -> Plan:
        """The plan, once there is one."""
        assert self.plan is not None, "no plan was made yet"
        return self.plan

    def add(self, node: Node) -> None:
        """It has come, or has another connection."""
        self.drop(node)
        self.nodes[node.name] = self.peers[node.peer] = node
        self._late[1].append(node.name)

    def drop(self, node: Node) -> None:
        """Forget a node that is lost, or has left."""
        if (known := self.nodes.pop(node.name, None)) is not None:
            del self.peers[known.peer]
            self.gone.discard(node.name)

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The nodes that the plan has roles on, and which, ascending."""
        places = self.places
        if self._hosted[0] is not places:
            by_node: dict[str, list[int]] = {}
            for role, name in sorted(places.items()):
                by_node.setdefault(name, []).append(role)
            self._hosted = places, by_node
        return self._hosted[1]

    def playing(self) -> list[Node]:
        """The live nodes that have a role."""
        return [node for name in self.hosts if (node := self.nodes.get(name)) is not None]

    def all_reported(self) -> bool:
        """Whether all nodes have said what they hold, in this epoch. Each is looked at a few times in it, not
        at every report of another."""
        if self._late[0] != self.epoch:
            self._late = self.epoch, list(self.nodes)
        late = self._late[1]
        while late:
            node = self.nodes.get(late[-1])
            if node is not None and node.holdings.reported != self.epoch:
                return False
            late.pop()
        return True

    def avoided(self, now: float) -> set[str]:
        """Live nodes that are not used while there are others."""
        places = self.strikes.avoided(now)
        return {name for name in self.nodes if place(name) in places}

    def compact_catalogue(self) -> Catalogue:
        """The catalogue, as plans have it."""
        if self._compact is None:
            self._compact = compact.catalogue(self.catalogue)
        return self._compact

    def _learn(self, role: int, segments: compact.Segments) -> None:
        """What its state consists of."""
        if self.catalogue.get(role) != segments:
            self.catalogue[role] = segments
            self._compact = None

    def alive(self, role: int, node: str) -> bool:
        """Whether `role` has a live worker on `node`."""
        held = self.nodes[node].holdings.roles.get(role) if node in self.nodes else None
        return held is not None and held.alive

    def to_all(self, message: Message) -> list[Effect]:
        """Say it to all nodes."""
        return to(self.nodes.values(), message)

    def next_epoch(self, after: Iterable[int] = ()) -> int:
        """The number of another epoch: newer than all that are known, also `after`, and than any of an older
        leader's."""
        return max(self.epoch + 1, first_epoch(self.term), *(epoch + 1 for epoch in after))

    def take(self, state: Plan) -> None:
        """A plan of another controller, from an agent that has begun it."""
        self.catalogue = {**compact.expanded(state.catalogue), **self.catalogue}
        self._compact = None
        self.initial, self.reached = state.initial, max(self.reached, state.reached)
        self.parts = state.parts
        self.resumes |= state.resumes
        self.started_over, self.start = state.started_over, state.start
        self.futile, self.goal = state.futile, state.goal
        self.groups.restore(state.groups)
        self.plan, self.epoch = state, max(self.epoch, state.epoch)

    def lay_out(self, message: RoleLayout) -> None:
        """What a role's state consists of; or the part of it that another has adopted."""
        if message.epoch < self.started_over:
            return
        if message.adopted:
            self._learn(message.role, {**self.catalogue.get(message.role, {}), **message.segments})
            return
        self._learn(message.role, message.segments)
        if self.initial is None:  # a newcomer's script may begin with a checkpoint that was not there then
            self.initial = message.initial
        self.resumes = message.resumes
        self.begins_at = max(self.begins_at, message.initial or 0)
        assert message.group is not None, f"role {message.role} tells of its state, and of no replica group"
        self.groups.register(message.role, message.group)

    def seen_at(self, versions: Iterable[int]) -> None:
        """Some role has, or had, these."""
        self.reached = max([self.reached, *versions])

    @property
    def trained(self) -> bool:
        """Whether a step was done: every role has had snapshots then, and copies of them are elsewhere."""
        return self.initial is not None and self.reached > self.initial

    @property
    def forgotten(self) -> bool:
        """Whether steps were done, and all who did them are lost, with a controller that knew what they held:
        nobody is left who knows of more than the first plan. It may be on record nowhere, if a leader was
        lost that could not write its notes; but where there are copies of two versions a step was done."""
        if self.initial is not None:
            return False
        copies = (held for node in self.nodes.values() for held in node.holdings.replicas.values())
        return self.resumed >= max(1, self.started_over) or len({v for held in copies for v in held}) > 1

    def fill_catalogue(self, roles: Collection[int]) -> None:
        """What these said of their segments was lost with their nodes, or with a controller: what others hold
        for them names the segments."""
        if not roles:
            return
        known: compact.Segments = {}
        for node in self.nodes.values():
            known |= node.holdings.segments
        wanted = set(roles)
        for segment, holders in known.items():
            for role in wanted.intersection(compact.all_in(holders)):
                if self.catalogue.get(role, {}).get(segment) != holders:
                    self._learn(role, {**self.catalogue.get(role, {}), segment: holders})

    def remember_the_lost(self) -> None:
        """Of roles that never said what their segments are: as many domains as copies cover may be lost, and
        then the others name all of them."""
        plan = self.begun
        gone = {about.domain for name, about in plan.nodes.items() if name not in self.nodes}
        if self.trained and len(gone) <= self.settings.replicas:
            self.fill_catalogue(set(plan.roles) - set(self.catalogue))

    def forget(self) -> None:
        """The job starts over."""
        self.initial, self.reached, self.begins_at, self.catalogue, self.parts = None, 0, 0, {}, []
        self.started_over, self.start = self.epoch, (None, "initial")
        self.groups.forget()
        self._compact = None


def to(nodes: Iterable[Node], message: Message) -> list[Effect]:
    """Send one message to each of these nodes."""
    return [Send(node.peer, message) for node in nodes]


def versions(held: Holdings) -> list[int]:
    """All that a node says it holds, of whatever."""
    found = [*held.replicas.values(), *(role.versions for role in held.roles.values())]
    return [version for each in found for version in each]


def report(node: Node) -> decision.NodeReport:
    """What a node holds, as the decision reads it."""
    held = node.holdings
    return decision.NodeReport(node.name, node.hello.domain, held.roles, held.replicas)


def copies(
    nodes: Iterable[Node], catalogue: Mapping[int, Iterable[str]], roles: Collection[int]
) -> dict[int, list[str]]:
    """For each of `roles` the nodes that keep copies for others, once for each of the role's segments."""
    wanted = {segment for role in roles for segment in catalogue.get(role, ())}
    held: dict[str, list[str]] = {}
    for node in nodes:
        for segment in wanted.intersection(node.holdings.replicas):
            held.setdefault(segment, []).append(node.name)
    return {role: [name for s in catalogue.get(role, ()) for name in held.get(s, ())] for role in roles}


def completed(counts: Iterable[tuple[int, Counts]]) -> Operations:
    """For each group how many start-up operations are done, and a role that has their record.

    `counts`: what roles have on record, of those that take part: one whose replica group leaves is about to
    lose its worker.
    """
    said = [(role, known) for role, known in counts if known]
    most: dict[str, int] = {}
    uneven = set()
    for name, count in set(chain.from_iterable(known.items() for _, known in said)):
        if name in most:
            uneven.add(name)
        most[name] = max(count, most.get(name, 0))
    holder: dict[str, int] = {}
    for role, known in reversed(said):
        holder.update(dict.fromkeys(known, role))
    for name in uneven:
        holder[name] = next(role for role, known in said if known.get(name) == most[name])
    return {name: (count, holder[name]) for name, count in sorted(most.items()) if count}


def records(nodes: Iterable[Node], roles: Collection[int]) -> list[tuple[int, Counts]]:
    """The counts that live workers of `roles` have reported."""
    return [
        (role, held.counts)
        for node in nodes
        for role, held in node.holdings.roles.items()
        if held.alive and role in roles
    ]
