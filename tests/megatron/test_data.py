"""Loaders that go back, or begin in the middle, read what one does that goes straight on."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ft_megatron.data import Loader

SAMPLES, MICRO, STEP = 1000, 2, 3
"""Samples in all, samples in a batch, batches in a step."""


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Each a function of its number alone."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"at": torch.tensor(index), "tokens": torch.arange(index, index + 4)}


class Sampler:
    """Like Megatron's two: in the order of the data, or in one that depends on the epoch."""

    def __init__(self, consumed: int, cyclic: bool) -> None:
        self.consumed, self.cyclic, self.micro_batch_times_data_parallel_size = consumed, cyclic, MICRO

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(5)).tolist()
        for first in range(self.consumed, SAMPLES, MICRO):
            yield [order[at] if self.cyclic else at for at in range(first, first + MICRO)]


def open_loader(processes: int, cyclic: bool) -> Loader:
    def build(dataset: Any, consumed: int) -> Any:
        return DataLoader(
            dataset,
            batch_sampler=Sampler(consumed, cyclic),  # type: ignore[arg-type]
            num_workers=processes,
            persistent_workers=processes > 0,
        )

    return Loader(build, Samples(), 0)


def step(batches: Loader) -> list[Any]:
    return [{key: value.tolist() for key, value in next(batches).items()} for _ in range(STEP)]


@pytest.mark.parametrize("cyclic", [False, True], ids=["single", "cyclic"])
@pytest.mark.parametrize("processes", [0, 2])
def test_a_survivor_and_a_newcomer_read_the_same_again(processes: int, cyclic: bool) -> None:
    """A step that was cut off is read again by who has begun it, and by who has read nothing yet."""
    straight = iter(open_loader(0, cyclic))
    expected = [step(straight) for _ in range(5)]
    survivor = iter(open_loader(processes, cyclic))
    survivor.mark()
    marks = []
    for number in range(4):
        assert step(survivor) == expected[number]
        marks.append(survivor.mark())
    next(survivor)
    next(survivor)
    for back in (marks[3], marks[2]):  # its own version, and the one before
        survivor.seek(back)
        assert step(survivor) == expected[marks.index(back) + 1]
    newcomer = iter(open_loader(processes, cyclic))
    newcomer.seek(marks[2])
    assert step(newcomer) == expected[3]
    newcomer.mark()
    assert step(newcomer) == expected[4]
    before = {child.pid for child in multiprocessing.active_children()}
    newcomer.seek(marks[0])  # which it has not kept: a new iteration
    newcomer._kept.clear()
    assert len(before - {child.pid for child in multiprocessing.active_children()}) == processes
    assert step(newcomer) == expected[1]


def test_what_is_kept_of_the_newest_steps_keeps_no_files_open() -> None:
    """A batch from a process comes in shared memory, with a descriptor for each tensor."""
    batches = iter(open_loader(2, False))
    step(batches)
    for _ in range(2):
        batches.mark()
        step(batches)
    assert len(batches._kept) > STEP
    assert not any(value.is_shared() for batch, _ in batches._kept for value in batch.values())


@pytest.mark.parametrize("name", ["MegatronPretrainingSampler", "HybridCPMegatronPretrainingSampler"])
def test_a_newcomer_reads_on_where_one_of_megatrons_own_samplers_was(name: str) -> None:
    """One draw is a micro batch, or all of a step's (--hybrid-context-parallel)."""
    samplers = pytest.importorskip("megatron.training.datasets.data_samplers", exc_type=ImportError)

    def opened() -> Loader:
        def build(dataset: Any, consumed: int) -> Any:
            sizes = (MICRO, 4 * MICRO) if "Hybrid" in name else (MICRO,)
            sampler = getattr(samplers, name)(SAMPLES, consumed, *sizes, 0, 2)
            return DataLoader(dataset, batch_sampler=sampler)

        return Loader(build, Samples(), 0)

    straight, newcomer = iter(opened()), iter(opened())
    step(straight)
    newcomer.seek(straight.mark())
    assert step(newcomer) == step(straight)
