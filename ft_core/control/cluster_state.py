"""What is known of the job and its nodes: the controller's soft state, all of which it was told by agents."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ft_core.control.decide import compact
from ft_core.control.decide.groups import Groups
from ft_core.control.decide.inventory import NodeInventory
from ft_core.control.decide.records import Records
from ft_core.control.events import Effect, Peer, Send
from ft_core.control.liveness.strikes import Strikes
from ft_core.control.liveness.suspicion import NodeLiveness
from ft_core.leadership.lease import first_epoch
from ft_core.protocol.domains import place
from ft_core.protocol.messages import (
    AgentHello,
    Catalogue,
    Epoch,
    Heartbeat,
    HoldingsChanged,
    Host,
    Message,
    NodeAddress,
    Origin,
    Plan,
    RoleBeat,
    RoleLayout,
    Timing,
)
from ft_core.protocol.table import moved_roles
from ft_core.settings import Settings
from ft_core.state.placement import Places, all_left, spares_of

ALL_IS_LOST = (
    "the controller and all nodes with a role were lost together, and with them the state of the job; what "
    "is left is its newest checkpoint, if it has one"
)


def epoch_of(plan: str) -> int:
    """The epoch of a plan's id; 0 of none."""
    return int(plan.partition("-")[0] or 0)


@dataclass
class Check:
    """What is known of a node's own check (`control.admission`)."""

    asked_at: float
    under_way: bool = True
    times: Mapping[str, Timing] = field(default_factory=dict)
    hardware: str = ""
    """Empty until it has ended well."""
    why: str = ""
    """What is wrong with the node."""
    was_slow: bool = False
    """Whether it was slow when it was measured last, and is measured once more for that."""


@dataclass
class Node:
    """A live agent. No other process has had its name: it stands for all that the process holds."""

    peer: Peer
    hello: AgentHello
    liveness: NodeLiveness
    holdings: NodeInventory
    waiting: int
    """Workers that wait for a role, as it has said last."""
    applied_plan: str
    """The plan that it had begun when it was heard last."""
    messages_before_plan: list[Message]
    """What was said before it could be understood."""
    beats: Mapping[int, RoleBeat] = field(default_factory=dict)
    replicas: Mapping[str, list[int]] = field(default_factory=dict)
    guarding: Sequence[int] = ()
    """Roles of other nodes that it has started ahead of need."""
    plan_sent_at: float = float("-inf")
    """When a plan was sent over this connection last."""
    hosts: list[Host] = field(default_factory=list)
    """What it has said of who is where, before it says what it keeps."""
    check: Check | None = None
    """Whether it is well; None: nobody has asked for that."""

    @classmethod
    def of(cls, peer: Peer, hello: AgentHello, now: float) -> Node:
        """The node that greets at `now`, by its greeting."""
        held = NodeInventory(hello)
        return cls(peer, hello, NodeLiveness(now), held, held.idle, held.begun, list(hello.said))

    @property
    def idle(self) -> int:
        """Workers that may be given a role: none until its check is over."""
        return 0 if self.under_check else self.waiting

    @property
    def under_check(self) -> bool:
        """Whether it is not known yet that it is well."""
        return self.check is not None and self.check.under_way

    @property
    def name(self) -> str:
        """The node's name, which no other node of the job has, nor will have."""
        return self.hello.node

    @property
    def greeted_with(self) -> str:
        """The plan that it had when it greeted."""
        return self.hello.holdings.begun

    @cached_property
    def address(self) -> NodeAddress:
        """Where others reach its memory, as plans say it."""
        return NodeAddress(data=self.hello.data, domain=self.hello.domain)

    def beat(self, beat: Heartbeat) -> None:
        """Take in the node's heartbeat: how far its roles are."""
        self.waiting, self.applied_plan, self.beats, self.replicas = (
            beat.idle,
            beat.begun,
            beat.roles,
            beat.replicas,
        )
        self.guarding = beat.guarding


