"""What the engine's calls returned, so that a newcomer's script sees what its predecessor's saw.

A newcomer's script runs from its top, and the calls of steps that are done are answered from here. What a
snapshot carries is the shapes of results and the numbers (losses, mostly) of the last calls. Larger tensors
are answered with zeros: what is computed from them was logged long ago.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ft_core.errors import CorruptSnapshot

KEPT = 3072
"""How many results are kept; in place of older ones a newcomer sees zeros, in the shape of the newest."""

_NORM = "grad norm"
_NUMBER = torch.float64
"""The type in which a number that is no tensor is kept: those of the engine are less exact."""

Plain = bool | int | float | str | None


class Results:
    """Results by kind of call ("forward", "evaluation", ...) and step."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        """Empty, or as `state` says. Raises CorruptSnapshot."""
        self._shapes: list[dict[str, Any]] = []
        """The different ones; most scripts have one or two."""
        self._newest: dict[str, int] = {}
        self._calls: dict[int, dict[str, list[list[Any]]]] = {}
        """version -> kind -> for each call the index of its shape, and its numbers"""
        try:
            if state is not None:
                self._shapes = list(state["shapes"])
                self._newest = dict(state["newest"])
                self._calls = {int(v): dict(calls) for v, calls in state["calls"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptSnapshot(f"results of earlier steps are not readable ({error})") from error
        self._held = sum(len(r) for calls in self._calls.values() for r in calls.values())

    def record(self, kind: str, version: int, result: Any) -> None:
        """The next result of that kind in the step after `version`. Numbers stay on their device."""
        leaves, spec = pytree.tree_flatten(result)
        try:
            text = pytree.treespec_dumps(spec)
        except NotImplementedError:
            text = ""  # a container of the script's own, which torch cannot take apart: answered with None
        shape = {"spec": text, "leaves": [_describe(leaf) for leaf in leaves]}
        if shape not in self._shapes:
            self._shapes.append(shape)
        index = self._newest[kind] = self._shapes.index(shape)
        numbers = [
            leaf.detach().clone() for leaf in leaves if _is_number(leaf)
        ]  # scripts scale losses in place
        self._calls.setdefault(version, {}).setdefault(kind, []).append([index, *numbers])
        self._held += 1
        while self._held > KEPT and (oldest := min(self._calls)) < version:
            self._held -= sum(map(len, self._calls.pop(oldest).values()))

    def answer(self, kind: str, version: int, number: int, device: torch.device) -> Any:
        """What call `number` of that kind returned in the step after `version`."""
        calls = self._calls.get(version, {}).get(kind, [])
        index, *numbers = calls[number] if number < len(calls) else [self._newest.get(kind)]
        if index is None or not self._shapes[index]["spec"]:
            return None
        shape, values = self._shapes[index], iter(numbers)
        leaves = [_make(leaf, values, device) for leaf in shape["leaves"]]
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(shape["spec"]))

    def record_norm(self, version: int, engine: Any) -> None:
        """Of the gradients of the step after `version`, which the script may ask the engine for."""
        norm = engine._global_grad_norm
        self.record(_NORM, version, torch.tensor(norm, dtype=_NUMBER) if isinstance(norm, float) else norm)

    def answer_norm(self, version: int, engine: Any) -> None:
        """Give the engine that of the step after `version`."""
        norm = self.answer(_NORM, version, 0, engine.device)
        plain = isinstance(norm, torch.Tensor) and norm.dtype == _NUMBER
        engine._global_grad_norm = norm.item() if plain else norm

    def state(self) -> dict[str, Any]:
        """What of it goes into the envelope."""
        for calls in self._calls.values():
            for kind, results in calls.items():
                if any(isinstance(x, torch.Tensor) for result in results for x in result):
                    calls[kind] = [[index, *map(float, numbers)] for index, *numbers in results]
        return {"shapes": self._shapes, "newest": self._newest, "calls": self._calls}


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
    # Not a leaf, so that the script may change it in place.
    return tensor.requires_grad_().clone() if leaf["grad"] else tensor
