"""Property tests of docs/recovery_rule.md: simulated ranks, snapshots and replicas with random failures.

Every copy is either whole or torn; a copy begins torn, on top of the version before the last. Ranks go
through the phases of a step in random order, held back only by the collectives and by their own commit wait.
Each run has its own stragglers, so that ranks drift as far apart as the phases let them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from core.control.decide.reports import RoleReport

from ft_core.control.decide.holdings import NodeReport
from ft_core.control.decide.version_choice import Choice, choose_version
from ft_core.errors import Unrecoverable
from ft_core.protocol.domains import domain_of, within
from ft_core.state.manifest import Segment
from ft_core.state.placement import Places, replica_nodes, sender

BEFORE_BARRIER = ("compute", "sync", "commit", "norm", "optimizer", "gather")
BEFORE_SYNC = ("compute", "commit", "sync", "norm", "optimizer", "gather")
AFTER_BARRIER = ("compute", "sync", "norm", "commit", "optimizer", "gather")


@dataclass(frozen=True)
class Layout:
    """Role p * dp + d is stage p, data-parallel index d; roles fill nodes in order, nodes fill racks."""

    pp: int
    dp: int
    per_node: int = 1
    rack: int = 0
    nested: bool = False  # nodes say which rack they are in, and which of its nodes they are
    replicas: int = 1
    unique: bool = True  # each role has a segment of its own: an optimizer shard, or experts
    gather: bool = True  # parameters are gathered after the optimizer: a sharded optimizer
    norm_over_world: bool = True  # else over the model-parallel group, as Megatron does without sharding
    phases: tuple[str, ...] = BEFORE_BARRIER

    @property
    def world(self) -> int:
        return self.pp * self.dp

    def stage(self, role: int) -> tuple[int, ...]:
        first = role // self.dp * self.dp
        return tuple(range(first, first + self.dp))

    def group(self, phase: str, role: int) -> tuple[int, ...]:
        if phase in ("sync", "gather"):
            return self.stage(role)
        return tuple(
            range(self.world) if self.norm_over_world else range(role % self.dp, self.world, self.dp)
        )


@dataclass
class Rank:
    version: int = 0  # of the last step it finished
    phase: int = 0
    alive: bool = True
    slots: dict[int, bool] = field(default_factory=lambda: {0: False})  # version -> whole?


def begin(slots: dict[int, bool], version: int) -> None:
    """Start a copy in the slot that holds the version before the last."""
    for old in [v for v in slots if v % 2 == version % 2]:
        del slots[old]
    slots[version] = False


class SimulatedJob:
    def __init__(self, layout: Layout, rng: random.Random) -> None:
        self.layout, self.rng = layout, rng
        self.ranks = [Rank() for _ in range(layout.world)]
        self.node = {r: f"n{r // layout.per_node}" for r in range(layout.world)}
        self.live = set(self.node.values())
        racks = {n: f"rack{int(n[1:]) // layout.rack}" for n in self.live} if layout.rack else {}
        self.domains = {n: f"{rack}/{n}" if layout.nested else rack for n, rack in racks.items()}
        self.arrived: dict[tuple[str, int, tuple[int, ...]], set[int]] = {}
        self.segments: dict[int, list[Segment]] = {}
        self.pushes: dict[int, list[tuple[str, str]]] = {r: [] for r in range(layout.world)}
        self.replicas: dict[str, dict[str, dict[int, bool]]] = {n: {} for n in self.live}
        self.pace: dict[tuple[str, int], float] = {}
        places = Places(self.node, self.domains)
        for role in range(layout.world):
            self.pace |= {(kind, role): rng.choice((0.03, 1, 1)) for kind in ("advance", "staged", "push")}
            holders = {layout.stage(role)} | ({(role,)} if layout.unique else set())
            self.segments[role] = [Segment(h, ()) for h in sorted(holders)]
            for segment in self.segments[role]:
                if sender(segment, self.node) == role:
                    ring = places.ring(layout.stage(role))
                    nodes = replica_nodes(segment, places, layout.replicas, ring)
                    self.pushes[role] += [(segment.id, n) for n in nodes]

    def slot(self, push: tuple[str, str]) -> dict[int, bool]:
        segment, node = push
        return self.replicas[node].setdefault(segment, {})

    def committed(self, role: int) -> bool:
        rank = self.ranks[role]
        return rank.slots.get(rank.version, False) and all(
            self.slot(p).get(rank.version, False) for p in self.pushes[role]
        )

    def ready(self) -> list[tuple[str, int, tuple[str, str] | None]]:
        """What may happen next: a rank goes on, a snapshot is whole, a push begins or ends."""
        events: list[tuple[str, int, tuple[str, str] | None]] = []
        for role, rank in enumerate(self.ranks):
            if self.node[role] not in self.live:
                continue
            if rank.alive and self.may_advance(role):
                events.append(("advance", role, None))
            if rank.alive and not rank.slots.get(rank.version, True):
                events.append(("staged", role, None))
            newest = max((v for v, whole in rank.slots.items() if whole), default=None)
            for push in self.pushes[role]:
                if push[1] in self.live and newest is not None and not self.slot(push).get(newest, False):
                    events.append(("push", role, push))
        return events

    def may_advance(self, role: int) -> bool:
        rank = self.ranks[role]
        phase = self.layout.phases[rank.phase]
        if phase == "commit":
            return self.committed(role)
        if phase in ("sync", "norm") or (phase == "gather" and self.layout.gather):
            group = self.layout.group(phase, role)
            arrived = self.arrived.setdefault((phase, rank.version, group), set())
            return role not in arrived or arrived == set(group)
        return True

    def step(self) -> None:
        """Let one random event happen."""
        events = self.ready()
        if not events:
            return
        kind, role, push = self.rng.choices(events, [self.pace[kind, role] for kind, role, _ in events])[0]
        rank = self.ranks[role]
        if kind == "staged":
            rank.slots[rank.version] = True
        elif push is not None:
            slots = self.slot(push)
            newest = max(v for v, whole in rank.slots.items() if whole)
            if newest in slots:
                slots[newest] = True
            else:
                begin(slots, newest)
        else:
            self.advance(role)

    def advance(self, role: int) -> None:
        rank = self.ranks[role]
        phase = self.layout.phases[rank.phase]
        if phase in ("sync", "norm") or (phase == "gather" and self.layout.gather):
            arrived = self.arrived[phase, rank.version, self.layout.group(phase, role)]
            if role not in arrived:
                arrived.add(role)
                return
        rank.phase = (rank.phase + 1) % len(self.layout.phases)
        if rank.phase == 0:
            rank.version += 1
            begin(rank.slots, rank.version)

    def lose_domains(self, count: int) -> None:
        """Lose up to `count` failure domains, one after the other, while the others go on: racks, where nodes
        say theirs."""
        widest = {n: within(domain_of(n, self.domains))[0] for n in sorted(self.live)}
        names = sorted(set(widest.values()))
        for domain in self.rng.sample(names, min(count, len(names))):
            self.live -= {n for n in self.live if widest[n] == domain}
            for _ in range(self.rng.randrange(6)):
                self.step()

    def crash_workers(self, chance: float) -> None:
        for rank in self.ranks:
            rank.alive = rank.alive and self.rng.random() >= chance

    def quiesce(self) -> None:
        """Live workers whose state is whole finish their snapshot, as `Session.protect` has them do."""
        for role, rank in enumerate(self.ranks):
            whole = rank.phase <= self.layout.phases.index("norm")
            if rank.alive and self.node[role] in self.live and whole:
                rank.slots[rank.version] = True

    def reports(self) -> list[NodeReport]:
        catalogue = {s.id: list(s.holders) for segments in self.segments.values() for s in segments}
        return [
            NodeReport(
                node,
                domain_of(node, self.domains),
                {
                    role: RoleReport(
                        role,
                        node,
                        rank.alive,
                        "training",
                        tuple(v for v, whole in rank.slots.items() if whole),
                        tuple(s.id for s in self.segments[role]),
                    )
                    for role, rank in enumerate(self.ranks)
                    if self.node[role] == node
                },
                {s: tuple(v for v, w in slots.items() if w) for s, slots in self.replicas[node].items()},
                catalogue,
            )
            for node in sorted(self.live)
        ]

    def holders(self, segment: Segment, version: int) -> set[str]:
        """Live nodes with a whole copy, worked out independently of `choose_version`."""
        local = {self.node[h] for h in segment.holders if self.ranks[h].slots.get(version)}
        kept = {n for n in self.live if self.replicas[n].get(segment.id, {}).get(version)}
        return local & self.live | kept

    def available(self, version: int) -> bool:
        return all(self.holders(s, version) for segments in self.segments.values() for s in segments)


def fail(layout: Layout, seed: int, crashes: float = 0.3) -> tuple[SimulatedJob, Choice]:
    rng = random.Random(seed)
    job = SimulatedJob(layout, rng)
    for _ in range(rng.randrange(40 * layout.world)):
        job.step()
    if rng.random() < 0.5:
        job.crash_workers(crashes)
    job.lose_domains(rng.randint(0, layout.replicas))
    job.quiesce()
    placements = {r: n for r, n in job.node.items() if n in job.live}
    return job, choose_version(job.reports(), range(layout.world), 0, [], placements)


def kept(job: SimulatedJob, choice: Choice) -> bool:
    """The guarantee: at most one step that any rank, dead or alive, has begun to apply is done again."""
    applying = job.layout.phases.index("optimizer")
    begun = max(r.version + (r.phase >= applying) for r in job.ranks)
    assert not any(job.available(v) for v in range(choice.version + 1, begun + 1)), "a newer one was there"
    assert choice.origin in ("memory", "initial")
    for role, segments in job.segments.items():
        if choice.origin == "initial" and choice.sources.get(role) == {}:
            continue
        if job.node[role] in job.live and job.ranks[role].slots.get(choice.version):
            assert role not in choice.sources, "its snapshot is in memory where it is: nobody is asked"
            continue
        assert set(choice.sources[role]) == {s.id for s in segments}
        for segment in segments:
            assert set(choice.sources[role][segment.id]) == job.holders(segment, choice.version) != set()
    return choice.version >= begun - 1


SOUND = [
    Layout(1, 4),
    Layout(1, 4, replicas=2),
    Layout(2, 2),
    Layout(2, 2, unique=False, gather=False),
    Layout(2, 2, per_node=2),
    Layout(2, 2, per_node=2, unique=False, gather=False),  # all data-parallel peers share a node
    Layout(3, 2, replicas=2),
    Layout(2, 3, per_node=2, replicas=2),
    Layout(2, 4, rack=2),
    Layout(2, 4, rack=2, nested=True),
    Layout(2, 5, rack=4, nested=True),  # the last rack is smaller
    Layout(2, 4, per_node=2, rack=2, nested=True, unique=False),
    Layout(2, 4, rack=2, nested=True, replicas=2),
    Layout(3, 1),
    Layout(2, 2, gather=False, norm_over_world=False, phases=BEFORE_SYNC),
    Layout(3, 2, unique=False, gather=False, norm_over_world=False, phases=BEFORE_SYNC, replicas=1),
]


@pytest.mark.parametrize("layout", SOUND, ids=str)
def test_a_version_always_exists(layout: Layout) -> None:
    for seed in range(250):
        job, choice = fail(layout, seed)
        assert kept(job, choice), seed
        finished = min(r.version for r in job.ranks)
        assert choice.version >= finished - 1
        assert choice.origin == "memory" or max(r.version for r in job.ranks) == 0


def broken(layout: Layout, crashes: float = 0.0) -> list[int]:
    """The runs in which no version is left, or more than one applied step is lost."""
    seeds = []
    for seed in range(400):
        try:
            if not kept(*fail(layout, seed, crashes)):
                seeds.append(seed)
        except Unrecoverable:
            seeds.append(seed)
    return seeds


def test_commit_wait_after_the_barrier_loses_state() -> None:
    """Why the wait stands before the contribution to the barrier, not between barrier and optimizer."""
    assert broken(Layout(2, 2, phases=AFTER_BARRIER))


def test_a_barrier_that_covers_one_replica_loses_unique_state() -> None:
    """Norm over the model-parallel group only, wait between gradient sync and norm: experts are lost."""
    layout = Layout(2, 2, gather=False, norm_over_world=False)
    assert broken(layout)
    assert not broken(replace(layout, phases=BEFORE_SYNC), crashes=0.5)


def test_without_unique_state_such_a_barrier_relies_on_live_workers() -> None:
    """Plain data parallelism survives node losses there, for the peers' devices still hold the version."""
    layout = Layout(2, 2, unique=False, gather=False, norm_over_world=False)
    assert not broken(layout)
    assert broken(layout, crashes=0.5)
