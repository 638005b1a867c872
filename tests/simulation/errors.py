"""Errors of scripts, nodes that fail often, and what must become of both."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft_core.control import events as ev
from ft_core.node.admission.child import LIMIT
from ft_core.worker.states import NoRole, StartUp

from .invariants import Invariant

if TYPE_CHECKING:
    from .control import SimController
    from .job import SimJob
    from .node import SimNode
    from .workers import SimWorker

TRIES = 2
"""Of the same error of a role in the same step."""
_SLACK = 20.0
"""Seconds by which processes that were stopped may take a strike for younger than it is."""


@dataclass
class Bug:
    """An exception of a role in the step after a version; `always`, or once."""

    role: int
    version: int
    always: bool


@dataclass
class Stray:
    """A role does something else than the others in the step after a version, `times` times."""

    role: int
    version: int
    times: int


@dataclass
class _Failure:
    """Of a worker, or of a node (role -1)."""

    machine: str
    role: int
    step: int
    at: float
    certain: bool
    """Whether it counts against the machine, and each controller must know that: once it has decided with
    it, and unless a node is gone since."""
    decided: bool = False


@dataclass
class Errors:
    """Of one job."""

    job: SimJob
    bugs: list[Bug] = field(default_factory=list)
    stray: Stray | None = None
    sick: set[str] = field(default_factory=set)
    """Machines with a device that has reported something, or failed."""
    sick_from_the_start: set[str] = field(default_factory=set)
    """Machines that are sick when they come."""
    diverged: set[SimWorker] = field(default_factory=set)
    """Who did something else than the others once, and is in no exchange of theirs."""
    _known: set[tuple[int, int]] = field(default_factory=set)
    _tries: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """By role and version, when it was tried of late: what was longer ago is forgotten, as all failures."""
    _failures: list[_Failure] = field(default_factory=list)

    def add(self, roles: list[int], version: int, always: bool) -> None:
        """A bug, where there was none before: two would be one that comes again."""
        new = [role for role in roles if (role, version) not in self._known]
        self._known |= {(role, version) for role in new}
        self.bugs += [Bug(role, version, always) for role in new]

    @property
    def fatal(self) -> bool:
        """Whether the job may end of it."""
        return any(bug.always for bug in self.bugs)

    def strays(self, worker: SimWorker) -> bool:
        """Whether this worker does something else than the others now."""
        found = self.stray
        if found is None or (found.role, found.version) != (worker.role, worker.version) or not found.times:
            return False
        found.times -= 1
        self.diverged.add(worker)
        worker.node.job.world.trace(f"{worker.name} does something else than the others")
        return True

    def due(self, worker: SimWorker) -> bool:
        """Whether this worker raises now."""
        now, window = self.job.world.now, self.job.settings.strike_minutes * 60
        for bug in self.bugs:
            if (bug.role, bug.version) == (worker.role, worker.version):
                if not bug.always:
                    self.bugs.remove(bug)
                if worker.node.name in self.job.given_up:  # as nobody will hear
                    return True
                tries = [at for at in self._tries.get((bug.role, bug.version), ()) if now - at <= window]
                self._tries[bug.role, bug.version] = [*tries, now]
                # From memory once more, and then from storage.
                restarts = self.job.shape.restarts
                most = TRIES + (1 + restarts if restarts else 0)
                if len(tries) >= most:
                    raise Invariant.TRIES.broken(
                        f"role {worker.role} raises in the step after version {worker.version}, and was "
                        f"tried more than {most} times",
                    )
                return True
        return False

    def node_gone(self, node: SimNode) -> None:
        """It may not have said what had failed there."""
        self._tries.clear()
        for failure in self._failures:
            failure.certain = False
        self._failures.append(_Failure(node.machine_name, -1, -1, self.job.world.now, False))

    def ended(self, node: SimNode, worker: SimWorker, code: int) -> None:
        """A worker has."""
        step = -1 if isinstance(worker.state, NoRole | StartUp) else worker.version
        known = node.machine.crew.get(worker.number)  # a role may be given to one that is dead
        if known is not None and known.plays:
            now = self.job.world.now
            self._failures.append(_Failure(node.machine_name, known.role, step, now, code == -11))

    def decided(self, controller: SimController, moved: dict[int, str], before: dict[int, str]) -> None:
        """Roles were given to workers; `before`: where all were."""
        cluster = controller.machine.cluster
        for failure in self._failures:
            failure.decided |= failure.role in moved
        used = set(cluster.current_plan.roles.values()) | self.job.drained
        spare = [n for n in cluster.nodes.values() if n.name not in used and n.idle > 0]
        others = [
            node.name
            for node in spare
            if self._against(_machine(node.name), 2 * _SLACK) == 0
            and _machine(node.name) not in self.sick | self.sick_from_the_start | self.job.slow.taken_out
        ]
        lost = Counter(before[role] for role in moved if role in before)
        for role, name in moved.items():
            home = before.get(role, "")
            if home in self.job.drained:
                continue  # it was placed when it began to move, or is to leave in any case
            window = self.job.settings.strike_minutes * 60
            count = self._against(_machine(name), window, certain=True)
            # A role that comes back was placed when its replica group began to.
            if role in before and count >= self.job.settings.strikes and others:
                raise Invariant.PLACES.broken(
                    f"{name} has failed {count} times, and role {role} is on it, not on {others}",
                )
            if role in before:
                self._is_admitted(controller, role, name, others)
                self._on_a_sound_device(controller, role, name, others)
            if _machine(home) in self.sick | self.sick_from_the_start | self.job.slow.taken_out:
                continue  # others are better
            if self.job.shape.policy != "wait" or home == name or home not in cluster.nodes:
                continue
            count = self._against(_machine(home), window + _SLACK)
            if cluster.nodes[home].idle >= lost[home] and count < self.job.settings.strikes:
                raise Invariant.PLACES.broken(
                    f"role {role} leaves {home}, which has a worker for it and has failed {count} times",
                )

    def _is_admitted(self, controller: SimController, role: int, name: str, others: list[str]) -> None:
        """A role was given to a node: is it known to be well, or is there no other?"""
        cluster, now = controller.machine.cluster, self.job.world.now
        told = controller.told_sick.get(_machine(name), -math.inf)
        there = [other for other in others if other not in cluster.draining]
        if there and now - told < self.job.settings.strike_minutes * 60 * 0.9:
            raise Invariant.ADMITTED.broken(f"role {role} is on {name}, which is sick, and not on {there}")
        if now - controller.unanswered.get(cluster.nodes[name].peer, -math.inf) < LIMIT:
            raise Invariant.ADMITTED.broken(f"role {role} is on {name}, which is being checked")

    def _on_a_sound_device(self, controller: SimController, role: int, name: str, others: list[str]) -> None:
        """A role was given to a node: is there a device for it that has not failed, or no other?"""
        cluster, now = controller.machine.cluster, controller.machine._out.now
        broken = Counter(place for place, _ in cluster.strikes.broken(now))
        sound = [other for other in others if not broken[_machine(other)] and other not in cluster.draining]
        here = len(cluster.roles_by_node.get(name, ()))
        if sound and broken[_machine(name)] and here + broken[_machine(name)] > self.job.shape.per_node:
            raise Invariant.PLACES.broken(
                f"role {role} is on {name}, which has {here} roles and {broken[_machine(name)]} devices that "
                f"have failed, and not on {sound}",
            )

    def _against(self, machine: str, seconds: float, certain: bool = False) -> int:
        """Failures there of late. `certain`: those that each controller must know, and count."""
        since = self.job.world.now - seconds
        here = [each for each in self._failures if each.machine == machine and each.at >= since]
        if not certain:
            return len(here)
        elsewhere = {(each.role, each.step) for each in self._failures if each.machine != machine}
        known = (each for each in here if each.certain and each.decided)
        return len([each for each in known if (each.role, each.step) not in elsewhere])


def _machine(node: str) -> str:
    return node.partition("+")[0]


def moved(event: ev.Record) -> dict[int, str]:
    """Of a decision."""
    found = event.more["moved"]
    assert isinstance(found, dict)
    return found
