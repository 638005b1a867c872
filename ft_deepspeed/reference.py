"""Engines that train nothing, beside the one that is protected: reference, teacher and reward models.

Such an engine has no optimizer, and its weights are what the script's start-up makes them: a newcomer's makes
them again, and a few of them are compared. A call of it depends on its weights and inputs alone. Where a
failure interrupts one (stage 3 gathers weights in it), it is made again with the calls of the protected
engine; in steps that are done a newcomer's is answered from the record.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from ft_core.errors import ConfigError
from ft_core.worker.session import Session
from ft_deepspeed import patched
from ft_deepspeed.abandon import abandon_pass, external
from ft_deepspeed.calls import Call, copied, tensors_of
from ft_deepspeed.dealing import POLICY
from ft_deepspeed.module_state import modes, set_modes

_LOOKED_AT = 8
"""Numbers of each weight that are compared."""
IN_PARTS = "cannot go with an engine without an optimizer whose weights are in parts (stage 3)"
GRADIENTS = (
    "an engine without an optimizer, whose weights are in parts, is called with gradients: what its backward "
    "pass gathers cannot be done again; call it under torch.no_grad()"
)
OTHERS = (
    "engine {} without an optimizer had other weights than here (the script changes them, or each start "
    "makes others: name the model, keep(reference=model), or load it from a file)"
)


class Protecting(Protocol):
    """The protected engine, see `ft_deepspeed.protection`."""

    @property
    def dealing(self) -> Any:
        """Who deals the samples, where replica groups may be away."""

    @property
    def position(self) -> int:
        """Steps that the script has done with it."""

    def beside(self, call: Call) -> Any:
        """Make a call that is not one of the protected engine's."""

    def retires(self, why: str) -> bool:
        """Let the script go on without protection, if it has trained with it."""


class References:
    """All of a process, in the order in which the script makes them."""

    def __init__(self) -> None:
        self.protection: Protecting | None = None
        """Once there is an engine that trains."""
        self._all: list[Reference] = []

    def add(self, engine: Any, session: Session) -> None:
        """One was made. Raises ConfigError where it cannot be with replica groups that are away."""
        number = len(self._all)
        self._all.append(Reference(engine))
        if self.in_parts and self.protection is not None and self.protection.dealing is not None:
            raise ConfigError(f"{POLICY} {IN_PARTS}: make it before the engine that trains, or in stage 0")

        def guarding(forward: Any) -> Any:
            def guarded(*args: Any, **kwargs: Any) -> Any:
                if self.protection is None:
                    with session.in_place.used():
                        return forward(*args, **kwargs)
                return self.protection.beside(Pass(engine, forward, args, kwargs, number))

            return guarded

        patched.CALLS[0].wrap(guarding, of=engine)

    @property
    def in_parts(self) -> bool:
        """Whether there is one whose weights are: no rank can be missed."""
        return any(reference.is_in_parts for reference in self._all)

    def reset(self) -> None:
        """What was fetched goes, on every role alike: a newcomer has nothing of it."""
        for reference in self._all:
            reference.reset()

    def state(self) -> list[int]:
        """For the envelope: a sum of the weights of each."""
        return [reference.sum() for reference in self._all]

    def objection(self, state: list[int]) -> str:
        """What is other than `state` says, if anything."""
        differ = (i for i, (one, other) in enumerate(zip(self.state(), state, strict=False)) if one != other)
        return next((OTHERS.format(number + 1) for number in differ), "")


class Reference:
    """One engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._external = external(engine.module) if self.is_in_parts else []
        self._places: list[int] = []
        self._samples: dict[Any, list[torch.Tensor]] = {}
        self.sum()

    @property
    def is_in_parts(self) -> bool:
        """Whether its weights are, and each pass gathers them."""
        return isinstance(self._engine.optimizer, DeepSpeedZeRoOffload)

    def reset(self) -> None:
        """Have it as before its first pass. Nothing is communicated."""
        if self.is_in_parts:
            coordinator = self._engine.optimizer.get_param_coordinator()
            abandon_pass(self._engine.module, coordinator, self._external)

    @torch.no_grad()
    def sum(self) -> int:
        """A checksum of a few numbers of each weight."""
        module = self._engine.module
        weights = [_own(weight).detach() for weight in [*module.parameters(), *module.buffers()]]
        places = [weight.data_ptr() for weight in weights]
        if places != self._places:
            self._places, self._samples = places, {}
            for weight in weights:
                if weight.numel() and weight.device.type != "meta":
                    self._samples.setdefault((weight.device, weight.dtype), []).append(_sample(weight))
        found = 0
        with torch.inference_mode(False):
            for samples in self._samples.values():
                data: Any = torch.cat(samples).cpu().view(torch.uint8).numpy()
                found = zlib.crc32(data.tobytes(), found)
        return found


def _own(weight: Any) -> torch.Tensor:
    """What this rank has of it, without what rounds it up, which is arbitrary memory."""
    if not hasattr(weight, "ds_tensor"):
        return torch.as_tensor(weight)
    part = weight.ds_tensor.view(-1)
    before = dist.get_rank(group=weight.ds_process_group) * part.numel()
    return torch.as_tensor(part[: max(0, weight.ds_numel - before)])


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """A few of its numbers, where they are."""
    held = weight.untyped_storage().nbytes() // weight.element_size() - weight.storage_offset()
    flat = weight.as_strided((min(weight.numel(), held),), (1,))
    return flat[:: max(1, flat.numel() // _LOOKED_AT)][:_LOOKED_AT]


class Pass(Call):
    """`engine(...)` of one of them."""

    evaluates = True

    def __init__(
        self, engine: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], number: int
    ) -> None:
        super().__init__(engine, method, args, kwargs)
        self.kind = f"reference {number}"
        self._saved: Any = None
        self._modes = modes(engine.module.modules())

    def execute(self) -> Any:
        """With the script's own inputs."""
        self._saved = copied((self.args, self.kwargs))
        result = self._made(self.args, self.kwargs)
        self.args, self.kwargs = (), {}
        return result

    def repeat(self) -> Any:
        """With copies of them."""
        if self._saved is None:  # interrupted before it had begun
            return self.execute()
        set_modes(self._modes)
        return self._made(*copied(self._saved))

    def _made(self, args: Any, kwargs: Any) -> Any:
        result = self.method(*args, **kwargs)
        if any(tensor.requires_grad for tensor in tensors_of(result)):
            self.again = GRADIENTS
        return result