@dataclass
class ClusterState:
    """What is known of the job."""

    settings: Settings
    """The job's settings, with what the script has brought."""
    job_dir: str
    groups: Groups
    term: int = 1
    """The term that this controller leads in."""
    nodes: dict[str, Node] = field(default_factory=dict)
    peers: dict[Peer, Node] = field(default_factory=dict)
    """The live nodes by their connections."""
    disconnected: set[str] = field(default_factory=set)
    """Live nodes whose connections have ended."""
    epoch: int = 0
    plan: Plan | None = None
    """The newest plan that was begun. Which nodes there are is kept up to date in it; nothing else of it
    changes."""
    _hosted: tuple[dict[int, str], dict[str, list[int]]] = field(default_factory=lambda: ({}, {}))
    """The plan's places, and the same by node."""
    _unreported: tuple[int, list[str]] = field(default_factory=lambda: (0, []))
    """An epoch, and the nodes that had not reported in it when it was looked last."""
    _healthy: set[str] = field(default_factory=set)
    """Nodes whose roles were those of the plan, and had live workers, when they were heard last."""
    catalogue: dict[int, compact.Segments] = field(default_factory=dict)
    """Role -> its segments and their holders: what is lost without a trace must still be missed."""
    _compact: Catalogue | None = None
    """The catalogue in the form that plans have it, once it was asked for."""
    _shown: dict[int, compact.Segments] | None = None
    """A copy of the catalogue for the page and metrics, which stays as it is; None until it is asked for."""
    initial_version: int | None = None
    """The version that the script makes by itself; known once a role has reached training."""
    verified: int | None = None
    """With `--ft-verify`, the newest version in which all who hold something alike are known to have the
    same: nothing newer is gone on from, as long as this is held. None: nothing was compared yet."""
    tainted: int | None = None
    """The oldest version of the epoch that is known to be wrong somewhere: neither it nor a newer one is gone
    on from in any case."""
    newest_seen: int = 0
    """The newest version that any role is known to have had."""
    script_resumes: bool = False
    """Whether the script, started again, goes on from a checkpoint of its own."""
    script_start_version: int = 0
    """The version that the script, started again, is known to begin with."""
    stepped_epoch: int = 0
    """The newest epoch in which all roles have finished a step, as far as it is written down."""
    restart_epoch: int = 0
    """The newest epoch in which all scripts were started again."""
    started_from: tuple[int | None, Origin] = (None, "initial")
    """Version and origin that the job began with."""
    records: Records = field(default_factory=Records)
    """What live workers have on record of the start-up phase."""
    strikes: Strikes = field(init=False)
    """What has failed where."""
    parts: list[int] = field(default_factory=list)
    """The parts of the script that every role has come to the end of: with which version."""
    draining: list[str] = field(default_factory=list)
    """Live nodes that are to be taken out, in that order: none of them is given another role."""
    departing: str = ""
    """The draining node that is to keep no copies any more, in the epoch under way."""
    attempts_without_progress: int = 0
    """Failures since a step was done that is newer than `progress_mark`."""
    progress_mark: int = 0
    escalation_level: int = 0
    """How far the ladder was climbed since there was progress, see `control.decide.ladder`."""
    furthest_step: int = 0
    """The newest version that was ever reached when something failed: what is newer is progress."""
    ledger_through: int = 0
    """The newest step that the ledger of samples has."""
    every: int = 1
    """Steps from a version that is protected to the next, as long as no number is given."""

    def __post_init__(self) -> None:
        self.strikes = Strikes(self.settings.strikes, 60 * self.settings.strike_minutes)

    @property
    def places(self) -> dict[int, str]:
        """Where the plan has its roles: empty before the first."""
        return self.plan.roles if self.plan is not None else {}

    @property
    def plan_epoch(self) -> int:
        """The plan's epoch; 0 before the first plan."""
        return self.plan.epoch if self.plan is not None else 0

    @property
    def plan_id(self) -> str:
        """The plan's id; empty before the first plan."""
        return self.plan.id if self.plan is not None else ""

    @property
    def current_plan(self) -> Plan:
        """The plan, once there is one."""
        assert self.plan is not None, "no plan was made yet"
        return self.plan

    def add(self, node: Node) -> None:
        """Add a node that has come, or that has another connection."""
        self._unlist(node)
        self.nodes[node.name] = self.peers[node.peer] = node
        self._unreported[1].append(node.name)
        self._count(node)
        self._look_at(node)

    def _count(self, node: Node) -> None:
        """Enter what is on record of start-up at those workers of a node that the plan has there."""
        for role, counts in node.holdings.counts().items():
            if self.places.get(role) == node.name:
                self.records.say(role, counts)

    def _forget_records(self, node: Node, roles: Iterable[int]) -> None:
        for role in roles:
            if self.places.get(role) == node.name:
                self.records.say(role, {})

    def report(self, node: Node, news: HoldingsChanged) -> bool:
        """Take in a node's report of what it holds. Returns whether that could be understood."""
        held = node.holdings
        anew = isinstance(news.roles, dict) or held.recount or bool(held.dead)
        before = held.counts() if anew else {}
        if not held.change(news):
            return False
        node.waiting, node.applied_plan = held.idle, held.begun
        if not self.is_of_before_the_restart(node):
            self.newest_seen = max(self.newest_seen, held.newest)
        if anew:
            self._forget_records(node, before.keys() - held.counts().keys())
            self._count(node)
        self._look_at(node)
        return True

    def _look_at(self, node: Node) -> None:
        """Note whether a node's roles are as the plan has them, and all live."""
        held, name = node.holdings, node.name
        held.report.home = home = list(held.roles) == self.roles_by_node.get(name, [])
        if home and held.all_alive:
            self._healthy.add(name)
        else:
            self._healthy.discard(name)

    def worker_died(self, node: Node, role: int) -> None:
        """Note that a role's worker has died, also where its node has reported in this epoch that it
        lives."""
        node.holdings.worker_died(role)
        self._healthy.discard(node.name)
        self._forget_records(node, [role])

    def takes_part(self, roles: Mapping[int, str], newcomers: Iterable[int]) -> None:
        """An epoch begins with `roles`: what others have on record is of no use, and `newcomers` will say
        what they have."""
        if list(roles) != list(self.places):
            for role in self.records.roles - roles.keys():
                self.records.say(role, {})
        for role in newcomers:
            self.records.say(role, {})
            if (node := self.nodes.get(roles.get(role, ""))) is not None:
                node.holdings.recount = True

    def drop(self, node: Node) -> None:
        """Forget a node that is lost, or has left."""
        self._unlist(node)
        if node.name in self.draining:
            self.draining.remove(node.name)

    def _unlist(self, node: Node) -> None:
        if (known := self.nodes.pop(node.name, None)) is not None:
            del self.peers[known.peer]
            self.disconnected.discard(node.name)
            self._healthy.discard(node.name)
            self._forget_records(known, known.holdings.counts())

    @property
    def roles_by_node(self) -> dict[str, list[int]]:
        """The nodes that the plan has roles on, and which, ascending."""
        places = self.places
        if self._hosted[0] is not places:
            self._hosted = places, hosts_now(*self._hosted, places)
        return self._hosted[1]

    def nodes_with_roles(self) -> list[Node]:
        """The live nodes that have a role."""
        return [node for name in self.roles_by_node if (node := self.nodes.get(name)) is not None]

    def spares(self) -> Iterator[Node]:
        """The live nodes that have none, and may be given some."""
        hosts = self.roles_by_node
        return (n for name, n in self.nodes.items() if name not in hosts and name not in self.draining)

    def checking(self) -> bool:
        """Whether nodes that could be given roles are being checked."""
        return any(n.under_check and n.waiting and n.name not in self.draining for n in self.nodes.values())

    def all_reported(self) -> bool:
        """Whether all nodes have said what they hold, in this epoch. Each is looked at a few times in it, not
        at every report of another."""
        if self._unreported[0] != self.epoch:
            self._unreported = self.epoch, list(self.nodes)
        late = self._unreported[1]
        while late:
            node = self.nodes.get(late[-1])
            if node is not None and node.holdings.reported != self.epoch:
                return False
            late.pop()
        return True

    def avoided(self, now: float) -> set[str]:
        """Live nodes that are not used while there are others."""
        places = self.strikes.avoided(now)
        return {name for name in self.nodes if place(name) in places} if places else set()

    def faulted(self, now: float) -> dict[str, int]:
        """Live nodes with devices that have failed of late, and how many."""
        count = Counter(device.place for device in self.strikes.broken(now))
        found = {name: count[place(name)] for name in self.nodes} if count else {}
        return {name: devices for name, devices in found.items() if devices}

    def compact_catalogue(self) -> Catalogue:
        """The catalogue, as plans have it."""
        if self._compact is None:
            self._compact = compact.catalogue(self.catalogue)
        return self._compact

    def catalogue_now(self) -> Mapping[int, compact.Segments]:
        """The catalogue, as it stays: the same object for as long as nothing new is learnt."""
        if self._shown is None:
            self._shown = dict(self.catalogue)
        return self._shown

    def _learn(self, role: int, segments: compact.Segments) -> None:
        """Note what a role's state consists of."""
        if self.catalogue.get(role) != segments:
            self.catalogue[role] = segments
            self._compact = self._shown = None

    def alive(self, role: int, node: str) -> bool:
        """Whether `role` has a live worker on `node`."""
        return node in self.nodes and self.nodes[node].holdings.alive(role)

    def lost(self) -> list[int]:
        """Roles of the plan without a live worker where they are. Asked once all have reported."""
        doubtful = self.roles_by_node.keys() - self._healthy
        return sorted(
            role for name in doubtful for role in self.roles_by_node[name] if not self.alive(role, name)
        )

    def to_all(self, message: Message) -> list[Effect]:
        """The effects that send a message to all nodes."""
        return to(self.nodes.values(), message)

    def next_epoch(self, after: Iterable[int] = ()) -> int:
        """The number of another epoch: newer than all that are known, than those in `after`, and than any of
        an older leader's."""
        return max(self.epoch + 1, first_epoch(self.term), *(epoch + 1 for epoch in after))

    def take(self, plan: Plan) -> None:
        """Take over another controller's plan, told by an agent that has begun it."""
        self.catalogue = {**self.catalogue, **compact.expanded(plan.catalogue)}
        self._compact = self._shown = None
        self.initial_version, self.newest_seen = (
            plan.initial_version,
            max(self.newest_seen, plan.newest_seen),
        )
        self.parts = plan.parts
        self.script_resumes |= plan.script_resumes
        self.restart_epoch, self.started_from = plan.restart_epoch, plan.started_from
        self.attempts_without_progress, self.progress_mark = (
            plan.attempts_without_progress,
            plan.progress_mark,
        )
        self.escalation_level, self.furthest_step = plan.escalation_level, plan.furthest_step
        self.every = plan.every
        self.groups.restore(plan.groups)
        self.plan, self.epoch = plan, max(self.epoch, plan.epoch)
        for node in self.nodes.values():
            self._count(node)

    def lay_out(self, message: RoleLayout) -> None:
        """Note what a role's state consists of, or the part of it that another role has adopted."""
        if message.epoch < self.restart_epoch:
            return
        if message.adopted:
            self._learn(message.role, {**self.catalogue.get(message.role, {}), **message.segments})
            return
        self._learn(message.role, message.segments)
        # A newcomer's script may begin with a checkpoint that was not there then.
        if self.initial_version is None:
            self.initial_version = message.initial
        self.script_resumes = message.resumes
        self.script_start_version = max(self.script_start_version, message.initial or 0)
        assert message.group is not None, f"role {message.role} tells of its state, and of no replica group"
        self.groups.register(message.role, message.group)

    def is_of_before_the_restart(self, node: Node) -> bool:
        """Whether a node has yet to begin a plan since all scripts were started again: what it holds is of a
        run that is over."""
        return epoch_of(node.holdings.begun) < self.restart_epoch

    def seen_at(self, versions: Iterable[int]) -> None:
        """Note versions that some role has, or had."""
        self.newest_seen = max([self.newest_seen, *versions])

    @property
    def redone(self) -> int:
        """The most finished steps that are done again while copies cover what is lost: see
        docs/recovery_rule.md."""
        return 2 * self.period - 1

    @property
    def period(self) -> int:
        """Steps from a protected version to the next, in the epoch under way."""
        return self.settings.period(self.plan.every if self.plan is not None else self.every)

    @property
    def trained(self) -> bool:
        """Whether a step was done: every role has had snapshots then, and copies of them are elsewhere."""
        return self.initial_version is not None and self.newest_seen > self.initial_version

    @property
    def begins_with_durable(self) -> bool:
        """Whether no step was done yet after the durable checkpoint that the job has begun with."""
        return self.initial_version is None and self.started_from[1] == "durable"

    @property
    def forgotten(self) -> bool:
        """Whether steps were done, and all who did them are lost, with a controller that knew what they held:
        nobody is left who knows of more than the first plan. It may be on record nowhere, if a leader was
        lost that could not write its notes; but where there are copies of two versions a step was done, and
        where a part of the script was."""
        if self.initial_version is not None:
            return False
        if any(end > (self.started_from[0] or 0) for end in self.parts):
            return True
        copies: set[int] = set()
        for node in self.nodes.values():
            if not self.is_of_before_the_restart(node):
                copies |= node.holdings.copied_versions()
        return self.stepped_epoch >= max(1, self.restart_epoch) or len(copies) > 1

    def fill_catalogue(self, roles: Collection[int]) -> None:
        """Complete the catalogue for `roles`, where what they said of their segments was lost with their
        nodes or with a controller: what others hold for them names the segments."""
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

    def has_successor(self, role: int, epoch: Epoch | None) -> bool:
        """Whether the plan gives a role to another worker than it had in `epoch`: what an agent says again of
        the former one, since it has yet to begin the plan, counts no more."""
        if self.plan is None or epoch is None or epoch >= self.plan.epoch:
            return False
        newcomers = self.plan.newcomers  # ascending
        at = bisect_left(newcomers, role)
        return newcomers[at : at + 1] == [role]

    def remember_the_lost(self) -> None:
        """Remember roles that never said what their segments are: as many domains as copies cover may be
        lost, and then the others name all of them."""
        plan = self.current_plan
        if not self.trained or len(self.catalogue) == self.settings.world_size:
            return
        domains = {name: about.domain for name, about in plan.nodes.items()}
        where = Places(plan.roles, domains, spares_of(plan.nodes, plan.roles), self.settings.guarded)
        gone = [name for name in plan.nodes if name not in self.nodes]
        if all_left(where, gone, self.settings.replicas):
            self.fill_catalogue(set(plan.roles) - set(self.catalogue))

    def note_progress(self) -> None:
        """Something has failed: was there a step since that nobody had done before?"""
        if self.newest_seen > self.progress_mark:  # the failure is the first that comes after it
            self.attempts_without_progress = min(self.attempts_without_progress, 1)
            self.progress_mark = self.newest_seen
        if self.newest_seen > self.furthest_step:
            self.escalation_level, self.furthest_step = 0, self.newest_seen

    def forget(self) -> None:
        """The job starts over."""
        self.note_progress()
        self.progress_mark = 0
        self.initial_version, self.newest_seen, self.script_start_version = None, 0, 0
        self.catalogue, self.parts = {}, []
        self.verified = self.tainted = None
        self.restart_epoch, self.started_from = self.epoch, (None, "initial")
        self.groups.forget()
        self._compact = self._shown = None


