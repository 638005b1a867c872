"""A training loop of one's own on DeepSpeed that is entered again after a recovery: `ProtectedTraining`.

The other way, and the usual one, is to protect a script as it is (`protection`). There a newcomer's script
goes through the steps that are done. A loop that can begin at any step is told which, so that a newcomer goes
through none, and nothing of what a script was given has to be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import deepspeed
import torch
from msgspec import structs

from ft_core.adapter import Adapter, Maker, Redundancy, StateTensor
from ft_core.errors import ConfigError
from ft_core.kept import Kept
from ft_core.state import rng
from ft_core.worker import session
from ft_core.worker.loop import Loop
from ft_deepspeed import boundary, patched
from ft_deepspeed.config import SECTION
from ft_deepspeed.module_state import ModuleState
from ft_deepspeed.own_code import scripts
from ft_deepspeed.state import DeepSpeedAdapter
from ft_deepspeed.zero import inner_optimizer

Result = TypeVar("Result")


class ProtectedTraining(Loop):
    """A training with a DeepSpeed engine, protected, as its loop sees it.

    The function given to `run` may be entered again from its top after a recovery, so it takes all it
    needs to know about progress from `step`.
    """

    def __init__(self, *, enabled: bool, engine: Any) -> None:
        """`engine`: as `deepspeed.initialize` made it of a configuration whose section `fault_tolerance` has
        `"in_place": false`. `enabled` False leaves the training path untouched: the same loop runs under
        torchrun, without that section.

        Made once per process, when the engine is what training begins with, before a step. Raises ConfigError
        when fault tolerance was asked for and cannot work.
        """
        super().__init__(session.current() if enabled else None)
        self._engine = engine
        self._state: LoopState | None = None
        self._trains = False
        """Whether the function given to `run` is under way."""
        if not enabled:
            return
        if self._session is None:
            raise ConfigError("ProtectedTraining needs ftrun in place of torchrun (same flags)")
        if hasattr(engine, "ft_protection"):
            raise ConfigError(
                f'this engine is protected in place already: give {SECTION} "in_place": false in its '
                "configuration, so that ProtectedTraining can do it"
            )
        if self._session.groups.elastic:
            raise ConfigError(
                "ProtectedTraining on DeepSpeed waits for a node where one is lost: use policy wait"
            )
        self._state = LoopState(engine, self._session.lean)
        boundary.install(engine, self._session)
        patched.RESUMPTION.wrap(self._secured, of=engine)
        self._session.point("startup")

    @property
    def step(self) -> int:
        """Training steps done; the next one is ``step + 1`` of the log."""
        return self._session.version if self._session is not None else self._engine.global_steps

    def step_done(self, result: Any = None) -> None:
        """The step is complete on this rank: its state is staged now, and `step` is one more.

        Called after the `engine.step()` (or `train_batch`) that ends a step. `result`, plain data for the
        log, travels with the state (see `inherited`).
        """
        self.inherited = None
        if self._session is not None:
            assert self._state is not None
            self._state.step_done(result)
            self._session.step_done()
        self._has_done()

    def _secured(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """The engine's `save_checkpoint`, which all ranks call. Before `step_done` the state is no version
        yet, and nothing is secured."""

        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            if self._trains and self._session is not None and self._session.between_steps:
                self.secure()
            return save(*args, **kwargs)

        return save_checkpoint

    def run(self, train: Callable[[], Result]) -> Result:
        """Run `train` to its end, through any number of recoveries, and return what it returns.

        `train` is called again after a recovery, on all ranks alike, and takes up the work at `step`. Once
        per process; only local work may follow. Errors that no recovery explains pass through.
        """
        if self._session is None:
            return train()
        state = self._state
        assert state is not None
        state.begin()

        def entered() -> Result:
            self._enters(state.result)
            self._trains = True
            try:
                return train()
            finally:
                self._trains = False

        return self._session.protect(state, entered, self._engine.global_steps)


class LoopState(Adapter):
    """DeepSpeed's state, what the model keeps in attributes, and what the script has named."""

    maker = Maker("DeepSpeed", deepspeed.__version__, "ProtectedTraining", 1)

    def __init__(self, engine: Any, lean: bool) -> None:
        self._engine, self._state = engine, DeepSpeedAdapter(engine, lean)
        self.ring = self._state.ring
        self.replica_group = structs.replace(self._state.replica_group, redundancy=Redundancy.SHARDED)
        self.result: Any = None
        """What was logged of the newest step."""
        self._kept = Kept()
        self._module: ModuleState

    def begin(self) -> None:
        """The script is about to train."""
        rng.find(scripts(self._engine.module))
        self._module, self._kept = (
            ModuleState(self._engine.module, inner_optimizer(self._engine), self._engine.lr_scheduler),
            Kept.capture(),
        )
        self._state.compare()

    def step_done(self, result: Any) -> None:
        """The state is the next version."""
        self.result, self._kept = result, Kept.capture()
        self._state.compare()

    def tensors(self) -> Iterable[StateTensor]:
        yield from self._state.tensors()
        yield from self._kept.tensors(self.envelope_holders())

    def envelope(self) -> Any:
        return {"engine": self._state.envelope(), "module": self._module.capture(), "result": self.result}

    def envelope_holders(self) -> tuple[int, ...]:
        return self._state.envelope_holders()

    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Any) -> None:
        self._state.restore(tensors, envelope["engine"])
        self._module.restore(envelope["module"])
        self.result, self._kept = envelope["result"], Kept(tensors)
        self._kept.apply()

    def derive(self) -> None:
        self._state.derive()

    def reset(self) -> None:
        self._state.reset()
