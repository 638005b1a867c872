"""State to take snapshots of: on a device, or on the host in its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import xxhash

from ft_core.adapter import StateTensor
from ft_core.state.memory import SnapshotBuffer
from ft_core.state.snapshot import Snapshotter
from ft_core.state.store import RoleMemory


class Tensors:
    """What an adapter tells of its framework's state, of these tensors, which are one role's own."""

    def __init__(self, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self.read = tensors

    def tensors(self) -> Iterator[StateTensor]:
        """All of them."""
        for name, tensor in self.read().items():
            yield StateTensor(name, tensor, (0,))

    def envelope(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def envelope_holders(self) -> tuple[int, ...]:
        """The one role."""
        return (0,)

    def restore(self, tensors: Mapping[str, torch.Tensor], envelope: Mapping[str, Any]) -> None:
        """Put a version back."""
        for name, tensor in self.read().items():
            tensor.copy_(tensors[name])

    def adopt(self, roles: Any) -> dict[int, Any]:
        """There are no others."""
        return {}

    def reset(self) -> None:
        """Nothing is half done."""


class Copying:
    """A snapshotter with memory of its own, and what its copies took."""

    def __init__(self, state: Tensors) -> None:
        self.state, self.memory = state, RoleMemory()
        self.copied: list[float] = []
        """Seconds of each copy from the device, the last one of a version last."""
        self.snapshotter = Snapshotter(
            state, lambda slot, segments: self.memory.allocate(slot, segments).memory.address, lambda _: None
        )
        original = self.snapshotter._copies.copy

        def timed(*args: Any) -> None:
            began = time.perf_counter()
            original(*args)
            self.copied.append(time.perf_counter() - began)

        self.snapshotter._copies.copy = timed  # type: ignore[method-assign,assignment]

    def whole(self, version: int) -> float:
        """Stage a version to its end. Seconds, with the checksums."""
        began = time.perf_counter()
        self.snapshotter.stage(version)
        self.snapshotter.wait()
        return time.perf_counter() - began

    def checksums(self, version: int) -> dict[str, int]:
        """Of each tensor in the staged copy of `version`."""
        found = self.memory.find(version)
        if found is None:
            raise RuntimeError(f"version {version} is not staged; there are {self.memory.versions()}")
        return {name: checksum(data) for name, data in _parts(found[1])}


def _parts(buffer: SnapshotBuffer) -> Iterator[tuple[str, memoryview]]:
    for index, segment in enumerate(buffer.segments):
        data = buffer.data(index)
        for item in segment.items:
            if item.name != "ft/envelope":
                yield item.name, data[item.offset : item.offset + item.nbytes]


def checksum(data: memoryview) -> int:
    """Of bytes on the host."""
    return xxhash.xxh3_64_intdigest(data)


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Of each, read from its device in the plainest way."""
    return {
        name: checksum(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        for name, tensor in tensors.items()
    }


def synchronize(device: str) -> None:
    """Until the device has done everything; the host has, always."""
    if device == "cuda":
        torch.cuda.synchronize()
