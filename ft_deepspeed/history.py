"""Numbers of calls that were made long ago, as a tensor that goes with a role's state.

It only grows, so of what is copied to other nodes little is new. A loss takes ten bytes, and a job of
one forward pass a step some 40 bytes for it: with 64 MiB that is more than a million steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import torch

from ft_core.adapter import StateTensor
from ft_core.errors import CorruptSnapshot
from ft_deepspeed.growing import Growing

NAME = "script/results"
"""The name of the tensor in a snapshot."""

LARGEST = 64 << 20
"""Bytes. When it is full the older half goes; a newcomer that needs it does not pass (see `Results`)."""
_CODES = 50_000
_HEAD = struct.Struct("<IH")
"""Before a step: its version, and how many calls."""
_CALL = struct.Struct("<HH")
"""Before a call: its code, and how many numbers."""

CallColumns = dict[str, list[list[Any]]]
"""Kind -> for each call the index of its shape, and its numbers."""


class History:
    """Steps in order."""

    def __init__(self, state: dict[str, Any] | None = None, buffer: torch.Tensor | None = None) -> None:
        """Empty, or as `state` says of `buffer`, which is copied. Raises CorruptSnapshot."""
        self._codes: list[list[Any]] = []
        """The different (kind, index of a shape), in the order in which they came."""
        self._bytes = Growing(NAME)
        self._next = 0, 0
        """Where `read` is: the offset of a step, and a version that it has no later one than."""
        if state is None:
            return
        try:
            self._codes = [[str(kind), int(shape)] for kind, shape in state["codes"]]
            used = int(state["used"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptSnapshot(f"the record of earlier steps is not readable ({error})") from error
        self._bytes = Growing(NAME, used, buffer)

    def __bool__(self) -> bool:
        return bool(self._bytes.used)

    def append(self, version: int, calls: CallColumns) -> None:
        """The step after `version`."""
        if len(self._codes) > _CODES:  # shapes that never come again: of what is that old nothing is known
            self._codes, self._next = [], (0, 0)
            self._bytes.drop(self._bytes.used)
        parts = []
        for kind, made in calls.items():
            for index, *numbers in made:
                if [kind, index] not in self._codes:
                    self._codes.append([kind, index])
                parts.append(_CALL.pack(self._codes.index([kind, index]), len(numbers)))
                parts.append(struct.pack(f"<{len(numbers)}d", *map(float, numbers)))
        data = _HEAD.pack(version, len(parts) // 2) + b"".join(parts)
        if self._bytes.used + len(data) > LARGEST:
            self._halve()
        self._bytes.append(data)

    def read(self, version: int) -> CallColumns | None:
        """Calls of the step after `version`; None: they are not known."""
        at, reached = self._next
        if version < reached:
            at = 0
        while at < self._bytes.used:
            found, calls, end = self._step(at)
            if found > version:
                break
            if found == version:
                self._next = at, version
                return calls
            at = end
        return None

    def state(self) -> dict[str, Any]:
        """What goes into the envelope."""
        return {"codes": self._codes, "used": self._bytes.used}

    def tensors(self, holders: tuple[int, ...]) -> Iterator[StateTensor]:
        """What goes into the snapshot beside it."""
        yield from self._bytes.tensors(holders)

    def _step(self, at: int) -> tuple[int, CallColumns, int]:
        data = self._bytes.view()
        version, many = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        calls: CallColumns = {}
        for _ in range(many):
            code, numbers = _CALL.unpack_from(data, at)
            at += _CALL.size
            kind, index = self._codes[code]
            calls.setdefault(kind, []).append([index, *struct.unpack_from(f"<{numbers}d", data, at)])
            at += 8 * numbers
        return version, calls, at

    def _halve(self) -> None:
        at = 0
        while at < self._bytes.used // 2:
            *_, at = self._step(at)
        self._bytes.drop(at)
        self._next = 0, 0
