"""What is known of the job and its nodes: the controller's soft state. Agents have told it, but for what a
predecessor's notes say (`Emitter.recorded_in`)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ft_core.control.cluster.catalogue import SegmentCatalogue
from ft_core.control.cluster.node import Node, epoch_of, sends_to
from ft_core.control.cluster.roles_by_node import RolesByNode
from ft_core.control.cluster.script import Script
from ft_core.control.cluster.setbacks import Setbacks
from ft_core.control.cluster.versions import Versions
from ft_core.control.decide.groups import Groups
from ft_core.control.decide.records import Records
from ft_core.control.events import Effect, Peer
from ft_core.control.liveness.strikes import Strikes
from ft_core.leadership.lease import first_epoch
from ft_core.protocol.checkpoint_names import Past
from ft_core.protocol.domains import place
from ft_core.protocol.messages import Epoch, HoldingsChanged, Message, Plan, RoleLayout
from ft_core.settings import Settings
from ft_core.state.placement import Places, all_left, spares_of

ALL_IS_LOST = (
    "the controller and all nodes with a role were lost together, and with them the state of the job; what "
    "is left is its newest checkpoint, if it has one"
)


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
    draining: list[str] = field(default_factory=list)
    """Live nodes that are to be taken out, in that order: none of them is given another role."""
    departing: str = ""
    """The draining node that is to keep no copies any more, in the epoch under way."""
    strikes: Strikes = field(init=False)
    """What has failed where."""
    epoch: int = 0
    """The newest epoch. While the job is `Running` it is the plan's; once that has ended it is the number of
    the next one, which has no plan yet, and what is said of the former is refused."""
    plan: Plan | None = None
    """The newest plan, since it was made or taken over. Which nodes there are is kept up to date in it;
    nothing else of it changes."""
    stepped_epoch: int = 0
    """The newest epoch in which all roles have finished a step, as far as it is written down."""
    every: int = 1
    """Steps from a version that is protected to the next, in the next plan, as long as no number is given."""
    catalogue: SegmentCatalogue = field(default_factory=SegmentCatalogue)
    versions: Versions = field(default_factory=Versions)
    script: Script = field(default_factory=Script)
    setbacks: Setbacks = field(default_factory=Setbacks)
    records: Records = field(default_factory=Records)
    """What live workers have on record of the start-up phase."""
    _roles_by_node: RolesByNode = field(default_factory=RolesByNode)
    _unreported: tuple[int, list[str]] = field(default_factory=lambda: (0, []))
    """An epoch, and the nodes that had not reported in it when it was looked last."""
    _healthy: set[str] = field(default_factory=set)
    """Nodes whose roles were those of the plan, and had live workers, when they were heard last."""

    def __post_init__(self) -> None:
        self.strikes = Strikes(self.settings.strikes, 60 * self.settings.strike_minutes)

    # -- the plan ----------------------------------------------------------------------------------

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

    @property
    def roles_by_node(self) -> dict[str, list[int]]:
        """The nodes that the plan has roles on, and which, ascending."""
        return self._roles_by_node.of(self.places)

    @property
    def share(self) -> float:
        """The share of the replica groups that takes part."""
        return len(self.places) / self.settings.world_size

    @property
    def period(self) -> int:
        """Steps from a protected version to the next, in the epoch under way."""
        return self.settings.period(self.plan.every if self.plan is not None else self.every)

    @property
    def redone(self) -> int:
        """The most finished steps that are done again while copies cover what is lost: see
        docs/recovery_rule.md."""
        return 2 * self.period - 1

    def next_epoch(self, after: Iterable[int] = ()) -> int:
        """The number of another epoch: newer than all that are known, than those in `after`, and than any of
        an older leader's."""
        return max(self.epoch + 1, first_epoch(self.term), *(epoch + 1 for epoch in after))

    def has_successor(self, role: int, epoch: Epoch | None) -> bool:
        """Whether the plan gives a role to another worker than it had in `epoch`: what an agent says again of
        the former one, since it has yet to begin the plan, counts no more."""
        if self.plan is None or epoch is None or epoch >= self.plan.epoch:
            return False
        newcomers = self.plan.newcomers  # ascending
        at = bisect_left(newcomers, role)
        return newcomers[at : at + 1] == [role]

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

    def take_over(self, plan: Plan) -> None:
        """Take over another controller's plan, told by an agent that has begun it."""
        self.catalogue.take(plan.catalogue)
        self.versions.take(plan)
        self.script.take(plan)
        self.setbacks.take(plan)
        self.every = plan.every
        self.groups.restore(plan.groups)
        self.plan, self.epoch = plan, max(self.epoch, plan.epoch)
        for node in self.nodes.values():
            self._count(node)

    # -- nodes that come, report and go ------------------------------------------------------------

    def add(self, node: Node) -> None:
        """Add a node that has come, or that has another connection."""
        self._unlist(node)
        self.nodes[node.name] = self.peers[node.peer] = node
        self._unreported[1].append(node.name)
        self._count(node)
        self._look_at(node)

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

    def report(self, node: Node, news: HoldingsChanged) -> bool:
        """Take in a node's report of what it holds. Returns whether that could be understood."""
        held = node.holdings
        anew = isinstance(news.roles, dict) or held.recount or bool(held.dead)
        before = held.counts() if anew else {}
        if not held.change(news):
            return False
        node.waiting, node.applied_plan = held.idle, held.begun
        if not self.is_of_before_the_restart(node):
            self.versions.seen([held.newest])
        if anew:
            self._forget_records(node, before.keys() - held.counts().keys())
            self._count(node)
        self._look_at(node)
        return True

    def worker_died(self, node: Node, role: int) -> None:
        """Note that a role's worker has died, also where its node has reported in this epoch that it
        lives."""
        node.holdings.worker_died(role)
        self._healthy.discard(node.name)
        self._forget_records(node, [role])

    def _look_at(self, node: Node) -> None:
        """Note whether a node's roles are as the plan has them, and all live."""
        held, name = node.holdings, node.name
        held.report.home = home = list(held.roles) == self.roles_by_node.get(name, [])
        if home and held.all_alive:
            self._healthy.add(name)
        else:
            self._healthy.discard(name)

    def _count(self, node: Node) -> None:
        """Enter what is on record of start-up at those workers of a node that the plan has there."""
        for role, counts in node.holdings.counts().items():
            if self.places.get(role) == node.name:
                self.records.say(role, counts)

    def _forget_records(self, node: Node, roles: Iterable[int]) -> None:
        for role in roles:
            if self.places.get(role) == node.name:
                self.records.say(role, {})

    # -- nodes, seen together ----------------------------------------------------------------------

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

    def alive(self, role: int, node: str) -> bool:
        """Whether `role` has a live worker on `node`."""
        return node in self.nodes and self.nodes[node].holdings.alive(role)

    def lost(self) -> list[int]:
        """Roles of the plan without a live worker where they are. Asked once all have reported."""
        doubtful = self.roles_by_node.keys() - self._healthy
        return sorted(
            role for name in doubtful for role in self.roles_by_node[name] if not self.alive(role, name)
        )

    def avoided(self, now: float) -> set[str]:
        """Live nodes that are not used while there are others."""
        places = self.strikes.avoided(now)
        return {name for name in self.nodes if place(name) in places} if places else set()

    def faulted(self, now: float) -> dict[str, int]:
        """Live nodes with devices that have failed of late, and how many."""
        count = Counter(device.place for device in self.strikes.broken(now))
        found = {name: count[place(name)] for name in self.nodes} if count else {}
        return {name: devices for name, devices in found.items() if devices}

    def to_all(self, message: Message) -> list[Effect]:
        """The effects that send a message to all nodes."""
        return sends_to(self.nodes.values(), message)

    # -- what roles hold, and what that was --------------------------------------------------------

    def lay_out(self, message: RoleLayout) -> None:
        """Note what a role's state consists of, or the part of it that another role has adopted."""
        script, versions = self.script, self.versions
        if message.epoch < script.restart_epoch:
            return
        if message.adopted:
            self.catalogue.add(message.role, message.segments)
            return
        self.catalogue.learn(message.role, message.segments)
        # A newcomer's script may begin with a checkpoint that was not there then.
        if versions.initial is None:
            versions.initial = message.initial
        script.resumes = message.resumes
        script.start_version = max(script.start_version, message.initial or 0)
        assert message.group is not None, f"role {message.role} tells of its state, and of no replica group"
        self.groups.register(message.role, message.group)

    def is_of_before_the_restart(self, node: Node) -> bool:
        """Whether a node has yet to begin a plan since all scripts were started again: what it holds is of a
        run that is over."""
        return epoch_of(node.holdings.begun) < self.script.restart_epoch

    @property
    def begins_with_durable(self) -> bool:
        """Whether no step was done yet after the durable checkpoint that the job has begun with."""
        return self.versions.initial is None and self.script.started_from[1] == "durable"

    @property
    def past(self) -> Past:
        """What durable checkpoints the job may go on from."""
        untrained = self.versions.initial is None and not self.script.restart_epoch
        # Where all is lost, its identity is as well, unless somebody has told of its plan.
        if self.plan is None or (untrained and (self.script.begun_here or not self.all_is_lost)):
            return Past()
        left = list(self.versions.left)
        if self.versions.tainted is not None:
            left.append((self.epoch + 1, self.versions.tainted - 1))
        return Past(self.plan.job, self.script.begun_from, left)

    @property
    def all_is_lost(self) -> bool:
        """Whether steps were done, and all who did them are lost, with a controller that knew what they held:
        nobody is left who knows of more than the first plan. It may be on record nowhere, if a leader was
        lost that could not write its notes; but where there are copies of two versions a step was done, and
        where a part of the script was."""
        script = self.script
        if self.versions.initial is not None:
            return False
        if any(end > (script.started_from[0] or 0) for end in script.parts):
            return True
        copies: set[int] = set()
        for node in self.nodes.values():
            if not self.is_of_before_the_restart(node):
                copies |= node.holdings.copied_versions()
        return self.stepped_epoch >= max(1, script.restart_epoch) or len(copies) > 1

    def all_left_without(self, names: Iterable[str]) -> bool:
        """Whether what these nodes of the plan had is on others as well: else something is lost with them."""
        plan = self.current_plan
        domains = {name: about.domain for name, about in plan.nodes.items()}
        where = Places(plan.roles, domains, spares_of(plan.nodes, plan.roles), self.settings.guarded)
        return all_left(where, set(names), self.settings.replicas)

    def remember_the_lost(self) -> None:
        """Remember roles that never said what their segments are: as many domains as copies cover may be
        lost, and then the others name all of them."""
        plan = self.current_plan
        if not self.versions.trained or len(self.catalogue.by_role) == self.settings.world_size:
            return
        if self.all_left_without(name for name in plan.nodes if name not in self.nodes):
            self.catalogue.fill(set(plan.roles) - set(self.catalogue.by_role), self.nodes.values())

    def forget(self) -> None:
        """The job starts over."""
        self.setbacks.note_progress(self.versions.newest_seen)
        self.setbacks.forget()
        self.versions.forget()
        self.versions.leave(self.epoch, 0)
        self.script.forget(self.epoch)
        self.catalogue.forget()
        self.groups.forget()
