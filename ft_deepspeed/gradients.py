"""Whether a script changes gradients, weights, buffers or the optimizer's state between the engine's calls:
it clips, masks or sets them.

What it does there is not done again where calls are made again, so a worker whose script does so begins anew
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ft_core.patching import Patch
from ft_deepspeed import patched, zero
from ft_deepspeed.module_state import saved_buffers
from ft_deepspeed.spans import span_of, storage_of

CHANGED = "its script changes gradients between the engine's calls, so that must run again"

WRITTEN = (
    "its script changes weights, buffers or the optimizer's state between the engine's calls, so that must "
    "run again"
)

BY_PASS = "its model's passes change weights, so they must run again from a version that was copied"

TORN = "its script has written weights, for the first time, while they were copied"

_READ = 3
"""Backward passes after which gradients themselves are compared. What is written to `grad.data` leaves no
other trace, and a script that does so does it from the beginning."""
_CALLS = 24
"""Calls after which weights are, for the same reason."""
_SAMPLED = 256
"""Bytes of each weight that are kept from the end of a step."""


class Gradients:
    """The gradients of one engine, from when a call returns to when the next one begins."""

    def __init__(self, engine: Any) -> None:
        self._parameters = list(engine.module.parameters())  # those, too, that do not train yet
        self._marks: list[tuple[int, int]] | None = None
        self._norms: torch.Tensor | None = None
        self._reads = _READ
        self._was_set = False
        self._always = False
        """Whether it was seen to write to them unseen."""
        _tell_of_setting(engine, patched.SET_GRADIENTS, patched.SET_GRADIENT, self._setting)

    def _setting(self) -> None:
        self._was_set = True

    def left(self) -> None:
        """A call that makes gradients has returned, and the script goes on."""
        self._marks, self._was_set = self._now(), False
        if self._reads:
            self._reads -= 1
            self._norms = self._norm()

    def changed(self) -> bool:
        """The script makes another call: whether it has changed them since."""
        found = self.differ()
        self._marks = self._norms = None
        self._was_set = False
        return found

    def differ(self) -> bool:
        """Whether the script has changed them since."""
        if self._was_set or self._marks is None:
            return self._was_set
        if not self._always and self._norms is not None and not torch.equal(self._norms, self._norm()):
            self._always = True
        return self._always or self._marks != self._now()

    def _now(self) -> list[tuple[int, int]]:
        return [(0, 0) if (g := p.grad) is None else (id(g), g._version) for p in self._parameters]

    def _norm(self) -> torch.Tensor:
        return _norm(p.grad for p in self._parameters if p.grad is not None)


class Weights:
    """The same of weights, buffers that are saved, and the optimizer's state. In stage 3 it is a rank's parts
    that are looked at: whole weights come and go between calls."""

    def __init__(self, engine: Any, optimizers: Sequence[Any] = ()) -> None:
        """`optimizers`: those that step them."""
        self._parameters = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
        self._optimizers = optimizers
        self._buffers = saved_buffers(engine.module)
        self._sets = 0
        """How often the script has set state by DeepSpeed's functions for that."""
        self._marks: list[int] | None = None
        self._norms: torch.Tensor | None = None
        self._reads = _CALLS
        self._always = False
        self._wary = _CALLS
        """Calls for which more writes are expected, after one or at the beginning."""
        self._samples: list[torch.Tensor] = []
        """Some bytes of each, where they are."""
        self._memory: list[int] = []
        self._ended: dict[int, list[torch.Tensor]] = {}
        self._left: dict[int, list[torch.Tensor]] = {}
        """By version: those bytes when the step had ended that made it, and when the next began."""
        self._of_the_model: set[int] = set()
        """Which ones passes themselves change, by their places: averages of others, say."""
        self._passes = 0
        """Calls for which more passes are expected to, after one that has."""
        self._began: list[int] | None = None
        self._before: torch.Tensor | None = None
        """Their versions and norms when the call began that is under way."""
        _tell_of_setting(engine, patched.SET_STATES, patched.SET_STATE, self._setting)

    def _setting(self) -> None:
        self._sets += 1

    def marks(self) -> list[int]:
        """Equal while nothing is written, but by way of `.data`, which nobody counts."""
        found = [buffers.get(name) for buffers, name in self._buffers]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found += group["params"]
            found += zero.kept_by(optimizer)
        others = [each for each in found if isinstance(each, torch.Tensor)]
        return [self._sets, *self._versions(), *map(id, others), *map(_version, others)]

    def _versions(self) -> list[int]:
        return list(map(_version, self._parameters))

    def left(self, changes: bool = False, evaluates: bool = False) -> bool:
        """A call has returned, and the script goes on. `changes`: it is one that changes them; `evaluates`:
        it does not train. Returns whether it has changed some though it should not."""
        self._marks = self.marks()
        own: set[int] = set()
        if self._began is not None and not changes and self._began != (versions := self._versions()):
            own = {at for at, before in enumerate(self._began) if before != versions[at]}
        if not evaluates:
            self._wary, self._passes = max(0, self._wary - 1), max(0, self._passes - 1)
            if self._reads:
                self._reads -= 1
                self._norms = norms = _norm(self._parameters)
                if self._before is not None and not changes:
                    own |= {*(self._before != norms).nonzero().flatten().tolist()}
        if not self._of_the_model.issuperset(own):
            self._of_the_model |= own
            self._memory, self._ended, self._left = [], {}, {}
        if own:
            self._passes = _CALLS
        return bool(own)

    def step_ended(self, version: int) -> None:
        """The state is that version."""
        if not self._always and self.were_written(version - 1):  # a step later: devices are done with that
            self._always = True
        self._ended[version] = self._sampled()
        self._left.pop(version, None)

    def restored(self, version: int, between: bool) -> None:
        """That version was loaded, which is no doing of the script's; `between`: two of its calls."""
        self.step_ended(version)
        self._began, self._marks = self._versions(), self.marks() if between else None

    def differ(self, version: int) -> bool:
        """Whether weights are others than when the step ended that made that version, however it was done, or
        anything was written since a call has returned, or by the one that is interrupted."""
        if self._marks is None and self._began not in (None, self._versions()):
            return True
        if version in self._ended and not _alike(self._ended[version], self._sampled()):
            return True
        return self._marks is not None and self._marks != self.marks()

    def were_written(self, version: int) -> bool:
        """Whether the script has written weights since the step ended that made that version, and before its
        newest step began."""
        both = (v for v in self._left if v >= version and v in self._ended)
        return not all(_alike(self._ended[v], self._left[v]) for v in both)

    def forget_before(self, version: int) -> None:
        """No recovery goes back further."""
        for kept in (self._ended, self._left):
            for older in [v for v in kept if v < version]:
                del kept[older]

    def _sampled(self) -> list[torch.Tensor]:
        if self._memory != (memory := [p.data_ptr() for p in self._parameters]):
            own = (p for at, p in enumerate(self._parameters) if at not in self._of_the_model)
            self._samples, self._memory = list(map(_sample, own)), memory
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for sample in self._samples:
            by_device.setdefault(sample.device, []).append(sample)
        return [torch.cat(samples) for samples in by_device.values()]

    def changed(self, saves: bool = False) -> bool:
        """The script makes another call: whether it has changed them since the one before. `saves`: one that
        may write what was there, as stage 3 does when it gathers weights."""
        marks, norms = self._marks, self._norms
        self._marks = self._norms = self._before = None
        self._began = None if saves else self._versions()
        if self._ended and (version := max(self._ended)) not in self._left:
            self._left[version] = self._sampled()
        if marks is None:
            return False
        if norms is not None:
            self._before = _norm(self._parameters)
            self._always = self._always or not torch.equal(norms, self._before)
        found = self._always or marks != self.marks()
        self._wary = _CALLS if found else self._wary
        return found

    @property
    def passes_write(self) -> bool:
        """Whether one of the last passes has changed any."""
        return self._passes > 0

    @property
    def may_be_written(self) -> bool:
        """Whether the script does so at present, or has yet to show whether it does, or its passes do."""
        return self._wary > 0 or self._always or self.passes_write


def _tell_of_setting(
    engine: Any, of_stage3: Iterable[Patch], of_others: Patch, tell: Callable[[], None]
) -> None:
    """Have `tell` called when the script sets something by DeepSpeed's `safe_set_...`."""

    def setting(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_it(*args: Any, **kwargs: Any) -> Any:
            tell()
            return original(*args, **kwargs)

        return set_it

    for patch in of_stage3:
        patch.wrap(setting, of=engine.optimizer)
    for parameter in engine.module.parameters():
        if hasattr(parameter, of_others.name):
            of_others.wrap(setting, of=parameter)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # nobody counts what is written to such


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Some of its bytes, from its middle on: what is at the beginning may be a row that is never used."""
    if not weight.numel() or not storage_of(weight) or not span_of(weight).dense:
        return torch.empty(0, dtype=torch.uint8)
    data = weight.detach().as_strided((weight.numel(),), (1,)).view(torch.uint8)
    return data[data.numel() // 2 :][:_SAMPLED]


def _alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.device == b.device and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


def _norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A mark of each."""
    found = [torch.nan_to_num(t.detach().float()).abs().sum().cpu() for t in tensors]
    return torch.stack(found) if found else torch.zeros(0)