def hosts_now(
    before: Mapping[int, str], by_node: Mapping[str, list[int]], now: Mapping[int, str]
) -> dict[str, list[int]]:
    """The roles of each node, ascending. `before`, `by_node`: what was so; little has changed as a rule."""
    hosts: dict[str, list[int]] = {}
    if list(before) != list(now):
        for role, name in sorted(now.items()):
            hosts.setdefault(name, []).append(role)
        return hosts
    moved = moved_roles(before, now)
    names = {before[role] for role in moved} | {now[role] for role in moved}
    for name in sorted(names):
        stay = (role for role in by_node.get(name, ()) if role not in moved)
        hosts[name] = sorted([*stay, *(role for role in moved if now[role] == name)])
    return {name: roles for name, roles in {**by_node, **hosts}.items() if roles}


def to(nodes: Iterable[Node], message: Message) -> list[Effect]:
    """Send one message to each of these nodes."""
    return [Send(node.peer, message) for node in nodes]


def copies(
    nodes: Iterable[Node], catalogue: Mapping[int, Iterable[str]], roles: Collection[int]
) -> dict[int, list[str]]:
    """For each of `roles`, the nodes that keep copies for others, once for each of the role's segments."""
    wanted = {segment for role in roles for segment in catalogue.get(role, ())}
    held: dict[str, list[str]] = {}
    for node in nodes:
        for segment in wanted.intersection(node.holdings.replicas):
            held.setdefault(segment, []).append(node.name)
    return {role: [name for s in catalogue.get(role, ()) for name in held.get(s, ())] for role in roles}
