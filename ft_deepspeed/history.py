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

NAME = "script/results"
"""Of the tensor in a snapshot."""

LARGEST = 64 << 20
"""Bytes. When it is full the older half goes; a newcomer that needs it does not pass (see `Results`)."""
_SMALLEST = 64 << 10
_CODES = 50_000
_HEAD = struct.Struct("<IH")
"""Before a step: its version, and how many calls."""
_CALL = struct.Struct("<HH")
"""Before a call: its code, and how many numbers."""

Calls = dict[str, list[list[Any]]]
"""Kind -> for each call the index of its shape, and its numbers."""


class History:
    """Steps in order. It is appended to where nobody copies the state: after a step, before its staging."""

    def __init__(self, state: dict[str, Any] | None = None, buffer: torch.Tensor | None = None) -> None:
        """Empty, or as `state` says of `buffer`, which is copied. Raises CorruptSnapshot."""
        self._codes: list[list[Any]] = []
        """The different (kind, index of a shape), in the order in which they came."""
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._next = 0, 0
        """Where `read` is: the offset of a step, and a version that it has no later one than."""
        if state is None:
            return
        try:
            self._codes = [[str(kind), int(shape)] for kind, shape in state["codes"]]
            self._used = int(state["used"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptSnapshot(f"the record of earlier steps is not readable ({error})") from error
        if self._used:
            if buffer is None or buffer.numel() < self._used:
                raise CorruptSnapshot("the record of earlier steps is not there")
            self._buffer = buffer.detach().cpu().clone()

    def __bool__(self) -> bool:
        return bool(self._used)

    def append(self, version: int, calls: Calls) -> None:
        """The step after `version`."""
        if len(self._codes) > _CODES:  # shapes that never come again: of what is that old nothing is known
            self._codes, self._used, self._next = [], 0, (0, 0)
        parts = []
        for kind, made in calls.items():
            for index, *numbers in made:
                if [kind, index] not in self._codes:
                    self._codes.append([kind, index])
                parts.append(_CALL.pack(self._codes.index([kind, index]), len(numbers)))
                parts.append(struct.pack(f"<{len(numbers)}d", *map(float, numbers)))
        data = _HEAD.pack(version, len(parts) // 2) + b"".join(parts)
        if self._used + len(data) > LARGEST:
            self._halve()
        end = self._used + len(data)
        if end > self._buffer.numel():
            larger = torch.zeros(max(_SMALLEST, 2 * self._buffer.numel(), len(data)), dtype=torch.uint8)
            larger[: self._used] = self._buffer[: self._used]
            self._buffer = larger
        self._buffer[self._used : end] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._used = end

    def read(self, version: int) -> Calls | None:
        """Calls of the step after `version`; None: they are not known."""
        at, reached = self._next
        if version < reached:
            at = 0
        while at < self._used:
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
        return {"codes": self._codes, "used": self._used}

    def tensors(self, holders: tuple[int, ...]) -> Iterator[StateTensor]:
        """What goes into the snapshot beside it."""
        if self._used:
            yield StateTensor(NAME, self._buffer, holders)

    def _step(self, at: int) -> tuple[int, Calls, int]:
        data: Any = self._buffer.numpy()
        version, many = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        calls: Calls = {}
        for _ in range(many):
            code, numbers = _CALL.unpack_from(data, at)
            at += _CALL.size
            kind, index = self._codes[code]
            calls.setdefault(kind, []).append([index, *struct.unpack_from(f"<{numbers}d", data, at)])
            at += 8 * numbers
        return version, calls, at

    def _halve(self) -> None:
        at = 0
        while at < self._used // 2:
            *_, at = self._step(at)
        kept = self._buffer[at : self._used].clone()
        self._buffer[: len(kept)] = kept
        self._used, self._next = len(kept), (0, 0)
