"""Standbys that start a role ahead of need: which, when, and for which epoch they are of use. On a node that
trains they start its own roles, on a spare those of the nodes that it guards (`state.placement`).

Such a worker runs the script as a newcomer would, from what the role's worker has on record, to where it
waits for its state (`Session.begin`). It takes no part in any epoch, and nobody waits for it. When the
worker of its role dies, and the plan places the role here again, it takes its place, and has only to load.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from ft_core.node.about import About
from ft_core.node.events import AskRecords, Effect, Kill, RecordsFound, SetApart, Start, ToWorker
from ft_core.node.memory.view import View
from ft_core.node.workers import standby_budget
from ft_core.node.workers.worker_table import NONE, Worker, WorkerState, WorkerTable
from ft_core.protocol import messages as m
from ft_core.protocol.groups import Ended, Series, Steps, parse, series_of
from ft_core.settings import AUTO, Settings
from ft_core.state.placement import Places, spares_of

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""Attempts to start a role ahead of need, in a row, before it is left."""
PAUSE = 5.0
"""Seconds from the end of one attempt to the next."""
SETTLED = 10.0
"""Seconds from the begin of an epoch to the first one on a spare that is sent no copies: otherwise it sees by
them that those whom it guards train."""


class Ready:
    """The standbys of one agent that have started a role."""

    def __init__(self, about: About, crew: WorkerTable, view: View) -> None:
        self._about, self._crew, self._view = about, crew, view
        self._failed: Counter[int] = Counter()
        """Role -> starts in a row that have failed."""
        self._not_before = -math.inf
        self._plan: m.NodePlan | None = None
        """The plan that `_guarded` and `_settled` are of."""
        self._guarded: list[list[int]] = []
        """Roles of each node that this one guards."""
        self._settled = math.inf
        """When the epoch counts as settled."""
        self._asking = False
        """Whether an agent is asked what a worker of its has on record."""

    # -- before need -------------------------------------------------------------------------------

    def tick(self, plan: m.NodePlan, settings: Settings, now: float) -> list[Effect]:
        """The epoch of `plan` is under way: once all roles here train in it, start the next one ahead, one
        after the other."""
        if not settings.ready_standbys or now < self._not_before:
            return []
        playing, ahead = self._crew.playing(), self._crew.ahead()
        if not all(_trains(worker, plan) for worker in playing):
            return []
        if any(not worker.is_ready for worker in ahead) or not self._crew.idle():
            return []
        if not playing:
            return self._guard(plan, settings, ahead, now)
        known = {worker.target_role for worker in ahead}
        roles = (worker.role for worker in playing if worker.role not in known)
        role = next((role for role in roles if self._failed[role] < ATTEMPTS), None)
        if role is None or len(ahead) >= self._most(plan, settings, playing, len(ahead)):
            return []
        worker = self._crew.add(-1)
        worker.target_role = role
        return [Start(worker.number, -1)]

    def _most(self, plan: m.NodePlan, settings: Settings, playing: Collection[Worker], there: int) -> int:
        if settings.ready_standbys != AUTO:
            return settings.ready_standbys
        return there if self._view.gpus() else there + self._room(plan, playing)

    def _room(self, plan: m.NodePlan, like: Collection[Worker]) -> int:
        host = _host_of(self._about.data)
        agents = sum(_host_of(each.data) == host for each in plan.nodes.values())
        return self._view.room([worker.number for worker in like], agents)

    def _guard(
        self, plan: m.NodePlan, settings: Settings, ahead: Sequence[Worker], now: float
    ) -> list[Effect]:
        """Have a spare start the next role of those that it guards, once its worker's agent has said what
        that has on record."""
        self._look(plan, now)
        auto = settings.ready_standbys == AUTO
        most = None if auto else settings.ready_standbys
        wanted = [role for roles in self._guarded for role in roles[:most]]
        if over := [worker for worker in ahead if worker.target_role not in wanted]:
            return [effect for worker in over for effect in self.end(worker)]
        known = {worker.target_role for worker in ahead}
        left = (r for r in wanted if r not in known and self._failed[r] < ATTEMPTS)
        role = next((r for r in left if not auto or self._fits(r % settings.nproc_per_node, ahead)), None)
        if role is None or self._asking or (auto and not self._room(plan, ahead)):
            return []
        if now < self._settled and not self._copies_come(plan):
            return []
        if (where := plan.nodes.get(plan.roles[role])) is None:
            return []
        self._asking = True
        return [AskRecords(role, plan.epoch, where.data)]

    def _fits(self, device: int, ahead: Sequence[Worker]) -> bool:
        """Whether one more has room on a GPU of a spare, which nobody else uses."""
        there = [worker for worker in ahead if worker.device == device]
        if not there or not self._view.gpus():
            return True
        newest = max(there, key=lambda worker: worker.number)
        return standby_budget.fits(self._view.device_memory(newest.number), len(there))

    def _copies_come(self, plan: m.NodePlan) -> bool:
        start = plan.version if plan.version is not None else NONE
        return any(max(versions, default=NONE) > start for versions in self._view.replicas().values())

    def _look(self, plan: m.NodePlan, now: float) -> None:
        """Which roles this node guards in the plan."""
        if plan is self._plan:
            return
        if self._plan is None or plan.epoch != self._plan.epoch:
            self._settled = now + SETTLED
        self._plan = plan
        domains = {node: where.domain for node, where in plan.nodes.items()}
        places = Places(plan.roles, domains, spares_of(plan.nodes, plan.roles), guarded=True)
        wards: dict[str, list[int]] = {node: [] for node in places.wards(self._about.node)}
        for role, node in plan.roles.items() if wards else ():
            if node in wards:
                wards[node].append(role)
        self._guarded = list(wards.values())

    def records_found(self, found: RecordsFound, plan: m.NodePlan | None, now: float) -> list[Effect]:
        """`plan`: of the epoch that is under way; None between two."""
        self._asking = False
        if found.failed:
            self._not_before = now + PAUSE
            log.debug(
                "node %s: role %d is not started ahead yet: %s", self._about.node, found.role, found.failed
            )
        if found.failed or plan is None or plan.epoch != found.epoch or self._crew.playing():
            return []
        worker = self._crew.add(-1)
        worker.target_role, worker.records = found.role, (found.epoch, found.counts)
        return [Start(worker.number, -1)]

    def begins(
        self, worker: Worker, plan: m.WorkerPlan | None, master: str, settings: Settings
    ) -> list[Effect]:
        """Let a worker that has connected start its role. `plan`: of the epoch that is under way; None
        between two."""
        player, role = self._crew.of_role(worker.target_role), worker.target_role
        counts: m.Counts | None = None
        if worker.records is not None:
            epoch, counts = worker.records
            counts = counts if plan is not None and plan.epoch == epoch else None
            device = role % settings.nproc_per_node
        elif player is not None and player.stage == "training":
            counts, device = player.counts, player.device
        if plan is None or counts is None:
            return self.end(worker)
        worker.role, worker.doing, worker.device = role, WorkerState.AHEAD, device
        worker.began_with = replace(
            plan,
            store="",
            origin="memory",
            surrogates=m.Counterparts(((0, str(role)),)),
            completed={name: (count, role) for name, count in counts.items() if count},
        )
        environment = self._about.environment_of(role, worker.device, master, settings)
        assign = m.Assign(role, environment, worker.began_with, self._crew.ending)
        return [SetApart(worker.number, apart=True), ToWorker(worker.number, assign)]

    def registered(self, worker: Worker) -> None:
        """A worker has come to where it waits for its state."""
        self._failed[worker.target_role] = 0
        free, total = self._view.device_memory(worker.number)
        taken = f"; {(total - free) >> 20} of {total >> 20} MiB of its GPU are taken" if total else ""
        log.info(
            "node %s: a standby is ready for role %d: worker %d%s",
            *(self._about.node, worker.target_role, worker.pid, taken),
        )

    def ended(self, worker: Worker, how: str, now: float) -> None:
        """A worker that was to start a role ahead has ended."""
        self._not_before = now + PAUSE
        role = worker.target_role
        if worker.ordered or worker.is_ready:
            return
        self._failed[role] += 1
        what = worker.failed.what if worker.failed is not None else how
        log.info("node %s: a standby could not start role %d ahead: %s", self._about.node, role, what)
        if self._failed[role] == ATTEMPTS:
            log.warning(
                "node %s: no standby starts role %d ahead any more: it could not %d times in a row (%s). "
                "Should its worker die, it is started then",
                *(self._about.node, role, ATTEMPTS, what),
            )

    def end(self, worker: Worker) -> list[Effect]:
        """End a worker that is of no use any more."""
        worker.ordered = True
        return [Kill(worker.number)]

    # -- in need -----------------------------------------------------------------------------------

    def needed(self, role: int) -> tuple[bool, list[Effect]]:
        """The worker of the role has died. Returns whether another is ready, so that no standby has to be
        started in place of the one that will play it."""
        worker = self._crew.standby_for(role)
        if worker is None:
            return False, []
        if worker.is_ready:
            worker.needed = True
            return True, []
        if worker.doing is WorkerState.STARTING:  # then it is a standby like any other
            worker.target_role = -1
            return True, []
        return False, self.end(worker)

    @property
    def guarding(self) -> list[int]:
        """Roles of other nodes that have been started here."""
        return [worker.target_role for worker in self._crew.ahead() if worker.records and worker.is_ready]

    @property
    def waiting(self) -> int:
        """How many are about to take a role."""
        return sum(worker.needed for worker in self._crew.ahead())

    def epoch_ends(self, epoch: int) -> list[Effect]:
        """`epoch` is to begin: those who may have to take a role leave the one that they began in. Who is not
        ready is ended, lest the others wait for the time that it takes."""
        effects: list[Effect] = []
        for worker in self._crew.ahead():
            if worker.needed:
                effects.append(ToWorker(worker.number, m.Abort(epoch)))
            elif not worker.is_ready:
                effects += self.end(worker)
        return effects

    def epoch_begins(self, plan: m.WorkerPlan, here: Collection[int]) -> list[Effect]:
        """End those that are of no use in the epoch that begins. Whom a spare guards then, it looks later."""
        effects: list[Effect] = []
        for worker in self._crew.ahead():
            meant = worker.target_role in here or (worker.records is not None and not here)
            if not meant or not worker.is_ready or not serves(worker, plan):
                effects += self.end(worker)
        return effects

    def takes(self, role: int, plan: m.WorkerPlan) -> tuple[Worker | None, list[Effect]]:
        """The plan gives the role to another worker here: this one, if it can go on in it."""
        worker = self._crew.standby_for(role)
        if worker is None:
            return None, []
        of_role = {name: found for name, found in plan.completed.items() if _series(name).needs(role)}
        if not covers(worker.counts, worker.initial or 0, of_role):
            return None, self.end(worker)
        if worker.records is not None:
            for idle in self._crew.idle():
                if idle.device == worker.device:
                    idle.device = -1  # it is a standby now
        worker.doing, worker.needed, worker.target_role, worker.records = WorkerState.PLAYING, False, -1, None
        effects: list[Effect] = [SetApart(worker.number, apart=False)]
        effects += [ToWorker(worker.number, m.Abort(plan.epoch)), ToWorker(worker.number, m.PlanBegins(plan))]
        return worker, effects


