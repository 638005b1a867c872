"""The training loop's side of fault tolerance: a `Job` says which step is next and runs the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ft_core import session
from ft_core.errors import ConfigError
from ft_core.session import Session
from ft_megatron.state import MegatronAdapter

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Job:
    """One training job as its loop sees it.

    The function given to `run` may be entered again from its top after a recovery, so it takes all it
    needs to know about progress from `step`.
    """

    def __init__(self, *, enabled: bool, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        """`model`: the DDP-wrapped chunks. `enabled` False leaves the training path untouched.

        Raises ConfigError when fault tolerance was asked for and cannot work.
        """
        self._session: Session | None = session.current()
        self._step = 0
        self._newest = 0
        self._repeated = False
        self._adapter: MegatronAdapter | None = None
        self.inherited: Any = None
        """The result of step `step`, if another worker did that step in this role, else None."""
        if not enabled:
            if self._session is not None:
                self._session.unprotected()
            self._session = None
            return
        if self._session is None:
            raise ConfigError("--ft needs ftrun in place of torchrun (same flags): nothing protects this job")
        if getattr(model[0].ddp_config, "overlap_param_gather", False):
            raise ConfigError(
                "--ft does not support --overlap-param-gather yet: at the end of a step the parameters are "
                "not complete; leave the flag out"
            )
        self._adapter = MegatronAdapter(model, optimizer, scheduler)
        _hook(optimizer, model, self._session, self._adapter.sharded)
        self._session.point("startup")

    @property
    def step(self) -> int:
        """Training steps done; the next one is ``step + 1`` of the log."""
        return self._step if self._session is None else self._session.version

    @property
    def replaying(self) -> bool:
        """Whether this process has been further than `step` already: what it logs now, it logged before."""
        return self.step < self._newest or self._repeated

    @property
    def epoch(self) -> int:
        """The engine's epoch: 1 plus the number of recoveries; 0 without fault tolerance."""
        return 0 if self._session is None else self._session.epoch

    @property
    def injecting(self) -> bool:
        """Whether faults are injected, so that the loop should install its injection points."""
        return self._session is not None and self._session.injecting

    def step_done(self, result: Any = None) -> None:
        """The step is complete on this rank; `result`, plain data for the log, travels with the state."""
        if self._adapter is not None:
            self._adapter.result = result
        self.inherited = None
        if self._session is None:
            self._step += 1
        else:
            self._session.step_done()
        self._repeated = self.step <= self._newest
        self._newest = max(self._newest, self.step)

    def point(self, name: str) -> None:
        """A named place where a test may have a fault injected."""
        if self._session is not None:
            self._session.point(name)

    def run(self, train: Callable[[], Result]) -> Result:
        """Run `train` to its end, through any number of recoveries, and return what it returns."""
        if self._session is None:
            return train()
        adapter = self._adapter
        assert adapter is not None

        def entered() -> Result:
            if self.step > self._newest:
                # A worker that takes a role over may find a step complete whose line nobody has logged.
                self.inherited = adapter.result
                self._newest = self.step
            self._repeated = self.step < self._newest
            return train()

        return self._session.protect(adapter, entered, self._step)


def _hook(optimizer: Any, model: list[Any], session: Session, sharded: bool) -> None:
    """Put the commit wait, the barrier and the step tag around the optimizer's own methods.

    The barrier is the all-reduce of the gradient norm, which `ChainedOptimizer.step` always does. With
    one distributed optimizer it spans every rank, so waiting for the commit just before it is enough.
    Otherwise it spans the model-parallel ranks only and becomes a barrier of all ranks together with
    the gradient exchange over DP before it: then the wait must come before that exchange.
    """
    spans_all = sharded and model[0].ddp_config.num_distributed_optimizer_instances == 1
    step, step_with_ready_grads = optimizer.step, optimizer.step_with_ready_grads
    has_norm = hasattr(optimizer, "chained_optimizers") or optimizer.config.clip_grad > 0
    overlapped = model[0].ddp_config.overlap_grad_reduce
    extra = not has_norm or (not spans_all and overlapped)
    if extra:
        log.warning(
            "this configuration has no reduction that all ranks take part in: one of one element is added"
        )

    def protected_step(*args: Any, **kwargs: Any) -> Any:
        session.point("gradients")
        if spans_all or extra:
            session.commit_wait()
        if extra:
            dist.all_reduce(torch.zeros(1, device=torch.cuda.current_device()))
        return step(*args, **kwargs)

    def tagged_step_with_ready_grads(*args: Any, **kwargs: Any) -> Any:
        session.optimizer_begins()
        return step_with_ready_grads(*args, **kwargs)

    optimizer.step = protected_step
    optimizer.step_with_ready_grads = tagged_step_with_ready_grads

    config = model[0].config
    finalize = config.finalize_model_grads_func
    if not spans_all and not extra:

        def protected_finalize(*args: Any, **kwargs: Any) -> Any:
            session.commit_wait()
            return finalize(*args, **kwargs)

        config.finalize_model_grads_func = protected_finalize

    for chunk in model if session.injecting else ():
        chunk.start_param_sync = _with_point(chunk.start_param_sync, session)


def _with_point(gather: Callable[..., Any], session: Session) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        session.point("gather")
        return gather(*args, **kwargs)

    return wrapped
