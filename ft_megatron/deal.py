"""Which training samples this role reads in a step, while replica groups come and go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ft_core.elastic.rules import Deal
from ft_core.protocol.messages import Dealt
from ft_core.worker.session import Session


class Dealer:
    """Deals to this role's replica group, micro batch by micro batch.

    A step that is abandoned leaves no trace: what it took is forgotten when the step begins anew.
    """

    def __init__(self, session: Session, group: int, deal: Deal, member: tuple[int, int] = (0, 1)) -> None:
        """`group`: this role's replica group. `deal`: as it is before the next step, with turns of a micro
        batch for each of the data-parallel ranks in a group: `member` is which of how many this one is."""
        self._session, self._group = session, group
        self._member = member
        self._done = self._deal = deal
        self._first = deal.to_json()
        self._step = -1

    @property
    def all_are_there(self) -> bool:
        """Whether all groups are dealt samples, and none wait: then each reads what it always has."""
        membership, step = self._session.groups.membership, self._session.version + 1
        return len(membership.dealt(step)) == membership.groups and not self._deal.waiting

    @property
    def contributes(self) -> bool:
        """Whether this group has samples of its own in the step under way."""
        return self._group in self._session.groups.contributing

    def take(self) -> list[int]:
        """Positions of the samples of this role's next micro batch in the step under way."""
        self._begin()
        dealt = self._deal.take_for(self._group, self._session.version + 1, self._session.groups.membership)
        index, members = self._member
        size = len(dealt) // members
        return dealt[index * size : (index + 1) * size]

    def step_done(self) -> Dealt:
        """The step is complete: what the ledger is to know of it. Before the engine hears of it."""
        self._begin()
        entry = self._deal.ledger_entry(self._session.version + 1, self._session.groups.membership)
        self._done, self._step = self._deal, -1
        return entry

    def restart(self) -> None:
        """The step under way begins anew."""
        self._step = -1

    def to_json(self) -> dict[str, Any]:
        """At the end of a step."""
        return self._done.to_json()

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Inverse of `to_json`, here or in a successor. None: the snapshot is older than this dealer."""
        self._done, self._step = Deal.from_json(self._first if saved is None else saved), -1

    def _begin(self) -> None:
        step = self._session.version + 1
        if self._step != step:
            self._step, self._deal = step, self._done.copy()
