"""Whether a script changes gradients or weights between the engine's calls: it clips, masks or sets them.

What it does there is not done again where calls are made again, so a worker whose script does so begins anew
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ft_deepspeed import patched

CHANGED = "its script changes gradients between the engine's calls, so that must run again"

WRITTEN = "its script changes weights between the engine's calls, so that must run again"

TORN = "its script has written weights, for the first time, while they were copied"

_READ = 3
"""Backward passes after which gradients themselves are compared. What is written to `grad.data` leaves no
other trace, and a script that does so does it from the beginning."""
_CALLS = 24
"""Calls after which weights are, for the same reason."""


class Gradients:
    """The gradients of one engine, from when a call returns to when the next one begins."""

    def __init__(self, engine: Any) -> None:
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._marks: list[tuple[int, int]] | None = None
        self._norms: torch.Tensor | None = None
        self._reads = _READ
        self._was_set = False
        self._always = False
        """Whether it was seen to write to them unseen."""
        for patch in patched.SET_GRADIENTS:
            patch.wrap(self._setting, of=engine.optimizer)
        for parameter in self._parameters:
            if hasattr(parameter, patched.SET_GRADIENT.name):
                patched.SET_GRADIENT.wrap(self._setting, of=parameter)

    def _setting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_gradient(*args: Any, **kwargs: Any) -> Any:
            self._was_set = True
            return original(*args, **kwargs)

        return set_gradient

    def left(self) -> None:
        """A backward pass has returned, and the script goes on."""
        self._marks, self._was_set = self._now(), False
        if self._reads:
            self._reads -= 1
            self._norms = self._norm()

    def changed(self) -> bool:
        """The script makes another call: whether it has changed them since."""
        marks, norms = self._marks, self._norms
        if marks is None:
            return False
        found = self._was_set or self._always or marks != self._now()
        if not found and norms is not None and not torch.equal(norms, self._norm()):
            found = self._always = True
        self._marks = self._norms = None
        return found

    def _now(self) -> list[tuple[int, int]]:
        return [(0, 0) if (g := p.grad) is None else (id(g), g._version) for p in self._parameters]

    def _norm(self) -> torch.Tensor:
        return _norm(p.grad for p in self._parameters if p.grad is not None)


class Weights:
    """The same of weights. Stage 3 has them in parts, which come and go between calls: not seen there."""

    def __init__(self, engine: Any) -> None:
        staged = engine.zero_optimization_stage() == 3
        self._parameters = [] if staged else list(engine.module.parameters())
        self._marks: list[int] | None = None
        self._norms: torch.Tensor | None = None
        self._reads = _CALLS
        self._always = False
        self.written = False
        """Whether they have ever been."""

    def left(self) -> None:
        """A call has returned, and the script goes on."""
        self._marks = [p._version for p in self._parameters]
        if self._reads:
            self._reads -= 1
            self._norms = _norm(self._parameters)

    def changed(self) -> bool:
        """The script makes another call: whether it has changed them since the one before."""
        marks, norms = self._marks, self._norms
        self._marks = self._norms = None
        if marks is None:
            return False
        if norms is not None and not torch.equal(norms, _norm(self._parameters)):
            self._always = True
        found = self._always or marks != [p._version for p in self._parameters]
        self.written = self.written or found
        return found

    @property
    def may_be_written(self) -> bool:
        """Whether the script is one that does so, or has yet to show whether it does."""
        return bool(self._parameters) and (self.written or self._reads > 0)


def _norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A mark of each."""
    found = [torch.nan_to_num(t.detach().float()).abs().sum().cpu() for t in tensors]
    return torch.stack(found) if found else torch.zeros(0)
