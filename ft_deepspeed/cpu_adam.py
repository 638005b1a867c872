"""DeepSpeed's Adam on CPUs holds state that no snapshot sees: the powers of its betas, in C++.

They are float products that grow by one factor a step, and are computed anew, by `pow` and so with other
last bits, whenever the step is not the one after the last or the betas are others. A restored optimizer would
compute them anew where an undisturbed one multiplies. So each call is noted, and the products are made again
with the optimizer's own code, on a tensor of one element.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ft_deepspeed import zero

_VANISHED = 2.0**-26
"""Below it a power no longer changes the bias correction, which is 1 minus it in float."""


@dataclass(frozen=True)
class Products:
    """How powers came about: computed in the step `begun`, and multiplied in each since then up to `seen`."""

    begun: int
    seen: int
    betas: tuple[float, float]
    again: bool = False
    """Whether there was more than one tensor in the last step: up to 0.17 the second computed them anew."""

    def after(self, step: int, betas: tuple[float, float]) -> Products:
        """What they are once a tensor was updated in this step."""
        if betas != self.betas or step not in (self.seen, self.seen + 1):
            return Products(step, step, betas)
        return replace(self, seen=step, again=step == self.seen)


@dataclass
class Powers:
    """Those of one optimizer in C++: what they are, and how it is called."""

    update: Callable[[int, tuple[float, float]], object]
    """Updates a tensor of its own, in a step and with betas."""
    products: Products | None = None

    def note(self, step: Any, betas: tuple[float, float]) -> None:
        """The optimizer is called with these."""
        step, rounded = int(step), _rounded(betas)
        self.products = self.products.after(step, rounded) if self.products else Products(step, step, rounded)

    def restore(self, products: Products) -> None:
        """Make the products again. Takes a millisecond per thousand steps, until they have vanished."""
        if products == self.products:
            return
        begun, seen, betas = products.begun, products.seen, products.betas
        if max(betas) ** seen < _VANISHED:
            begun = max(begun, seen - 1)
        self.update(begun, (betas[0] / 2, betas[1] / 2))  # whatever is there is of other betas then
        for step in range(begun, seen + 1):
            for _ in range(1 + products.again):
                self.update(step, betas)
        self.products = products


class CPUAdams:
    """Follows those Adams of an engine that are in C++, if it has any."""

    def __init__(self, engine: Any) -> None:
        inner = zero.inner_optimizers(engine)
        candidates = [*inner, *(vars(o).get("aux_optimizer") for o in inner)]  # Muon leaves some to Adam
        self._powers = [found for o in candidates if (found := _followed(o)) is not None]

    def state(self) -> list[tuple[Any, ...] | None]:
        """How the powers of each came about; None for one that was never called."""
        return [astuple(p.products) if p.products else None for p in self._powers]

    def restore(self, state: list[tuple[Any, ...] | None]) -> None:
        """Make all powers what they were; those that the state does not have are left to the optimizer."""
        for powers, products in zip(self._powers, state, strict=False):
            if products is not None:
                begun, seen, betas, again = products
                powers.restore(Products(begun, seen, tuple(betas), again))


def _followed(optimizer: Any) -> Powers | None:
    if hasattr(optimizer, "ds_opt_adam"):
        if not isinstance(optimizer.ds_opt_adam, _Native):
            optimizer.ds_opt_adam = _Native(optimizer.ds_opt_adam, optimizer.opt_id)
        return optimizer.ds_opt_adam.powers
    if hasattr(optimizer, "multi_tensor_adam") and get_accelerator().device_name() == "cpu":
        return _follow_fused(optimizer)
    return None


def _rounded(betas: tuple[float, float]) -> tuple[float, float]:
    """As they are in C++, which compares those."""
    beta1, beta2 = struct.unpack("ff", struct.pack("ff", *betas))
    return beta1, beta2


def _scratch() -> list[torch.Tensor]:
    return [torch.zeros(1, dtype=torch.float32, device="cpu") for _ in range(4)]


class _Native:
    """The C++ of one `DeepSpeedCPUAdam`, of whose calls is noted which step and betas they have."""

    def __init__(self, native: Any, number: int) -> None:
        self._native = native
        scratch = _scratch()
        self.powers = Powers(
            lambda step, betas: native.adam_update(number, step, 0.0, *betas, 1e-8, 0.0, True, *scratch)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def adam_update(self, number: int, step: int, lr: float, beta1: float, beta2: float, *rest: Any) -> Any:
        """Update one tensor."""
        self.powers.note(step, (beta1, beta2))
        return self._native.adam_update(number, step, lr, beta1, beta2, *rest)


_fused: dict[int, Powers] = {}
"""Those of all `FusedAdam` of this process, by whether they decay as AdamW: these share one in C++."""


def _follow_fused(optimizer: Any) -> Powers:
    mode, native = optimizer.adam_w_mode, optimizer.multi_tensor_adam
    if hasattr(native, "powers"):
        return native.powers
    if mode not in _fused:
        scratch = [[tensor] for tensor in _scratch()]
        none = torch.zeros(1, dtype=torch.int, device="cpu")
        _fused[mode] = Powers(
            lambda step, betas: native(0, none, scratch, 0.0, *betas, 1e-8, step, mode, True, 0.0)
        )
    powers = _fused[mode]

    def multi_tensor_adam(
        chunk: int, flag: Any, tensors: list[list[Any]], lr: float, beta1: float, beta2: float, *rest: Any
    ) -> Any:
        for _ in tensors[0]:
            powers.note(rest[1], (beta1, beta2))
        return native(chunk, flag, tensors, lr, beta1, beta2, *rest)

    multi_tensor_adam.powers = powers  # type: ignore[attr-defined]
    optimizer.multi_tensor_adam = multi_tensor_adam
    return powers
