"""The training loop's side of fault tolerance: `ProtectedTraining` says which step is next and runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ft_core.elastic.rules import Deal, Membership
from ft_core.errors import ConfigError
from ft_core.kept import Kept
from ft_core.worker import session
from ft_core.worker.loop import Loop
from ft_megatron.arguments import NOT_ASKED
from ft_megatron.deal import Dealer
from ft_megatron.exchange import Exchange
from ft_megatron.optimizer_hooks import hook_optimizer
from ft_megatron.state import MegatronAdapter

Result = TypeVar("Result")


class ProtectedTraining(Loop):
    """A training of Megatron-Core, protected, as its loop sees it.

    The function given to `run` may be entered again from its top after a recovery, so it takes all it
    needs to know about progress from `step`.
    """

    def __init__(self, *, enabled: bool, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        """`model`: the DDP-wrapped chunks, one for each virtual pipeline stage of this rank. `optimizer` as
        `get_megatron_optimizer` made it. `scheduler`: Megatron's, or None. `enabled`
        False leaves the training path untouched: the same loop runs under torchrun.

        Made once per process, when model, optimizer and scheduler are what training begins with, and before a
        step. Raises ConfigError when fault tolerance was asked for and cannot work.
        """
        super().__init__(session.current())
        self._adapter: MegatronAdapter | None = None
        self._group = 0
        self._lead = 0
        self._membership = Membership(1)
        self._exchange: Exchange | None = None
        if not enabled:
            if self._session is not None:
                self._session.unprotected(NOT_ASKED)
            self._session = None
            return
        if self._session is None:
            raise ConfigError("--ft needs ftrun in place of torchrun (same flags): nothing protects this job")
        self._adapter = MegatronAdapter(model, optimizer, scheduler)
        self._group = self._adapter.replica_group.index
        self._exchange = Exchange(model, self._session, self._group)
        config = model[0].config
        protected = hook_optimizer(optimizer, model, self._session, self._adapter.sharded)
        config.finalize_model_grads_func = protected(config.finalize_model_grads_func)
        self._session.point("startup")

    def _who_logs(self) -> tuple[int, ...]:
        assert self._session is not None and self._adapter is not None
        return self._adapter.ring if self._session.groups.elastic else ()

    # -- replica groups ------------------------------------------------------------------------

    @property
    def lead(self) -> int:
        """The first data-parallel rank that is there, counted over all replica groups: it writes the log."""
        if self._session is None or self._adapter is None:
            return 0
        return self._session.groups.taking_part[0] * self._adapter.member[1]

    def samples(self, count: int) -> list[int] | None:
        """Positions in the training data of this rank's next micro batch of `count` samples.

        All ranks ask once for each micro batch of a step, also those that read no data. None without fault
        tolerance: samples are dealt to the data-parallel ranks as always.
        """
        if self._session is None or self._adapter is None:
            return None
        self._session.check_epoch()  # before the step, rather than in its first collective
        if not self._adapter.dealers:
            member = self._adapter.member
            self._adapter.deal(Dealer(self._session, self._group, Deal(count * member[1]), member))
        return self._adapter.dealers[0].take()

    def schedule(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `forward_backward_func` for training: see `Exchange.schedule`."""
        return forward_backward if self._exchange is None else self._exchange.schedule(forward_backward)

    def mean(self, value: torch.Tensor, group: Any, of_training: bool = True) -> torch.Tensor:
        """The mean of `value`, of any shape, over the data-parallel ranks in `group` that took part, in
        place.

        `group`: a torch process group. `of_training`: in a training step those alone count that have been
        dealt samples. All ranks of the group call it. Waits for the device, as it is for a log that is
        written once: raises EpochChanged where the mean may be garbage.
        """
        if self._session is None:
            dist.all_reduce(value, group=group)
            return value.div_(dist.get_world_size(group))
        counted = self._session.groups.contributing if of_training else self._session.groups.taking_part
        if self._group not in counted:
            value.zero_()
        dist.all_reduce(value, group=group)
        self._session.exchanged()
        return value.div_(
            max(1, dist.get_world_size(group) * len(counted) // self._session.groups.membership.groups)
        )

    # -- the step ------------------------------------------------------------------------------

    def step_done(self, result: Any = None) -> None:
        """The step is complete on this rank: its state is staged now, and `step` is one more.

        `result`, plain data for the log, travels with the state (see `inherited`). All that belongs to the
        step has been done before, the scheduler's step included. Raises ConfigError for a loop that does not
        take its samples from `samples` under policy `shrink`.
        """
        if self._adapter is not None:
            self._adapter.result = result
        self.inherited = None
        if self._session is None:
            self._step += 1
        else:
            assert self._adapter is not None
            if self._session.groups.elastic and not self._adapter.dealers:
                raise ConfigError(
                    "--ft-policy shrink deals the samples of groups that left to the others: a training "
                    "loop must take its samples from `ProtectedTraining.samples`, on every rank; or give "
                    "another policy"
                )
            trained = [dealer.step_done() for dealer in self._adapter.dealers]
            self._adapter.kept = Kept.capture()
            self._session.step_done(trained[0] if trained and self._adapter.leads_group else None)
        self._has_done()

    def run(self, train: Callable[[], Result], step: Callable[[], object] = lambda: None) -> Result:
        """Run `train` to its end, through any number of recoveries, and return what it returns.

        `train` is called again after a recovery, on all ranks alike, and takes up the work at `step`. Once
        per process. `step`: a training step. A replica group that comes back rehearses it, before others wait
        for it. Errors that no recovery explains pass through.
        """
        if self._session is None:
            return train()
        session, adapter = self._session, self._adapter
        assert adapter is not None
        session.rehearse(adapter, step)
        adapter.kept = Kept.capture()

        def entered() -> Result:
            newcomer = self._enters(adapter.result)
            if not newcomer and self._lead != self.lead == self._group * adapter.member[1]:
                self._doubtful = self.step
                self.inherited = adapter.result  # who logged until now has left, and may not have come to it
            self._lead = self.lead
            if self._membership != session.groups.membership:
                # Steps that are done again are not what they were: other groups take part in them.
                self._membership, self._newest = session.groups.membership, self.step
                changes = session.groups.membership.changes
                if not newcomer or (changes and changes[-1][0] == self.step):
                    self._doubtful = min(self._doubtful, self.step)
            self._repeated = self.step < self._newest
            for dealer in adapter.dealers:
                dealer.restart()
            return train()

        return session.protect(adapter, entered, self._step)
