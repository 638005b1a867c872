"""DeepSpeed's gradient exchange while replica groups come and go (see `Membership.gradient_scale`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from deepspeed import comm as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from ft_core.patching import replaced
from ft_core.worker.boundary import intervening
from ft_core.worker.session import Session
from ft_deepspeed import patched
from ft_deepspeed.comm import Comm
from ft_deepspeed.zero import inner_optimizers


class Exchange:
    """Sets what one engine's gradients are multiplied by before DeepSpeed averages them over all groups."""

    def __init__(self, engine: Any, session: Session, group: int) -> None:
        """`engine`: one whose data-parallel ranks are replica groups; `group`: this role's."""
        self._engine, self._session, self._group = engine, session, group
        if isinstance(engine.optimizer, (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)):
            self._weigh_partitioned(engine.optimizer)
        else:
            self._weigh_whole(engine)
        for average in patched.AVERAGES:
            average.wrap(self._over_those_present, of=engine)
        patched.CLIP.wrap(self._by_whole_norm, of=engine)
        slowed = intervening(
            session, lambda: itertools.chain.from_iterable(o.param_groups for o in inner_optimizers(engine))
        )
        patched.SLOWED_STEP.wrap(slowed, of=engine.optimizer, bound=True)  # schedulers expect a method

    def _weigh_whole(self, engine: Any) -> None:
        """Where ranks exchange whole gradients after the last backward pass."""

        def weighing(gradients: Callable[..., Any]) -> Callable[..., Any]:
            def weighted() -> Any:
                found = dense, experts = gradients()
                for gradient in itertools.chain(dense, *experts.values()):
                    self._weigh(gradient)
                return found

            return weighted

        patched.WHOLE_GRADIENTS.wrap(weighing, of=engine)

    def _weigh_partitioned(self, optimizer: Any) -> None:
        """With ZeRO: as a gradient goes into the bucket that is reduced."""
        stage3 = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)

        def weighing(enter: Callable[..., Any]) -> Callable[..., Any]:
            def entered(parameter: Any, *args: Any) -> None:
                gradient = parameter.grad if stage3 else optimizer.get_param_gradient_attribute(parameter)
                if gradient is not None and getattr(parameter, "ds_grad_is_ready", True):
                    self._weigh(gradient)
                enter(parameter, *args)

            return entered

        patched.BUCKETED_GRADIENTS[stage3].wrap(weighing, of=optimizer)

    def _weigh(self, gradient: Any) -> None:
        scale = self._session.groups.membership.gradient_scale(self._session.version + 1, self._group)
        if scale is None:
            gradient.zero_()
        elif scale != 1.0:
            gradient.mul_(scale)

    def _over_those_present(self, average: Callable[..., Any]) -> Callable[..., Any]:
        def averaged(*args: Any, **kwargs: Any) -> Any:
            there = self._session.groups.membership.taking_part(self._session.version + 1)
            with replaced(self._engine, {"dp_world_size": len(there)}):
                return average(*args, **kwargs)

        return averaged

    def _by_whole_norm(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        """DeepSpeed averages the norm over the data-parallel ranks once more, all of which have the same."""

        def clipped(*args: Any, **kwargs: Any) -> Any:
            membership = self._session.groups.membership
            there = membership.taking_part(self._session.version + 1)

            def all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                """A sum over the data-parallel ranks is what all of them would have given."""
                work = dist.all_reduce(tensor, *args, **kwargs)
                if kwargs.get("group") is groups._get_data_parallel_group():
                    tensor.mul_(membership.groups / len(there))
                return work

            with patched.NORM_COMM.replaced(Comm(all_reduce=all_reduce)):
                return clip(*args, **kwargs)

        return clipped
