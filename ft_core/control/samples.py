"""The controller's entries into the ledger of samples."""

from __future__ import annotations

from ft_core.control.cluster.state import ClusterState
from ft_core.control.events import AppendLedger, Effect, Record
from ft_core.elastic.ledger import Ledger
from ft_core.elastic.rules import Membership
from ft_core.protocol.messages import Trained


class Samples:
    """What roles tell of their steps, in the order in which it can be entered."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._ledger = Ledger(self._lines.append)
        self._epoch = 0
        """The newest epoch that is entered."""
        self._waiting: list[Trained] = []
        self._unknown: dict[int, int | None] = {}
        """The versions of epochs that began before all roles had told of their groups."""

    def begin(self, cluster: ClusterState) -> list[Effect]:
        """Enter that an epoch has begun; later for the first, in which roles tell of their groups."""
        plan = cluster.current_plan
        if not cluster.groups.known:
            self._unknown[plan.epoch] = plan.version
        elif self._epoch != plan.epoch:
            start = cluster.settings.start.membership(cluster.groups.membership.groups)
            for epoch in sorted(set(self._unknown) - {plan.epoch}):
                self._ledger.epoch(epoch, self._unknown[epoch], _json(start))
            self._unknown.clear()
            self._epoch, cluster.versions.ledger_through = plan.epoch, plan.ledger_through
            self._ledger.epoch(plan.epoch, plan.version, _json(cluster.groups.membership))
        return self._entered()

    def on_trained(self, cluster: ClusterState, message: Trained) -> list[Effect]:
        """A role has trained a step's samples."""
        self._waiting.append(message)
        effects = self.begin(cluster)
        if not cluster.groups.known:
            return effects  # word of another role's group is on its way
        for each in self._waiting:
            dealt = each.dealt
            record = {"samples": {str(group): ranges for group, ranges in dealt.samples.items()}}
            about = {"waiting": dealt.waiting, "next": dealt.next}
            when = {"epoch": each.epoch, "since": each.since or 0, "step": each.step}
            problem = self._ledger.step({**when, **record, **about})
            if problem is not None:
                effects.append(Record("ledger", cluster.epoch, problem))
            if each.epoch == self._epoch or each.step <= (cluster.current_plan.version or 0):
                cluster.versions.ledger_through = max(cluster.versions.ledger_through, each.step)
        self._waiting.clear()
        return effects + self._entered()

    def _entered(self) -> list[Effect]:
        lines, self._lines[:] = list(self._lines), []
        return [AppendLedger(line) for line in lines]


def _json(membership: Membership) -> dict[str, object]:
    return membership.to_json()
