"""State of a script's own that goes with a version: an average of the weights, say, or a second optimizer.

    from ft_core.kept import keep

    keep(ema=ema)  # anything with `state_dict` and `load_state_dict`, or a tensor that is changed in place

Without `ftrun` it does nothing. A name belongs to the object that was given for it last. What is kept is each
role's own, and copied to another node with the rest of a version.

It is for scripts on Megatron and DeepSpeed. A loop with an adapter of its own lists such state in the
adapter, or takes it from a `Kept`, as those of the frameworks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ft_core.adapter import StateTensor
from ft_core.errors import ConfigError, CorruptSnapshot
from ft_core.state import envelope

PREFIX = "kept."
"""How the names of such tensors begin in a snapshot."""

_REST = f"{PREFIX}ft/rest"
"""The tensor that has all that is no tensor, encoded."""

_TENSOR = "ft/tensor"
"""In the rest of a state, what stands for a tensor: its name, and the kind of device that it was on."""

_named: dict[str, Any] = {}


def keep(**objects: Any) -> None:
    """Have these objects go with every version from now on, under these names.

    Each has `state_dict` and `load_state_dict`, with tensors and plain data in it, or is a tensor that is
    changed in place. Every role names the same, anywhere before it matters. Raises ConfigError for what has
    no state.
    """
    for name, found in objects.items():
        parts = (getattr(found, part, None) for part in ("state_dict", "load_state_dict"))
        if not isinstance(found, torch.Tensor) and not all(map(callable, parts)):
            raise ConfigError(
                f"keep({name}=...): a {type(found).__name__} has no state_dict and load_state_dict; "
                "give what has both, or a tensor that is changed in place"
            )
    _named.update(objects)


def has(found: Any) -> bool:
    """Whether it is named now."""
    return any(found is one for one in _named.values())


def covers(tensor: torch.Tensor) -> bool:
    """Whether it is named now, or is part of what is named."""
    modules = (one for one in _named.values() if isinstance(one, torch.nn.Module))
    if has(tensor) or any(part is tensor for module in modules for part in module.parameters()):
        return True
    states = (one.state_dict() for one in _named.values() if not isinstance(one, torch.Tensor))
    parts = (part for state in states for part in pytree.tree_leaves(state))
    return any(isinstance(part, torch.Tensor) and part.data_ptr() == tensor.data_ptr() for part in parts)


def names() -> list[str]:
    """The names of all that is named now."""
    return sorted(_named)


class Kept:
    """What all named objects were at one moment of the script, or are to be."""

    def __init__(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """`tensors`: of a snapshot, by name; what was kept is found among them and copied. Without them
        nothing is kept."""
        found = {} if tensors is None else tensors
        self._tensors = {n: t.detach().clone() for n, t in found.items() if n.startswith(PREFIX)}
        about = self._tensors.pop(_REST, None)
        self._rest: dict[str, Any] = {} if about is None else envelope.decode(about.cpu().numpy().tobytes())

    @classmethod
    def capture(cls) -> Kept:
        """Copies of all that is named now. Raises ConfigError for what cannot go into a snapshot."""
        kept = cls()
        for name, found in _named.items():
            state = found if isinstance(found, torch.Tensor) else found.state_dict()
            kept._rest[name] = kept._taken(state, name, name)
        return kept

    def tensors(self, holders: tuple[int, ...]) -> Iterator[StateTensor]:
        """What an adapter adds to its own `tensors`; nothing while nothing is named.

        `holders`: the roles that have the same content, usually this one alone.
        """
        for name, tensor in self._tensors.items():
            yield StateTensor(name, tensor, holders)
        if self._rest:
            about = torch.frombuffer(bytearray(envelope.encode(self._rest)), dtype=torch.uint8)
            yield StateTensor(_REST, about, holders)

    def apply(self) -> None:
        """Put it back into the objects of these names.

        Raises ConfigError where this worker has not named an object that its predecessor had, and
        CorruptSnapshot where a tensor is missing.
        """
        for name, rest in self._rest.items():
            if (found := _named.get(name)) is None:
                raise ConfigError(
                    f"keep({name}=...) was called by the worker that played this role before, and was not by "
                    "its successor in the same step: have it called on every worker alike"
                )
            state = self._put_together(rest)
            if isinstance(found, torch.Tensor):
                with torch.no_grad():
                    found.copy_(state)
                continue
            metadata = getattr(found.state_dict(), "_metadata", None)
            if metadata is not None:  # versions of torch's modules, which travel as an attribute
                state = _WithMetadata(state)
                state._metadata = metadata
            found.load_state_dict(state)

    def _taken(self, value: Any, name: str, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            number = f"{PREFIX}{name}.{len(self._tensors):05d}"
            self._tensors[number] = value.detach().clone()
            return {_TENSOR: number, "device": value.device.type}
        if isinstance(value, Mapping):
            return {key: self._taken(part, name, f"{path}[{key!r}]") for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            parts = [self._taken(part, name, f"{path}[{at}]") for at, part in enumerate(value)]
            return tuple(parts) if isinstance(value, tuple) else parts
        if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic, np.ndarray)):
            return value
        what = type(value).__name__
        raise ConfigError(f"keep({name}=...): {path} is a {what}; a state has tensors and plain data")

    def _put_together(self, value: Any) -> Any:
        if isinstance(value, dict):
            if _TENSOR in value:
                if (tensor := self._tensors.get(value[_TENSOR])) is None:
                    raise CorruptSnapshot(f"{value[_TENSOR]} is missing in a snapshot")
                return tensor.to(value["device"])
            return {key: self._put_together(part) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._put_together, value))
        return value


class _WithMetadata(dict[str, Any]):
    _metadata: Any
