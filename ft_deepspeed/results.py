"""What the engine's calls returned, so that a newcomer's script sees what its predecessor's saw.

A newcomer's script runs from its top, and the calls of steps that are done are answered from here. What a
snapshot carries is the shape of the newest result of each kind, and the numbers (losses, mostly) of the
last steps. Larger tensors are answered with zeros: what is computed from them was logged long ago.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ft_core.errors import CorruptSnapshot

KEPT = 2048
"""How many results are kept with their numbers; in place of older ones a newcomer sees zeros."""

Plain = bool | int | float | str | None


class Results:
    """Results by kind of call ("forward", "evaluation", ...) and step."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        """Empty, or as `state` says. Raises CorruptSnapshot."""
        self._shapes: dict[str, dict[str, Any]] = {}
        self._numbers: dict[int, dict[str, list[Any]]] = {}
        try:
            if state is not None:
                self._shapes = dict(state["shapes"])
                self._numbers = {int(v): dict(calls) for v, calls in state["numbers"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptSnapshot(f"results of earlier steps are not readable ({error})") from error
        self._held = sum(len(r) for calls in self._numbers.values() for r in calls.values())

    def record(self, kind: str, version: int, result: Any) -> None:
        """The next result of that kind in the step after `version`. Numbers stay on their device."""
        leaves, spec = pytree.tree_flatten(result)
        numbers = [leaf.detach() for leaf in leaves if _is_number(leaf)]
        self._numbers.setdefault(version, {}).setdefault(kind, []).append(numbers)
        try:
            text = pytree.treespec_dumps(spec)
        except NotImplementedError:
            text = ""  # a container of the script's own, which torch cannot take apart: answered with None
        self._shapes[kind] = {"spec": text, "leaves": [_describe(leaf) for leaf in leaves]}
        self._held += 1
        while self._held > KEPT and (oldest := min(self._numbers)) < version:
            self._held -= sum(map(len, self._numbers.pop(oldest).values()))

    def answer(self, kind: str, version: int, number: int, device: torch.device) -> Any:
        """What call `number` of that kind returned in the step after `version`."""
        shape = self._shapes.get(kind)
        if shape is None or not shape["spec"]:
            return None
        calls = self._numbers.get(version, {}).get(kind, [])
        numbers = iter(calls[number] if number < len(calls) else ())
        leaves = [_make(leaf, numbers, device) for leaf in shape["leaves"]]
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(shape["spec"]))

    def state(self) -> dict[str, Any]:
        """For the envelope."""
        for calls in self._numbers.values():
            for kind, results in calls.items():
                if any(isinstance(x, torch.Tensor) for numbers in results for x in numbers):
                    calls[kind] = [[float(x) for x in numbers] for numbers in results]
        return {"shapes": self._shapes, "numbers": self._numbers}


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() == 1


def _describe(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(leaf.shape), "grad": leaf.requires_grad}
    return {"value": leaf if isinstance(leaf, Plain) else None}


def _make(leaf: dict[str, Any], numbers: Any, device: torch.device) -> Any:
    if "value" in leaf:
        return leaf["value"]
    tensor = torch.zeros(leaf["shape"], dtype=getattr(torch, leaf["dtype"]), device=device)
    if tensor.numel() == 1:
        tensor.fill_(next(numbers, 0.0))
    return tensor.requires_grad_(leaf["grad"])
