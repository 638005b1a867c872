"""Which training samples a script's own loader draws, while replica groups come and go.

Under policy `shrink`, batches over a `DistributedSampler` are made of what `elastic.Deal` deals to this
role's group. With all groups there these are the samples that the sampler itself would have given. The deal
goes by the steps that the script has done: it draws a step's batches once, also where the engine does the
step again with fewer groups, and what was drawn for later steps stands (see `elastic`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler

from ft_core.adapter import ReplicaGroup
from ft_core.elastic.rules import Deal, Membership
from ft_core.errors import ConfigError
from ft_core.patching import replaced
from ft_core.protocol.messages import Dealt
from ft_core.worker.session import Session
from ft_deepspeed import patched
from ft_deepspeed.stream import Stream

log = logging.getLogger(__name__)

KEPT = 4
"""Steps whose deals are kept: a recovery goes back by two at most."""

POLICY = 'fault_tolerance.policy "shrink"'


class Dealing:
    """Stands in for the `DistributedSampler` that is drawn from first in training; others are left alone."""

    def __init__(
        self,
        session: Session,
        group: ReplicaGroup,
        micro_batches: int,
        position: Callable[[], int],
        training: Callable[[], bool],
    ) -> None:
        """`group`: this role's. `micro_batches`: in a step. `position`: steps the script has
        done. `training`: what is drawn now is trained on."""
        self._session, self._group, self._groups = session, group.index, group.groups
        self._micro_batches = micro_batches
        self._position, self._training = position, training
        self._stream: Stream | None = None
        self._epochs: dict[int, int] = {}
        self._states: dict[int, dict[str, Any]] = {}
        """The deal as it was after a step."""
        self._turns: Counter[int] = Counter()
        """By step, samples that this group has been dealt for it, and ..."""
        self._batches: Counter[int] = Counter()
        """... the batches that they made."""
        self._under_way: tuple[int, Deal] | None = None
        self._warned = False
        self._resumed: int | None = None
        """The step of the checkpoint that the script goes on from, until it draws its first batch."""
        self._install()

    # -- the script's loader -------------------------------------------------------------------

    def _install(self) -> None:
        self._plain: Any = patched.DRAW.original()

        def dealing(plain: Callable[..., Any]) -> Callable[..., Any]:
            def drawn(batches: BatchSampler) -> Iterator[list[int]]:
                yield from self._deal_to(batches) if self._deals(batches) else plain(batches)

            return drawn

        def checking(begin: Callable[..., Any]) -> Callable[..., Any]:
            def checked(loader: Any) -> Any:
                self._check(loader)
                ahead = self._deals(loader.batch_sampler) and loader.num_workers > 0
                return self._not_ahead(begin, loader) if ahead else begin(loader)

            return checked

        patched.DRAW.wrap(dealing)
        patched.DRAW_AHEAD.wrap(checking)

    def _deals(self, batches: Any) -> bool:
        if not isinstance(batches, BatchSampler) or not isinstance(batches.sampler, DistributedSampler):
            return False
        return self._training() and (self._stream is None or self._stream.covers(batches))

    def _check(self, loader: Any) -> None:
        batches = loader.batch_sampler
        if type(batches).__module__.partition(".")[0] == "accelerate" and self._training():
            raise ConfigError(
                f"{POLICY} needs a DataLoader over torch's DistributedSampler, and accelerate (Hugging Face's"
                ' Trainer) deals samples in its own way: use "wait"'
            )

    def _not_ahead(self, begin: Callable[[Any], Any], loader: Any) -> Any:
        """An iteration in which this process reads the samples itself, though the script wants others to.

        They would read those of later steps, before it is known which groups will be there. To read these
        again would move their random states, besides.
        """
        if not self._warned and self._group == 0:
            log.warning(
                "%s: this process reads its training samples itself, and not by num_workers=%d others: they "
                "read ahead, before it is known which groups will be there",
                *(POLICY, loader.num_workers),
            )
        self._warned = True
        with replaced(loader, {"num_workers": 0, "timeout": 0}):
            return begin(loader)

    def _deal_to(self, batches: BatchSampler) -> Iterator[list[int]]:
        if self._stream is None:
            self._bind(batches)
        stream = self._stream
        assert stream is not None
        if self._resumed is not None:
            yield from self._skipped(batches, self._resumed)
        end = 0
        while stream.length:
            step = self._position() + 1
            deal = self._dealt_so_far(step)
            if not end:
                end = stream.begin(batches, deal.next)
            if deal.next >= end:
                return
            batch: list[int] = []
            while len(batch) < batches.batch_size and (deal.next < end or (batch and stream.whole)):
                batch += deal.take_for(self._group, step, self._membership)
                self._turns[step] += 1
            self._batches[step] += 1
            yield [stream.index(at) for at in batch]

    def _bind(self, batches: BatchSampler) -> None:
        sampler: Any = batches.sampler
        if (sampler.rank, sampler.num_replicas) != (self._group, self._groups):
            raise ConfigError(
                f"{POLICY} needs a DistributedSampler of {self._groups} replicas, one for each data-parallel "
                f"rank, and its rank to be {self._group} here, not {sampler.num_replicas} and {sampler.rank}"
            )
        self._stream = Stream(batches, self._epochs)

    def resume(self, version: int, saved: Any) -> None:
        """The script goes on from its own checkpoint of step `version`, which says this of the samples."""
        self._resumed = version
        if saved is not None:
            self.restore(version, saved)

    def _skipped(self, batches: BatchSampler, version: int) -> Iterator[list[int]]:
        """The batches that the script passes over in the epoch that it resumes in.

        As many as if all groups had been there all the time: it knows no better.
        """
        sampler: Any = batches.sampler
        many = version * self._micro_batches - sampler.epoch * len(batches)
        many = many if 0 <= many < len(batches) else 0  # it begins an epoch
        plain = self._plain(batches)
        for _ in range(many):
            yield next(plain)
        self._resumed = None
        if not self._states:  # the checkpoint is of a job whose groups were always there
            assert self._stream is not None
            first = sampler.epoch * self._stream.length + many * batches.batch_size * self._groups
            self._states[version] = Deal(1, first).to_json()

    # -- the step ------------------------------------------------------------------------------

    def check_drawn(self, step: int, micro_batches: int) -> None:
        """The script has come to the end of `step`, in which it trained so many.

        Raises ConfigError if it drew others: then nobody knows which step trains which samples.
        """
        if self._batches[step] == micro_batches:
            return
        if self._stream is None:
            raise ConfigError(
                f"{POLICY} needs a DataLoader over torch's DistributedSampler: step {step} drew from none"
            )
        raise ConfigError(
            f"{POLICY} needs a script that draws each micro batch in the step that trains it, and after "
            "loading a checkpoint first draws those of the epoch that are done: "
            f"step {step} has trained {micro_batches} and drawn {self._batches[step]}"
        )

    def finish(self, step: int) -> Dealt | None:
        """`step` is complete, or it is once more: what the ledger is to know of it. None on a role without
        data."""
        if not self._turns[step]:
            return None
        deal, membership = Deal.from_json(self._states[step - 1]), self._membership
        for _ in range(self._turns[step]):
            deal.take(step, membership)
        entry = deal.ledger_entry(step, membership)
        self._under_way = None
        self._states[step] = deal.to_json()
        for kept in (self._states, self._turns, self._batches):
            kept.pop(step - KEPT, None)
        return entry

    # -- snapshots -----------------------------------------------------------------------------

    def state(self, version: int) -> Any:
        """After that step, for the envelope."""
        if (deal := self._states.get(version)) is None:
            return None
        return {"deal": deal, "epochs": dict(self._epochs)}

    def restore(self, version: int, saved: Any) -> bool:
        """Have it as a peer's was after step `version`, where the script is. Returns whether the batches that
        it has drawn for the next step are the right ones."""
        if saved is None:
            return True
        right = not self._turns[version + 1] or (
            self._deal_after(version) == Deal.from_json(saved["deal"])
            and len(self._membership.dealt(version + 1)) == self._groups
        )
        self._states[version] = saved["deal"]
        self._epochs.clear()
        self._epochs.update(saved["epochs"])
        self._under_way = None
        return right

    def _deal_after(self, version: int) -> Deal | None:
        return Deal.from_json(self._states[version]) if version in self._states else None

    def _dealt_so_far(self, step: int) -> Deal:
        if self._under_way is None or self._under_way[0] != step:
            if not self._states:
                self._states[step - 1] = Deal(1).to_json()
            deal = Deal.from_json(self._states[step - 1])
            for _ in range(self._turns[step]):
                deal.take(step, self._membership)
            self._under_way = step, deal
        return self._under_way[1]

    @property
    def _membership(self) -> Membership:
        known = self._session.groups.membership
        return known if known.groups == self._groups else self._session.groups.start.membership(self._groups)
