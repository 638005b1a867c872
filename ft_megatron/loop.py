"""The training loop's own state in `megatron.training.pretrain`: what it keeps in its variables, and Megatron
for it elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ft_core.protocol.groups import GroupId
from ft_core.state import rng
from ft_megatron import saves, trackers
from ft_megatron.data import Loaders
from ft_megatron.state import MegatronAdapter

log = logging.getLogger(__name__)

_OWN = ("first", "iteration", "operations", "result", "totals", "lengths", "parts", "returned")
"""Attributes of `Loop` that go with a version."""
_COUNTERS = (
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "consumed_train_bins",
    "iterations_to_skip",  # to which each start of a process adds what it finds in a file
)
_LOADED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
"""Megatron's arguments that its checkpoint brings, with the iteration and the floating-point operations."""
_RERUN = (
    "current_iteration",
    "first_iteration_complete",
    "rerun_requested",
    "checkpoint_requested",
    "restart_again_requested",
    "continue_requested",
    "large_value_counts",
    "max_values",
)


@dataclass(frozen=True)
class Carried:
    """Something of Megatron's that goes with a version, as plain data."""

    capture: Callable[[], Any]
    restore: Callable[[Any], None]


def _attributes(owner: Callable[[], Any], names: tuple[str, ...]) -> Carried:
    """Those that there are in this version of Megatron."""

    def restore(saved: dict[str, Any]) -> None:
        for name, value in saved.items():
            setattr(owner(), name, value)

    return Carried(
        lambda: {name: getattr(owner(), name) for name in names if hasattr(owner(), name)}, restore
    )


def tell_beginning(training: ModuleType, iteration: int, operations: float, told: bool) -> tuple[int, float]:
    """The iteration and operations from which the job went on; with the samples of `_LOADED`, also for a
    newcomer (`told`), who has not read the checkpoint.

    Data sets are made by them. Found once for all ranks, and on record as all that comes before training.
    """
    args = training.get_args()
    own = iteration, operations, *(getattr(args, name) for name in _LOADED)
    found = torch.tensor(own, dtype=torch.float64, device=torch.cuda.current_device())
    dist.broadcast(found, 0)
    if not told:
        return iteration, operations
    iteration, operations, *samples = map(int, found.tolist())
    for name, value in zip(_LOADED, samples, strict=True):
        setattr(args, name, value)
    training.update_num_microbatches(consumed_samples=args.consumed_train_samples)
    return iteration, operations


class Loop:
    """The training loop's own state: what a worker needs to know to enter it where its peers are."""

    def __init__(self, training: ModuleType, loaders: Loaders, find_group: Callable[[GroupId], Any]) -> None:
        self._training = training
        args = training.get_args()
        self.first: tuple[int, int] = (args.iteration, args.num_floating_point_operations_so_far)
        """Iteration and floating-point operations at the job's beginning."""
        self.iteration, self.operations = self.first
        self.differs = trackers.of_each_role(args)
        self.result: Any = None
        """What the train step of `iteration` (counted from 0) returned; None at the job's beginning."""
        self.totals: dict[str, Any] = {}
        """Losses since the last line of the log, without that step's."""
        self.lengths: Any = None
        """What the step has found of packed sequences' lengths, on all ranks together."""
        self.parts = 0
        """How many parts this state has behind it: the loop, and what comes after training."""
        self.returned: Any = None
        """What the loop returned."""
        self._carried = {
            "counters": _attributes(training.get_args, _COUNTERS),
            "rerun": _attributes(training.get_rerun_state_machine, _RERUN),
            "data": Carried(loaders.mark, loaders.seek),
            "trackers": Carried(trackers.capture, partial(trackers.restore, find_group=find_group)),
            "stragglers": Carried(lambda: training.stimer._off, self._switch_stragglers),
            "started": Carried(
                lambda: training._TRAIN_START_TIME, partial(setattr, training, "_TRAIN_START_TIME")
            ),
        }
        self._rerun_mode = training.get_rerun_state_machine().get_mode()
        self._entered: tuple[dict[str, Any], bool] | None = None

    def capture(self) -> dict[str, Any]:
        """What is there at the end of a step, as plain data."""
        own = {name: getattr(self, name) for name in _OWN} | {"totals": dict(self.totals)}
        return own | {name: carried.capture() for name, carried in self._carried.items()}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `capture` returned, here or in a predecessor."""
        device = torch.cuda.current_device()
        for name in _OWN:
            setattr(self, name, saved[name])
        self.result, self.totals = _on(device, saved["result"]), _on(device, saved["totals"])
        for name, carried in self._carried.items():
            if name in saved:  # an earlier release has not written all
                carried.restore(saved[name])

    def enter(self) -> None:
        """What the loop does at its top before its first step must not change what a version has."""
        self._entered = rng.capture(), self._training.stimer._off

    def answer(self) -> None:
        """The step at which the loop was entered was done before: its end finds what it did then."""
        assert self._entered is not None
        states, stragglers_off = self._entered
        rng.restore(states)
        self._switch_stragglers(stragglers_off)
        self._training.stimer.reset()  # a newcomer has measured nothing

    def _switch_stragglers(self, off: bool) -> None:
        """Megatron's straggler detector reports on all ranks or on none, and may be switched at any time."""
        detector = self._training.stimer
        detector._off = off
        detector.start = detector.null_method if off else detector.start_method
        detector.stop = detector.null_method if off else detector.stop_method

    def reset(self) -> None:
        """Forget an abandoned step, evaluation or save."""
        rerun = self._training.get_rerun_state_machine()
        rerun.state = type(rerun.state).NOT_RUNNING_YET
        rerun.set_mode(self._rerun_mode)
        for timer in self._training.get_timers()._timers.values():
            if getattr(timer, "_started", False):
                timer.stop()
        trackers.forget_hooks()
        trackers.forget_lengths(self._training)
        if saves.forget(self._training):
            log.warning(
                "the asynchronous checkpoint under way at iteration %d is given up; the one before it is "
                "complete. It is written again if training goes back to its iteration, else the next comes "
                "as --save-interval says",
                self.iteration,
            )


class PretrainAdapter(MegatronAdapter):
    """Megatron-Core's state, and the training loop's in the envelope."""

    maker = replace(MegatronAdapter.maker, adapter="pretrain")

    def __init__(self, model: list[Any], optimizer: Any, scheduler: Any, loop: Loop) -> None:
        super().__init__(model, optimizer, scheduler)
        self._loop = loop

    def envelope_holders(self) -> tuple[int, ...]:
        """Experts have random states of their own, and each role its part of what there is for the log."""
        return (dist.get_rank(),) if self._loop.differs else super().envelope_holders()

    def envelope(self) -> Any:
        """The framework's small state, and the loop's."""
        return {**super().envelope(), "loop": self._loop.capture()}

    def restore(self, tensors: Any, envelope: Any) -> None:
        """Put back the training's state, and that of Megatron's loop."""
        super().restore(tensors, envelope)
        self._loop.restore(envelope["loop"])

    def reset(self) -> None:
        """Forget what an epoch change interrupted."""
        super().reset()
        self._loop.reset()


def _on(device: Any, value: Any) -> Any:
    """`value` with its tensors on `device`."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, dict):
        return {key: _on(device, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_on(device, item) for item in value)
    return value
