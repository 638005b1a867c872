"""The job as people and metrics see it: numbers, page and status, read from what the machine knows."""

from __future__ import annotations

from msgspec.structs import replace

from ft_core.control.decide import risk
from ft_core.control.liveness.hangs.detector import Detector
from ft_core.control.observe import ctl
from ft_core.control.observe.goodput import Account, Standing
from ft_core.control.observe.job_metrics import Numbers, counted
from ft_core.control.observe.observer import Observer
from ft_core.control.observe.overview import Overview, overview
from ft_core.control.phases import Done, Forming
from ft_core.control.recovery import RecoveryCoordinator
from ft_core.control.slow_nodes import SlowNodes
from ft_core.protocol.messages import NAMED, JobStatus, SlowRole


class JobView:
    """What one controller shows."""

    def __init__(
        self,
        recovery: RecoveryCoordinator,
        hangs: Detector,
        slow: SlowNodes,
        observer: Observer,
        pid: int,
    ) -> None:
        """`observer`: of the job. `pid`: of the controller's process."""
        self._slow = slow
        self._recovery, self._hangs, self._observer, self._pid = recovery, hangs, observer, pid
        self._cluster, self._out = recovery.cluster, recovery.out
        self._counted = risk.Last()

    @property
    def account(self) -> Account:
        """Where the job's time goes."""
        return self._observer.account

    def numbers(self, wall: float, since_1970: float) -> Numbers:
        """The job's numbers for metrics, now: the same moment by the wall clock and in seconds since 1970."""
        cluster, account, counts = self._cluster, self.account, self._observer.metrics
        settings, groups = cluster.settings, cluster.groups.membership.groups
        there = round(groups * len(cluster.places) / settings.world_size)
        at = counts.durable
        return Numbers(
            job={
                "job": cluster.plan.job if cluster.plan is not None else "",
                "nodes": str(settings.nnodes),
                "workers": str(settings.world_size),
                "replicas": str(settings.replicas),
                "policy": settings.policy,
                "term": str(cluster.term),
            },
            phase=self._recovery.phase.name,
            epoch=cluster.epoch,
            step=account.version,
            spares=sum(node.idle > 0 for node in cluster.spares()),
            groups=(there, groups - there) if groups else None,
            failures=dict(counts.failures),
            recoveries=dict(counts.recoveries),
            rungs=dict(counts.rungs),
            recovery={phase: counted(each) for phase, each in counts.phases.items()},
            steps=counted(counts.steps),
            steps_redone=account.steps_redone,
            seconds=account.until(wall),
            waited=counts.waited,
            sent=counts.sent,
            durable=None if at is None else since_1970 - (wall - at),
            suspects=len(self._hangs.suspects),
            xids=dict(counts.xids),
            loss=counts.loss,
            writes=counted(counts.writes),
            broken=cluster.strikes.broken(self._out.now),
            held=risk.held(cluster, self._counted) if cluster.plan is not None else None,
            standing=self.standing(wall),
            unprotected=self._recovery.protection.lacking,
            every=cluster.period,
            stragglers=tuple(self._slow.stragglers.standing_out),
        )

    def overview(self, wall: float, since_1970: float) -> Overview:
        """What the page shows, now: the same moment by the wall clock and in seconds since 1970."""
        numbers = self.numbers(wall, since_1970)
        finished, suspects = self._recovery.completion.finished, self._hangs.suspects
        return overview(self._cluster, numbers, finished, suspects, self.account.step, self._out.now)

    def standing(self, wall: float) -> Standing:
        """How the job gets on."""
        recovery, account = self._recovery, self.account
        on_its_own = recovery.protection.unprotected or recovery.completion.released
        over = on_its_own or isinstance(recovery.phase, Forming | Done)
        return Standing(account.now, None if over else account.since_step(wall), account.patience)

    def status(self) -> JobStatus:
        """What `ftctl status` shows."""
        recovery, wall = self._recovery, self._out.wall
        finished = recovery.completion.finished
        status = ctl.status(self._cluster, recovery.phase, finished, self._pid, self._out.now)
        return replace(
            status,
            seconds={str(cause): s for cause, s in self.account.until(wall).items() if s},
            complaint=self.standing(wall).complaint,
            unprotected=recovery.protection.lacking,
            slow=[
                SlowRole(found.role, found.node, found.part, found.score)
                for found in list(self._slow.stragglers.found.values())[:NAMED]
            ],
        )
