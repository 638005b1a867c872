"""What is done where roles that hold the same state do not have the same (`--ft-verify`).

Each role's agent says the checksums of its newest versions, and lets no version be overwritten before
it hears that the next one was alike everywhere (`Verified`). So what comes before a difference is there, on
all nodes, and nothing newer is gone on from (`Versions.verified`). What a difference means is said by
`decide.comparison`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ft_core.control.cluster.node import Node
from ft_core.control.decide.compact import all_in
from ft_core.control.decide.comparison import Alike, Differ, Incomparable, compare
from ft_core.control.liveness import strikes
from ft_core.control.observe.explain import some
from ft_core.control.phases import Done, Running
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.protocol import messages as m

log = logging.getLogger(__name__)

_NEVER = -1
_UNPROVEN = 2
"""Differences of a segment that came to nothing, after which it is compared no more."""
_KEPT = 4
"""Versions of a segment of which some holders have said something, and others not yet: the newest ones."""


@dataclass(frozen=True)
class _Worker:
    node: str
    domain: str
    pid: int
    device: int

    def __str__(self) -> str:
        return f"{self.node}, worker {self.pid}" + f", device {self.device}" * (self.device >= 0)


@dataclass(frozen=True)
class _Doubt:
    """Holders of a segment that differed."""

    epoch: m.Epoch
    version: m.Version
    values: Mapping[m.Role, m.Digest]
    workers: Mapping[m.Role, _Worker]
    blamed: bool = False


def _of(version: m.Version | None) -> m.Version:
    """A version that can be compared with others; -1 for none."""
    return _NEVER if version is None else version


class Corruption:
    """The comparisons of one job, as one controller knows them."""

    def __init__(self, recovery: RecoveryCoordinator) -> None:
        self._recovery, self._cluster, self._out = recovery, recovery.cluster, recovery.out
        self._epoch = 0
        self._said: dict[m.SegmentId, dict[m.Version, dict[m.Role, m.Digest]]] = {}
        """Segment -> version -> role -> checksum, of what is not compared yet in this epoch. A segment's
        entry stays once there was one."""
        self._holders: dict[m.SegmentId, tuple[m.Role, ...]] = {}
        """Segment -> its holders that take part in this epoch."""
        self._announced = 0, _NEVER
        """The epoch, and the version of it that agents know to be alike."""
        self._alike: dict[m.SegmentId, m.Version] = {}
        """Segment -> the newest version of this epoch in which it was compared."""
        self._workers: dict[m.Role, _Worker] = {}
        self._doubts: dict[m.SegmentId, _Doubt] = {}
        self._incomparable: set[m.SegmentId] = set()
        self._told = False
        """Whether it was said that nothing can be compared."""
        self._advanced = False
        """Whether some segment was found alike since it was looked which version all are."""
        self._unproven: Counter[m.SegmentId] = Counter()
        """How often each segment differed, and came to something else when the step was done again."""

    def on_checksums(self, node: Node, said: m.Checksums) -> None:
        """A role has said what it holds. The last one of a segment's holders lets it be compared."""
        cluster, role = self._cluster, said.role
        plan = cluster.plan
        stale = plan is None or said.epoch != plan.epoch or cluster.places.get(role) != node.name
        if stale or plan is None or isinstance(self._recovery.phase, Done):
            return
        if self._epoch != plan.epoch:
            self._epoch, self._alike, self._holders = plan.epoch, {}, {}
            there = {segment for each in cluster.places for segment in cluster.catalogue.of(each)}
            self._said = {segment: {} for segment in self._said if segment in there}
        self._workers[role] = _Worker(node.name, node.hello.domain, said.pid, said.device)
        base = _of(plan.version)
        if said.alike > max(base, _of(cluster.versions.verified)):
            cluster.versions.verified = said.alike  # as a former controller has found
        for version, sums in sorted(said.versions.items()):
            for segment, value in sums.items():
                known = self._said.setdefault(segment, {})
                if version > self._alike.get(segment, base):
                    known.setdefault(version, {})[role] = value
                    self._look(segment, version, role)
                    for older in sorted(known)[:-_KEPT]:
                        del known[older]
        newest = base
        if self._advanced:
            self._advanced = False
            newest = min((self._alike.get(segment, base) for segment in self._said), default=base)
        if newest > max(base, _of(cluster.versions.verified)):
            cluster.versions.verified = newest
            self._announce()
        elif self._announced[0] == self._epoch and max(said.versions, default=_NEVER) <= self._announced[1]:
            self._out.send(node, m.Verified(*self._announced))  # it may not have heard that

    def tick(self) -> None:
        """Announce what is alike; and say, once, where there is nothing to compare."""
        if self._epoch == self._cluster.epoch:
            self._announce()
        wanted = (
            self._cluster.settings.verify and not self._told and isinstance(self._recovery.phase, Running)
        )
        if wanted and self._recovery.progress.all_stepped and not self._recovery.protection.unprotected:
            self._told = True
            if not self._said:
                self._not_compared(
                    "no two roles hold weights or moments that are compared: each has shards of its own, and "
                    "with --ft-snapshot lean weights follow from these"
                )

    # -- comparing -----------------------------------------------------------------------------------

    def _look(self, segment: m.SegmentId, version: m.Version, role: m.Role) -> None:
        cluster, values = self._cluster, self._said[segment][version]
        holders = cluster.catalogue.of(role).get(segment, "")
        if segment not in self._holders and holders:
            self._holders[segment] = tuple(each for each in all_in(holders) if each in cluster.places)
        taking_part = self._holders.get(segment, ())
        if not taking_part or any(each not in values for each in taking_part):
            return
        del self._said[segment][version]
        values = {each: values[each] for each in taking_part}
        doubt = self._doubts.get(segment)
        if doubt is not None and doubt.epoch == self._epoch and doubt.version <= version:
            return  # the step has yet to be done again: this is said once more, or follows from it
        before = doubt.values if doubt is not None and doubt.version == version else None
        if before is not None and before.keys() != values.keys():
            before = None  # others take part by now, so it is another step
        verdict = Alike() if segment in self._incomparable else compare(values, before)
        plan = cluster.current_plan
        if isinstance(verdict, Differ) and segment not in self._alike:
            start = f"what roles {some(taking_part)} should hold alike (segment {segment}) differs"
            if plan.version is None and version == (cluster.versions.initial or 0):
                self._give_up(segment, version, taking_part, f"{start} as their scripts begin")
                return
            if version > _of(plan.version) + plan.every:
                unknown = f"in version {version}, the first that this controller has compared"
                self._give_up(segment, version, taking_part, f"{start} {unknown}: since when is not known")
                return
        if isinstance(verdict, Alike):
            self._found_alike(segment, version, verdict)
            return
        where = f"version {version}: what roles {some(taking_part)} hold alike (segment {segment}) differs"
        if isinstance(verdict, Incomparable):
            self._doubts.pop(segment, None)
            why = (
                "each came to the same when it did the step again"
                if verdict.reproduced
                else "the step, done again, came to something else: kernels are not deterministic"
            )
            self._give_up(segment, version, taking_part, f"{where}, and {why}")
            return
        cluster.versions.taint(version)
        workers = {each: self._workers[each] for each in taking_part}
        self._doubts[segment] = _Doubt(self._epoch, version, values, workers)
        if isinstance(verdict, Differ):
            odd = "" if verdict.odd is None else f", role {verdict.odd} from all others"
            reason = f"{where}{odd}; the step is done again, from the version before"
            log.error("%s", reason)
            self._recovery.fail(reason, [], fault=m.Fault.CORRUPTION, node=self._node_of(verdict.odd))
        else:
            self._replace(segment, verdict.role, where)

    def _give_up(self, segment: m.SegmentId, version: m.Version, roles: Iterable[m.Role], why: str) -> None:
        """Compare a segment no more."""
        self._incomparable.add(segment)
        self._alike[segment] = version
        self._advanced = True
        self._not_compared(f"{why}; it is not compared any more", roles)

    def _found_alike(self, segment: m.SegmentId, version: m.Version, verdict: Alike) -> None:
        self._alike[segment] = version
        self._advanced = True
        said = self._said[segment]
        for older in [each for each in said if each < version]:
            del said[older]
        doubt = self._doubts.get(segment)
        if doubt is None or doubt.version > version:
            return
        del self._doubts[segment]
        if doubt.blamed:  # it was replaced, and this is of its successor
            return
        if doubt.version < version or not verdict.culprits:
            self._unproven[segment] += 1
            self._out.record(
                "corruption",
                f"version {doubt.version}: segment {segment} differed, and does not any more; of whom it was "
                "is not known",
            )
            if self._unproven[segment] >= _UNPROVEN:
                what = f"segment {segment} has differed {_UNPROVEN} times, and was another one each time that"
                self._give_up(
                    segment,
                    version,
                    doubt.values,
                    f"{what} a step was done again: kernels are not deterministic",
                )
            return
        for role in verdict.culprits:
            how = "not when the step was done again"
            self._blame(role, doubt.workers[role], doubt.version, how)

    def _replace(self, segment: m.SegmentId, role: m.Role, where: str) -> None:
        """Replace the worker of a role that would be wrong once more."""
        doubt, worker = self._doubts[segment], self._workers[role]
        self._doubts[segment] = replace(doubt, blamed=True)
        self._blame(
            role, worker, doubt.version, "something else when the step was done again: it is replaced"
        )
        self._recovery.kill_workers({role: worker.node})
        self._recovery.fail(where, [role], fault=m.Fault.CORRUPTION, node=worker.node)

    def _blame(self, role: m.Role, worker: _Worker, version: m.Version, how: str) -> None:
        reason = f"role {role} on {worker} held corrupt state in version {version}, and {how}"
        log.error("%s", reason)
        self._out.record("corruption", reason, [role])
        self._recovery.strike(
            strikes.of_corruption(worker.node, worker.device, role, worker.pid, version), worker.domain
        )

    def _not_compared(self, reason: str, roles: Iterable[m.Role] = ()) -> None:
        log.warning("--ft-verify: %s", reason)
        self._out.record("not_compared", f"--ft-verify: {reason}", list(roles))

    def _node_of(self, role: m.Role | None) -> str:
        return "" if role is None else self._workers[role].node

    # -- telling -------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Let agents give up what is older than what all have alike."""
        known = self._epoch, self._cluster.versions.verified
        if known[1] is not None and known > self._announced and isinstance(self._recovery.phase, Running):
            self._announced = self._epoch, known[1]
            self._out.send_to_all(m.Verified(*self._announced))
