"""The commit wait and the barrier in a framework's step (docs/recovery_rule.md), where its adapter puts them.

The rule: a role waits for its commit before it contributes to a reduction without which no role can begin to
change state. Which reduction that is, and so where `wait` stands, the adapter knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ft_core.elastic.rules import intervened
from ft_core.worker.session import Session

log = logging.getLogger(__name__)
Method = Callable[..., Any]


class Boundary:
    """The boundary of one engine's steps."""

    def __init__(self, session: Session, own_barrier: bool, device: Callable[[], Any]) -> None:
        """`own_barrier`: the framework has no such reduction here, and one of one element is added."""
        self._session, self._device = session, device
        self.own_barrier = own_barrier
        if own_barrier:
            log.warning(
                "this configuration has no reduction that all ranks take part in: one of one element is added"
            )

    def wait(self) -> None:
        """Before the reduction that all roles take part in. Raises EpochChanged."""
        self._session.commit_wait()
        if self.own_barrier:
            dist.all_reduce(torch.zeros(1, device=self._device()))


def intervening(
    session: Session, groups: Callable[[], Iterable[dict[str, Any]]]
) -> Callable[[Method], Method]:
    """Wraps what steps: by the learning rate that goes with the number of replica groups that train.

    `groups`: the optimizers' parameter groups.
    """

    def wrapper(step: Method) -> Method:
        def intervening_step(*args: Any, **kwargs: Any) -> Any:
            with intervened(list(groups()), session.groups.lr_factor):
                return step(*args, **kwargs)

        return intervening_step

    return wrapper


def preceded_by(action: Callable[[], None]) -> Callable[[Method], Method]:
    """Wraps a function: `action` comes first."""

    def wrapper(method: Method) -> Method:
        def preceded(*args: Any, **kwargs: Any) -> Any:
            action()
            return method(*args, **kwargs)

        return preceded

    return wrapper
