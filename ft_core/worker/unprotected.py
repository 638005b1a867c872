"""Scripts that train under `ftrun` and are not protected: the job says so, once, and why.

Torch's own data parallelism exchanges gradients by itself, in steps that no adapter sees: such a script has
no step that could be done again. Others just never say that they train: all that they do counts as start-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from ft_core import patched
from ft_core.import_hook import after_import
from ft_core.worker.session import Session

_STEPS = 100
"""Steps of optimizers in start-up after which a script is taken to train."""
_FEW, _SECONDS = 3, 10.0
"""So many suffice if they come this far apart; fewer, or all at once, are how some optimizers are made."""
_WHY = (
    "its script has done {} optimizer steps, and has neither called Session.protect nor asked its framework "
    "to (Megatron: --ft; DeepSpeed: a fault_tolerance section)"
)


class UnprotectedWatch:
    """Notices that one worker's script trains unprotected."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps = 0
        self._first = 0.0
        self._said = False
        self._hook = register_optimizer_step_post_hook(self._stepped)

    @property
    def _in_start_up(self) -> bool:
        return not (self._session.protecting or self._session.is_unprotected)

    def _stepped(self, *_: object) -> None:
        # The hook stays: torch goes through all of them now, and fails if one is taken away meanwhile.
        if self._in_start_up:
            self._steps += 1
            self._first = self._first or time.monotonic()
            apart = self._steps >= _FEW and time.monotonic() - self._first >= _SECONDS
            if self._steps >= _STEPS or apart:
                self._say()

    def script_ends(self) -> None:
        """By itself. That it has trained unprotected should not go unnoticed, short as it may have been."""
        if self._steps and self._in_start_up:
            self._say()

    def _say(self) -> None:
        if not self._said and self._session.role == 0:
            self._session.unprotected_so_far(_WHY.format(self._steps))
        self._said = True


def install(session: Session) -> UnprotectedWatch:
    """Have the session know when a model is wrapped, and the user when nothing is protected. Once per
    process."""

    def noticing(name: str, wrap: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not session.protecting:
                session.unprotected(f"a model is wrapped in torch's {name}, whose steps cannot be done again")
            return wrap(*args, **kwargs)

        return wrapped

    def patch(_: ModuleType) -> None:
        patched.FSDP.wrap(partial(noticing, "FullyShardedDataParallel"))
        patched.FULLY_SHARD.wrap(partial(noticing, "fully_shard"))

    patched.DDP.wrap(partial(noticing, "DistributedDataParallel"))
    after_import("torch.distributed.fsdp", patch)
    return UnprotectedWatch(session)
