"""What the console is told while a job forms or recovers, if that takes long: who is awaited."""

from __future__ import annotations

from ft_core.control.cluster.progress import Progress
from ft_core.control.cluster.state import ClusterState
from ft_core.control.decide.forming import ranked
from ft_core.control.events import PrintConsole
from ft_core.control.observe import explain
from ft_core.control.phases import Done, Forming, Phase, Quiescing, Rebuilding, Running, Saving, Waiting

FIRST = 10.0
"""Seconds after which it is said for the first time; then after twice as long each time, so that what takes
hours fills no console."""


class ProgressReporter:
    """Says nothing while all is well."""

    def __init__(self) -> None:
        self._since: float | None = None
        """The time since which all is not well; None: all is."""
        self._wait = FIRST
        self._starts = False
        """Whether it was the job's start: of a recovery it is said elsewhere that all is well again."""

    def tick(
        self, cluster: ClusterState, phase: Phase, progress: Progress | None, now: float
    ) -> list[PrintConsole]:
        """`progress`: of the epoch under way; None where nobody says how far it is."""
        if _well(phase, progress):
            said, since = self._wait > FIRST, self._since
            self._since, self._wait = None, FIRST
            if not said or since is None or not self._starts or isinstance(phase, Done):
                return []
            return [PrintConsole(f"ftrun: all roles train, after {now - since:.0f} s")]
        if self._since is None:
            self._since, self._starts = now, not cluster.versions.trained
        # Each is said when as much time has passed as all before it together.
        if now - self._since < self._wait:
            return []
        self._wait *= 2
        return [PrintConsole(f"ftrun: {_doing(cluster, phase, progress)} ({now - self._since:.0f} s)")]


def _well(phase: Phase, progress: Progress | None) -> bool:
    running = isinstance(phase, Running) and (progress is None or progress.all_stepped)
    return running or isinstance(phase, Done)


def _doing(cluster: ClusterState, phase: Phase, progress: Progress | None) -> str:
    settings = cluster.settings
    match phase:
        case Forming():
            wanted, n = settings.first_nodes, settings.nproc_per_node
            by_rank = ranked(cluster)
            missing = [rank for rank in range(wanted) if rank not in by_rank]
            if missing:
                here, late = wanted - len(missing), explain.some(missing)
                return (
                    f"starting: {here} of {wanted} nodes are up; not here, or still importing: ranks {late}"
                )
            late = explain.some([node.name for rank in range(wanted) if (node := by_rank[rank]).idle < n])
            return f"starting: all {wanted} nodes are up; still importing: {late}"
        case Rebuilding():
            return f"a new controller has heard from {len(cluster.nodes)} nodes, and waits for the others"
        case Quiescing():
            late = explain.some(
                [n for n, node in cluster.nodes.items() if node.holdings.reported != cluster.epoch]
            )
            return f"recovering: workers leave their step; not yet: nodes {late}"
        case Waiting():
            return f"waiting for a node; without a worker: roles {explain.some(cluster.lost())}"
        case Saving():
            return "the job ends, and its newest version is written to storage"
    assert progress is not None
    awaited = progress.awaited
    verb = "have their state" if awaited.what == "state" else "have finished a step"
    done = f"{len(cluster.places) - len(awaited.roles)} of {len(cluster.places)} roles {verb}"
    names = sorted({cluster.places[role] for role in awaited.roles if role in cluster.places})
    awaiting = f"not yet: roles {explain.some(sorted(awaited.roles))} on {explain.some(names)}"
    return f"{'recovering' if cluster.versions.trained else 'starting'}: {done}; {awaiting}"
