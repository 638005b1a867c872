"""Whether a script changes gradients between the engine's calls: it clips, masks, or sets them.

What it does there is not done again where calls are made again, so a worker whose script does so begins anew
instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ft_deepspeed import patched

CHANGED = "its script changes gradients between the engine's calls, so that must run again"

_READ = 3
"""Backward passes after which gradients themselves are compared. What is written to `grad.data` leaves no
other trace, and a script that does so does it from the beginning."""


class Gradients:
    """Of one engine, from when a call returns to when the next one begins."""

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
        """A mark of each."""
        found = [p.grad.detach() for p in self._parameters if p.grad is not None]
        if not found:
            return torch.zeros(0)
        return torch.stack([torch.nan_to_num(g.float()).abs().sum().cpu() for g in found])
