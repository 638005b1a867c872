"""What is trained: collectives, the true content of each version, and what must never happen to it.

The state is a number that each step makes of the number before and of what the groups that took part have
trained. So two states are equal only if they have the same past.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from ft_core.elastic.rules import Deal, Range, positions
from ft_core.protocol.messages import Suspect
from ft_core.state.manifest import Segment, layout

from .flight import FlightRecorder
from .invariants import Invariant
from .world import World

if TYPE_CHECKING:
    from .storage import Storage
    from .workers import SimWorker

Content = int
BREAKS = 2.0
"""Seconds after which a connection that lets nothing through breaks."""


def after(content: Content, epoch: int, step: int, trained: dict[int, list[Range]]) -> Content:
    """The state that a step makes of another, with what each replica group has trained in it. Done again, it
    comes out otherwise."""
    dealt = tuple((group, tuple(ranges)) for group, ranges in sorted(trained.items()))
    return hash((content, epoch, step, dealt))


@cache
def segments_of(role: int, roles: int, groups: int) -> tuple[Segment, ...]:
    """What all roles hold, and what only this one does, or its counterparts in all replica groups."""
    tensor = [("x", "float32", (4,), 16)]
    holders = range(role % (roles // groups), roles, roles // groups)
    return tuple(layout(tuple(each), tensor) for each in dict.fromkeys((range(roles), holders)))


@dataclass
class Exchange:
    """The barrier of one step in one epoch."""

    joined: dict[int, SimWorker] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    complete: bool = False
    broken: bool = False
    """Whether a connection has: nothing comes of it any more."""
    blocked_at: float | None = None
    """When a link was found to let nothing through."""


_Known = tuple[int, dict[int, Content], dict[int, list[int]], dict[int, set[int]], int]
"""The newest epoch, and of its past: truth, samples, who has finished what, and the newest version."""


class Training:
    """All that the roles do together."""

    def __init__(self, world: World, roles: int, groups: int, derives: bool) -> None:
        self.world, self.roles, self.groups, self.derives = world, roles, groups, derives
        self.truth: dict[int, Content] = {0: 1}
        """By version, the content that every role must have."""
        self.samples: dict[int, list[int]] = {}
        """By version, what the step before it has trained."""
        self.deals: dict[Content, dict[str, Any]] = {1: Deal(1).to_json()}
        """By content, how far the samples were dealt then: a part of the state."""
        self.pasts: dict[Content, tuple[int, Content, list[int]]] = {}
        """By content: its version, the content before it, and what the step between has trained."""
        self.finished: dict[int, set[int]] = {}
        """By version, the roles that have ever had it."""
        self.least = 0
        """A version that was there before the job."""
        self.without = False
        """Whether training began when nobody saw what a former job has left."""
        self.newest = 0
        """The newest version that any role has had."""
        self.step_at: dict[tuple[int, int], float] = {}
        """When a role first had that version, made in that epoch."""
        self.epoch = 0
        """The newest epoch that was decided on."""
        self._before = self._as_is()
        """How all was before that."""
        self.flight = FlightRecorder(world, roles)
        self._exchanges: dict[tuple[int, str, int], Exchange] = {}
        self._starts: dict[tuple[int, str, int], Exchange] = {}
        self._plans: dict[int, str] = {}

    def join(self, worker: SimWorker, kind: str, number: int, members: frozenset[int]) -> Exchange:
        """A role takes part in a collective of its epoch; `complete` once all have."""
        assert worker.plan is not None and worker.role is not None
        if worker.plan.detached:
            raise Invariant.ONE_WORKER.broken(
                f"{worker.name} joins {kind}, and another worker plays role {worker.role}",
            )
        store = worker.plan.store
        key = (worker.epoch, store, number)
        exchange = (self._exchanges if kind == "step" else self._starts).setdefault(key, Exchange())
        other = exchange.joined.get(worker.role)
        if other is not None and other is not worker and other.alive:
            raise Invariant.ONE_WORKER.broken(
                f"role {worker.role} has two live workers in epoch {worker.epoch}: {other.name} and "
                f"{worker.name}",
            )
        if exchange.complete:
            if worker.role not in exchange.joined:
                raise Invariant.EPOCH_ORDER.broken(
                    f"role {worker.role} joins {kind} {number} of epoch {worker.epoch}, which is complete",
                )
            return exchange
        exchange.joined[worker.role] = worker
        self.flight.begins(worker, kind, number)
        if set(exchange.joined) >= members:
            self._exchange(worker.epoch, kind, number, exchange)
        return exchange

    def _exchange(self, epoch: int, kind: str, number: int, exchange: Exchange) -> None:
        """All are there: it is complete, once all links let it through."""
        workers = exchange.joined.values()
        if exchange.broken or any(not w.alive or w.pending > epoch for w in workers):
            return  # connections to who has died, or has left, are broken
        if apart := self._apart(exchange):
            since = exchange.blocked_at = exchange.blocked_at or self.world.now
            if self.world.now - since < BREAKS:
                self.world.at(0.2, lambda: self._exchange(epoch, kind, number, exchange))
                return
            exchange.broken = True
            for member in apart:
                member.do(lambda w=member: w.node.from_worker(w, Suspect(epoch, w.machine.role, "reset")))  # type: ignore[misc]
            return
        if kind == "step":
            self._check(epoch, number, exchange)
        exchange.complete = True
        self.flight.ends(workers)
        for member in workers:
            member.later(self.world.delay(), member.pump)

    def _apart(self, exchange: Exchange) -> list[SimWorker]:
        """Members that do not reach another one."""
        workers = list(exchange.joined.values())
        network = workers[0].node.job.network
        if not network.cut and not network.severed:
            return []
        machines = {w.node.machine_name for w in workers}
        return [w for w in workers if not all(network.joins(w.node.machine_name, name) for name in machines)]

    def begins(self, storage: Storage) -> None:
        """Some role begins to train, or all do: what nobody has seen by then was not there for this job."""
        if storage.is_nowhere:
            self.least, self.without = 0, True

    def _check(self, epoch: int, version: int, exchange: Exchange) -> None:
        self.begins(next(iter(exchange.joined.values())).node.job.storage)
        if version < self.least:
            raise Invariant.NEWEST.broken(f"step {version + 1} is done, and version {self.least} was there")
        if (
            len(
                {
                    (w.plan.policy, w.plan.lr_intervention, w.plan.every)
                    for w in exchange.joined.values()
                    if w.plan
                }
            )
            > 1
        ):
            raise Invariant.SETTINGS.broken(f"the roles have different settings in step {version + 1}")
        for role, worker in exchange.joined.items():
            if worker.version != version:
                raise Invariant.ONE_PAST.broken(
                    f"role {role} is at version {worker.version} in step {version + 1} of epoch {epoch}",
                )
            if worker.weights != worker.content:
                raise Invariant.ONE_PAST.broken(
                    f"role {role} trains in step {version + 1} with weights of no version"
                )
            if worker.epoch != epoch:
                raise Invariant.EPOCH_ORDER.broken(
                    f"role {role} is in epoch {worker.epoch} in an exchange of epoch {epoch}",
                )
            if epoch >= self.epoch and worker.content != self.truth[version]:  # else it was given up
                raise Invariant.ONE_PAST.broken(
                    f"role {role} has another content of version {version}, epoch {epoch}"
                )

    def stepped(self, worker: SimWorker, trained: dict[int, list[Range]]) -> None:
        """A role has made a new version."""
        if worker.epoch < self.epoch:
            return  # of a node that was given up, and does not know it yet
        version = worker.version
        known = self.truth.setdefault(version, worker.content)
        if known != worker.content:
            raise Invariant.ONE_PAST.broken(
                f"role {worker.role} has made another content of version {version}"
            )
        if version not in self.samples:
            found = [at for ranges in trained.values() for at in positions(ranges)]
            before = {at for each in self.samples.values() for at in each}
            if len(set(found)) != len(found) or before & set(found):
                raise Invariant.SAMPLES.broken(
                    f"step {version} trains samples again: {sorted(before & set(found)) or found}",
                )
            self.samples[version] = found
            self.pasts[worker.content] = version, self.truth[version - 1], found
        self.step_at.setdefault((worker.epoch, version), self.world.now)
        self.finished.setdefault(version, set()).add(worker.role if worker.role is not None else -1)
        self.newest = max(self.newest, version)

    def all_finished(self) -> int:
        """The newest version that every role has had."""
        return max((v for v, roles in self.finished.items() if len(roles) == self.roles), default=0)

    def segments(self, role: int, adopted: bool = False) -> tuple[Segment, ...]:
        """What the state of a role consists of; `adopted`: what it has alone."""
        found = segments_of(role, self.roles, self.groups)
        return found[1:] if adopted or (self.derives and len(found) > 1) else found

    def go_on_from(self, epoch: int, version: int, content: Content | None = None) -> None:
        """All do, in that epoch: what was newer has never been. `content`: of another past."""
        if epoch < self.epoch:
            raise Invariant.EPOCH_ORDER.broken(f"epoch {epoch} is begun after epoch {self.epoch}")
        self._before = self._as_is()
        self.epoch = epoch
        if content is not None and content != self.truth.get(version):
            self._remember(version, content)
        for known in (self.truth, self.finished, self.samples):
            for newer in [v for v in known if v > version]:
                del known[newer]  # type: ignore[attr-defined]
        self.newest = min(self.newest, version)

    def takes_over(self, epoch: int) -> None:
        """A controller does, with that epoch as the newest: what was decided after it nobody has heard."""
        if self.epoch > epoch:
            self.epoch, self.truth, self.samples, self.finished, self.newest = self._before

    def _as_is(self) -> _Known:
        finished = {version: set(roles) for version, roles in self.finished.items()}
        return self.epoch, dict(self.truth), dict(self.samples), finished, self.newest

    def _remember(self, version: int, content: Content) -> None:
        """What became that content is what has been."""
        self.truth, self.samples, self.newest = {version: content}, {}, version
        while content in self.pasts:
            version, before, found = self.pasts[content]
            self.samples[version], self.truth[version - 1] = found, before
            content = before

    def check_samples(self, worker: SimWorker) -> None:
        """None is left out, but those that wait to be dealt again, or are dealt."""
        trained = {at for each in self.samples.values() for at in each}
        deal = Deal.from_json(self.deals[self.truth[worker.version]])
        waiting = {at for _, first, end in deal.waiting for at in range(first, end)}
        newer = {at for version, each in self.samples.items() if version > worker.version for at in each}
        if (missing := set(range(deal.next)) - trained - waiting) or (trained - newer) & waiting:
            raise Invariant.SAMPLES.broken(
                f"samples {sorted(missing)} are left out at version {worker.version}"
            )
