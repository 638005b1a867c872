"""A job: its processes, what becomes of it, and what is checked of it."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ft_core.cli import ledger_check
from ft_core.control import events as ev
from ft_core.control.observe.recorded import EVENTS
from ft_core.control.prestart.draining import Draining
from ft_core.control.prestart.notices import AGAIN
from ft_core.elastic.rules import Deal, tellers
from ft_core.protocol import messages as m
from ft_core.protocol.checkpoint_names import parse
from ft_core.protocol.goodput import Spent
from ft_core.settings import AUTO, Command, Settings
from ft_core.state import durable
from ft_core.worker.states import Holding

from .arbiter import MACHINE, Arbiter
from .control import SimController, decides
from .errors import Errors, moved
from .invariants import Invariant
from .node import SimNode
from .slowness import Slowness
from .storage import Storage, preloaded
from .time_account import TimeAccount
from .training import Content, Training
from .world import Link, Network, World

_CALM = 12.0
"""Seconds after the last fault in which every node that is well must have come back."""
_LIMIT = 400.0
"""Seconds after the last fault in which the job must have done steps, or ended with the reason."""
_STEPS = 2
_SILENCE = 6.0
"""Seconds."""
_ANSWER = 4.0
"""Seconds within which a node was asked about another, has tried, and its answer is here."""
SHORT = 2.0
"""Seconds for which a node may be stopped, at any time, without being lost for its silence."""
_LOST = re.compile(r"node (\S+?)(?: lost)?: ")


@dataclass(frozen=True)
class Shape:
    """How large the job is."""

    nodes: int = 2
    per_node: int = 1
    spares: int = 0
    replicas: int = 1
    policy: str = "wait"
    groups: int = 1
    adopts: bool = False
    """Each role has something alone that others can adopt, instead of nothing."""
    durable: int = 0
    """Steps between durable checkpoints; 0: there are none."""
    former: int = 0
    """The version of one that a former job has left."""
    saves: int = 0
    """Steps between checkpoints of the script's own."""
    loads: str = ""
    """Who goes on from those: the scripts of all roles, once they are started again together (`all`, as with
    Megatron-LM), or each newcomer's (`each`, as with DeepSpeed)."""
    brings: str = ""
    """The script brings its settings: the `same` everywhere, `different` ones, `impossible` ones."""
    part: int = 0
    """The version with which a first part of the script ends."""
    elects: bool = False
    """The controller is on any of the nodes, by a lease, and not on a machine of its own."""
    derives: bool = False
    """Of what all roles hold no copies are made: all together derive it from what each has alone."""
    drains: bool = False
    """Nodes are taken out of it."""
    every: int = AUTO
    """Steps from a version that is protected to the next."""
    slow: bool = False
    """Copies do not keep up with the steps."""
    notices: bool = False
    """As their machines are about to go, and not as somebody asks for it."""
    sick: bool = False
    """As devices of theirs report something, or fail."""
    slows: bool = False
    """As roles on them are slow."""
    checks: bool = False
    """Who joins is checked first, and may be sick."""
    ready: bool = False
    """Standbys start roles ahead of need."""
    relays: bool = False
    """Some nodes have no connection with the controller, but others speak for them."""
    verifies: bool = False
    """What roles hold alike is compared."""
    flips: bool = False
    """A bit of it flips. Then nothing else fails but workers and nodes: while a controller is away, or not
    heard, nobody compares."""
    restarts: int = 0
    """How often in a row its scripts are started again."""
    cut_short: bool = False
    """It ends with the last fault."""
    brief: bool = False
    """It is about who leads: what a job does all the time it does more seldom, once it trains again after the
    last fault, that is all, and it is not asked whether a node was lost in vain."""

    @property
    def redundancy(self) -> m.Redundancy:
        """Of the replica groups."""
        if self.adopts:
            return m.Redundancy.ADOPTABLE
        return m.Redundancy.REPLICATED if self.groups > 1 else m.Redundancy.SHARDED


@dataclass
class Outcome:
    """Of a schedule."""

    code: int | None = None
    reason: str = ""
    events: Counter[str] = field(default_factory=Counter)
    pauses: int = 0
    """Of nodes, their agents, or everything."""
    evictions: int = 0
    """Of nodes that live."""
    terms: int = 0
    """Leaders, where they are elected."""
    short: int = 0
    """Of those, nodes that were stopped for a short while, and taken for lost because of their silence."""


