"""What torch's layers exchange when they are used for the first time, and never again.

In start-up that is on record, as all is. In a training step it is not: a worker that takes a role over comes
to its first use while its peers are past theirs, and would exchange with nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from ft_core import patched
from ft_core.errors import ConfigError
from ft_core.import_hook import after_import
from ft_core.worker.session import Session

_RANDOM = (
    "a random operation of torch's DTensor, the first of this process, comes in a training step: it "
    "exchanges random states, which a worker that takes this role over would do alone. Do one before: "
    "torch.distributed.tensor.rand(1, device_mesh=mesh)"
)


def install(session: Session) -> None:
    """Once per process."""
    phases: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
    """By schedule of a pipeline: when it was used last, 0 for start-up, else the epoch."""
    warm: WeakSet[Any] = WeakSet()
    """Those that were used in start-up."""

    def anew(initialize: Callable[..., Any]) -> Callable[..., Any]:
        """Stages tell each other what they send whenever an epoch begins: newcomers know nothing of it."""

        def initialized(
            schedule: Any,
            stages: Any,
            args: Any,
            kwargs: Any,
            target: Any,
            forward: bool,
            backward: bool,
            *more: Any,
            **named: Any,
        ) -> Any:
            phase = 0 if session.comms.startup.recording else session.epoch
            again = phases.get(schedule, 0) != phase
            phases[schedule] = phase
            if phase == 0:
                warm.add(schedule)
            state = forward and not again, backward and not again
            before = []
            if again and (session.has_advanced or schedule in warm):
                # It computes outputs; what that counts (a running statistic) was counted the first time.
                buffers = [buffer for stage in stages for buffer in stage.submod.buffers()]
                before = [(buffer, buffer.detach().clone()) for buffer in buffers]
            found = initialize(schedule, stages, args, kwargs, target, *state, *more, **named)
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
            return found

        return initialized

    def checked(make: Callable[..., None]) -> Callable[..., None]:
        def made(tracker: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
            if run_state_sync and session.protecting and not session.comms.startup.recording:
                raise ConfigError(_RANDOM)
            make(tracker, device_mesh, run_state_sync)

        return made

    def known_to_be_unknown(make: Callable[..., None]) -> Callable[..., None]:
        def made(*args: Any, **kwargs: Any) -> None:
            if not session.protecting:
                session.unprotected("stages of this version's pipelines tell each other once what they send")
            make(*args, **kwargs)

        return made

    def pipelines(_: ModuleType) -> None:
        if patched.STAGES.exists():
            patched.STAGES.wrap(anew)
        else:
            patched.SCHEDULE.wrap(known_to_be_unknown)

    after_import("torch.distributed.pipelining.schedules", pipelines)
    after_import("torch.distributed.tensor._random", lambda _: patched.RANDOM_STATES.wrap(checked))
