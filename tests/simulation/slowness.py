"""Roles that are slow, and what must become of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from ft_core.control import events as ev
from ft_core.protocol.domains import place
from ft_core.protocol.messages import Fault

from .invariants import Invariant

if TYPE_CHECKING:
    from .control import SimController
    from .job import SimJob
    from .node import SimNode

_OWN, _MORE = 0.3, 0.1
"""Seconds of a step that each role takes for its own part, and that a slow one takes besides."""
_SOON = 60.0
"""Seconds within which somebody who is slow is named, and moved, where nothing else happens."""
_IS_SLOW = re.compile(r"role (\d+) on (\S+) is slow")


@dataclass
class _Move:
    """A machine was taken out for a role's sake. `decided`: all who take part in the epoch since know that,
    and no node is gone since."""

    machine: str
    role: int
    decided: bool = False


@dataclass
class Slowness:
    """That of one job."""

    job: SimJob
    taken_out: set[str] = field(default_factory=set)
    """Machines that were, or were to be, since a role was slow there."""
    _now: set[str | int] = field(default_factory=set)
    """Machines, and roles, that are slow."""
    _ever: set[str | int] = field(default_factory=set)
    _moves: list[_Move] = field(default_factory=list)

    def begin(self, rng: Random, who: str | int) -> None:
        """A machine, or a role, is slow from now on, perhaps for a while."""
        self.job.world.trace(f"{who} is slow")
        self._now.add(who)
        self._ever.add(who)
        if rng.random() < 0.3:
            self.job.world.at(rng.choice((6.0, 25.0)), lambda: self._now.discard(who))

    def parts(self, node: SimNode, number: int) -> tuple[float, float]:
        """What a worker computes in a step, and what it waits for its data."""
        worker = node.workers[number]
        if not self.job.shape.slows or worker.role is None:
            return 0.0, 0.0
        more = _MORE * (not self._now.isdisjoint((node.machine_name, worker.role)))
        return (_OWN + more, 0.0) if self.job.world.seed % 2 else (_OWN, more)

    def node_gone(self) -> None:
        """It may have been the last to know."""
        for move in self._moves:
            move.decided = False

    def record(self, controller: SimController, event: ev.Record) -> None:
        """A line of events.jsonl."""
        if event.event == "straggler" and not event.more["over"]:
            [role] = event.roles
            if self._ever.isdisjoint((place(event.more["node"]), role)):
                raise Invariant.SLOW.broken(f"role {role} was never slow: {event.reason}")
            part = "compute" if self.job.world.seed % 2 else "data"
            if event.more["part"] != part:
                raise Invariant.SLOW.broken(f"it is {part} that is slow: {event.reason}")
        if event.event == "decided":
            for move in self._moves:
                move.decided = True
        if event.event != "draining" or (found := _IS_SLOW.match(event.reason)) is None:
            return
        role, machine = int(found[1]), place(found[2])
        self.taken_out.add(machine)
        known = [s for s in controller.machine.cluster.strikes.value(0.0) if s.fault is Fault.SLOW]
        if len([s for s in known if s.place == machine or s.role == role]) > 1:
            raise Invariant.SLOW.broken(f"a second time, though that is known: {event.reason}")
        if any(move.decided and (move.machine == machine or move.role == role) for move in self._moves):
            raise Invariant.SLOW.broken(f"a second time, and all knew of the first: {event.reason}")
        self._moves.append(_Move(machine, role))

    def check_the_end(self) -> None:
        """Nothing else happens any more: who is slow is named, and moves if that can help."""
        world, job = self.job.world, self.job
        world.run(world.now + _SOON, lambda: job.over or not self._overlooked())
        if not job.over and (found := self._overlooked()):
            raise Invariant.SLOW.broken(f"{found}; {job._where()}")

    def _overlooked(self) -> str:
        """Who is slow and not named, or named and not moved, though there is nothing against it."""
        machine = self.job.controller.machine
        cluster, slow = machine.cluster, machine._slow
        if cluster.draining:
            return f"{cluster.draining} are being drained"
        for found, node, objection in slow.candidates():
            if not objection:
                return f"role {found.role} is named, and stays on {node.name}"
        for roles in cluster.groups.alike():
            there = [role for role in roles if role in cluster.places]
            slow_ones = [r for r in there if not self._now.isdisjoint((place(cluster.places[r]), r))]
            if 2 * len(slow_ones) <= len(there):
                for role in slow_ones:
                    if role not in slow.stragglers.found:
                        return f"role {role} on {cluster.places[role]} is slow, and not named"
        return ""
