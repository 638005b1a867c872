"""What becomes of Megatron's training loop while replica groups come and go (policy `shrink`)."""

from __future__ import annotations

import logging
import time
from types import ModuleType
from typing import Any, NoReturn

from ft_core.elastic.rules import Deal, stand_in
from ft_core.protocol.messages import Dealt
from ft_core.worker import session
from ft_core.worker.session import Session
from ft_megatron import patched
from ft_megatron.data import Loaders
from ft_megatron.deal import Dealer
from ft_megatron.exchange import Exchange
from ft_megatron.state import MegatronAdapter

log = logging.getLogger(__name__)

_POLL = 0.05


def dealt(dataset: Any) -> bool:
    """Whether the samples of this data set are dealt to the groups that are there: the training data's."""
    current = session.current()
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    return current is not None and current.groups.elastic and getattr(split, "name", "train") == "train"


class ReplicaGroups:
    """The loop's samples, schedule and log, by who takes part."""

    exchange: Exchange

    def __init__(self, training: ModuleType, current: Session, adapter: MegatronAdapter) -> None:
        self._training, self._session, self._adapter = training, current, adapter

    def join(self, model: list[Any], scheduler: Any, loaders: Loaders) -> None:
        """Hook the gradient exchange, the loaders and the schedule."""
        group = self._adapter.replica_group.index
        self.exchange = Exchange(model, self._session, group)
        for loader in loaders.dealt:
            deal = Deal(loader.turn * self._adapter.member[1], loader.first)
            loader.dealer = Dealer(self._session, group, deal, self._adapter.member)
            self._adapter.deal(loader.dealer)
        if scheduler is not None and self._training.get_args().train_samples:
            patched.SCHEDULE.wrap(self._by_samples, of=scheduler)

    @property
    def all_are_there(self) -> bool:
        """Whether all groups take part in the step under way."""
        return len(self._session.groups.taking_part) == self._session.groups.membership.groups

    @property
    def settled(self) -> bool:
        """Whether a checkpoint says with its number of samples which of them are trained."""
        return self._session.groups.membership.settled(self._session.version + 1)

    def await_all(self) -> NoReturn:
        """Wait for a new epoch, with groups that are away now: what needs all of them is done then.

        Raises EpochChanged.
        """
        log.warning(
            "training has come to its end; the last checkpoint waits for the replica groups that left"
        )
        while True:
            self._session.check_epoch()
            time.sleep(_POLL)

    def restart(self) -> None:
        """The step under way begins anew."""
        for dealer in self._adapter.dealers:
            dealer.restart()

    def step_done(self) -> Dealt | None:
        """A step is complete: for the ledger, from one role of each group."""
        trained = [dealer.step_done() for dealer in self._adapter.dealers]
        return trained[0] if trained and self._adapter.leads_group else None

    def count_missing(self) -> None:
        """Megatron's loop is about to count the samples of all groups as consumed: allow for it."""
        args = self._training.get_args()
        full = self._session.groups.membership.groups
        if missing := full - self._contributing():
            of_all = self._training.get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
            args.consumed_train_samples -= of_all * missing // full

    def is_last(self) -> bool:
        """Whether this role writes Megatron's log: the last does, or its next peer whose group is there."""
        last, ring = self._session.world_size - 1, self._adapter.ring
        return last in ring and self._session.role == stand_in(last, ring, self._session.groups.absent)

    def printed(self, text: str) -> bool:
        """Whether a worker that has written Megatron's log before has printed `text`."""
        return self._session.printed(text, self._adapter.ring if self._session.groups.elastic else ())

    def _contributing(self) -> int:
        return len(self._session.groups.contributing)

    def _by_samples(self, step: Any) -> Any:
        """A schedule that goes by samples goes by those that are trained; one by iterations as always."""

        def counted(increment: int) -> Any:
            return step(increment=increment * self._contributing() // self._session.groups.membership.groups)

        return counted