def _trains(worker: Worker, plan: m.NodePlan) -> bool:
    """Whether it has done a step in this epoch, of which there are the copies that there must be."""
    if worker.doing is not WorkerState.PLAYING or worker.stage != "training":
        return False
    start = plan.version
    return worker.committed > (start if start is not None else worker.initial or 0)


def serves(worker: Worker, plan: m.WorkerPlan) -> bool:
    """Whether one that has started with other plans' epochs could go on in that of this plan."""
    began = worker.began_with
    if began is None or plan.version is None or plan.origin == "initial":
        return False  # it has left out to make what it would begin with
    return (
        plan.restart_epoch == began.restart_epoch
        and plan.version >= (worker.initial or 0)
        and plan.counterparts == began.counterparts
        and plan.membership.changes == began.membership.changes
        and plan.began_with == began.began_with
    )


def _series(name: str) -> Series:
    return series_of(parse(name))


def covers(counts: m.Counts, position: m.Version, completed: Mapping[str, tuple[int, int]]) -> bool:
    """Whether all start-up operations that a standby has taken from records are done for the others as well,
    who would do them with it otherwise; and whether those that its script, `position` steps on, comes to are
    on record still. `completed`: of the groups of its role."""
    done = {parse(name): count for name, (count, _) in completed.items()}
    over: dict[Series, list[tuple[int, int]]] = {}
    for tally, count in done.items():
        if isinstance(tally, Steps):
            over.setdefault(tally.series, []).append((tally.first, count))
    if any(min(first for first, _ in found) > position for found in over.values()):
        return False
    for name, count in counts.items():
        tally = parse(name)
        if isinstance(tally, Ended):
            continue
        if isinstance(tally, Steps):
            if all(until < count for _, until in over.get(tally.series, [])):
                return False
            continue
        step = tally.step
        past = step is not None and any(step < until for _, until in over.get(tally.at(None), []))
        if not past and done.get(tally, 0) < count:
            return False
    return True


def _host_of(data: str) -> str:
    """The first of an agent's addresses, without its port."""
    return data.partition(",")[0].rpartition(":")[0]
