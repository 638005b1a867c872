"""Bytes that only get more, as a tensor that goes with a role's state: of what is copied little is new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ft_core.adapter import StateTensor
from ft_core.errors import CorruptSnapshot

_SMALLEST = 64 << 10


class Growing:
    """It is appended to where nobody copies the state: after a step, before its staging."""

    def __init__(self, name: str, used: int = 0, buffer: torch.Tensor | None = None) -> None:
        """`name`: in a snapshot. `used` bytes of `buffer`, which is copied. Raises CorruptSnapshot."""
        self.name, self.used = name, used
        self._buffer = torch.empty(0, dtype=torch.uint8)
        if used:
            if buffer is None or buffer.numel() < used:
                raise CorruptSnapshot(f"of {name} {used} bytes should be there, and are not")
            self._buffer = buffer.detach().cpu().clone()

    def append(self, data: bytes) -> None:
        """At the end."""
        end = self.used + len(data)
        if end > self._buffer.numel():
            larger = torch.zeros(max(_SMALLEST, 2 * self._buffer.numel(), end), dtype=torch.uint8)
            larger[: self.used] = self._buffer[: self.used]
            self._buffer = larger
        if data:
            self._buffer[self.used : end] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.used = end

    def drop(self, until: int) -> None:
        """What comes before that offset."""
        kept = self._buffer[until : self.used].clone()
        self._buffer[: len(kept)] = kept
        self.used = len(kept)

    def view(self) -> memoryview:
        """All of it. It is valid until the next change."""
        data: Any = self._buffer.numpy()
        return memoryview(data)[: self.used]

    def tensors(self, holders: tuple[int, ...]) -> Iterator[StateTensor]:
        """What goes into the snapshot."""
        if self.used:
            yield StateTensor(self.name, self._buffer, holders)
