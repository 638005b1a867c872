"""What the engine's calls returned, so that a newcomer's script sees what its predecessor's saw.

A newcomer's script runs from its top, and the calls of steps that are done are answered from here. What a
snapshot carries is the shapes of results and the numbers (losses, mostly) of all calls: the last ones in its
envelope, older ones in a tensor (`history`). Larger tensors are answered with zeros: what is computed from
them was logged long ago.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ft_core.errors import CorruptSnapshot
from ft_deepspeed.history import CallColumns, History
from ft_deepspeed.unknown import Absent, UnknownArray

RECENT = 3072
"""How many results go with the envelope, so that a role that starts ahead of need has them."""

_NORM = "grad norm"
_AFTER = "after"
UNRECORDED = frozenset({"step", "save", "reduction"})
"""Kinds of calls that return nothing."""
_HOST = torch.device("cpu")
_NUMBER = torch.float64
"""The type in which a number that is no tensor is kept: those of the engine are less exact."""

Plain = bool | int | float | str | None


class NotOnRecord(Exception):  # noqa: N818 - said of what was asked for
    """What the script of a newcomer asks for is not known. Says what."""


class Results:
    """Results by kind of call ("forward", "evaluation", ...) and step."""

    def __init__(self, state: dict[str, Any] | None = None, history: torch.Tensor | None = None) -> None:
        """Empty, or as `state` and the tensor of older ones say. Raises CorruptSnapshot."""
        self._shapes: list[dict[str, Any]] = []
        """The different ones; most scripts have one or two."""
        self._known: dict[str, int] = {}
        """By what it looks like: its index."""
        self._calls: dict[int, CallColumns] = {}
        """By version, the newest."""
        self.history = History()
        """All others."""
        self._read: tuple[int, CallColumns] = -1, {}
        """A version, and what is known of it."""
        try:
            if state is not None:
                self._shapes = list(state["shapes"])
                self._known = {repr(shape): index for index, shape in enumerate(self._shapes)}
                self._calls = {int(v): dict(calls) for v, calls in state["calls"].items()}
                self.history = History(state["history"], history)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptSnapshot(f"results of earlier steps are not readable ({error})") from error
        self._held = sum(len(r) for calls in self._calls.values() for r in calls.values())

    @classmethod
    def newest(cls, state: dict[str, Any]) -> Results:
        """Those that `state` has, where the tensor of older ones is not there. Raises CorruptSnapshot."""
        return cls({**state, "history": History().state()})

    def record(self, kind: str, version: int, result: Any) -> None:
        """The next result of that kind in the step after `version`. Numbers stay on their device."""
        leaves, spec = pytree.tree_flatten(result)
        try:
            text = pytree.treespec_dumps(spec)
        except NotImplementedError:
            text = ""  # a container of the script's own, which torch cannot take apart: answered with None
        shape = {"spec": text, "leaves": [_describe(leaf) for leaf in leaves]}
        index = self._known.setdefault(repr(shape), len(self._shapes))
        if index == len(self._shapes):
            self._shapes.append(shape)
        # Scripts scale losses in place.
        numbers = [
            leaf.detach().clone() if isinstance(leaf, torch.Tensor) else float(leaf)
            for leaf in leaves
            if _is_number(leaf)
        ]
        self._calls.setdefault(version, {}).setdefault(kind, []).append([index, *numbers])
        self._held += 1

    def step_done(self) -> None:
        """Once the state is the next version, and nobody copies the one before any more."""
        while self._held > RECENT and len(self._calls) > 1:
            oldest = min(self._calls)
            calls = self._calls.pop(oldest)
            self._held -= sum(map(len, calls.values()))
            self.history.append(oldest, calls)

    def covers(self, version: int) -> bool:
        """Whether a script that has come to `version` can pass what came after it."""
        return not self._calls or min(self._calls) <= version or self.history.read(version) is not None

    def answer(self, kind: str, version: int, number: int, device: torch.device) -> Any:
        """What call `number` of that kind returned in the step after `version`. Raises NotOnRecord."""
        if kind in UNRECORDED:
            return None
        calls = self._of(version).get(kind, [])
        if number >= len(calls):
            raise NotOnRecord(f"it asks for the result of {kind} {number + 1} of step {version + 1}")
        index, *numbers = calls[number]
        if not self._shapes[index]["spec"]:
            return None
        shape, values = self._shapes[index], iter(numbers)
        leaves = [_make(leaf, values, device) for leaf in shape["leaves"]]
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(shape["spec"]))

    def record_after(self, version: int, name: str, number: int, found: dict[str, Any]) -> None:
        """What call `number` of the step after `version` has left in the engine's attributes, where that is
        not what each leaves."""
        if found:
            values = {key: torch.tensor(float(value), dtype=_NUMBER) for key, value in found.items()}
            self.record(f"{_AFTER} {name} {number}", version, values)

    def answer_after(self, version: int, name: str, number: int) -> dict[str, float]:
        """The same."""
        kind = f"{_AFTER} {name} {number}"
        if kind not in self._of(version):
            return {}
        return {key: value.item() for key, value in self.answer(kind, version, 0, _HOST).items()}

    def counted(self, version: int) -> dict[str, int]:
        """How many calls of each kind there were in the step after `version`."""
        found = self._of(version).items()
        return {
            kind: len(made) for kind, made in found if kind != _NORM and not kind.startswith(f"{_AFTER} ")
        }

    def _of(self, version: int) -> CallColumns:
        if (found := self._calls.get(version)) is not None:
            return found
        if self._read[0] != version:
            self._read = version, self.history.read(version) or {}
        return self._read[1]

    def record_norm(self, version: int, engine: Any) -> None:
        """Record the norm of the gradients of the step after `version`, which the script may ask the engine
        for."""
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
        history = self.history.state()
        return {"shapes": self._shapes, "calls": self._calls, "history": history}


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, np.floating):
        return leaf.itemsize <= _NUMBER.itemsize
    if isinstance(leaf, (np.integer, np.bool_)):
        return int(float(leaf)) == int(leaf)
    return isinstance(leaf, torch.Tensor) and leaf.numel() == 1


def _describe(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(leaf.shape), "grad": leaf.requires_grad}
    if isinstance(leaf, np.generic) and _is_number(leaf):
        return {"numpy": leaf.dtype.str}
    if isinstance(leaf, np.ndarray):
        return {"array": list(leaf.shape)}
    return {"value": leaf} if isinstance(leaf, Plain) else {"kind": type(leaf).__name__}


def _make(leaf: dict[str, Any], numbers: Any, device: torch.device) -> Any:
    if "value" in leaf:
        return leaf["value"]
    if "numpy" in leaf:
        return np.dtype(leaf["numpy"]).type(next(numbers, 0.0))
    if "array" in leaf:
        return UnknownArray.made(leaf["array"], 0, _needed)
    if "kind" in leaf:
        return Absent(leaf["kind"], _needed)
    tensor = torch.zeros(leaf["shape"], dtype=getattr(torch, leaf["dtype"]), device=device)
    if tensor.numel() == 1:
        tensor.fill_(next(numbers, 0.0))
    # Not a leaf, so that the script may change it in place.
    return tensor.requires_grad_().clone() if leaf["grad"] else tensor


def _needed(what: str) -> NoReturn:
    raise NotOnRecord(what)