class SimJob:
    """Everything that one schedule is about."""

    def __init__(self, world: World, shape: Shape) -> None:
        self.world, self.shape = world, shape
        self.wanted: dict[str, Any] = {
            "replicas": shape.replicas,
            "policy": shape.policy,
            "lr_intervention": "linear",
            "every": shape.every,
            "durable_interval": shape.durable,
            "durable_dir": "/durable" if shape.durable else "",
        }
        self.settings = Settings(
            shape.nodes,
            shape.per_node,
            Command("train.py"),
            controller="10.0.0.1:1",
            leadership="etcd://10.0.0.9:1/job" if shape.elects else "",
            spares=shape.spares,
            heartbeat=_SILENCE / (3 if shape.brief else 12),
            heartbeats_missed=3 if shape.brief else 12,
            strikes=99 if shape.flips else 2,
            strike_minutes=1 / 3,
            quiesce_timeout=6.0,
            hang_limit=90.0,
            ready_standbys=shape.per_node if shape.ready else 0,
            max_restarts=shape.restarts,
            verify=shape.verifies,
            straggler="replace" if shape.slows else "report",
            preflight="joining" if shape.checks else "off",
            **({} if shape.brings else self.wanted),
        )
        groups = 1 if shape.adopts else shape.groups
        self.training = Training(world, shape.nodes * shape.per_node, groups, shape.derives)
        self.owners: dict[str, list[int]] = {}
        """Roles by segment."""
        for role in range(self.training.roles):
            for segment in self.training.segments(role):
                self.owners.setdefault(segment.id, []).append(role)
        self.steps = 1 << 30
        self.step = 2.5 if shape.brief else 0.6
        """Seconds of a step's forward and backward."""
        self.copying = 1.0
        """How many times longer it takes to send copies."""
        self.every = max(1, shape.every)
        """Steps from a protected version to the next, in the newest epoch that was decided on."""
        if shape.every > 1:  # faults come in several periods
            self.step, self.copying = max(0.1, 1.2 / shape.every), world.rng.choice((1.0, 5.0, 20.0))
        elif shape.slow:
            self.step, self.copying = 0.3, 150.0
        self.network = Network()
        self.datagrams = world.rng.random() < 0.8
        """Whether a firewall lets any through."""
        self.storage = Storage(self)
        self.saved: tuple[int, Content] | None = None
        """The script's own newest checkpoint."""
        self._gone_back: list[tuple[int, int]] = []
        """Epochs that began from a durable checkpoint, or with the script, and from which version."""
        self._epoch, self._promised = 0, ""
        """The newest epoch in the events, and the newest durable checkpoint that was complete before it."""
        if shape.former:
            self._go_on_from_former()
        self.achieved: set[tuple[str, int, int | None]] = set()
        """(event, epoch, role): what a role has done that an event tells of, once all have."""
        self.ledger: dict[int, list[str]] = {}
        """By term."""
        self.recorded: dict[str, int] = {}
        """What can be read in events.jsonl."""
        self.spent: tuple[Spent | None, float] = None, 0.0
        """What the job's time went to, as it is read there, and until when."""
        self.noted = 0
        """The number of the line that has said so."""
        self.time = TimeAccount(world)
        """The same, as it has to be."""
        self.disk_full = False
        """That which the controller's files are on."""
        self.flipped = False
        """Whether one has, or will."""
        self.flips_of = -1
        """Of which role's state it is."""
        self.flip: tuple[int, int] | None = None
        """The role and the version of whose state a bit flips."""
        self.poison: tuple[int, int] | None = None
        """A role, and the version at whose beginning its worker dies, whoever plays it."""
        self.slow = Slowness(self)
        self.errors = Errors(self)
        self.diverges = False
        """Whether a script that is started again does something else than its peers have on record."""
        self.restarts = False
        """Whether all begin anew from storage in the next epoch."""
        self.not_before = 0.0
        """When the last fault is over, should one take longer."""
        self._places: dict[int, str] = {}
        """Where the newest plan has all roles."""
        self.outcome = Outcome()
        self.over = False
        self._may_end = False
        """Whether nobody is to blame for the job's end, as it was when that was decided."""
        self.hung = 0
        """Workers that were made to hang for good, and ..."""
        self.stalled = 0
        """... such as had to wait for data."""
        self.hooks: list[tuple[str, int, Callable[[], None]]] = []
        """(kind of message, how many more of them, what happens then)."""
        self.beyond = False
        """Whether more was ever lost at once than there are copies for: word of steps, too."""
        self._exposed: set[str] = set()
        """Nodes whose memory is lost since everything was in enough of them."""
        self._out: dict[str, float] = {}
        """Nodes that live, and are lost to the controller: since when."""
        self._joined: dict[str, float] = {}
        """When nodes greeted a controller that had not heard of them."""
        self._linked = 0, ""
        """The epoch that a broken link has begun, and the machine that was replaced."""
        self.given_up: set[str] = set()
        """Nodes without which the job has gone on."""
        self._begun_with = 0
        """The version that the scripts have begun with last."""
        self._all_told = False
        """Whether all whom the controller knew were told to end when it began to end the job."""
        self._ailed: set[str] = set()
        """Those of which that is no wonder."""
        self.drained: set[str] = set()
        """Nodes that are to be taken out."""
        self.calm = False
        """Whether nothing more happens to it."""
        self._moving = 0
        """The epoch that begins for that alone."""
        self._pids = itertools.count(1000)
        self._names = itertools.count()
        self._controllers = itertools.count()
        self.arbiter = Arbiter(self) if shape.elects else None
        """Who keeps the lease of the leader."""
        self.decided = 1
        """The newest term in which anything was decided."""
        self.nodes: list[SimNode] = []
        self.controllers = [] if shape.elects else [SimController(self, next(self._controllers))]
        """The newest of each machine that has one, or may have."""
        for rank in range(shape.nodes):
            self.join(rank)
        for _ in range(shape.spares):
            self.join(-1)

    # -- processes -----------------------------------------------------------------------------

    @property
    def controller(self) -> SimController:
        """That which leads, or has led last."""
        return max(self.controllers, key=lambda c: (c.leads and c.alive, c.term))

    def join(self, rank: int = -1) -> None:
        """A node comes."""
        self.nodes.append(SimNode(self, f"node{next(self._names)}", rank))
        if self.shape.elects:
            name = self.nodes[-1].machine_name
            self.controllers.append(SimController(self, next(self._controllers), name))

    def pid(self) -> int:
        return next(self._pids)

    def connect(self, node: SimNode, to: SimController | None = None) -> Link | None:
        """A node tries to reach the controller."""
        controller = to or self.controller
        if not controller.alive or controller.code is not None or not controller.leads:
            return None
        machines = node.machine_name, controller.machine_name
        if not self.network.joins(*machines):
            return None
        link = Link(self.world, (node, controller), machines, self.network)
        controller.connected.append(link)
        controller.do(lambda: controller.accept(node, link))
        return link

    def send_pulse(self, node: SimNode, met: SimController, pulse: m.Pulse) -> None:
        """To where the node has met that controller; another one may be there by now. It may be lost on the
        way, come late, and come again."""
        controller, rng = met if self.arbiter is not None else self.controller, self.world.rng
        if not self.datagrams or not self.network.passes(node.machine_name, controller.machine_name):
            return
        draw = rng.random()
        for _ in range(0 if draw < 0.02 else 2 if draw < 0.04 else 1):
            late = rng.choice((1.0, 10.0)) if rng.random() < 0.01 else 0.0
            self.world.at(
                late + self.world.delay(),
                lambda: controller.do(lambda: controller.handle(ev.Pulsed([pulse]))),
            )

    def restart_controller(self) -> None:
        """It has died: `ftrun` starts another."""
        dead = self.controller
        dead.die()
        if not self.over:
            self.world.at(0.3 + self.world.rng.random(), lambda: self._next_controller(dead))

    def _next_controller(self, dead: SimController) -> None:
        if not self.over and dead in self.controllers:
            at = self.controllers.index(dead)
            self.controllers[at] = SimController(self, next(self._controllers), dead.machine_name)

    def machine_ends(self, node: SimNode) -> None:
        """With what there may be of a controller."""
        for controller in [c for c in self.controllers if c.machine_name == node.machine_name]:
            controller.die()
            if len(self.controllers) > 1:
                self.controllers.remove(controller)

    def stop_for_a_while(self, controller: SimController, rng: Random) -> None:
        """SIGSTOP."""
        self.world.trace(f"{controller.name} is stopped")
        controller.stop()
        self.world.at(rng.choice((0.5, 3.0, 10.0)), controller.go_on)

    def decides(self, controller: SimController, effects: list[ev.Effect]) -> None:
        """It does, with these."""
        if self.arbiter is None or not decides(effects):
            return
        if self.arbiter.term > controller.term and not controller.wild:
            raise Invariant.ONE_LEADER.broken(
                f"term {controller.term} decides, and term {self.arbiter.term} has begun",
            )
        self.decided = max(self.decided, controller.term)

    def obeys(self, node: SimNode, term: int, message: object) -> None:
        """A node does what it was told in that term."""
        if term < self.decided:
            raise Invariant.ONE_LEADER.broken(
                f"{node.name} obeys term {term} ({type(message).__name__}), and term {self.decided} has "
                "decided",
            )
        if self.arbiter is not None and term < self.arbiter.term and isinstance(message, m.SharedPlan):
            self._ailed.add(node.name)  # the next leader does not know that plan, and goes on without it

    @property
    def redone(self) -> int:
        """Finished steps that may be done again while copies cover what is lost."""
        return 2 * self.every - 1

    def live(self) -> list[SimNode]:
        return [node for node in self.nodes if node.alive]

    def named(self, name: str) -> SimNode | None:
        return next((node for node in self.nodes if node.alive and node.name == name), None)

    def group_of(self, role: int | None) -> m.ReplicaGroup:
        """Roles are numbered by group; all groups have all the state."""
        assert role is not None
        per_group = self.training.roles // self.shape.groups
        return m.ReplicaGroup(role // per_group, self.shape.groups, self.shape.redundancy)

    def has_record(self, role: int, number: int) -> bool:
        """Whether the worker of a role can tell of that operation."""
        nodes = self.live()
        workers = (
            w for node in nodes for w in node.workers.values() if w.alive and w.plays and w.role == role
        )
        return any(worker.begun > number for worker in workers)

    def brought(self, role: int) -> dict[str, Any]:
        """The settings that the script of a role brings, if it does."""
        if self.shape.brings == "impossible":
            return {**self.wanted, "durable_interval": -1}
        if self.shape.brings == "different" and role == self.training.roles - 1:
            return {**self.wanted, "lr_intervention": "none"}
        return self.wanted if self.shape.brings else {}

    def end_of(self, parts: int) -> int:
        """The version with which so many parts of the script end."""
        return self.shape.part if parts else 0

    def tells(self, role: int | None, there: tuple[int, ...]) -> bool:
        """Whether it tells of the samples: the first role of its replica group, if that is one of those that
        tell the controller: only one in some jobs, so that it is lost now and then."""
        group, place = divmod(-1 if role is None else role, self.training.roles // self.shape.groups)
        telling = there[:1] if self.shape.nodes % 2 else tellers(there)
        return self.shape.policy == "shrink" and place == 0 and group in telling

    def own_checkpoint(self, plan: m.WorkerPlan) -> tuple[int, Content]:
        """What a script loads that begins now: version 0 if nothing."""
        joining = plan.origin in ("memory", "durable")
        if self.saved is None or (joining and self.shape.loads == "all"):
            return 0, 1
        return self.saved

    # -- what happens --------------------------------------------------------------------------

    def _go_on_from_former(self) -> None:
        """A former job has left a durable checkpoint."""
        version = self.shape.former
        content = hash(("former", version))
        self.training.deals[content] = Deal(1).to_json()
        self.training.least = version
        preloaded(self, version, content)

    def sent(self, message: object) -> None:
        """A message is on its way: that may be a moment for a fault."""
        kind = type(message).__name__
        for at, (wanted, left, call) in enumerate(self.hooks):
            if wanted == kind:
                if left > 0:
                    self.hooks[at] = (wanted, left - 1, call)
                else:
                    del self.hooks[at]
                    self.world.at(0.0, call)
                return

    def memory_lost(self, node: SimNode) -> None:
        """With all that it held."""
        self._exposed.add(node.machine_name)
        self.errors.node_gone(node)
        self.slow.node_gone()
        self.beyond |= len(self._exposed) > self.shape.replicas

    def record(self, controller: SimController, event: ev.Record) -> None:
        """A line of events.jsonl."""
        if controller.term < self.decided:
            return  # of one that does not know yet that nobody obeys it
        if event.event not in EVENTS:
            raise Invariant.EVENTS.broken(f"an event is not described: {event}")
        self.outcome.events[event.event] += 1
        if (found := _LOST.match(event.reason)) is not None:  # to the job it is, though it may live
            for node in self.nodes:
                if node.name == found[1]:
                    self._is_lost(node, event.reason, controller)
        self._drains(controller, event)
        self.slow.record(controller, event)
        if event.event == "joined":
            self._joined[event.more["node"]] = self.world.now
        if event.event in ("stopping", "stopped"):  # who comes after that finds a job that ends
            known = controller.machine.cluster.nodes
            self._all_told |= self._all_are_told([node for node in self.live() if node.name in known])
        if event.event == "controller_restarted":
            self._look(controller)
        said = event.event == "starting_over" or "it is damaged" in event.reason
        if said and not self.storage.complete():  # what a former job has left is damaged, and it is said
            self.training.least = 0
        if event.event in ("state_restored", "resumed", "communicators_ready"):
            plan = controller.machine.cluster.current_plan
            of = set(plan.roles) - set(plan.newcomers if event.event == "communicators_ready" else ())
            if missing := [r for r in sorted(of) if (event.event, event.epoch, r) not in self.achieved]:
                raise Invariant.EVENTS.broken(
                    f"{event.event} of epoch {event.epoch}, and roles {missing} have not"
                )
        if event.event in ("corruption", "not_compared") or event.more.get("fault") is m.Fault.CORRUPTION:
            self._check_corruption(event)
        if event.event == "link":
            self._spared(event.more["replaced"], controller)
            self._ailed.add(event.more["replaced"])  # should it come back before it hears of that
            machines = [name.partition("+")[0] for name in event.more["nodes"]]
            # If it was mended only just now, it was broken when they tried.
            well = self.network.joined(*machines, self.world.now - _ANSWER)
            if well and not any(map(self._ails, self.live())):
                raise Invariant.LINKS.broken(f"the link between {machines} is well, and {event.reason}")
        back = self.named(event.more["node"]) if event.event == "given_up" else None
        ails = back is not None and (self._in_trouble(back) or back.name in self._ailed)
        # A new leader waits for as long as another may be obeyed; who knew nothing for longer comes too late.
        needless = back is not None and not ails and not back.in_doubt
        # A spare that holds nothing, and alone has begun what a former controller decided, begins anew.
        if back is not None and needless and not self.shape.brief and back.store.holds_something:
            raise Invariant.WELL.broken(f"{back.name} is well, and is given up")
        if event.event == "begins_anew":
            self._begins_anew(event)
        if event.event == "hang" and event.more["explained"]:
            self._check_blame(controller, event)
        if event.event == "controller_restarted":  # what its predecessor decided last nobody may have heard
            self._places = dict(controller.machine.cluster.places)
            self.training.takes_over(controller.machine.cluster.current_plan.epoch)
        if event.event == "decided":
            self._decided(controller, event)
            self.errors.decided(controller, moved(event), self._places)
            self._places = dict(controller.machine.cluster.places)
        elif event.event in ("stopped", "finished"):
            self.outcome.reason = event.reason
        elif event.event == "stopping":
            lost = self._lost()
            self._may_end = self._excused(event.reason) or len(lost) > self.shape.replicas
        elif event.event == "saved":
            self._saved(controller, event)
        elif event.event == "not_saved":
            self._not_saved(controller, event)
        if event.epoch > self._epoch:
            self._epoch, self._promised = event.epoch, self.storage.newest(self._left_behind)

    def _left_behind(self, name: str) -> bool:
        """Whether the job has gone back to before that checkpoint since it was written."""
        found = parse(name)
        if found.job == "former":
            return self.training.without
        return any(found.epoch < e and found.version > v for e, v in self._gone_back)

    def _check_corruption(self, event: ev.Record) -> None:
        """A bit has flipped, of that role's; and nobody is taken for one who is not compared."""
        if event.event == "not_compared" and "no two roles hold" in event.reason:
            return
        if not self.flipped or not set(event.roles) <= {self.flips_of} or event.event == "not_compared":
            raise Invariant.BLAME.broken(f"roles {event.roles}: {event.event}, {event.reason}")

    def _saved(self, controller: SimController, event: ev.Record) -> None:
        """Before the job ends, that version is on storage: no older one than its nodes hold together."""
        seen = [node for node in self.live() if node.name in controller.machine.cluster.nodes]
        version, held = event.more["version"], self._held_and_compared(seen, controller)
        names = [name for name in self.storage.complete() if durable.version_of(name) == version]
        if not names or version < held:
            raise Invariant.SAVED.broken(f"nodes hold version {held}, {names} are complete: {event.reason}")
        content = self.storage.content(max(names))
        if version == held and content not in self._contents(seen, version):
            raise Invariant.SAVED.broken(f"what is saved is not what was in memory: {event.reason}")

    def _not_saved(self, controller: SimController, event: ev.Record) -> None:
        """It is not, and nobody is to blame."""
        seen = [node for node in self.live() if node.name in controller.machine.cluster.nodes]
        well = self.network.sound and not self.outcome.pauses and not controller.slept
        there = [durable.version_of(n) for n in self.storage.complete() if not self._left_behind(n)]
        if (
            well
            and not self.storage.ever_ailed
            and self._held_and_compared(seen, controller) > max([self._begun_with, *there])
        ):
            raise Invariant.SAVED.broken(
                f"all is well, and the nodes hold {self._held(seen)}: {event.reason}"
            )

    def _contents(self, nodes: list[SimNode], version: int) -> set[int | None]:
        return {node.store.content(s, version, self.owners) for node in nodes for s in self.owners}

    def _begins_anew(self, event: ev.Record) -> None:
        """The next rung of the ladder is tried: not without need."""
        if not self.shape.restarts:
            raise Invariant.ANEW.broken(f"roles begin anew, and nobody wants that: {event.reason}")
        if not self._excused(event.reason) and len(lost := self._lost()) <= self.shape.replicas:
            raise Invariant.ANEW.broken(
                f"roles begin anew, though only {sorted(lost)} was lost: {event.reason}"
            )
        self.restarts = event.more["rung"] == "restart"

    def _drains(self, controller: SimController, event: ev.Record) -> None:
        """Nodes are taken out: no role moves to one of them, and nothing is done again for it."""
        cluster = controller.machine.cluster
        leads = self.arbiter is None or controller.term == self.arbiter.term  # else the next goes on with it
        if event.event == "draining":
            self.drained.add(event.more["node"])
        elif event.event in ("drained", "not_drained") and leads:
            self.drained.discard(event.more["node"])
        if event.event == "drained" and (roles := cluster.roles_by_node.get(event.more["node"])):
            raise Invariant.DRAINS.broken(f"{event.more['node']} is let go, and plays roles {roles}")
        if event.event in ("moving", "period"):
            self._moving = event.epoch
            workers = [w for node in self.live() for w in node.workers.values()]
            well = self.network.sound and not self.outcome.pauses and not controller.slept
            there = {node.name for node in self.live()}  # who has stopped may be lost since
            well &= there >= set(cluster.places.values())
            if well and not any(isinstance(w.state, Holding) for w in workers):
                raise Invariant.DRAINS.broken("roles move, and nobody has stopped for that between two steps")
        elif event.event == "detected" or event.epoch > self._moving:
            self._moving = 0
        if event.event == "decided":
            new = {role: name for role, name in cluster.places.items() if self._places.get(role) != name}
            known = self._known_as_drained(controller)
            if taken := {role: name for role, name in new.items() if name in known}:
                raise Invariant.DRAINS.broken(f"roles move to nodes that are drained: {taken}")
            version, newest = event.more["version"], self.training.newest
            if self._moving and version != newest and not self._out:
                raise Invariant.DRAINS.broken(
                    f"roles move, and version {newest} is done again from {version}"
                )

    def _is_lost(self, node: SimNode, reason: str, controller: SimController) -> None:
        """The controller takes a node for lost; it may live."""
        if not node.alive:
            return
        if self.arbiter is not None and controller.term < self.arbiter.term:
            self._ailed.add(node.name)  # which has gone over to the next leader, and that goes on with this
        self.outcome.evictions += 1
        if "nothing listens" in reason:
            raise Invariant.WELL.broken(
                f"{node.name} lives, and others have found that it has ended: {reason}"
            )
        if "its link" in reason:
            epoch, machine = self._linked  # it may have come back as a spare, with the link broken yet
            if epoch == controller.machine.cluster.epoch and machine != node.machine_name:
                raise Invariant.LINKS.broken(f"a second node is taken for lost for one broken link: {reason}")
            self._linked = controller.machine.cluster.epoch, node.machine_name
            self.memory_lost(node)
        gone_over = node.follower.term > controller.term  # it says nothing to who leads no more
        if "no heartbeat" in reason and not self.shape.brief and not gone_over:
            if not self._in_trouble(node, controller):
                raise Invariant.WELL.broken(f"{node.name} is well, and is taken for lost: {reason}")
            if "though" not in reason and not self._ails(node) and self._spoken_for(node, controller):
                raise Invariant.WELL.broken(f"others reach {node.name}, and it is taken for lost: {reason}")
            # Nothing tells an agent that is held up from its machine where no pulse comes through.
            held_up = node.agent_alone and self.datagrams
            limit = 0.7 * self.settings.silence_limit if held_up else SHORT
            ends = node.machine_name, controller.machine_name
            if node.trouble <= limit and self.network.joined(*ends, self.world.now - _ANSWER):
                self.outcome.short += 1
                raise Invariant.WELL.broken(
                    f"{node.name} was stopped for {node.trouble} s, and is lost: {reason}"
                )
        self._out.setdefault(node.name, self.world.now)

    def _spared(self, name: str, controller: SimController) -> None:
        """A node is about to be replaced for a broken link: what it holds, others must hold as well."""
        seen = [node for node in self.live() if node.name in controller.machine.cluster.nodes]
        promised = self.training.newest - self.redone
        if self._held(seen) >= promised > self._held([node for node in seen if node.name != name]):
            raise Invariant.LINKS.broken(
                f"{name} is replaced for a broken link, and holds what nobody else does"
            )

    def _held_and_compared(self, nodes: list[SimNode], controller: SimController) -> int:
        """The same, but for what may be wrong, where that is looked for."""
        held, alike = self._held(nodes), controller.machine.cluster.versions.verified
        return held if alike is None else min(held, alike)

    def _held(self, nodes: list[SimNode]) -> int:
        """The newest version of which all state is in the memory of these; -1: there is none."""
        versions = range(max(0, self.training.newest - self.redone), self.training.newest + 1)
        whole = (
            version
            for version in versions
            if all(
                any(node.store.content(segment, version, self.owners) is not None for node in nodes)
                for segment in self.owners
            )
        )
        return max(whole, default=-1)

    def _look(self, controller: SimController) -> None:
        """Which nodes that live the controller does not see, since it began at the latest."""
        seen = controller.machine.cluster.nodes
        self._out = {
            node.name: self._out.get(node.name, controller.began)
            for node in self.live()
            if node.name not in seen
        }

    def _lost(self) -> set[str]:
        """Nodes whose memory is lost, or out of the controller's sight for as long as it waits."""
        limit = self.settings.silence_limit
        out = [
            node for node in self.live() if self.world.now - self._out.get(node.name, math.inf) > limit - 0.5
        ]
        return self._exposed | {node.machine_name for node in out}

    def _in_trouble(self, node: SimNode, controller: SimController | None = None) -> bool:
        """Whether it is, or was of late, stopped, cut off or without a connection of its own fault, to that
        controller."""
        needed = [
            (controller or self.controller).machine_name,
            *([MACHINE] if self.arbiter is not None else []),
        ]
        since = self.world.now - _ANSWER  # if they are joined only just now, nothing has come yet
        return self._ails(node) or not all(
            self.network.joined(node.machine_name, each, since) for each in needed
        )

    def _ails(self, node: SimNode) -> bool:
        """The same, but for what is between it and the controller alone."""
        here = node.stopped or node.machine_name in self.network.cut
        return bool(here) or self.world.now - node.trouble_at < 2 * self.settings.silence_limit

    def _spoken_for(self, node: SimNode, controller: SimController) -> bool:
        """Whether somebody is sure to say that it can be reached."""
        cluster, since = controller.machine.cluster, self.world.now - _ANSWER
        heard = cluster.nodes.keys() - cluster.disconnected  # who has hung up speaks for nobody any more
        return any(
            self.network.joined(node.machine_name, other.machine_name, since) and not self._in_trouble(other)
            for other in self.live()
            if other is not node and other.name in heard
            # Who has come only just now may not have been asked.
            if self._joined.get(other.name, since) <= since
        )

    def _check_blame(self, controller: SimController, event: ev.Record) -> None:
        """Nobody is replaced who is well."""
        plan = controller.machine.cluster.current_plan
        for role in event.roles:
            node = self.named(plan.roles[role])
            there = list(node.workers.values()) if node else []
            workers = [w for w in there if w.alive and w.plays and w.role == role]
            # It was stopped until then.
            just_now = node is not None and self.world.now - node.trouble_at < 1.0
            well = [w for w in workers if not w.hung and not w.stopped and w not in self.errors.diverged]
            if well and not just_now:
                raise Invariant.BLAME.broken(f"role {role} is well, and is taken for hung: {event.reason}")

    def _decided(self, controller: SimController, event: ev.Record) -> None:
        version, training, lost = event.more["version"], self.training, self._lost()
        content: Content | None = None
        if event.more["origin"] == "durable":
            plan = controller.machine.cluster.current_plan
            if plan.durable not in self.storage.complete():
                raise Invariant.DURABLE.broken(
                    f"epoch {event.epoch} goes on from {plan.durable}, which is not complete",
                )
            if parse(plan.durable).job == plan.job and self._left_behind(plan.durable):
                raise Invariant.DURABLE.broken(
                    f"epoch {event.epoch} goes on from {plan.durable}, behind which the job had gone back",
                )
            content = self.storage.content(plan.durable)
            self._gone_back.append((event.epoch, version))
        elif version is None or event.more["origin"] == "initial":  # as the scripts begin
            version, content = self.saved or (0, 1)
            self._begun_with = version
            if event.more["version"] is None:
                self._gone_back.append((event.epoch, version))
        restarts, self.restarts = self.restarts, False
        covered = len(lost) <= self.shape.replicas and not self._newest_is_damaged
        if restarts or self.storage.is_nowhere:
            self.beyond |= version < training.newest - self.redone
            training.least = min(training.least, version)
        elif training.newest - version > self.redone and covered:
            raise Invariant.NOTHING_LOST.broken(
                f"epoch {event.epoch} goes on from version {version}, and version {training.newest} was "
                f"there; lost: {sorted(lost) or 'nothing'}",
            )
        for node in self.live():
            if node.name in self._out:  # it will be told, once it is back
                self.given_up.add(node.name)
                self._ailed |= {node.name} if self.arbiter is not None and self._in_trouble(node) else set()
                self.memory_lost(node)
        # Or else where checkpoints are has yet to be said to this controller.
        settled = bool(controller.machine.cluster.settings.durable_dir) and (
            training.newest > 0 or not self.shape.brings
        )
        settled &= not self.storage.is_nowhere
        if self._promised in self.storage.complete() and settled and not (restarts and self.diverges):
            promised = durable.version_of(self._promised)
            if version < (promised if content is not None else min(promised, training.newest - self.redone)):
                raise Invariant.NEWEST.broken(
                    f"epoch {event.epoch} goes on from version {version}, version {training.newest} was "
                    f"there, and {self._promised} is complete",
                )
        if self.shape.every == AUTO:  # else it is what the script brings, perhaps, of which nobody knows yet
            self.every = controller.machine.cluster.current_plan.every
        training.go_on_from(event.epoch, version, content)

    def ended(self, controller: SimController, code: int) -> None:
        """The controller has ended the job."""
        self.over = True
        self.outcome.code = code
        account = controller.machine.view.account
        self.time.compare(account)
        if self.network.sound and not controller.slept:  # it saw all steps when they were done
            self.time.check_steps(account, self.training.step_at)
        if code == 0:
            done = self.training.finished.get(self.steps, set())
            if (len(done) < self.training.roles and self.shape.policy != "shrink") or not done:
                raise Invariant.ENDS.broken(
                    f"the job has ended well, and only roles {done} have done step {self.steps}",
                )
            lines = [line for _, part in sorted(self.ledger.items()) for line in part]
            if not self.beyond and (problems := ledger_check.verify(lines).problems):
                raise Invariant.SAMPLES.broken(f"the ledger: {problems}")
        elif self.training.newest > self._begun_with + 1 and not self._tried_to_save(controller):
            raise Invariant.SAVED.broken(f"nothing was written, nor said of that: {self.outcome.reason}")
        elif "recoveries in a row without a new step" in self.outcome.reason and not self._hopeless:
            raise Invariant.ENDS.broken(f"the job has given up recoveries in vain: {self.outcome.reason}")
        elif (
            not self._may_end
            and not self._excused(self.outcome.reason)
            and len(lost := self._lost()) <= self.shape.replicas
        ):
            raise Invariant.ENDS.broken(
                f"the job has ended, though only {sorted(lost)} was lost: {self.outcome.reason}",
            )

    def _tried_to_save(self, controller: SimController) -> bool:
        """Whether its end has said what became of the newest version, or nothing of it was known there."""
        cluster = controller.machine.cluster
        known = cluster.versions.trained and bool(cluster.nodes)
        return not known or self.outcome.events["saved"] + self.outcome.events["not_saved"] > 0

    @property
    def _hopeless(self) -> bool:
        """Whether its script may fail for ever."""
        return bool(self.poison or self.errors.fatal or self.errors.stray or self.diverges)

    @property
    def _at_odds(self) -> bool:
        """Whether its scripts bring settings with which no step can be done."""
        return self.shape.brings in ("different", "impossible")

    def _all_are_told(self, there: list[SimNode]) -> bool:
        """Whether all of these were told to end, or cannot say that they were not."""
        return all(node.leaving or node.stopped or node.name in self._out for node in there)

    def _excused(self, reason: str) -> bool:
        """Whether the job may end for that, or all roles begin anew, though copies cover what was lost."""
        if self._hopeless or self._at_odds:
            return True
        if self.beyond and reason.startswith("after "):  # restarts
            return True
        storage = self.storage
        # All that the controller sees were told to end; others are lost, as they are stopped, or cut off.
        if "told to end (SIGTERM)" in reason:
            return self.shape.brief or self._all_told or self._all_are_told(self.live())
        if "no step was done yet" in reason:
            return self.training.newest <= self._begun_with
        if "cannot be read" in reason or "not by nodes" in reason:
            return storage.was_in_trouble
        if "Every durable checkpoint" in reason:
            return bool(storage.damaged) or storage.was_in_trouble
        return self._newest_is_damaged and "damaged" in reason

    @property
    def _newest_is_damaged(self) -> bool:
        """Whether the newest version is of a damaged checkpoint: before the first step after that was read it
        is the copy, by role, of what the role has read, and some role could not."""
        return any(durable.version_of(name) == self.training.newest for name, _ in self.storage.damaged)

    def terminate(self, node: SimNode) -> None:
        """SIGTERM to a node."""
        node.terminate()

    # -- what is checked -----------------------------------------------------------------------

    def check(self, controller: SimController) -> None:
        """After every event of the controller."""
        if self._out and controller.term >= self.decided:
            seen = controller.machine.cluster.nodes
            self._out = {name: since for name, since in self._out.items() if name not in seen}
        if not self._exposed:
            return
        # One that the controller has lost sight of has what it has: it is waited for where that is needed.
        nodes = [node for node in self.live() if node.name not in self.given_up]
        roles = {w.role: w for node in nodes for w in node.workers.values() if w.plays and w.alive}
        newest = max(roles.values(), key=lambda w: w.epoch, default=None)
        if newest is None or len({w.epoch for w in roles.values()}) > 1 or not newest.members <= set(roles):
            return
        version = min(w.words.committed for w in roles.values())
        if version < 0:
            return
        for segment in self.owners:
            having = [node for node in nodes if node.store.content(segment, version, self.owners) is not None]
            if len({node.machine_name for node in having}) <= self.shape.replicas:
                return
        self._exposed.clear()

    def run(self, last_fault: float) -> Outcome:
        """To the end, the last fault being at that time; everything that can be undone is undone then."""
        world = self.world
        world.run(last_fault, lambda: self.over)
        world.run(self.not_before, lambda: self.over)
        if self.over or self.shape.cut_short:
            return self.outcome
        self._heal()
        healed, reached = world.now, self.training.newest
        limit = healed + _LIMIT
        steps = 1 if self.shape.brief else _STEPS
        if not self.shape.brief:
            world.run(healed + _CALM, lambda: self.over)
        at_odds = self._at_odds  # the newest version is a former job's checkpoint, perhaps

        def goes_on() -> bool:
            return self.training.newest > reached + steps and not at_odds

        world.run(limit, lambda: self.over or goes_on())
        if not self.over and not at_odds and not goes_on():
            raise Invariant.GOES_ON.broken(
                f"{_LIMIT:g} s after the last fault no step was done; {self._where()}"
            )
        if at_odds:
            if self.training.step_at:
                raise Invariant.SETTINGS.broken(
                    f"the scripts bring {self.shape.brings} settings, and a step was done"
                )
            if not self.over:
                raise Invariant.SETTINGS.broken(
                    f"the scripts bring {self.shape.brings} settings; {self._where()}"
                )
        if self.over or self.shape.brief:
            return self.outcome
        known = self.controller.machine.cluster.nodes
        out = [node.name for node in self.live() if node.name not in known and not node.leaving]
        if out and self.controller.alive:
            world.run(world.now + 2 * _CALM, lambda: self.over)
            known = self.controller.machine.cluster.nodes
            out = [node.name for node in self.live() if node.name not in known and not node.leaving]
            if out:
                raise Invariant.RETURN.broken(f"{out} are well, and stay out")
        if not self.diverges:  # nobody can start ahead of need, then, with what others have on record
            self._groups_return()
            self._drains_end()
            self._notices_are_followed()
            if self.shape.slows:
                self.slow.check_the_end()
        self.steps = self.training.newest + _STEPS
        world.run(world.now + _LIMIT, lambda: self.over)
        if not self.over:
            raise Invariant.GOES_ON.broken(f"all is well, and the job does not end; {self._where()}")
        return self.outcome

    def _groups_return(self) -> None:
        """Replica groups do, as there are nodes enough; perhaps another makes them try once more. One more is
        needed for each that is about to go."""
        for _ in range(2 + sum(node.noticed for node in self.live())):
            if self.over or self._everybody_trains():
                return
            self.join()
            self.world.run(self.world.now + 3 * _CALM, lambda: self.over or self._everybody_trains())
        if not self.over and not self._everybody_trains():
            raise Invariant.RETURN.broken(f"replica groups stay away; {self._where()}")

    def _known_as_drained(self, controller: SimController) -> set[str]:
        """What was said by a leader that nobody obeyed any more, or that died over it, nobody may know."""
        told = {node.name for node in self.live() if node.machine.draining}
        return self.drained & {*told, *controller.machine.cluster.draining}

    def _drains_end(self) -> None:
        """Nodes that are to be taken out are, or it is said that they stay; perhaps once another comes."""

        def over() -> bool:
            self.drained = self._known_as_drained(self.controller)  # which may be another by then
            return self.over or not self.drained

        for _ in range(2):
            if over():
                return
            self.join()
            limit = 3 * _CALM + 3 * self.every * self.step  # until copies are elsewhere, or all was tried
            limit = _LIMIT if self._hopeless else limit
            self.world.run(self.world.now + limit, over)
        if self.drained and not self.over:
            raise Invariant.DRAINS.broken(f"{self.drained} are being drained for ever; {self._where()}")

    def _notices_are_followed(self) -> None:
        """Who is about to go is drained, or there is something against it; perhaps once another comes."""
        if not self.over and any(node.noticed for node in self.live()):
            self.join()
        self.world.run(self.world.now + 3 * _CALM + AGAIN, lambda: self.over or not self._unheeded())
        if not self.over and (names := self._unheeded()):
            raise Invariant.DRAINS.broken(f"{names} are about to go, and nobody minds; {self._where()}")

    def _unheeded(self) -> list[str]:
        cluster = self.controller.machine.cluster
        there = (n.name for n in self.live() if n.noticed and n.name in cluster.nodes)
        return [n for n in there if n not in cluster.draining and not Draining().objection(cluster, n)]

    def _everybody_trains(self) -> bool:
        return len(self.controller.machine.cluster.places) == self.training.roles

    def _heal(self) -> None:
        self.world.trace("all is well from here on")
        self.calm = True
        self.hooks.clear()
        self.network.heal(self.world.now)
        self.storage.healed()
        self.disk_full = False
        for controller in self.controllers:
            controller.healed()
        if self.arbiter is not None:
            self.arbiter.down = False
        for node in self.live():
            node.healed()
        going = (node for node in self.live() if node.leaving or node.noticed or node.machine.draining)
        goes = self.drained | {node.name for node in going}
        stay = [node for node in self.live() if node.name not in goes]
        if self.shape.brief:  # in the place of each: a job that has yet to begin waits long for others
            for rank in set(range(self.shape.nodes)) - {node.rank for node in stay}:
                self.join(rank)
        else:
            for _ in range(self.shape.nodes - len(stay)):
                self.join()

    def _where(self) -> str:
        lines = [f"{self.controller.name}: {self.controller.machine.phase!r}"]
        lines += [str(node) for node in self.live()]
        return "\n  ".join(lines)
