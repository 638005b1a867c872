"""Whether the job hangs: from the beats of its nodes and, where those stand still, from flight records.

How long is too long is learned. Steps: three times the 99th percentile of what steps take, and 5 s at least.
What others wait in, an exchange after evaluation or the barrier of a checkpoint as well: three times what the
same wait has taken before. While the first step of an epoch is under way, a newcomer, and a survivor without
its state: three times what the job's longest start has taken, and 30 s at least. Of a wait that was never
seen, and of others before that step, little is known: `--ft-hang-limit`. Records that have moved between two
readings are progress, whatever they are of; and a role that reads or writes is at work, for as long as that
limit. Whose wait ended by itself may take three times as long again; and who was replaced and does not come
in the same step again has that limit: what one role does alone, such as an evaluation, looks like a hang, and
is taken for one once. Of roles that will never meet, whatever they do, it is known as soon as a step takes
too long; and if one that was replaced for it does the same again, to go on in place does not help.

Before a role is blamed for not coming, its worker is looked at. One that waits itself, for data, storage, a
compiler or a process, is not replaced for it at once: another worker would wait for the same, and begin anew
besides. It has three times what the job's longest such wait has taken, two minutes at least, and that limit
at most; a compiler has that limit. A site that has said how long is too long is taken at its word.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from ft_core.control.cluster.progress import Progress
from ft_core.control.cluster.state import ClusterState
from ft_core.control.liveness.hangs.finding import Case, Finding
from ft_core.control.liveness.hangs.operations import Operation
from ft_core.control.liveness.hangs.waiting import For, Wait, waits_for
from ft_core.protocol.flight import NEWEST, FlightLog
from ft_core.protocol.messages import Flights, RoleBeat, SendFlight

FLOOR = 5.0
"""Seconds for which nothing is taken for a hang, whatever is usual."""
START_FLOOR = 30.0
"""Seconds for which nothing is taken for a hang of roles that recover."""
FACTOR = 3.0
"""How many times as long as usual something must take to count as unusual."""
ANSWER = 5.0
"""Seconds that nodes have to send their records, before it is judged without them."""
WAITING = 120.0
"""Seconds that a role may wait for data, storage, or a process, whatever is usual."""
READING, SELDOM = 1.0, 10.0
"""Seconds between two readings: at first, and at most where it takes long."""
TREATMENT = 15.0
"""Seconds in which a worker is to end that is to blame."""
BUSY = 1 << 16
"""Bytes that a role reads and writes between two readings, if it is at work: it saves, or loads."""
_STEPS = 1000
"""How many of the newest steps are remembered with the time that they took."""
_EXCUSES = 64
"""How many of those who have held the others up for a while are remembered."""
_UNUSUAL = 1 << 16
"""How many operations are remembered that took long for a known reason."""
_RECORDS = 16384
"""About how many operations of all roles one reading brings."""


@dataclass(frozen=True)
class Culprit:
    """These roles hold the job up: their workers are to be replaced."""

    finding: Finding


@dataclass(frozen=True)
class Stalled:
    """Others wait for roles that wait themselves, for what ends by itself as a rule: they are left to it."""

    finding: Finding


@dataclass(frozen=True)
class Inconclusive:
    """Nothing moves, and to replace somebody does not help: who is to blame is not clear, or it was tried.
    `hopeless`: for so long that it has to end."""

    finding: Finding
    hopeless: bool


Verdict = SendFlight | Culprit | Stalled | Inconclusive


@dataclass
class Usual:
    """What something takes, as far as it was seen of late."""

    seen: deque[float]

    def add(self, seconds: float) -> None:
        self.seen.append(seconds)

    @property
    def long(self) -> float:
        """The 99th percentile; 0 before any."""
        ordered = sorted(self.seen)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0


class Detector:
    """The detector of hangs of one job."""

    def __init__(self) -> None:
        self._steps = Usual(deque(maxlen=_STEPS))
        self._start = 0.0
        """The longest time from the beginning of an epoch to the end of its first step on all roles."""
        self._plan = ""
        self._began = self._moved = self._next = 0.0
        self._training = False
        self._newest = -1
        self._where: dict[int, tuple[int, int, int, int]] = {}
        self._number = 0
        self._asked: float | None = None
        self._answers: dict[str, tuple[FlightLog, ...]] = {}
        self._before: tuple[object, ...] = ()
        """What the last reading has shown."""
        self._bytes: dict[int, int] = {}
        """Bytes that each role had read and written by the last reading."""
        self._said: tuple[object, ...] = ()
        """What was reported last, so that it is reported once."""
        self._suspects: tuple[int, ...] = ()
        """Roles without whom nothing moves just now."""
        self._excuses: dict[tuple[int, ...], float] = {}
        """How long suspects have held the others up before that ended by itself; the newest last."""
        self._closely: tuple[int, ...] = ()
        """Roles at which the reading looks that is under way, or to come."""
        self._waiting: For | None = None
        """What the suspects wait for themselves, if anything."""
        self._longest: dict[For, float] = {}
        """How long such waits have taken that ended by themselves."""
        self._unusual: dict[Operation, None] = {}
        """Operations of this epoch that took long as a role waited for data, storage, a compiler or a
        process: their time says nothing of what is usual."""
        self._long_step = -1
        """The step that took long for that; -1: none."""
        self._blamed: dict[int, int] = {}
        """Roles that were taken for hung in this epoch, and in which step."""
        self._replaced: dict[int, int] = {}
        """Roles that were taken for hung in former epochs, as far as the job has not left that step
        behind."""

    @property
    def suspects(self) -> tuple[int, ...]:
        """Roles without whom nothing moves just now."""
        return self._suspects

    def quiet(self, now: float) -> float:
        """Seconds since anything moved."""
        return now - self._moved

    def rests(self, now: float) -> None:
        """Nothing that could hang is under way."""
        self._plan, self._moved = "", now
        self._forget()

    def _forget(self) -> None:
        self._asked, self._before, self._said, self._suspects = None, (), (), ()
        self._next, self._closely, self._waiting = 0.0, (), None

    def on_beat(self, beats: Mapping[int, RoleBeat], now: float) -> None:
        """How far the roles of a node are."""
        moved = False
        for role, beat in beats.items():
            where = beat.pid, beat.step, beat.tag, beat.passed
            if self._where.get(role) != where:
                self._where[role], moved = where, True
            if beat.step > self._newest:
                known = self._training and self._newest >= 0 and beat.step != self._long_step
                if known and beat.step_s > 0:
                    self._steps.add(beat.step_s)
                self._newest = beat.step
                self._replaced = {r: step for r, step in self._replaced.items() if step >= beat.step}
        if moved:
            self._excuse(now - self._moved)
            self._moved = now
            self._forget()

    def _excuse(self, seconds: float) -> None:
        """The suspects go on by themselves: note how long that took."""
        if self._waiting is not None:
            self._longest[self._waiting] = max(seconds, self._longest.get(self._waiting, 0.0))
        elif self._suspects:
            longest = max(seconds, self._excuses.pop(self._suspects, 0.0))
            self._excuses[self._suspects] = longest
            if len(self._excuses) > _EXCUSES:
                del self._excuses[next(iter(self._excuses))]

    def on_flights(self, node: str, answer: Flights) -> None:
        """A node has sent its records."""
        if answer.number == self._number:
            self._answers[node] = answer.logs

    def tick(self, cluster: ClusterState, progress: Progress, now: float) -> Verdict | None:
        """What is to be done now."""
        if cluster.current_plan.id != self._plan:
            self.rests(now)
            self._plan, self._began, self._training, self._newest = cluster.current_plan.id, now, False, -1
            self._where, self._unusual, self._long_step = {}, {}, -1
            self._replaced, self._blamed = self._replaced | self._blamed, {}
        if progress.all_stepped and not self._training:
            self._training, self._start = True, max(self._start, now - self._began)
            self._moved = now
        if self._asked is not None:
            missing = {node.name for node in cluster.nodes_with_roles()} - set(self._answers)
            return self._judge(cluster, progress, now) if not missing or now > self._asked + ANSWER else None
        if now - self._moved < self.limit(cluster) or now < self._next:
            return None
        self._number, self._asked, self._answers = self._number + 1, now, {}
        newest = max(4, min(NEWEST, _RECORDS // max(len(cluster.places), 1)))
        return SendFlight(self._number, newest, self._closely)

    def limit(self, cluster: ClusterState) -> float:
        """Seconds after which a step takes too long."""
        return cluster.settings.hang_after or max(FLOOR, FACTOR * self._steps.long)

    def _judge(self, cluster: ClusterState, progress: Progress, now: float) -> Verdict | None:
        """All have answered, or it is gone on without those who have not."""
        self._asked = None
        quiet = now - self._moved
        self._next = now + max(READING, min(SELDOM, quiet / 20))
        logs = [
            log
            for node, found in self._answers.items()
            for log in found
            if log.epoch == cluster.plan_epoch and cluster.places.get(log.role, node) == node
        ]
        self._answers = {}
        case = Case(logs, cluster.places, _held_up(cluster, progress), self._unusual)
        finding = case.explain()
        shown = (_moments(logs), finding and (finding.kind, finding.roles))
        same, self._before = shown == self._before, shown
        looked, self._closely = set(self._closely), ()
        limit = math.inf
        if finding is not None:
            starting = _starting(cluster, progress) - {log.role for log in logs if log.fetches}
            limit = self._patience(cluster, finding, starting)
        if finding is not None and finding.culprits:
            self._next = now + READING
            if _may_wait(cluster, finding) and _waited(finding, quiet) >= limit - 2 * READING:
                self._closely = finding.culprits
        before, self._bytes = self._bytes, {log.role: log.moved for log in logs}
        if not same:
            return None
        if finding is None:  # a long evaluation looks the same: it is said, and the job goes on
            if quiet < cluster.settings.hang_limit or self._said == shown or not self._training:
                return None
            self._said = shown
            return Inconclusive(case.alone(), hopeless=False)
        if quiet < cluster.settings.hang_limit and any(
            self._bytes[role] - before.get(role, 0) >= BUSY for role in finding.roles if role in self._bytes
        ):
            return None  # it saves, or loads
        self._suspects, self._waiting = finding.culprits if finding.kind != "stopped" else (), None
        waited = _waited(finding, quiet)
        if finding.culprits and waited >= limit:
            if not _may_wait(cluster, finding):
                in_vain = finding.proven and cluster.settings.max_restarts and self._again(finding)
                return Inconclusive(finding, hopeless=False) if in_vain else self._blame(finding, now)
            if not looked.issuperset(finding.culprits):
                self._next = now
                return None
            excused = self._excused(cluster, logs, finding, waited)
            if (left := case.explain(excused) if excused else finding) is not None and left.culprits:
                return self._blame(left, now)
            self._waiting = next(iter(excused.values())).what
            self._next = now + max(READING, min(SELDOM, quiet / 4))
            return self._stalled(case, left or finding)
        hopeless = waited >= max(limit, cluster.settings.hang_limit)
        if finding.kind == "blocked" and waited >= limit and not hopeless:
            return self._stalled(case, finding)
        if not finding.culprits and waited >= limit and (hopeless or self._said != shown):
            self._said = shown
            return Inconclusive(finding, hopeless)
        return None

    def _blame(self, finding: Finding, now: float) -> Culprit:
        self._forget()
        self._next = now + TREATMENT
        self._blamed |= dict.fromkeys(finding.culprits, self._newest)
        return Culprit(finding)

    def _excused(
        self, cluster: ClusterState, logs: Iterable[FlightLog], finding: Finding, waited: float
    ) -> dict[int, Wait]:
        """Roles that would be to blame, and wait for what others in their place would wait for as well."""
        found: dict[int, Wait] = {}
        limit = cluster.settings.hang_limit
        for log in logs:
            wait = waits_for(log.look) if log.role in finding.culprits and log.look is not None else None
            if wait is None:
                continue
            usual = limit if wait.what == "a compiler" else FACTOR * self._longest.get(wait.what, 0.0)
            if waited < min(limit, max(WAITING, usual)):
                found[log.role] = wait
        return found

    def _stalled(self, case: Case, finding: Finding) -> Stalled | None:
        """Report it once. How long such a wait takes says nothing of what is usual for those who wait in
        it."""
        if self._said == (finding.kind, finding.roles):
            return None
        self._said = finding.kind, finding.roles
        self._unusual |= dict.fromkeys(case.waits.waiting)
        while len(self._unusual) > _UNUSUAL:
            del self._unusual[next(iter(self._unusual))]
        self._long_step = self._newest + 1
        return Stalled(finding)

    def _patience(self, cluster: ClusterState, finding: Finding, starting: Set[int]) -> float:
        """Seconds that others have to wait before somebody is to blame for it. `starting`: roles that do what
        has been done before, on their way to the first step of this epoch."""
        usual, limit = self.limit(cluster), cluster.settings.hang_limit
        if finding.kind == "stopped":
            return usual
        if not self._training:
            return self._patience_at_start(cluster, finding, starting)
        if cluster.settings.hang_after or finding.proven:
            return usual
        if finding.usual is None or self._again(finding):
            return max(usual, limit)
        excuse = min(limit, FACTOR * self._excuses.get(finding.culprits, 0.0))
        return max(usual, FACTOR * finding.usual, excuse)

    def _patience_at_start(self, cluster: ClusterState, finding: Finding, starting: Set[int]) -> float:
        """Seconds that others have to wait before somebody is to blame, while the first step of the epoch is
        under way."""
        if finding.proven:
            return START_FLOOR
        if not cluster.versions.trained:
            # Of the very first start nothing is known: its operations' time-outs hold.
            return math.inf
        known = FACTOR * self._start
        if known and starting >= set(finding.culprits) and not self._again(finding):
            return max(START_FLOOR, known)
        return max(cluster.settings.hang_limit, known)

    def _again(self, finding: Finding) -> bool:
        """Whether one of the culprits was replaced for it before."""
        return bool(self._replaced.keys() & set(finding.culprits))


def _may_wait(cluster: ClusterState, finding: Finding) -> bool:
    """Whether those to blame may themselves wait for what ends by itself."""
    return finding.kind == "absent" and not cluster.settings.hang_after


def _waited(finding: Finding, quiet: float) -> float:
    """Seconds for which others have waited; not while a newcomer got on that they wait for."""
    return quiet if finding.kind == "stopped" else min(quiet, finding.waited)


def _starting(cluster: ClusterState, progress: Progress) -> set[int]:
    """Newcomers, and survivors without the state of this epoch."""
    return set(cluster.places) - (progress.restored.keys() - set(cluster.current_plan.newcomers))


def _held_up(cluster: ClusterState, progress: Progress) -> list[int]:
    """Roles whose newest version is whole on their node, and not yet safe elsewhere. Who is still without the
    state of this epoch has nothing that could be: it waits for its own."""
    beats = ((role, beat) for node in cluster.nodes.values() for role, beat in node.beats.items())
    there = progress.restored
    return [r for r, beat in beats if r in there and beat.held and beat.committed < max(beat.held)]


def _moments(logs: Iterable[FlightLog]) -> tuple[object, ...]:
    """What changes whenever a role begins or ends an operation."""

    def of(log: FlightLog) -> tuple[int, ...]:
        newest = max((max(record.started, record.ended) for record in log.records), default=0)
        return log.role, log.epoch, log.version, newest, sum(record.under_way for record in log.records)

    return tuple(sorted(map(of, logs)))
